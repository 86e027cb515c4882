"""A recording with a segment for each operation replays as any other, and names the operation that differs from eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import segue
from segue.graph import Recorder, Recording, traced
from segue.graph.bisect import first_difference
from segue.memory.lane import Lane
from tests_support import churn


@segue.eager_on_graph
def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Model:
    """Reads Python state, which a recording freezes."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.scale = 2.0
        self.total = torch.zeros_like(x)

    def __call__(self) -> torch.Tensor:
        y = shift(self.x.relu() @ self.x.t()) - 1
        y = y.view(-1)[:4] * self.scale
        self.total.view(-1)[:4].add_(y)
        return y.softmax(dim=0)


def recorded(lane: Lane, forward: Any, *, segmented: bool) -> Recording:
    with torch.no_grad(), lane.exclusive(), lane.device.on_stream(lane.stream):
        _, trace = traced(forward, lane.device, is_full=True, segmented=segmented)
        return Recorder(lane.device, lane.pool, lane.stream, trace, segmented=segmented, per_operation=True).record(forward)


@pytest.mark.parametrize("segmented", [True, False])
def test_every_operation_is_a_segment_and_replays_as_eager(lane: Lane, segmented: bool) -> None:
    model = Model(torch.randn(4, 4, device=lane.device.device))
    run = recorded(lane, model, segmented=segmented)
    assert [s.nodes for s in run.segments] == [1] * len(run.segments)
    assert len(run.breaks) == (1 if segmented else 0)
    for _ in range(3):
        model.x.normal_()
        before = model.total.clone()
        churn(lane.device)
        with torch.no_grad(), lane.exclusive():
            got = run.replay().clone()
        after = model.total.clone()
        model.total.copy_(before)
        torch.testing.assert_close(got, model(), rtol=0, atol=0)
        torch.testing.assert_close(after, model.total, rtol=0, atol=0)


@pytest.mark.parametrize("segmented", [True, False])
def test_the_first_operation_that_differs_is_named(lane: Lane, segmented: bool) -> None:
    model = Model(torch.randn(4, 4, device=lane.device.device))
    run = recorded(lane, model, segmented=segmented)
    model.x.uniform_(0.1, 1)  # positive: no row of zeros, so that the total does change
    total = model.total.clone()
    with torch.no_grad(), lane.exclusive():
        assert first_difference(run, model, lane.device, segmented=segmented) is None
    assert not torch.equal(model.total, total), "the replay wrote, once"
    model.scale = 3.0
    with torch.no_grad(), lane.exclusive():
        culprit = first_difference(run, model, lane.device, segmented=segmented)
    assert culprit is not None
    assert culprit.operation.startswith("aten.mul")
    assert culprit.location is not None and "test_bisect.py" in culprit.location
    assert culprit.largest > 0


def test_an_ordinary_recording_cannot_be_bisected(lane: Lane) -> None:
    x = torch.randn(4, device=lane.device.device)
    with torch.no_grad(), lane.exclusive(), lane.device.on_stream(lane.stream):
        _, trace = traced(lambda: x + 1, lane.device, is_full=True, segmented=False)
        run = Recorder(lane.device, lane.pool, lane.stream, trace, segmented=False).record(lambda: x + 1)
    with pytest.raises(ValueError, match="per_operation"):
        first_difference(run, lambda: x + 1, lane.device, segmented=False)
