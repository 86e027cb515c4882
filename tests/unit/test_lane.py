"""A lane serialises: threads replay its recordings in turn, nested replays are refused, a pass collects garbage once."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import segue
from segue.errors import ReplayError
from segue.memory.lane import Lane
from tests_support import record, replay


def test_threads_that_replay_different_recordings_get_their_own_results(lane: Lane) -> None:
    body = segue.eager_on_graph(lambda y: y @ y.t())
    inputs = [torch.randn(n, 16, device=lane.device.device) for n in (48, 4, 16, 32)]
    runs = [record(lane, lambda x=x: body(x * 2).softmax(1) @ x, "breakable") for x in inputs]
    expected = [replay(lane, run) for run in runs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(60):
            if not torch.equal(replay(lane, runs[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_one_thread_captures_while_another_replays_and_a_third_runs_eagerly(lane: Lane) -> None:
    x = torch.randn(16, 16, device=lane.device.device)
    run = record(lane, lambda: (x @ x).relu() + 1)
    expected = replay(lane, run)
    stop, wrong = threading.Event(), []

    def replaying() -> None:
        while not stop.is_set():
            if not torch.equal(replay(lane, run), expected):
                wrong.append("replay")

    def eager() -> None:
        y = torch.randn(8, 8)
        want = y @ y
        while not stop.is_set():
            if not torch.equal(y @ y, want):
                wrong.append("eager")

    threads = [threading.Thread(target=replaying), threading.Thread(target=eager)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            other = record(lane, lambda: (x + 1) @ x)
            assert torch.equal(replay(lane, other), (x + 1) @ x)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_entering_twice_is_an_error_and_leaves_the_lane_usable(lane: Lane) -> None:
    with lane.exclusive():
        assert lane.is_entered
        with pytest.raises(ReplayError, match="inside another one"), lane.exclusive():
            pass
        assert lane.is_entered
    assert not lane.is_entered
    with lane.exclusive():
        pass


def test_a_pass_turns_the_collector_off_and_on_again_whatever_happens_inside(lane: Lane) -> None:
    with lane.capture_pass():
        for _ in range(3):
            with lane.capture_pass():
                assert not gc.isenabled()
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(KeyError), lane.capture_pass():
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_replay_counts_a_generation(lane: Lane) -> None:
    x = torch.randn(4, device=lane.device.device)
    run = record(lane, lambda: x + 1)
    before = lane.generation
    replay(lane, run)
    assert lane.generation == before + 1
