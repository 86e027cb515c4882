"""A recording with a segment for each operation replays as any other, and names the operation that differs from eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import segue
from call_support import check_calls
from segue.device import Device
from segue.errors import CaptureError, ConfigError
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


# -- segue.bisect -----------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """Holds state of every kind that a bisection must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.settings = {"scale": 2.0}  # too deep for the audit: docs/safety.md
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = shift(self.inner(x)).tanh()
        self.get_buffer("total")[4:] += y.sum(0)
        return y * self.settings["scale"] + 1


@pytest.fixture
def scaled(device: Device) -> Scaled:
    return Scaled().to(device.device)


def test_bisect_says_none_where_all_operations_agree_and_leaves_everything_as_it_was(scaled: Scaled, device: Device) -> None:
    x = torch.randn(3, 4, device=device.device)
    before, x_before = {k: v.clone() for k, v in scaled.state_dict().items()}, x.clone()
    random = torch.get_rng_state()
    with torch.no_grad():
        for step in (segue.graph(scaled), segue.graph(scaled, debug="ops"), scaled):
            for _ in range(3):
                assert segue.bisect(step, x) is None
    torch.testing.assert_close(dict(scaled.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(x, x_before) and torch.equal(torch.get_rng_state(), random)


def test_bisect_names_the_operation_that_reads_a_frozen_value(scaled: Scaled, device: Device) -> None:
    step = segue.graph(scaled, debug="ops")
    with torch.no_grad():
        for _ in range(3):
            step(torch.randn(3, 4, device=device.device))
        x = torch.randn(3, 4, device=device.device)
        assert step.explain(x).is_replay and segue.bisect(step, x) is None
        scaled.settings["scale"] = 3.0
        culprit = segue.bisect(step, x)
        assert culprit is not None and culprit.operation.startswith("aten.mul")
        assert culprit.location is not None and "test_bisect.py" in culprit.location and "in forward" in culprit.location
        expected = (scaled.inner(x) + 1).tanh().abs().max()
        assert culprit.largest == pytest.approx(float(expected), rel=1e-5)
        assert f"operation {culprit.index}, aten.mul" in str(culprit)


def test_bisect_names_where_recorded_code_takes_another_way(device: Device) -> None:
    from segue.graph.guard import is_capturing

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y = y + 1 if is_capturing() else y - 1
        return y.relu()

    with torch.no_grad():
        culprit = segue.bisect(f, torch.randn(4, device=device.device))
    assert culprit is not None and (culprit.index, culprit.operation) == (1, "aten.add.Tensor")
    assert "is not what eager does there" in str(culprit)


def test_bisect_of_a_callable_that_fills_a_cache_the_first_time(device: Device) -> None:
    cache: dict[int, torch.Tensor] = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in cache:
            cache[x.shape[0]] = torch.arange(float(x.shape[0]), device=x.device)
        return x + cache[x.shape[0]]

    with torch.no_grad():
        assert segue.bisect(f, torch.randn(4, device=device.device)) is None
    assert not cache


def test_bisect_refuses_what_has_no_replay(device: Device) -> None:
    x = torch.randn(4, device=device.device)
    with torch.no_grad():
        with pytest.raises(CaptureError, match="host"):
            segue.bisect(lambda x: x * x.sum().item(), x)
        with pytest.raises(CaptureError, match="unhashable_argument"):
            segue.bisect(lambda x, s: x, x, {1, 2})
    with pytest.raises(CaptureError, match="autograd"):
        segue.bisect(lambda x: x * 2, x.requires_grad_())
    with torch.no_grad():  # and what was refused leaves no trace
        step = segue.graph(lambda x: x * 2)
        assert segue.bisect(step, x) is None


# -- debug="forward", debug="ops" ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", ["forward", "ops"])
def test_debug_modes_answer_as_eager(debug: Any, device: Device) -> None:
    ours, theirs = Scaled().to(device.device), Scaled().to(device.device)
    theirs.load_state_dict(ours.state_dict())

    def wrap(model: Scaled) -> Any:
        def f(x: torch.Tensor, out: dict[str, torch.Tensor]) -> Any:
            out["into"].copy_(model(x))
            return out["into"][1:], {"y": x.exp(), "n": 3}, model.total.clone(), model.inner.weight

        return f

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            step = segue.graph(wrap(ours), debug=debug)
            made = [
                ((torch.randn(3, 4, device=device.device),), {"out": {"into": torch.zeros(3, 4, device=device.device)}})
                for _ in range(5)
            ]
            check_calls(step, wrap(theirs), made)
            report = step.report()
            assert (report.replays, report.captures) == (3, 1)
            row = report.to_dict()["graphs"][0]
            if debug == "forward":
                assert (row["segments"], row["breaks"]) == (0, 1)
            else:
                assert row["segments"] > 5 and row["breaks"] == 1


def test_debug_forward_runs_the_python_at_each_call_so_that_nothing_is_frozen(scaled: Scaled, device: Device) -> None:
    step = segue.graph(scaled, debug="forward")
    with torch.no_grad():
        for scale in (2.0, 3.0, 4.0, 5.0):
            scaled.settings["scale"] = scale
            x = torch.randn(3, 4, device=device.device)
            before = scaled.get_buffer("total").clone()
            got = step(x)
            scaled.get_buffer("total").copy_(before)
            torch.testing.assert_close(got, scaled(x), rtol=0, atol=0)
    assert step.report().replays == 2


def test_an_unknown_debug_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="forward"):
        segue.graph(lambda x: x, debug="all")


@segue.eager_on_graph
def add_to(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total.add_(x)
    return total * 1


@pytest.mark.parametrize("debug", [None, "ops"])
def test_what_breaks_write_into_their_arguments_is_put_back(debug: Any, device: Device) -> None:
    total = torch.zeros(3, device=device.device)
    step = segue.graph(lambda x: add_to(total, x * 1) + 1, debug=debug)
    x = torch.ones(3, device=device.device)
    with torch.no_grad():
        for _ in range(3):
            step(x)
        before = total.clone()
        assert segue.bisect(step, x) is None
        torch.testing.assert_close(total, before, rtol=0, atol=0)
        torch.testing.assert_close(step(x), before + 2, rtol=0, atol=0)
