"""Callables that keep many tensors and are given some of them: one recording serves all, and none goes stale."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import segue


class Net(torch.nn.Module):
    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(count)])
        self.states = {i: torch.full((2, 8), float(i)) for i in range(60)}
        self.register_buffer("state", torch.zeros(2, 8))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + c


X = torch.ones(2, 8)


@pytest.mark.parametrize("options", [{}, {"max_graphs": 8}, {"strict": True}])
def test_a_pool_of_held_tensors_is_served_by_a_few_recordings(options: dict[str, Any]) -> None:
    model = Net()
    step = segue.graph(model, **options)
    with torch.inference_mode():
        for _ in range(8):
            for state in model.states.values():
                assert torch.equal(step(X, state), model(X, state))
                state.add_(1)
    report = step.report()
    assert report.captures <= 6 and report.replays >= 8 * 60 - 20


def test_a_held_tensor_that_each_step_binds_anew_makes_no_storm_of_captures() -> None:
    model = Net(4)
    step, plain = segue.graph(model), Net(4)
    plain.load_state_dict(model.state_dict())
    with torch.inference_mode():
        for _ in range(600):
            model.state = step(X, model.state) * 0.1
            plain.state = plain(X, plain.state) * 0.1
            assert torch.equal(model.state, plain.state)
    assert step.report().captures <= 24


@pytest.mark.parametrize("is_captured", [True, False])
def test_once_frozen_a_held_tensor_needs_a_capture_of_its_own(is_captured: bool) -> None:
    model = Net()

    def forward(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return model(x, c) * (100 if c is model.states[0] else 1)

    step = segue.graph(forward)
    with torch.inference_mode():
        step.capture(torch.zeros(2, 8), torch.zeros(2, 8))
        if is_captured:
            step.capture(torch.zeros(2, 8), model.state)
        step.freeze()
        for _ in range(5):
            for state in (model.state, model.states[0]):
                assert torch.equal(step(X, state), forward(X, state))
        assert "is a tensor that the callable holds" in step.explain(X, model.states[0]).detail
    assert step.report().replays == (5 if is_captured else 0)


def test_a_result_that_is_no_value_does_not_count_as_another_answer() -> None:
    model = Net()

    def forward(x: torch.Tensor, c: torch.Tensor) -> Any:
        return model(x, c), lambda: 1

    step = segue.graph(forward)
    with torch.inference_mode():
        for _ in range(6):
            assert torch.equal(step(X, model.state)[0], model(X, model.state))
    assert step.report().replays >= 3


@pytest.mark.parametrize("before", [0, 3])
def test_a_tensor_that_code_asks_for_is_found_among_others(before: int) -> None:
    """What comes after the first few is not told from them: they must have come to be recorded by then."""
    model = Net()

    def forward(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return model(x, c) * 100 if c is model.state else model(x, c)

    step = segue.graph(forward)
    with torch.inference_mode():
        for _ in range(4):
            for i in range(before):
                assert torch.equal(step(X, model.states[i]), forward(X, model.states[i]))
        for _ in range(4):
            assert torch.equal(step(X, model.state), forward(X, model.state))
        for _ in range(4):
            for c in (*model.states.values(), model.state, torch.ones(2, 8)):
                assert torch.equal(step(X, c), forward(X, c))


def test_a_sentinel_is_told_from_a_pool_that_was_given_as_another_argument_or_as_the_same() -> None:
    class Steps:
        def __init__(self) -> None:
            self.states = [torch.ones(4) * i for i in range(8)]
            self.no_mask, self.causal = torch.ones(4), torch.tensor([1.0, 0, 1, 0])
            self.first = torch.zeros(4)

        def step(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            state = state - 7 if state is self.first else state
            return state + 1 if mask is self.no_mask else state * mask

    steps = Steps()
    step = segue.graph(steps.step)
    for state in [*steps.states, steps.first]:
        for mask in (steps.causal, steps.no_mask):
            for _ in range(3):
                assert torch.equal(step(state, mask), steps.step(state, mask))


def test_a_sentinel_is_told_from_tensors_that_took_one_place_in_turn() -> None:
    class Session:
        def __init__(self) -> None:
            self.null, self.current = torch.zeros(4), torch.ones(4)

        def step(self, state: torch.Tensor) -> torch.Tensor:
            return state + 1 if state is self.null else state + 2

    session, kept = Session(), []
    step = segue.graph(session.step)
    for number in range(7):
        session.current = torch.full((4,), float(number))
        kept.append(session.current)
        for _ in range(4):
            assert torch.equal(step(session.current), session.step(session.current))
        assert torch.equal(step(kept[0]), session.step(kept[0]))
    for _ in range(4):
        assert torch.equal(step(session.null), session.step(session.null))


def test_explaining_leaves_what_calls_are_told_apart() -> None:
    model = Net()

    def forward(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return model(x, c) * (100 if c is model.state else 1)

    step = segue.graph(forward)
    with torch.inference_mode():
        for state in model.states.values():
            step.explain(X, state)
        for state in (model.states[9], model.states[50], model.state):
            for _ in range(4):
                assert torch.equal(step(X, state), forward(X, state))


def test_a_held_tensor_that_is_another_argument_as_well_is_seen_to_be_asked_for() -> None:
    class Cell:
        def __init__(self) -> None:
            self.null, self.start = torch.zeros(4), torch.full((4,), 9.0)

        def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (h if h is self.null else self.start) * 1 + x

    cell = Cell()
    step = segue.graph(cell.step)
    for _ in range(5):
        assert torch.equal(step(cell.null, cell.start), cell.step(cell.null, cell.start))


KEY, CONSTANT, SLOT = torch.full((3,), 5.0), torch.full((3,), 6.0), torch.full((3,), 7.0)


class Constants:
    NULL = CONSTANT


@dataclasses.dataclass
class Slotted:
    __slots__ = ("null",)
    null: torch.Tensor


TABLE, SLOTTED = {KEY: 4.0}, Slotted(SLOT)


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda c: c * TABLE.get(c, 3.0), KEY),
        (lambda c: c * 2 if c is Constants.NULL else c * 3, CONSTANT),
        (lambda c: c * 2 if c is SLOTTED.null else c * 3, SLOT),
    ],
    ids=["a key", "a constant of a class", "in a slot"],
)
def test_held_tensors_are_found_where_they_hide(
    function: Callable[[torch.Tensor], torch.Tensor], held: torch.Tensor
) -> None:
    step = segue.graph(function)
    for given in [torch.ones(3)] * 4 + [held] * 4 + [held.clone()] * 2:
        assert torch.equal(step(given), function(given))
