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
    """Traces and captures `forward`; the trace's own result is dropped."""
    made = make_backend(backend, lane)
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


def churn(device: Device) -> None:
    """Allocates and frees memory full of NaN, so that whoever reads memory that nothing keeps shows it."""
    held = [torch.full((n,), float("nan"), device=device.device) for n in (1, 64, 1024, 16_384, 262_144)]
    del held
    gc.collect()
