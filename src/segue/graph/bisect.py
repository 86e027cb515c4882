"""Which operation is at fault: replays a recording one operation at a time beside an eager run of the same inputs.

The recording must have been made with a segment for each operation. The forward pass runs eagerly first, and what each
operation leaves behind is copied; what it wrote in the outside world is put back, random generators too. Then the
recording is replayed step by step, and the first operation that leaves other values is the answer. It holds copies of
every intermediate result, so it is a tool for small inputs and for finding faults, not for production.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from segue.device import Device
from segue.graph.recording import Break, Recording
from segue.graph.state import unchanged
from segue.graph.trace import traced


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first operation whose replay differs from eager. `index` counts all operations of the pass, `location` is the
    user's line; `largest` is the largest absolute difference, nan where only one of the two is not a number, or where
    eager does another operation at this place."""

    index: int
    operation: str
    location: str | None
    largest: float

    def __str__(self) -> str:
        where = self.location or "an unknown line"
        how = "is not what eager does there" if self.largest != self.largest else f"differs by up to {self.largest:g}"
        return f"operation {self.index}, {self.operation} at {where}, {how}"


def first_difference(recording: Recording, forward: Callable[[], Any], device: Device, *, segmented: bool) -> Culprit | None:
    """The first operation of `recording` that differs from running `forward` on the same inputs, or None. What `forward`
    writes is put back, then written once by the replay.

    Raises:
        ValueError: the recording has no segment for each operation.
    """
    if not recording.operations:
        raise ValueError("this recording does not hold its operations one by one: record it with per_operation=True")
    results: dict[int, list[torch.Tensor]] = {}

    def collect(index: int, left: list[torch.Tensor]) -> None:
        results[index] = [t.detach().clone() for t in left]

    with unchanged(recording.memory, device.device, recording.generators):
        _, trace = traced(forward, device, is_full=True, segmented=segmented, collect=collect)
    for at, step in enumerate(recording.steps):
        step.replay()
        note = recording.operations.get(at)
        if note is None or isinstance(step, Break):
            continue
        if note.index >= len(trace.operations) or trace.operations[note.index][0].name != note.operation:
            return Culprit(note.index, note.operation, note.location, float("nan"))
        for mine, eager in zip(note.results, results.get(note.index, []), strict=False):
            if mine.shape != eager.shape or mine.dtype != eager.dtype:
                return Culprit(note.index, note.operation, note.location, float("nan"))
            if not _is_same(mine, eager):
                return Culprit(note.index, note.operation, note.location, _largest(mine, eager))
    return None


def _is_same(mine: torch.Tensor, eager: torch.Tensor) -> bool:
    """Bit for bit, save that any nan is any other."""
    return torch.equal(mine, eager) or bool(((mine == eager) | ((mine != mine) & (eager != eager))).all())


def _largest(mine: torch.Tensor, eager: torch.Tensor) -> float:
    return float((mine.double() - eager.double()).abs().max()) if not mine.dtype.is_complex else float("nan")
