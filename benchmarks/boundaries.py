"""What a break costs at least: one graph against the same kernels as segments with a kernel launched between each two.

    python benchmarks/boundaries.py [--segments 33] [--kernels 6] [--microseconds 8] [--repeats 41] [--json FILE]

Every kernel only waits, so nothing but the submissions differs. The host is put ahead first, so its own time does not count.
Events around each pass, arms in turn, medians. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import describe_machine, table

HEAD_START = 8_000_000  # device cycles, some milliseconds


def captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def milliseconds(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=33)
    parser.add_argument("--kernels", type=int, default=6, help="of a segment")
    parser.add_argument("--microseconds", type=int, default=8, help="of a kernel")
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample")
    options = parser.parse_args()
    torch.cuda._sleep(1)
    cycles = int(options.microseconds * HEAD_START / milliseconds(lambda: torch.cuda._sleep(HEAD_START)) / 1e3)

    def kernel() -> None:
        torch.cuda._sleep(cycles)

    def segment() -> None:
        for _ in range(options.kernels):
            kernel()

    def whole(run_segment: Callable[[int], None], run_break: Callable[[int], None]) -> None:
        for index in range(options.segments):
            run_segment(index)
            if index + 1 < options.segments:
                run_break(index)

    one = captured(lambda: whole(lambda _: segment(), lambda _: kernel()))
    segments = [captured(segment) for _ in range(options.segments)]
    singles = [captured(kernel) for _ in range(options.segments)]
    arms: dict[str, Callable[[], None]] = {
        "one graph": one.replay,
        "a kernel between graphs": lambda: whole(lambda i: segments[i].replay(), lambda _: kernel()),
        "a graph of one kernel between": lambda: whole(lambda i: segments[i].replay(), lambda i: singles[i].replay()),
        "kernels alone": lambda: whole(lambda _: segment(), lambda _: kernel()),
    }
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(options.repeats):
        for name, run in arms.items():
            samples[name].append(milliseconds(run))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    breaks, least = options.segments - 1, medians["one graph"]
    rows: list[list[Any]] = [
        [name, took, min(samples[name]), max(samples[name]), 1e3 * (took - least) / breaks, "us a break"]
        for name, took in medians.items()
    ]
    print(table(["", "median ms", "fastest", "slowest", "more than one graph", ""], rows))
    if options.json:
        described = {
            "machine": describe_machine(torch.device("cuda")),
            "options": vars(options) | {"json": str(options.json)},
        }
        options.json.write_text(json.dumps(described | {"ms": samples}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
