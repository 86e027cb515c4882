"""Timing: rounds through all arms in turn, medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

_LONGEST = 0.2
"""seconds that the calls of one arm may take in a round"""


class Sample(NamedTuple):
    """Seconds of one call: the median over rounds, the fastest and the slowest round, and how many rounds."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{1e3 * self.median:.3f} ({1e3 * self.low:.3f}-{1e3 * self.high:.3f})"


def interleaved(
    arms: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 7,
    calls: int = 20,
    warmups: int = 3,
    settle: float = 0.0,
    waits: bool = False,
) -> dict[str, Sample]:
    """Seconds a call of each arm; a round times `calls` calls behind one another with one wait at the end, or with `waits`
    one after each. Of an arm that would take longer than `_LONGEST` for them, fewer. As many untimed ones go before, and
    for at least `settle` seconds: a device that an arm has let idle is faster for some time, and each arm is to meet the
    device as it leaves it itself."""
    counts: dict[str, int] = {}
    for name, call in arms.items():
        for _ in range(warmups):
            call()
        counts[name] = max(1, min(calls, int(_LONGEST / _seconds(call, device, 1, waits))))
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, call in arms.items():
            until = time.perf_counter() + settle
            while True:
                _seconds(call, device, counts[name], waits)
                if time.perf_counter() >= until:
                    break
            found[name].append(_seconds(call, device, counts[name], waits))
    return {name: Sample(statistics.median(all_), min(all_), max(all_), rounds) for name, all_ in found.items()}


def _seconds(call: Callable[[], object], device: torch.device, calls: int, waits: bool) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
        if waits:
            _wait(device)
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
