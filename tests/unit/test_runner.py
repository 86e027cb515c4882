"""The runner, with a toy phase: which recording answers, what padding costs, what a failed capture leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import segue
from runner_support import WIDTH, Settings, Toy, ToyRunner, batch, captured, check
from segue.device import Device
from segue.errors import CaptureError, CaptureNotAllowed, CaptureOutOfMemory, ReplayError, StrictModeError
from segue.memory.lane import Lane
from segue.observe.decision import Reason
from segue.shapes.key import ShapeKey
from tests_support import churn


def host_read_at(*rungs: int) -> Callable[[int, torch.Tensor], None]:
    """What no capture can repeat, at some rungs; a warm-up does not mind."""

    def trouble(rung: int, x: torch.Tensor) -> None:
        if rung in rungs:
            x.sum().item()

    return trouble


def raise_at(rung_at_fault: int, error: BaseException, num_calls: int) -> Callable[[int, torch.Tensor], None]:
    """Raises at one rung's call number `num_calls`: 1 is the warm-up, 2 the capture."""
    seen: list[int] = []

    def trouble(rung: int, x: torch.Tensor) -> None:
        if rung == rung_at_fault:
            seen.append(rung)
            if len(seen) == num_calls:
                raise error

    return trouble


Make = Callable[..., ToyRunner]


@pytest.fixture
def make(lane: Lane) -> Iterator[Make]:
    made: list[ToyRunner] = []

    def build(ladder: Sequence[int] = (1, 2, 4, 8), strict: bool = False, **settings: Any) -> ToyRunner:
        made.append(ToyRunner(lane, Settings(**settings), ladder, strict=strict))
        return made[-1]

    with torch.inference_mode():
        yield build
    for runner in made:
        runner.close()


def test_every_size_is_answered_by_the_rung_above_it(make: Make, device: Device) -> None:
    runner = make()
    report = runner.capture()
    assert [record.key.tokens for record in report.records] == [8, 4, 2, 1] and not report.failures
    assert report.seconds > 0 and report.pool_bytes >= 0
    for size, rung in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (1, 1)):
        churn(device)
        check(runner, size, rung)
    assert runner.num_eager == 0


def test_hits_real_and_padded_rows_add_up(make: Make) -> None:
    runner = make()
    runner.capture()
    for size in (1, 3, 3, 4, 6, 7):
        check(runner, size, {1: 1, 3: 4, 4: 4, 6: 8, 7: 8}[size])
    check(runner, 9, None, Reason.NO_RUNG)
    rows = {record.key.tokens: (record.hits, record.real, record.padded) for record in runner.store.records()}
    assert rows == {1: (1, 1, 1), 2: (0, 0, 0), 4: (3, 10, 12), 8: (2, 13, 16)}
    assert sum(hits for hits, _, _ in rows.values()) == runner.decisions.num_replays == 6
    assert runner.decisions.num_eager == 1


def test_deciding_counts_nothing(make: Make) -> None:
    runner = make()
    runner.capture()
    for size in range(1, 12):
        runner.decide(batch(runner, size))
    assert runner.decisions.num_replays == runner.decisions.num_eager == 0 and runner.decisions.last is None


def test_a_rung_much_larger_than_the_batch_is_not_used(make: Make) -> None:
    runner = make(ladder=(1, 16))
    runner.capture()
    check(runner, 2, None, Reason.OVER_PADDED)
    check(runner, 8, 16)
    roomy = make(ladder=(1, 16), max_padding=8.0)
    roomy.capture()
    check(roomy, 2, 16)


def test_before_the_capture_calls_run_eagerly(make: Make) -> None:
    runner = make()
    check(runner, 2, None, Reason.NOT_CAPTURED)
    runner.capture([ShapeKey("call", tokens=2)])
    check(runner, 2, 2)
    check(runner, 4, None, Reason.NO_RUNG)


def test_a_disabled_phase_captures_nothing_and_is_no_fault_in_strict_mode(make: Make) -> None:
    runner = make(backend="disabled", strict=True)
    assert runner.capture().records == []
    check(runner, 2, None, Reason.DISABLED)


def test_what_is_recorded_already_is_not_recorded_again(make: Make) -> None:
    runner = make()
    first = runner.capture([ShapeKey("call", tokens=4)])
    kept = runner.store.get(ShapeKey("call", tokens=4))
    second = runner.capture()
    assert len(first.records) == 1 and [r.key.tokens for r in second.records] == [8, 2, 1]
    assert runner.store.get(ShapeKey("call", tokens=4)) is kept
    check(runner, 4, 4)


def test_each_step_of_a_capture_is_told(make: Make) -> None:
    runner = make(ladder=(1, 2))
    told: list[tuple[int, str]] = []
    runner.capture(progress=lambda key, what: told.append((key.tokens, what)))
    assert told == [(2, "warm-up"), (2, "capture"), (1, "warm-up"), (1, "capture")]


