"""A failed capture is survivable: memory returns, the generator works, the next capture works, older recordings replay,
and an exception of the user's own code arrives unchanged and once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import segue
from segue.errors import CaptureError, TraceMismatchError
from segue.memory.lane import Lane
from tests_support import record, replay

ROUNDS = 20


class Mishap(Exception):
    """The user's own."""


@segue.eager_on_graph
def pause(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Stage:
    """A forward pass that goes wrong at a chosen place, in its second run: the capture."""

    PLACES = ("begin", "middle", "later_segment", "nested", "end")

    def __init__(self, x: torch.Tensor, place: str, fault: Callable[[torch.Tensor], None]) -> None:
        self.x = x
        self.place = place
        self.fault = fault
        self.runs = 0
        self.faults = 0

    def __call__(self) -> torch.Tensor:
        self.runs += 1
        self._at("begin", self.x)
        y = self.x * 2
        self._at("middle", y)
        y = pause(y)
        z = y * 3
        self._at("later_segment", z)
        z = self._inner(z)
        z = pause(z) * 2
        self._at("end", z)
        return z

    def _inner(self, z: torch.Tensor) -> torch.Tensor:
        w = z - 1
        self._at("nested", w)
        return w

    def _at(self, place: str, value: torch.Tensor) -> None:
        if place == self.place and self.runs == 2:
            self.faults += 1
            self.fault(value)


def _host_read(value: torch.Tensor) -> None:
    value.sum().item()


def _raise(value: torch.Tensor) -> None:
    raise Mishap("mine")


@pytest.mark.parametrize("place", Stage.PLACES)
@pytest.mark.parametrize("fault", [_host_read, _raise], ids=["host_read", "exception"])
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_twenty_failures_in_a_row_leave_the_device_as_it_was(
    lane: Lane, place: str, fault: Callable[[torch.Tensor], None], backend: str
) -> None:
    x = torch.randn(8, 8, device=lane.device.device)
    survivor = record(lane, lambda: pause(x * 5) * 2, backend)
    kind = Mishap if fault is _raise else CaptureError
    levels = []
    for _ in range(ROUNDS):
        stage = Stage(x, place, fault)
        with pytest.raises(kind) as caught:
            record(lane, stage, backend)
        assert (stage.runs, stage.faults) == (2, 1), "the user's code runs once in the trace, once in the capture"
        if kind is CaptureError:
            assert "test_capture_failure.py" in (caught.value.location or "")
        del caught
        gc.collect(1)
        _check_device(lane, x)
        torch.testing.assert_close(replay(lane, survivor), (x * 5 + 1) * 2, rtol=0, atol=0)
        levels.append(_level(lane))
    assert levels[-1] <= levels[2], f"memory grows with failures: {levels}"
    good = record(lane, Stage(x, "nowhere", fault), backend)
    expected = ((x * 2 + 1) * 3 - 1 + 1) * 2
    torch.testing.assert_close(replay(lane, good), expected, rtol=0, atol=0)


def _level(lane: Lane) -> int:
    if lane.device.kind == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()
    return lane.reserved_bytes


def _check_device(lane: Lane, x: torch.Tensor) -> None:
    assert torch.rand(4, device=x.device).shape == (4,)
    seen: list[Any] = []
    other = threading.Thread(target=lambda: seen.append(torch.rand(4, device=x.device).sum().item()))
    other.start()
    other.join()
    assert len(seen) == 1
    if lane.device.kind == "cuda":
        torch.cuda.empty_cache()
        assert torch.randn(4, pin_memory=True).is_pinned()


def test_a_users_exception_passes_unchanged(lane: Lane) -> None:
    x = torch.randn(4, device=lane.device.device)
    mishap = Mishap("mine")

    def fault(value: torch.Tensor) -> None:
        raise mishap

    with pytest.raises(Mishap) as caught:
        record(lane, Stage(x, "middle", fault), "breakable")
    assert caught.value is mishap
    assert mishap.__cause__ is None


def test_other_breaks_than_traced_are_an_error(lane: Lane) -> None:
    x = torch.randn(4, device=lane.device.device)
    runs = 0

    def forward() -> torch.Tensor:
        nonlocal runs
        runs += 1
        y = pause(x)
        return pause(y) if runs == 1 else y

    with pytest.raises(TraceMismatchError, match="pause"):
        record(lane, forward, "breakable")
    runs = 5

    def more() -> torch.Tensor:
        nonlocal runs
        runs += 1
        y = pause(x)
        return y if runs == 6 else pause(y)

    with pytest.raises(TraceMismatchError, match="no further break"):
        record(lane, more, "breakable")
    assert torch.equal(replay(lane, record(lane, lambda: pause(x) * 2, "breakable")), (x + 1) * 2)


def test_a_cache_filled_during_capture_is_named(lane: Lane) -> None:
    class Rope:
        table: torch.Tensor | None = None

    rope = Rope()
    runs = 0
    x = torch.randn(4, device=lane.device.device)

    def forward() -> torch.Tensor:
        nonlocal runs
        runs += 1
        if runs == 2:
            rope.table = x * 2
        return x + 1

    with pytest.raises(segue.SegueError, match=r"Rope\.table") as caught:
        record(lane, forward)
    rope.table = None
    assert "test_capture_failure.py" in str(caught.value)
    assert torch.equal(replay(lane, record(lane, lambda: x + 3)), x + 3)
