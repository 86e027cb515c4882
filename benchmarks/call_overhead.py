"""Host time of one `segue.graph` call, and what each of its checks costs.

    python benchmarks/call_overhead.py [--device cuda] [--parameters 300] [--inputs 4] [--rounds 2000] [--json FILE]

*By hand* is the same work without Segue: one grouped copy into static inputs, the raw replay, a clone of the output. The
call is measured beside it, round by round, so that a slow moment of the machine hits both; medians. Then each part of the
call is measured alone. On CUDA the device is left to run behind: what is measured is what the host spends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import describe_machine

import segue
from segue.graph.modes import kernel_modes
from segue.observe.report import format_table
from segue.runners.call_key import scan


class Small(torch.nn.Module):
    """Many parameters, little work: a chain of `parameters / 2` small linear layers."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(parameters // 2)])

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x
        for layer in self.layers:
            total = layer(total)
        return total


def microseconds(call: Callable[[], Any], rounds: int, sync: Callable[[], None]) -> float:
    """The median of `rounds` calls; the device catches up every 64, outside what is measured."""
    times = []
    for index in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if index % 64 == 0:
            sync()
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--inputs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures, in microseconds, with what they were measured on"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    model = Small(options.parameters).to(device).eval()
    inputs = tuple(torch.randn(4, 8, device=device) for _ in range(options.inputs))
    with torch.inference_mode():
        step = segue.graph(model)
        step.capture(*inputs)
        site = next(iter(step._dispatch.sites.values()))
        graph = next(iter(site.store.recorded.values()))
        static = graph.static.buffers
        replay = graph.graph.replay

        def by_hand() -> torch.Tensor:
            torch._foreach_copy_(static, inputs)
            return replay().clone()

        call = scan(inputs, {}, lambda: device)
        entries = site.store.entries
        key = next(iter(entries))

        def lane() -> None:
            site.lane.enter()
            site.lane.leave()

        parts: dict[str, Callable[[], Any]] = {
            "a call that looks as an earlier one": lambda: step._dispatch.known(inputs, {}),
            "  of that, modes that select kernels": lambda: kernel_modes(device.type),
            "key of the arguments, where it does not": lambda: scan(inputs, {}, lambda: device),
            "looking the key up": lambda: entries.get(key),
            "parameters, buffers, attributes, hooks": graph.audit.holds,
            "arguments fit static inputs": lambda: graph.cannot_answer(call.tensors),
            "taking and leaving the lane": lane,
            "copying the inputs in": lambda: graph.static.load(call.tensors),
            "replay": replay,
            "copying the output out": lambda: graph.outputs.copied(call.tensors, None),
        }
        for warm in (by_hand, lambda: step(*inputs), lambda: model(*inputs)):
            microseconds(warm, 200, sync)
        whole, hand = [], []
        for _ in range(10):
            hand.append(microseconds(by_hand, options.rounds // 10, sync))
            whole.append(microseconds(lambda: step(*inputs), options.rounds // 10, sync))
        eager = microseconds(lambda: model(*inputs), options.rounds // 4, sync)
        costs = {name: microseconds(part, options.rounds // 4, sync) for name, part in parts.items()}
    call_us, hand_us = statistics.median(whole), statistics.median(hand)
    machine = describe_machine(device)
    beyond = {"eager": eager, "by hand": hand_us, "segue.graph": call_us, "beyond by hand": call_us - hand_us}
    sizes = f"{options.parameters} parameters, {options.inputs} inputs, n = {options.rounds}"
    print(f"{machine['device']} ({machine['cpu']}), torch {machine['torch']}; {sizes}")
    rows = [[part, f"{cost:.2f}"] for part, cost in costs.items()]
    rows += [[what, f"{us:.2f}"] for what, us in beyond.items()]
    print(format_table(["one call", "host us"], rows))
    if options.json is not None:
        asked = {"parameters": options.parameters, "inputs": options.inputs, "rounds": options.rounds}
        report = {"machine": machine, **asked, "parts_us": costs, "calls_us": beyond}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
