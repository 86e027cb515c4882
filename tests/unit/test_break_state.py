"""Breaks whose bodies change Python state: what recorded parts may read of it is never read too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import segue
from call_support import eager_reasons, same
from segue.errors import BreakStateError

NUMBER: Any = 0.0
LOG: list[int] = []


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    globals()["NUMBER"] = 0.0
    LOG.clear()
    with torch.no_grad():
        yield


@segue.eager_on_graph
def _rebind(m: Any, x: torch.Tensor) -> None:
    m.state = x * 2


@segue.eager_on_graph
def _renew(m: Any, x: torch.Tensor) -> None:
    m.kept = m.kept * 0 + x


@segue.eager_on_graph
def _number(x: torch.Tensor) -> None:
    global NUMBER
    NUMBER = float(x.sum())


@segue.eager_on_graph
def _grow(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.items.append(1)
    return x * 1


@segue.eager_on_graph
def _fill(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.table[len(m.table)] = 1
    return x * 1


class Plain:
    pass


class Stateful(torch.nn.Module):
    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = body
        self.state = torch.zeros(4)
        self.register_buffer("kept", torch.zeros(4))
        self.items: Any = []
        self.table: dict[int, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def _on_number(m: Any, x: torch.Tensor) -> torch.Tensor:
    _number(x)
    return x * NUMBER


def _on_local(m: Any, x: torch.Tensor) -> torch.Tensor:
    held = Plain()
    held.state = x  # type: ignore[attr-defined]
    _rebind(held, x)
    return held.state + 1  # type: ignore[attr-defined,no-any-return]


BODIES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "attribute": lambda m, x: (_rebind(m, x), m.state + 1)[1],
    "buffer": lambda m, x: (_renew(m, x), m.kept * 1)[1],
    "global number": _on_number,
    "length of a list": lambda m, x: _grow(m, x) * len(m.items),
    "length of a dict": lambda m, x: _fill(m, x) * len(m.table),
    "plain value of the result": lambda m, x: (_grow(m, x), len(m.items)),
    "object made in the call": _on_local,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_break_that_changes_what_others_read_runs_eagerly_with_its_name(name: str) -> None:
    model, beside = Stateful(BODIES[name]), Stateful(BODIES[name])
    step = segue.graph(model)
    for number in range(5):
        x = torch.arange(4.0) + number
        same(step(x), beside(x))
    assert step.report().replays == 0 and eager_reasons(step)["unsafe_effects"] >= 3
    (refused,) = step.report().refused
    assert "break _" in refused[2]


def test_a_change_in_a_deque_further_down_is_named() -> None:
    inner = Plain()
    inner.items = deque([1])  # type: ignore[attr-defined]
    model = Stateful(lambda m, x: _grow(inner, x) * len(inner.items))  # type: ignore[attr-defined]
    step = segue.graph(model)
    for number in range(4):
        same(step(torch.ones(4)), torch.full((4,), number + 2.0))
    assert "items" in step.report().refused[0][2]


LATE: dict[str, tuple[Callable[[Any], None], str]] = {
    "attribute": (lambda m: setattr(m, "state", torch.full((4,), 7.0)), "Late.state"),
    "new attribute": (lambda m: setattr(m, "more", 1), "Late.more"),
    "buffer": (lambda m: setattr(m, "kept", torch.full((4,), 7.0)), "Late.kept"),
    "data": (lambda m: setattr(m.kept, "data", torch.full((4,), 7.0)), "where a parameter, buffer or tensor lies"),
    "child": (lambda m: setattr(m, "child", torch.nn.Tanh()), "Late.child"),
    "list": (lambda m: m.items.append(torch.ones(4)), "the items of Late.items"),
    "dict": (lambda m: m.table.update({7: 7}), "the items of Late.table"),
    "training": (lambda m: m.eval(), "Late.training"),
    "function": (lambda m: setattr(m, "act", torch.cos), "Late.act"),
}


@pytest.mark.parametrize("name", LATE)
def test_a_change_at_a_later_replay_is_an_error_that_names_it_and_never_a_stale_result(name: str) -> None:
    class Late(Stateful):
        def __init__(self) -> None:
            super().__init__(lambda m, x: x)
            self.act = torch.sin
            self.child = torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = _late(self.act(x))
            scale = 2 if self.training else 3
            return y * (self.kept + self.state) * (1 + len(self.items) + len(self.table)) * scale + self.act(self.child(y))

    due: list[Callable[[], None]] = []

    @segue.eager_on_graph
    def _late(x: torch.Tensor) -> torch.Tensor:
        while due:
            due.pop()()
        return x + 1

    model = Late()
    step = segue.graph(model)
    for number in range(4):
        same(step(torch.ones(4) * number), model(torch.ones(4) * number))
    assert step.report().replays == 2
    change, what = LATE[name]
    due.append(lambda: change(model))
    with pytest.raises(BreakStateError, match=f"a break .or another thread. changed {what}"):
        step(torch.ones(4))
    for number in range(4):
        same(step(torch.ones(4) * number), model(torch.ones(4) * number))
    assert step.report().captures == 2


def test_the_error_names_what_was_changed() -> None:
    due: list[int] = []

    class Step:
        def __init__(self) -> None:
            self.scale = 1.0

        def run(self, x: torch.Tensor) -> torch.Tensor:
            self.late(x)
            return x * self.scale

        @segue.eager_on_graph
        def late(self, x: torch.Tensor) -> None:
            self.scale += len(due)

    step = segue.graph(Step().run)
    for _ in range(4):
        step(torch.ones(4))
    due.append(1)
    with pytest.raises(BreakStateError, match=r"Step\.scale"):
        step(torch.ones(4))


def test_state_that_bodies_alone_reach_may_change_at_each_replay() -> None:
    seen: list[int] = []

    @segue.eager_on_graph
    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(seen))
        return x * len(seen)

    step = segue.graph(lambda x: noting(x + 1) - 1)
    for number in range(6):
        same(step(torch.ones(4)), torch.full((4,), 2.0 * (number + 1)) - 1)
    assert step.report().replays == 4


def test_a_cache_that_a_body_filled_before_is_no_change() -> None:
    @segue.eager_on_graph
    def cached(m: Any, x: torch.Tensor) -> torch.Tensor:
        if 4 not in m.table:
            m.table[4] = 3
        return x * m.table[4]

    step = segue.graph(Stateful(lambda m, x: cached(m, x) + 1))
    for _ in range(5):
        same(step(torch.ones(4)), torch.full((4,), 4.0))
    assert step.report().replays == 3


def test_in_debug_mode_the_whole_call_is_a_break_and_may_change_anything() -> None:
    model, beside = Stateful(lambda m, x: m.act(m, x)), Stateful(lambda m, x: m.act(m, x))
    for each in (model, beside):
        each.act = lambda m, x: (m.items.append(1), x * len(m.items))[1]
    step = segue.graph(model, debug="forward")
    for _ in range(5):
        same(step(torch.ones(4)), beside(torch.ones(4)))
    assert step.report().replays == 3