def test_warm_ups_run_as_often_as_configured(make: Make) -> None:
    calls: list[int] = []
    runner = make(ladder=(2,), num_warmups=3)
    runner.trouble = lambda rung, x: calls.append(rung)
    runner.capture()
    assert calls == [2] * 4  # three warm-ups, the last of them the trace, and the capture


def test_a_plain_argument_of_a_break_that_changes_between_warm_ups_is_refused_by_name(make: Make) -> None:
    steps = itertools.count()
    shift = segue.eager_on_graph(lambda x, step: None)
    runner = make(backend="breakable", ladder=(2,), num_warmups=2)
    runner.trouble = lambda rung, x: shift(x, next(steps))
    with pytest.raises(CaptureError, match="its argument step was 0 and then 1"):
        runner.capture()
    runner.trouble = lambda rung, x: shift(x, 7)
    assert len(runner.capture().records) == 1
    check(runner, 2, 2)


# -- a shape that cannot be recorded -----------------------------------------------------------------------------------


def test_raise_names_the_key_and_the_operation_and_leaves_larger_rungs_in_use(make: Make) -> None:
    runner = make()
    runner.trouble = host_read_at(4)
    with pytest.raises(CaptureError, match=r"call\[4 tokens\]: ") as caught:
        runner.capture()
    assert caught.value.location is not None and "test_runner.py" in caught.value.location
    assert captured(runner) == [8]
    check(runner, 5, 8)
    runner.trouble = host_read_at()
    runner.capture()
    assert captured(runner) == [1, 2, 4, 8]
    check(runner, 4, 4)


def test_skip_leaves_out_the_shape_alone(make: Make) -> None:
    runner = make(on_failure="skip")
    runner.trouble = host_read_at(4)
    report = runner.capture()
    assert captured(runner) == [1, 2, 8] and [key.tokens for key, _ in report.failures] == [4]
    assert isinstance(report.failures[0][1], CaptureError)
    check(runner, 4, 8)
    check(runner, 3, None, Reason.CAPTURE_FAILED)  # 8 would be over-padded, and 4 is what it lacks
    check(runner, 2, 2)
    check(runner, 9, None, Reason.NO_RUNG)  # which no failure caused


@pytest.mark.parametrize("rung", [8, 4, 1])
def test_eager_runs_the_whole_phase_eagerly(make: Make, rung: int) -> None:
    runner = make(on_failure="eager")
    runner.trouble = host_read_at(rung)
    report = runner.capture()
    assert captured(runner) == [] and [key.tokens for key, _ in report.failures] == [rung]
    for size in (1, 3, 8):
        check(runner, size, None, Reason.CAPTURE_FAILED)
    check(runner, 9, None, Reason.NO_RUNG)  # which no capture would have changed


def test_shrink_keeps_the_smaller_shapes(make: Make) -> None:
    runner = make(on_failure="shrink")
    runner.trouble = host_read_at(4)
    runner.capture()
    assert captured(runner) == [1, 2]
    check(runner, 2, 2)
    for size in (3, 4, 5, 8):
        check(runner, size, None, Reason.CAPTURE_FAILED)


@pytest.mark.parametrize(("policy", "kept"), [("skip", [1, 2, 8]), ("eager", []), ("shrink", [1, 2])])
def test_out_of_memory_in_a_warm_up_falls_back_as_a_failed_capture_does(make: Make, policy: str, kept: list[int]) -> None:
    runner = make(on_failure=policy)
    runner.trouble = raise_at(4, torch.OutOfMemoryError("no memory left"), 1)
    report = runner.capture()
    assert captured(runner) == kept and isinstance(report.failures[0][1], CaptureOutOfMemory)
    check(runner, 3, None, Reason.CAPTURE_FAILED)


def test_a_shape_that_failed_can_be_captured_later(make: Make) -> None:
    runner = make(on_failure="skip")
    runner.trouble = host_read_at(4)
    runner.capture()
    runner.trouble = host_read_at()
    assert [record.key.tokens for record in runner.capture().records] == [4]
    check(runner, 3, 4)


@pytest.mark.parametrize("num_calls", [1, 2], ids=["warm-up", "capture"])
def test_an_exception_of_the_forward_pass_arrives_unchanged_and_the_runner_goes_on(
    make: Make, num_calls: int, device: Device
) -> None:
    runner = make(on_failure="skip")  # a fault of the user's is never skipped over
    error = KeyError("mine")
    runner.trouble = raise_at(4, error, num_calls)
    with pytest.raises(KeyError) as caught:
        runner.capture()
    assert caught.value is error
    assert captured(runner) == [8]
    assert not runner.lane.is_entered
    churn(device)
    for size in (3, 8):
        live = batch(runner, size)
        torch.testing.assert_close(runner.execute(live), (live.rows * live.rows + 1).sum(dim=-1))
    assert len(runner.capture().records) == 3
    check(runner, 3, 4)


# -- strictness, the guard, the end ------------------------------------------------------------------------------------


def test_strict_mode_raises_where_a_call_would_run_eagerly(make: Make) -> None:
    runner = make(strict=True)
    with pytest.raises(StrictModeError, match="not_captured"):
        runner.execute(batch(runner, 2))
    runner.capture()
    check(runner, 2, 2)
    with pytest.raises(StrictModeError, match="no_rung"):
        runner.execute(batch(runner, 9))
    assert runner.num_eager == 0 and runner.decisions.eager[Reason.NO_RUNG] == 1


