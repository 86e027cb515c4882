"""Breaks with `prepare=`: after its first replay a body is no longer called; what was prepared in its place is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import segue
from segue.memory.lane import Lane
from tests_support import check_against_eager, record, replay


@pytest.fixture(params=["breakable", "tc_piecewise"])
def segmented(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Counted:
    """A break that adds a weight to its argument, by a body and by what it prepares, each of which counts its calls."""

    def __init__(self, **options: Any) -> None:
        self.weight = torch.arange(4.0)
        self.runs = self.asked = self.prepared = 0
        self.answers = True
        self.marked = segue.eager_on_graph(prepare=self.prepare, **options)(self.body)

    def body(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.runs += 1
        return torch.add(x, self.weight.to(x.device), out=out)

    def prepare(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Callable[[], None] | None:
        self.asked += 1

        def add() -> None:
            self.prepared += 1
            torch.add(x, self.weight.to(x.device), out=out)

        return add if self.answers else None


def test_later_replays_call_what_was_prepared_and_answer_as_eager(lane: Lane, segmented: str) -> None:
    x, counted = torch.randn(3, 4, device=lane.device.device), Counted()

    def forward() -> torch.Tensor:
        return counted.marked(x * 2) * 3

    recorded = record(lane, forward, segmented)
    runs = counted.runs
    assert counted.asked == 0
    for at in range(5):
        x.normal_()
        counted.weight += 1
        found = replay(lane, recorded)
        assert torch.equal(found, (x * 2 + counted.weight.to(x.device)) * 3)
        assert (counted.runs, counted.asked, counted.prepared) == (runs + 1, 1, at)
    assert torch.equal(counted.marked(x), x + counted.weight.to(x.device)), "elsewhere the body is called"
    assert counted.runs == runs + 2


def test_a_none_leaves_the_body_in_its_place(lane: Lane, segmented: str) -> None:
    x, counted = torch.randn(3, 4, device=lane.device.device), Counted()
    counted.answers = False
    recorded = record(lane, lambda: counted.marked(x * 2) * 3, segmented)
    runs = counted.runs
    for at in range(1, 4):
        replay(lane, recorded)
        assert (counted.runs, counted.asked, counted.prepared) == (runs + at, 1, 0)


def test_each_recording_asks_for_itself(lane: Lane) -> None:
    counted = Counted()
    kept = [torch.randn(n, 4, device=lane.device.device) for n in (2, 3)]
    recordings = [record(lane, lambda x=x: counted.marked(x + 1) * 2, "breakable") for x in kept]  # type: ignore[misc]
    for _ in range(3):
        for x, recorded in zip(kept, recordings, strict=True):
            x.normal_()
            assert torch.equal(replay(lane, recorded), (x + 1 + counted.weight.to(x.device)) * 2)
    assert (counted.asked, counted.prepared) == (2, 4)


def test_an_error_in_prepare_arrives_and_it_is_asked_again(lane: Lane) -> None:
    x = torch.randn(4, device=lane.device.device)
    faults = [ValueError("not yet")]

    def prepare(y: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        if faults:
            raise faults.pop()
        return lambda: torch.neg(y, out=out)

    @segue.eager_on_graph(prepare=prepare)
    def body(y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.neg(y, out=out)

    recorded = record(lane, lambda: body(x + 1) * 2, "breakable")
    with pytest.raises(ValueError, match="not yet"):
        replay(lane, recorded)
    for _ in range(3):
        x.normal_()
        assert torch.equal(replay(lane, recorded), -(x + 1) * 2)


def _takes_no_out(prepare: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return segue.eager_on_graph(prepare=prepare)(lambda y: y + 1)


def _leaves_out_alone(prepare: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return segue.eager_on_graph(prepare=prepare)(lambda y, out=None: y + 1)


def _takes_a_list(prepare: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    marked = segue.eager_on_graph(prepare=prepare)(lambda ys, out=None: torch.add(ys[0], 1, out=out))
    return lambda y: marked([y])


def _lies_in_another_mode(prepare: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    marked = segue.eager_on_graph(prepare=prepare)(lambda y, out=None: torch.add(y, 1, out=out))

    def call(y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return marked(y)

    return call


@pytest.mark.parametrize("make", [_takes_no_out, _leaves_out_alone, _takes_a_list, _lies_in_another_mode])
def test_where_a_replay_does_more_than_the_body_nothing_is_prepared(
    lane: Lane, make: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    asked: list[int] = []

    def prepare(*args: Any, **kwargs: Any) -> Callable[[], None]:
        asked.append(1)
        return lambda: None

    x, marked = torch.randn(4, device=lane.device.device), make(prepare)
    recorded = record(lane, lambda: marked(x * 2) - 1, "breakable")
    check_against_eager(lane, recorded, lambda: marked(x * 2) - 1, [x])
    for _ in range(2):
        replay(lane, recorded)
    assert not asked


def test_a_body_that_writes_its_argument_can_be_prepared(lane: Lane, segmented: str) -> None:
    x = torch.randn(4, device=lane.device.device)
    calls: list[str] = []

    def prepare(y: torch.Tensor) -> Callable[[], object]:
        return lambda: (calls.append("prepared"), y.add_(1))

    @segue.eager_on_graph(writes=("y",), prepare=prepare)
    def body(y: torch.Tensor) -> None:
        calls.append("body")
        y.add_(1)

    def forward() -> torch.Tensor:
        y = x * 2
        body(y)
        return y * 3

    recorded = record(lane, forward, segmented)
    calls.clear()
    for _ in range(3):
        x.normal_()
        assert torch.equal(replay(lane, recorded), (x * 2 + 1) * 3)
    assert calls == ["body", "prepared", "prepared"]


def test_a_wrapped_callable_prepares_each_of_its_shapes(lane: Lane) -> None:
    calls: list[str] = []

    def prepare(y: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        calls.append("asked")
        return lambda: (calls.append("prepared"), torch.neg(y, out=out))

    @segue.eager_on_graph(prepare=prepare)
    def body(y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.neg(y, out=out)

    step = segue.graph(lambda x: body(x * 2) * 3)
    for at in range(32):
        x = torch.randn(2 if at // 8 % 2 else 5, 4, device=lane.device.device)
        with torch.no_grad():
            assert torch.equal(step(x), -(x * 2) * 3)
    assert calls.count("asked") == 2
    assert calls.count("prepared") > 20
    step.close()


def test_values_and_state_that_a_body_returns_are_looked_at_each_time(lane: Lane) -> None:
    asked: list[int] = []

    def prepare(x: torch.Tensor) -> Callable[[], None]:
        asked.append(1)
        return lambda: None

    kept = [torch.ones(2, device=lane.device.device)]
    sign = segue.eager_on_graph(prepare=prepare)(lambda x: 3 if float(x.sum()) >= 0 else 4)
    state = segue.eager_on_graph(prepare=prepare)(lambda x: kept[0])
    x = torch.ones(2, device=lane.device.device)
    for marked in (sign, state):
        recorded = record(lane, lambda f=marked: x * f(x), "breakable")  # type: ignore[misc]
        for _ in range(3):
            assert torch.equal(replay(lane, recorded), x * 3 if marked is sign else x)
    assert not asked


@pytest.mark.parametrize("given", [5, "x"])
def test_what_cannot_be_called_is_told_at_once(lane: Lane, given: Any) -> None:
    with pytest.raises(ValueError, match="prepare"):
        segue.eager_on_graph(prepare=given)(lambda x: x)
    with pytest.raises(ValueError, match="fake"):
        segue.eager_on_graph(fake=given)(lambda x: x)
    with pytest.raises(TypeError, match="eager_on_graph marks functions"):
        segue.eager_on_graph(given)
    marked = segue.eager_on_graph(prepare=lambda x: given)(lambda x: None)
    x = torch.ones(2, device=lane.device.device)
    recorded = record(lane, lambda: (marked(x), x * 2)[1], "breakable")
    with pytest.raises(TypeError, match="prepare returned"):
        replay(lane, recorded)


def test_names_of_parameters_are_given_as_several() -> None:
    for option in ("static", "writes"):
        with pytest.raises(ValueError, match="give names"):
            segue.eager_on_graph(**{option: "x"})(lambda x: x)


def test_a_prepare_that_takes_other_arguments_is_told_with_the_breaks_name(lane: Lane) -> None:
    marked = segue.eager_on_graph(prepare=lambda y, z: None)(lambda x: None)
    x = torch.ones(2, device=lane.device.device)
    recorded = record(lane, lambda: (marked(x), x * 2)[1], "breakable")
    with pytest.raises(TypeError, match=r"break .*prepare does not take the body's arguments"):
        replay(lane, recorded)


def test_what_is_prepared_may_wait_for_a_thread_that_makes_the_same_call(lane: Lane) -> None:
    import threading

    found: list[torch.Tensor] = []
    depth = threading.local()

    def wait(x: torch.Tensor) -> None:
        if getattr(depth, "inside", False) or len(found) > 3:
            return

        def other() -> None:
            depth.inside = True
            with torch.no_grad():
                found.append(step(torch.ones(2, device=lane.device.device)))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=30)
        assert not thread.is_alive()

    def prepare(x: torch.Tensor) -> Callable[[], None]:
        return lambda: wait(x)

    marked = segue.eager_on_graph(prepare=prepare)(wait)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        marked(y)
        return y + 1

    step = segue.graph(function)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(2, device=lane.device.device)
            assert torch.equal(step(x), x * 2 + 1)
    assert all(torch.equal(y, torch.full((2,), 3.0, device=lane.device.device)) for y in found)


def test_what_the_body_wrote_is_written_back_however_the_prepared_writes(lane: Lane) -> None:
    """A kernel that is launched without torch raises no version counter."""

    @segue.eager_on_graph(prepare=lambda y: lambda: y.data.add_(1))
    def body(y: torch.Tensor) -> None:
        y.add_(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        body(x)
        return x * 2

    step = segue.graph(function)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(3, device=lane.device.device)
            before = x.clone()
            assert torch.equal(step(x), (before + 1) * 2) and torch.equal(x, before + 1)
    assert step.report().replays == 4
