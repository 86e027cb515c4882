"""Timing: rounds through all arms in turn, medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Sample(NamedTuple):
    """Seconds of one call: the median over rounds, the fastest and the slowest round, and how many rounds."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{1e3 * self.median:.3f} ({1e3 * self.low:.3f}-{1e3 * self.high:.3f})"


def interleaved(
    arms: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int = 7, calls: int = 20, warmups: int = 3
) -> dict[str, Sample]:
    """Seconds a call of each arm; a round times `calls` calls behind one another, with one wait at the end."""
    for call in arms.values():
        for _ in range(warmups):
            call()
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, call in arms.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            _wait(device)
            found[name].append((time.perf_counter() - start) / calls)
    return {name: Sample(statistics.median(all_), min(all_), max(all_), rounds) for name, all_ in found.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
