"""Known failure classes of CUDA-graph users (F1, F2, ...), each a passing test: replay equals eager, or a clear error."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import segue
from segue.errors import CaptureError
from segue.memory.lane import Lane
from tests_support import check_against_eager, churn, poison, record, replay

SIZES = (64, 32, 16, 8)


class Attention:
    """A stand-in for attention: an eager break that reads what the segment before it made, and a cache."""

    def __init__(self, lane: Lane, width: int) -> None:
        self.weight = torch.randn(width, width, device=lane.device.device)
        self.cache = torch.zeros(128, width, device=lane.device.device)

    @segue.eager_on_graph
    def in_place(self, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
        self.cache[: k.shape[0]] = k
        out.copy_((q @ self.cache.t()).softmax(1) @ self.cache)

    @segue.eager_on_graph
    def fresh(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        self.cache[: k.shape[0]] = k
        return (q @ self.cache.t()).softmax(1) @ self.cache

    def layer(self, x: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        q, k = x @ self.weight, (x + 1) @ self.weight
        if in_place:
            out = torch.empty_like(q)
            self.in_place(q, k, out)
        else:
            out = self.fresh(q, k)
        return torch.nn.functional.layer_norm(x + out @ self.weight, x.shape[1:])


def _buckets(lane: Lane, sizes: tuple[int, ...], *, in_place: bool) -> tuple[dict[int, Any], dict[int, torch.Tensor]]:
    """Three layers a bucket, all buckets in one pool; nothing but the recordings keeps what crosses the breaks."""
    attention = [Attention(lane, 32) for _ in range(3)]
    inputs = {n: torch.randn(n, 32, device=lane.device.device) for n in sizes}
    runs: dict[int, Any] = {}
    for n in sizes:

        def forward(x: torch.Tensor = inputs[n]) -> torch.Tensor:
            y = x * 1
            for a in attention:
                y = a.layer(y, in_place=in_place)
            return y

        runs[n] = record(lane, forward, "breakable", tokens=n), forward
        gc.collect()
    return runs, inputs


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "fresh"])
@pytest.mark.parametrize("captured", [SIZES, SIZES[::-1], (8, 64, 16, 32)], ids=["falling", "rising", "mixed"])
def test_f1_f2_every_bucket_equals_eager_in_any_order_of_capture_and_replay(
    lane: Lane, captured: tuple[int, ...], in_place: bool
) -> None:
    runs, inputs = _buckets(lane, captured, in_place=in_place)
    for order in itertools.permutations(SIZES):
        for n in order:
            recorded, forward = runs[n]
            inputs[n].normal_()
            poison(lane)
            with torch.no_grad():
                expected = forward()
            assert torch.equal(replay(lane, recorded), expected), (order, n)
    for n in SIZES:
        check_against_eager(lane, *runs[n], [inputs[n]])


def test_f1_buckets_share_memory_although_what_crosses_a_break_is_kept(lane: Lane) -> None:
    runs, _ = _buckets(lane, SIZES, in_place=False)
    limit = (4 if lane.device.kind == "cpu" else 80) << 20  # CUDA: with the matrix library's workspace
    assert lane.reserved_bytes <= limit
    for recorded, _forward in runs.values():
        assert all(not lane.pool.state().live.get(t.data_ptr()) for t in recorded.recording.owned)


def test_f1_an_earlier_bucket_survives_when_later_ones_are_closed(lane: Lane) -> None:
    runs, inputs = _buckets(lane, SIZES, in_place=False)
    for n in SIZES[1:]:
        runs[n][0].close()
    lane.device.flush()
    check_against_eager(lane, *runs[SIZES[0]], [inputs[SIZES[0]]])


def test_f2_a_bridge_is_kept_alive_and_updated_in_place(lane: Lane) -> None:
    x = torch.randn(64, 64, device=lane.device.device)
    body = segue.eager_on_graph(lambda y: y @ y)

    def forward() -> torch.Tensor:
        return body(x + 1) * 2 + body(x - 1)

    recorded = record(lane, forward, "breakable")
    for _ in range(4):  # unrelated recordings and allocations run over whatever is not kept
        record(lane, lambda: (x * 3).sin() + x, "full")
        churn(lane.device)
    check_against_eager(lane, recorded, forward, [x], rounds=5)


def test_f3_a_fresh_tensor_at_each_call_reaches_the_next_segment(lane: Lane) -> None:
    x, weight = (torch.randn(16, 16, device=lane.device.device) for _ in range(2))
    addresses: list[int] = []
    held: list[torch.Tensor] = []

    @segue.eager_on_graph
    def product(y: torch.Tensor) -> torch.Tensor:
        result = y @ weight
        addresses.append(result.data_ptr())
        held.append(torch.empty_like(result))  # so that the next result lies elsewhere
        return result

    recorded = record(lane, lambda: product(x * 2).relu() + 1, "breakable")
    check_against_eager(lane, recorded, lambda: product(x * 2).relu() + 1, [x, weight], rounds=5)
    assert len(set(addresses)) > 1


def _whole(x: torch.Tensor) -> torch.Tensor:
    return (x / x.abs().amax()).cumsum(0) @ x.t()


def _unwritten_rows(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:3] = x[:3] * 2
    return out[:3].sum() + x.amax()


@pytest.mark.parametrize("program", [_whole, _unwritten_rows])
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_f13_poison_in_the_pools_free_memory_never_shows(
    lane: Lane, program: Callable[[torch.Tensor], torch.Tensor], backend: str
) -> None:
    body = segue.eager_on_graph(lambda y: y.exp() + 1)
    inputs = {n: torch.randn(n, 16, device=lane.device.device) for n in (32, 4, 8)}
    runs = {n: (record(lane, lambda x=x: program(body(x * 0.1)), backend), x) for n, x in inputs.items()}
    for n in (4, 32, 4, 8, 32, 8):
        recorded, x = runs[n]
        check_against_eager(lane, recorded, lambda x=x: program(body(x * 0.1)), [x], rounds=2)


def test_f18_f19_what_a_recording_reads_from_outside_is_kept_alive(lane: Lane) -> None:
    x = torch.randn(8, 8, device=lane.device.device)
    table = torch.randn(64, 8, device=lane.device.device)
    body = segue.eager_on_graph(lambda y, t: y + t)
    held = {"w": torch.randn(8, 8, device=lane.device.device), "piece": table[8:24:2]}
    recorded = record(lane, lambda: body(x @ held["w"], held["piece"]) * held["piece"], "breakable")
    expected_from = (held["w"].clone(), held["piece"].clone())
    held.clear()
    del table
    for _ in range(3):
        x.normal_()
        churn(lane.device)
        expected = (x @ expected_from[0] + expected_from[1]) * expected_from[1]
        assert torch.equal(replay(lane, recorded), expected)


def test_f19_an_output_of_another_recording_is_never_taken_for_own_memory(lane: Lane) -> None:
    x = torch.randn(8, 8, device=lane.device.device)
    first = record(lane, lambda: x * 2)
    with lane.exclusive():
        leased = first.replay()
    for backend in ("full", "breakable"):
        body = segue.eager_on_graph(lambda y: y + 1)
        with pytest.raises(CaptureError, match="memory of its own lane"):
            record(lane, lambda body=body: body(leased) + leased, backend)
    kept = leased.clone()
    check_against_eager(lane, record(lane, lambda: kept + x), lambda: kept + x, [x])


def test_f19_an_outside_tensor_that_only_the_capture_reads_is_kept_alive(lane: Lane) -> None:
    x = torch.randn(8, 8, device=lane.device.device)
    held = [torch.full((8, 8), 3.0, device=lane.device.device), torch.full((8, 8), 5.0, device=lane.device.device)]
    runs = iter(range(9))
    recorded = record(lane, lambda: x * held[next(runs) % 2])  # the trace reads the first, the capture the second
    held.clear()
    for _ in range(3):
        churn(lane.device)
        assert torch.equal(replay(lane, recorded), x * 5.0)
    assert recorded.recording.difference is None
