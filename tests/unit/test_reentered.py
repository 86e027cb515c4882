"""Calls inside a call of the same wrapper and thread, of which nobody knew: a signal's handler, a finaliser, `outputs`."""

from __future__ import annotations

import gc
import signal
import threading
import time
from typing import Any

import pytest
import torch

import segue
from call_support import eager_reasons, same


def f(x: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        x = (x * 1.5 + 1).remainder(7)
    return x


def test_a_handler_that_calls_takes_the_lane_from_nobody() -> None:
    """Another thread replays in the same pool: whoever lost the lane would write over its results."""
    step, stop, wrong, calls = segue.graph(f), threading.Event(), [], [0, 0]
    mine, theirs = torch.ones(20_000), torch.full((20_000,), 2.0)
    expected, of_other = f(mine), f(theirs)
    for _ in range(3):
        step(mine)

    def other() -> None:
        while not stop.is_set():
            calls[0] += 1
            if not torch.equal(step(theirs), of_other):
                wrong.append("a thread's result")

    def handle(*_: Any) -> None:
        calls[1] += 1
        if not torch.equal(step(mine), expected):
            wrong.append("the handler's result")

    before = signal.signal(signal.SIGALRM, handle)
    thread = threading.Thread(target=other)
    thread.start()
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            same(step(mine), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.set()
        thread.join()
    assert not wrong and min(calls) > 20
    same(step(mine), expected)


def test_a_finaliser_that_calls() -> None:
    step, x = segue.graph(lambda x: x * 2 + 1), torch.ones(4)
    found: list[float] = []

    class Last:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            found.append(step(x)[0].item())

    for _ in range(3):
        step(x)
    threshold = gc.get_threshold()
    gc.set_threshold(50)
    try:
        for _ in range(500):
            Last()
            same(step(x), x * 2 + 1)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(found) == 500 and set(found) == {3.0}


def test_a_function_of_the_output_that_calls_the_same_wrapper() -> None:
    step: Any = segue.graph(lambda x: x * 2, outputs=lambda o: step(o[1:]) if o.numel() > 1 else o.clone())
    for _ in range(4):
        for n in (1, 2, 3):
            same(step(torch.ones(n)), torch.full((1,), 2.0**n))
    assert "lane_busy" in eager_reasons(step)


def test_an_exception_of_a_call_inside_leaves_the_outer_one_its_lane() -> None:
    held: list[tuple[bool, bool]] = []

    def is_held() -> bool:
        return any(site.lane.is_entered for site in step._dispatch.sites.values())

    def answer(out: torch.Tensor) -> torch.Tensor:
        before = is_held()
        with pytest.raises(TypeError):
            step("no tensor", 1, 2)
        held.append((before, is_held()))
        return out.clone()

    step = segue.graph(lambda x: x + 1, outputs=answer)
    for value in range(5):
        same(step(torch.full((2,), float(value))), torch.full((2,), value + 1.0))
    assert held == [(False, False)] * 2 + [(True, True)] * 3 and not is_held()
