"""Side streams and breaks (CASES F5): what a body leaves running is joined before the next segment, and side streams of a
segment are joined before it ends and forked again after."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import segue
from segue.device import get_device
from segue.graph.streams import noting_streams
from segue.memory.lane import Lane
from tests_support import record, replay


@pytest.mark.gpu
def test_work_that_a_body_leaves_on_another_stream_is_waited_for() -> None:
    lane = Lane(get_device("cuda"))
    side = torch.cuda.Stream()
    x = torch.randn(1 << 20, device="cuda")

    @segue.eager_on_graph
    def careless(y: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(y)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # some ten milliseconds
            out.copy_(y * 2)
        return out

    run = record(lane, lambda: careless(x + 1) * 3, "breakable")
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(replay(lane, run), (x + 1) * 2 * 3, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_side_stream_of_a_segment_is_joined_at_the_break_and_used_again_after_it() -> None:
    lane = Lane(get_device("cuda"))
    side = torch.cuda.Stream()
    x = torch.randn(1 << 16, device="cuda")
    shift = segue.eager_on_graph(lambda y: y + 1)

    def forward() -> torch.Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            doubled = x * 2
        y = shift(x)  # the side stream's work is not joined by this code
        with torch.cuda.stream(side):
            doubled = doubled + 1
        main.wait_stream(side)
        return y + doubled

    run = record(lane, forward, "breakable")
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(replay(lane, run), (x + 1) + (x * 2 + 1), rtol=0, atol=0)


@pytest.mark.gpu
def test_streams_made_current_are_noted_and_the_profiler_is_put_back() -> None:
    device = get_device("cuda")
    side = torch.cuda.Stream()

    def mine(*_: Any) -> None:
        return None

    sys.setprofile(mine)
    try:
        with noting_streams(device) as found, torch.cuda.stream(side):
            torch.zeros(1, device="cuda")
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert found == [side]


def test_without_cuda_nothing_is_noted_and_no_profiler_set() -> None:
    with noting_streams(get_device("cpu")) as found:
        assert sys.getprofile() is None
    assert found == []
