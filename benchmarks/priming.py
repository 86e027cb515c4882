"""What priming a graph is worth: the driver runs a graph's kernels closer together after one launch of a certain kind.

    PYTHONPATH=src python benchmarks/priming.py [--repeats 21] [--json FILE]      # a CUDA GPU of capability 9.0 or newer

Each timing follows ten ordinary launches, such as a step's own copies are, which end what an earlier one left. First graphs
of N short kernels, and one with a matrix product at every 28th: *one at a time* is the host's wait from the submission to
the end, *queued* the device's time a replay when ten are submitted behind one another. *Both* launches, or *one*, come in
front of every replay, *once* in front of the first. Then segments of N kernels with two ordinary kernels between each two,
as breaks launch them. Arms in turn, medians, microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from boundaries import captured, milliseconds
from common import describe_machine, table

from segue.device.driver import primer

KERNELS = (16, 32, 64, 128, 300, 900)
OF_A_SEGMENT = (4, 6, 8, 12, 16, 26, 52)
NUM_SEGMENTS = 33
NUM_QUEUED = 10
NUM_LAYERS = 32

Call = Callable[[], None]


def in_turn(*calls: Call) -> None:
    for call in calls:
        call()


def nothing() -> None:
    pass


def with_breaks(segments: list[Call], between: Call, first: Call, before: Call) -> None:
    in_turn(first, segments[0])
    for segment in segments[1:]:
        in_turn(between, before, segment)


def medians(arms: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in arms.items():
            samples[name].append(run())
    return {name: statistics.median(times) for name, times in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    numbers, prime = torch.zeros(4096, device=device), primer(0)
    assert prime is not None, "this GPU or its driver cannot prime"
    weights = [torch.zeros(14336, 4096, device=device, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
    rows_in = torch.zeros(4, 4096, device=device, dtype=torch.bfloat16)

    def ordinary(count: int) -> None:
        for _ in range(count):
            numbers.add_(1)

    def products() -> None:
        for weight in weights:
            F.linear(rows_in, weight)
            ordinary(27)

    def one_at_a_time(graph: Call, first: Call, before: Call) -> float:
        ordinary(10)
        torch.cuda.synchronize()
        start = time.perf_counter()
        in_turn(first, before, graph)
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start)

    def queued(graph: Call, first: Call, before: Call) -> float:
        ordinary(10)
        return 1e3 / NUM_QUEUED * milliseconds(partial(in_turn, first, *(before, graph) * NUM_QUEUED))

    def segmented(segments: list[Call], first: Call, before: Call) -> float:
        ordinary(10)
        return 1e3 * milliseconds(partial(with_breaks, segments, partial(ordinary, 2), first, before))

    found: dict[str, Any] = {"machine": describe_machine(device), "graphs": {}, "segments": {}}
    products()
    graphs = {str(count): captured(partial(ordinary, count)).replay for count in KERNELS}
    graphs["with products"] = captured(products).replay
    ways = {
        "plain": (nothing, nothing),
        "both": (nothing, prime.first),
        "one": (nothing, prime.behind),
        "once": (prime.first, nothing),
    }
    for name, graph in graphs.items():
        found["graphs"][name] = medians(
            {
                f"{way}, {how}": partial(measured, graph, *calls)
                for how, measured in (("one at a time", one_at_a_time), ("queued", queued))
                for way, calls in ways.items()
                if (way, how) != ("once", "one at a time")
            },
            options.repeats,
        )
    print(table(["kernels", *found["graphs"]["16"]], [[name, *took.values()] for name, took in found["graphs"].items()]))
    ways = {"plain": (nothing, nothing), "first": (prime.first, nothing), "each": (prime.first, prime.behind)}
    for count in OF_A_SEGMENT:
        segments = [captured(partial(ordinary, count)).replay for _ in range(NUM_SEGMENTS)]
        arms = {way: partial(segmented, segments, *calls) for way, calls in ways.items()}
        found["segments"][count] = medians(arms, options.repeats)
    rows = [[n, *t.values(), (t["each"] - t["plain"]) / NUM_SEGMENTS] for n, t in found["segments"].items()]
    print(table(["kernels a segment", *ways, "more a segment"], rows))
    start = time.perf_counter()
    in_turn(*[prime.behind] * 1000)
    print(f"the launch that primes takes the host {1e3 * (time.perf_counter() - start):.2f} us")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
