"""Lending the idle pool to eager work: the values are eager's, the pool stays as it is where the work fits, and nothing is
replayed or captured over a tensor that somebody kept."""

from __future__ import annotations

import gc
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch

import segue
from segue._compat import data_address
from segue.errors import CaptureError, ReplayError
from segue.memory.lane import Lane
from tests_support import churn, poison, record, replay

MIB = 1 << 20
Pair = namedtuple("Pair", "first rest")


def wide(x: torch.Tensor, mib: int = 3) -> torch.Tensor:
    """Temporaries of three times `mib` MiB at once, with a matrix product, a view, and a write in place."""
    held = x.repeat(1, mib * MIB // (4 * x.numel()))
    other = (held * 2).add_(1)
    return (x @ x.t()).softmax(1) @ (held.view(held.shape[0], -1) + other)[:, : x.shape[1]]


def is_in_pool(lane: Lane, tensor: torch.Tensor) -> bool:
    segments = lane.pool.state().segments
    return any(start <= data_address(tensor) < start + nbytes for start, nbytes in segments)


@pytest.fixture
def x(lane: Lane) -> torch.Tensor:
    return torch.randn(8, 16, device=lane.device.device)


def test_eager_work_in_a_lent_pool_is_eager_work_and_takes_no_memory(lane: Lane, x: torch.Tensor) -> None:
    run = record(lane, lambda: wide(x, 4) + 1)
    reserved = lane.reserved_bytes
    for _ in range(3):
        x.normal_()
        expected = wide(x)
        poison(lane)
        with torch.no_grad(), lane.lend() as loan:
            made = wide(x)
            assert is_in_pool(lane, made)
            kept = loan.keep(made)
            del made
        assert not is_in_pool(lane, kept) and lane.borrowed_bytes == 0
        churn(lane.device)
        assert torch.equal(replay(lane, run), wide(x, 4) + 1)
        assert torch.equal(kept, expected) and lane.reserved_bytes == reserved


def test_outside_tensors_are_read_and_written_as_ever(lane: Lane, x: torch.Tensor) -> None:
    record(lane, lambda: wide(x))
    state, out = torch.zeros_like(x), torch.empty_like(x)
    with torch.inference_mode(), lane.lend() as loan:
        state.add_(x * 2)
        torch.mul(x, 3, out=out)
        same, copied = loan.keep((state, torch.stack([state, out])))
    assert same is state and torch.equal(state, x * 2) and torch.equal(out, x * 3)
    assert torch.equal(copied, torch.stack([x * 2, x * 3]))


def test_what_is_kept_may_be_nested_and_views(lane: Lane, x: torch.Tensor) -> None:
    record(lane, lambda: wide(x))
    with lane.lend() as loan:
        kept = loan.keep({"a": Pair((x + 1)[::2], [(x * 2).t(), x, 7, None]), "b": torch.empty(0, device=x.device)})
    assert lane.borrowed_bytes == 0 and isinstance(kept["a"], Pair)
    first, (turned, same, number, nothing) = kept["a"]
    assert torch.equal(first, (x + 1)[::2]) and torch.equal(turned, (x * 2).t()) and same is x
    assert (number, nothing, kept["b"].numel()) == (7, None, 0)
    assert not any(is_in_pool(lane, t) for t in (first, turned))


def test_nothing_is_replayed_or_captured_over_a_borrowed_tensor(lane: Lane, x: torch.Tensor) -> None:
    run = record(lane, lambda: wide(x))
    with torch.no_grad(), lane.lend() as loan:
        loan.keep(x)
    with torch.no_grad(), lane.lend():
        borrowed = x.repeat(8, 1) + 1
    expected = borrowed.clone()
    for _ in range(2):
        assert lane.borrowed_bytes >= borrowed.nbytes
        for use in (lambda: replay(lane, run), lambda: record(lane, lambda: x * 2), lambda: lane.lend().__enter__()):
            with pytest.raises(ReplayError, match=r"\d.* [KM]?i?B of this lane's pool are still borrowed.*Loan\.keep"):
                use()
        assert not lane.is_entered and torch.equal(borrowed, expected)
    view = borrowed[3:]
    del borrowed
    with pytest.raises(ReplayError, match="borrowed"):
        replay(lane, run)
    del view
    assert lane.borrowed_bytes == 0
    assert torch.equal(replay(lane, run), wide(x)) and torch.equal(replay(lane, record(lane, lambda: x * 2)), x * 2)


def test_an_exception_borrows_what_its_frames_hold_as_long_as_it_lives(lane: Lane, x: torch.Tensor) -> None:
    run = record(lane, lambda: wide(x))

    def fail() -> None:
        held = x * 2  # noqa: F841
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught, lane.lend():
        fail()
    with pytest.raises(ReplayError, match="exception"):
        replay(lane, run)
    del caught
    gc.collect()
    assert torch.equal(replay(lane, run), wide(x))


def test_a_cycle_is_no_borrower(lane: Lane, x: torch.Tensor) -> None:
    run = record(lane, lambda: wide(x))
    with lane.lend():
        cycle: list[Any] = [x * 2]
        cycle.append(cycle)
        del cycle
    assert lane.borrowed_bytes == 0 and torch.equal(replay(lane, run), wide(x))


def test_a_pool_grows_to_what_the_work_needs_once(lane: Lane, x: torch.Tensor) -> None:
    run = record(lane, lambda: x * 2)
    small, sizes = lane.reserved_bytes, []
    for _ in range(3):
        with torch.no_grad(), lane.lend() as loan:
            kept = loan.keep(wide(x, 8))
        sizes.append(lane.reserved_bytes)
    assert sizes[0] >= small + 20 * MIB and set(sizes) == {sizes[0]}
    assert torch.equal(kept, wide(x, 8)) and torch.equal(replay(lane, run), x * 2)


def test_a_capture_or_a_replay_of_the_lane_inside_a_loan_is_refused(lane: Lane, x: torch.Tensor) -> None:
    run = record(lane, lambda: wide(x))
    other = Lane(lane.device)
    elsewhere = record(other, lambda: x + 1)
    with torch.no_grad(), lane.lend() as loan:
        with pytest.raises(ReplayError, match="inside another one"):
            replay(lane, run)
        with pytest.raises(CaptureError, match=r"inside Lane\.lend"):
            record(other, lambda: x + 2)
        got = loan.keep(replay(other, elsewhere))
    gc.collect()
    assert torch.equal(got, x + 1) and torch.equal(replay(lane, run), wide(x))
    assert torch.equal(replay(other, record(other, lambda: x + 2)), x + 2)
    other.close()


def test_a_wrapped_callable_is_not_recorded_inside_a_loan(lane: Lane, x: torch.Tensor) -> None:
    record(lane, lambda: wide(x))
    step = segue.graph(lambda y: y @ y.t() + 1)
    with torch.no_grad():
        for _ in range(3):
            with lane.lend() as loan:
                kept = loan.keep(step(x))
            assert torch.equal(kept, x @ x.t() + 1) and lane.borrowed_bytes == 0
        assert len(step.report().to_dict()["graphs"]) == 0
        for _ in range(3):
            assert torch.equal(step(x), x @ x.t() + 1)
        assert len(step.report().to_dict()["graphs"]) == 1
        with lane.lend() as loan:
            assert torch.equal(loan.keep(step(x)), x @ x.t() + 1)
    step.close()


def test_a_lane_is_closed_over_borrowed_tensors_which_stay_whole(lane: Lane, x: torch.Tensor) -> None:
    run = record(lane, lambda: wide(x))
    with lane.lend():
        borrowed = x * 2
    run.close()
    with lane.exclusive(is_upkeep=True):
        lane.release()
    churn(lane.device)
    assert torch.equal(borrowed, x * 2) and lane.borrowed_bytes == 0
    again = record(lane, lambda: wide(x))
    assert torch.equal(replay(lane, again), wide(x)) and torch.equal(borrowed, x * 2)


def test_other_threads_allocate_where_they_did(lane: Lane, x: torch.Tensor) -> None:
    run = record(lane, lambda: wide(x))
    inside, outside = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)
    made: list[torch.Tensor] = []

    def work() -> None:
        inside.wait()
        made.append(torch.ones(8, 16, device=x.device) * 5)
        outside.wait()

    thread = threading.Thread(target=work)
    thread.start()
    with lane.lend() as loan:
        loan.keep(x * 2)
        inside.wait()
        outside.wait()
    thread.join()
    assert not is_in_pool(lane, made[0]) and lane.borrowed_bytes == 0
    assert torch.equal(replay(lane, run), wide(x)) and torch.equal(made[0], torch.full_like(x, 5))


def test_loans_of_many_threads_leave_nothing_behind(lane: Lane, x: torch.Tensor) -> None:
    """What a library makes for each thread, at its first product there, lies elsewhere."""
    run = record(lane, lambda: wide(x))
    expected, wrong = wide(x), []
    started = threading.Barrier(4, timeout=60)

    def work() -> None:
        started.wait()  # all alive at once, so that no handle of a library is handed on
        for _ in range(3):
            with torch.no_grad(), lane.lend() as loan:
                got = loan.keep(torch.addmm(x.t()[0][:8], x, x.t()) @ x)
            if not torch.isfinite(got).all() or lane.borrowed_bytes or not torch.equal(replay(lane, run), expected):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and lane.borrowed_bytes == 0
