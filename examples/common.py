"""What the examples share: timing two ways of doing the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def compare(name: str, eager: Callable[[], Any], graphs: Callable[[], Any], device: str, rounds: int = 5) -> float:
    """Prints the median time of both, measured in turns, and returns their ratio (above 1: graphs are faster)."""
    import torch

    def timed(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed(eager), timed(graphs)
    pairs = [(timed(eager), timed(graphs)) for _ in range(rounds)]
    slow, fast = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{name} on {device}: eager {slow * 1e3:.2f} ms, graphs {fast * 1e3:.2f} ms, {slow / fast:.2f} times")
    return slow / fast