def test_a_closed_guard_refuses_captures_and_nothing_else(make: Make) -> None:
    runner = make()
    runner.capture([ShapeKey("call", tokens=4)])
    runner.guard.close()
    for keys in (None, [ShapeKey("call", tokens=8)], [ShapeKey("call", tokens=4)], []):
        with pytest.raises(CaptureNotAllowed, match="start-up is over"):
            runner.capture(keys)
    assert captured(runner) == [4]
    check(runner, 4, 4)
    check(runner, 5, None, Reason.NO_RUNG)
    runner.guard.reopen()
    runner.capture()
    check(runner, 5, 8)


def test_a_dropped_shape_says_why(make: Make) -> None:
    runner = make()
    runner.capture()
    graph = runner.store.get(ShapeKey("call", tokens=4))
    runner.drop(ShapeKey("call", tokens=4), Reason.EVICTED)
    with pytest.raises(ReplayError, match="closed"):
        graph.replay()
    check(runner, 3, None, Reason.EVICTED)
    check(runner, 4, 8)
    runner.drop(ShapeKey("call", tokens=4), Reason.OVER_BUDGET)  # no longer there
    check(runner, 3, None, Reason.EVICTED)
    runner.capture()
    check(runner, 3, 4)


def test_a_closed_runner_has_no_recordings_and_its_lane_goes_on(make: Make) -> None:
    runner, other = make(), make()
    runner.capture()
    other.capture()
    runner.close()
    runner.close()
    assert captured(runner) == []
    check(runner, 2, None, Reason.NOT_CAPTURED)
    check(other, 2, 2)


def test_an_exception_in_a_load_leaves_the_lane_free(make: Make) -> None:
    runner = make()
    runner.capture()
    with pytest.raises(RuntimeError):
        runner.execute(Toy(torch.zeros(2, WIDTH + 1, device=runner.inputs.device)))
    assert not runner.lane.is_entered
    check(runner, 2, 2)


# -- memory that runs out ----------------------------------------------------------------------------------------------


class LargeRunner(ToyRunner):
    """As `ToyRunner`, with a temporary of 4 MiB a row in the forward pass."""

    def compute(self, x: torch.Tensor, rung: int) -> torch.Tensor:
        wide = x[:, :1].repeat(1, 1 << 20)
        return super().compute(x, rung) + 0 * wide.sum(dim=-1)


@pytest.fixture
def small_lane() -> Iterator[Lane]:
    """A cpu device with 24 MiB for its pools: rungs of up to 4 rows fit."""
    from segue.device.cpu import CpuDevice

    lane = Lane(CpuDevice(capacity=24 << 20))
    yield lane
    lane.close()


def test_a_capture_out_of_memory_says_the_numbers_the_family_the_rung_and_what_helps(small_lane: Lane) -> None:
    runner = LargeRunner(small_lane, Settings(), (2, 8))
    with torch.inference_mode(), pytest.raises(CaptureOutOfMemory) as caught:
        runner.capture()
    text = str(caught.value)
    assert text.startswith("call[8 tokens]: the device ran out of memory while recording") and "\n" not in text
    assert "33554432 bytes wanted" in text and "of 24.0 MiB the graph pools hold 0 B" in text
    assert "max_size below 8" in text and "on_failure='shrink'" in text and "'breakable' for call" in text
    assert caught.value.location is not None and "test_runner.py" in caught.value.location
    assert small_lane.reserved_bytes == 0 and len(runner.store) == 0
    runner.close()


@pytest.mark.parametrize(("policy", "kept"), [("shrink", [1, 2, 4]), ("skip", [1, 2, 4]), ("eager", [])])
def test_shrink_finds_the_largest_ladder_that_fits(small_lane: Lane, policy: str, kept: list[int]) -> None:
    runner = LargeRunner(small_lane, Settings(on_failure=policy), (1, 2, 4, 8, 16))
    with torch.inference_mode():
        report = runner.capture()
        assert captured(runner) == kept
        assert all(isinstance(error, CaptureOutOfMemory) for _, error in report.failures)
        check(runner, 9, None, Reason.CAPTURE_FAILED)
        if kept:
            check(runner, 3, 4)
    assert small_lane.reserved_bytes <= 24 << 20
    runner.close()


def test_a_warm_up_out_of_memory_keeps_no_tensor_of_the_pass(make: Make) -> None:
    import gc
    import weakref

    seen: list[Any] = []

    def trouble(rung: int, x: torch.Tensor) -> None:
        activation = x * 2
        seen.append(weakref.ref(activation))
        if rung == 4:
            raise torch.OutOfMemoryError("no memory left")

    runner = make()
    runner.trouble = trouble
    with pytest.raises(CaptureOutOfMemory) as caught:
        runner.capture()
    gc.collect()
    assert caught.value and not any(ref() is not None for ref in seen)
