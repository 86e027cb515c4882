"""What the examples share: timing two ways of doing the same, and the command line."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def compare(name: str, eager: Callable[[], Any], graphs: Callable[[], Any], device: str, rounds: int = 5) -> float:
    """Prints the median time of both, measured in turns, and returns their ratio (above 1: graphs are faster)."""

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


def run(main: Callable[[str], float]) -> None:
    """Runs an example on the device that the command line names; a GPU where there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args().device)
