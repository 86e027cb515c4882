"""How long calls take while recordings are made: eager, `capture="lazy"` and `capture="background"`.

    python benchmarks/background.py [--device cuda] [--layers 200] [--calls 1000] [--shapes 3] [--json FILE]

A server's loop: a call, a pause of half a millisecond, the next call, of `shapes` sizes in turn, until every size was
recorded and at least `calls` calls were made. Each call is timed until its result is there. The table has the median, the
99th percentile and the longest call, and what that percentile is in eager calls (their median).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import describe_machine, synchronize, table

import segue


class Layers(torch.nn.Module):
    """A chain of small linear layers, bound by launches."""

    def __init__(self, depth: int, width: int = 256) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def call_times(call: Callable[[Any], Any], inputs: list[torch.Tensor], is_done: Callable[[int], bool]) -> list[float]:
    """Milliseconds of each call."""
    times: list[float] = []
    while not is_done(len(times)):
        x = inputs[len(times) % len(inputs)]
        start = time.perf_counter()
        call(x)
        synchronize(x.device)
        times.append((time.perf_counter() - start) * 1e3)
        time.sleep(5e-4)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--shapes", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample")
    options = parser.parse_args()
    device = torch.device(options.device)
    model = Layers(options.layers).to(device).eval()
    inputs = [torch.randn(n + 1, 256, device=device) for n in range(options.shapes)]
    samples: dict[str, list[float]] = {}
    notes: list[str] = []
    with torch.inference_mode():
        call_times(model, inputs, lambda n: n >= 20)
        samples["eager"] = call_times(model, inputs, lambda n: n >= options.calls)
        for capture in ("lazy", "background"):
            with segue.graph(model, capture=capture, min_hits=options.calls // options.shapes // 2) as step:
                samples[capture] = call_times(
                    step, inputs, lambda n, step=step: n >= options.calls and step.report().captures == len(inputs)
                )
                notes += step.report().notes
    machine = describe_machine(device)
    print(f"{machine['device']} ({machine['cpu']}), torch {machine['torch']}; {options.layers} layers, {len(inputs)} shapes")
    median = _at(samples["eager"], 0.5)
    rows = [
        [name, len(times), _at(times, 0.5), _at(times, 0.99), max(times), _at(times, 0.99) / median, "eager calls"]
        for name, times in samples.items()
    ]
    print(table(["capture", "n", "median ms", "p99 ms", "longest ms", "p99 in", ""], rows))
    print("\n".join(notes))
    if options.json is not None:
        report = {"machine": machine, "layers": options.layers, "samples_ms": samples, "notes": notes}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _at(times: list[float], share: float) -> float:
    return sorted(times)[min(int(len(times) * share), len(times) - 1)]


if __name__ == "__main__":
    main()
