"""What tests of the core share: recording a function, replaying it, churning the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from segue.backends import make_backend
from segue.backends.base import GraphReplay
from segue.device import Device
from segue.memory.lane import Lane
from segue.shapes.key import ShapeKey


def record(lane: Lane, forward: Callable[[], Any], backend: str = "full", tokens: int = 1) -> GraphReplay:
    """Traces and captures `forward`; the trace's own result is dropped. Nothing is compiled, so that bits are comparable."""
    made = make_backend(backend, lane, compiler="eager")
    with torch.no_grad(), lane.exclusive():
        with lane.device.on_stream(lane.stream):
            _, trace = made.trace(forward)
        recorded = made.record(ShapeKey("call", tokens), forward, trace)
    assert isinstance(recorded, GraphReplay)
    return recorded


def replay(lane: Lane, recorded: GraphReplay) -> Any:
    """Replays, and copies what comes out."""
    with torch.no_grad(), lane.exclusive():
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, recorded.replay())


def churn(device: Device, *, collect: bool = True) -> None:
    """Allocates and frees memory full of NaN, so that whoever reads memory that nothing keeps shows it."""
    held = [torch.full((n,), float("nan"), device=device.device) for n in (1, 64, 1024, 16_384, 262_144)]
    del held
    if collect:
        gc.collect(1)


def check_against_eager(
    lane: Lane, recorded: GraphReplay, forward: Callable[[], Any], state: list[torch.Tensor], rounds: int = 3
) -> None:
    """Replays beside eager on new values of `state` (what `forward` reads and writes), and compares results and state
    bit for bit. Free memory of the pool is poisoned and the allocator churned before each replay."""
    for seed in range(1, rounds + 1):
        before = [_new_values(t, seed) for t in state]
        expected, state_expected = _run(forward, state, before)
        churn(lane.device, collect=False)
        poison(lane)
        got, state_got = _run(lambda: replay(lane, recorded), state, before)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(state_got, state_expected, rtol=0, atol=0, equal_nan=True)


def poison(lane: Lane) -> None:
    """Fills the pool's free memory with NaN, where the device lets us."""
    fill = getattr(lane.pool, "fill_free_memory", None)
    if fill is not None:
        fill(0xFF)


def _new_values(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, generator=generator).to(tensor)
    return torch.randint(0, 3, tensor.shape, generator=generator).to(tensor)


def _run(call: Callable[[], Any], state: list[torch.Tensor], values: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    with torch.no_grad():
        for tensor, value in zip(state, values, strict=True):
            tensor.copy_(value)
        result = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, call())
        return result, [t.clone() for t in state]
