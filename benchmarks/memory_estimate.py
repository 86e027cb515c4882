"""Graph memory estimated before the capture and measured after it, for six combinations of shape, backend and ladder.

    PYTHONPATH=src python benchmarks/memory_estimate.py --json estimates.json     # one CUDA GPU, under 120 s
    PYTHONPATH=src python benchmarks/memory_estimate.py --tiny                    # cpu, seconds: does it run?
    PYTHONPATH=src python benchmarks/memory_estimate.py --only moe-78-layers      # the 42 prefill shapes of 78 layers

Each combination is an engine that measures (a few recordings in a lane that is thrown away), and then captures. "Graphs"
are the pool and the executable graphs; ours and the usual formula stand beside what they took. The balance is the growth
that the driver reports over the capture, less what the ledger explains.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import describe_machine, progress, table

from segue.cli.bench.child import in_child, leave_cuda_alone
from segue.config import GraphConfig, PhaseConfig
from segue.llm import Engine, EngineConfig
from segue.llm.bench.models import random_model
from segue.memory.estimate import error_text

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A model's shape and what is recorded of it; None leaves a phase eager."""

    name: str
    shape: str
    prefill: PhaseConfig | None = None
    decode: PhaseConfig | None = None
    chunk: int = 2048
    requests: int = 64
    context: int = 2048


BREAKABLE, FULL = PhaseConfig(backend="breakable"), PhaseConfig(backend="full")
COMBINATIONS = (
    Combination(name="smollm2 prefill", shape="smollm2", prefill=BREAKABLE),
    Combination(name="smollm2 both", shape="smollm2", prefill=BREAKABLE, decode=FULL, chunk=1024, requests=16, context=1024),
    Combination(name="llama-3-8b prefill", shape="llama-3-8b", prefill=BREAKABLE),
    Combination(
        name="llama-3-8b decode",
        shape="llama-3-8b",
        decode=PhaseConfig(backend="full", ladder="vllm"),
        requests=32,
        context=1024,
    ),
    Combination(
        name="llama-3-8b full prefill",
        shape="llama-3-8b",
        prefill=PhaseConfig(backend="full", ladder=(64, 128, 256, 512, 1024), request_slots=2),
        chunk=1024,
        requests=8,
        context=1024,
    ),
    Combination(name="qwen3-8b both", shape="qwen3-8b", prefill=BREAKABLE, decode=FULL, requests=16, context=1024),
    Combination(name="moe-78-layers", shape="moe-78-layers", prefill=BREAKABLE, requests=8),
)
DEFAULT = [c.name for c in COMBINATIONS if c.name != "moe-78-layers"]


def run(combination: Combination, model: Any, device: torch.device, is_tiny: bool) -> dict[str, Any]:
    sizes = {"chunk_size": combination.chunk, "max_requests": combination.requests, "max_context": combination.context}
    if is_tiny:
        sizes = {"chunk_size": 64, "max_requests": 4, "max_context": 128}
    off = PhaseConfig(backend="disabled")
    graphs = GraphConfig(prefill=combination.prefill or off, decode=combination.decode or off, capture="manual")
    config = EngineConfig(device=device, graphs=graphs, num_pages=sizes["max_requests"] + 256, **sizes)  # type: ignore[arg-type]
    with Engine(model, config) as engine:
        start = time.perf_counter()
        estimate = engine.measure()
        measured = time.perf_counter()
        engine.capture()
        captured = time.perf_counter()
        ledger = engine.ledger()
    assert ledger.balance is not None
    result = {
        "name": combination.name,
        "shape": combination.shape,
        "graphs": len(ledger.graphs),
        "actual": ledger.budget_bytes,
        "estimated": estimate.graph_bytes,
        "formula": estimate.formula_bytes,
        "static_estimated": estimate.static_bytes,
        "static_actual": sum(row.static_bytes for row in ledger.families) + ledger.workspace_bytes,
        "driver_growth": ledger.balance.driver,
        "unexplained": ledger.balance.unexplained,
        "measure_s": measured - start,
        "capture_s": captured - measured,
        "estimate": estimate.to_dict(),
        "ledger": ledger.to_dict(),
    }
    progress(f"{combination.name}: {estimate.compared(ledger)[0]}; measured in {measured - start:.1f} s")
    print(ledger, flush=True)
    return result


def run_all(names: list[str], is_tiny: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The results, and the machine. On CUDA each combination has a process of its own, as an engine that starts has: a
    driver that already holds memory of graphs long gone takes less for new ones."""
    if not is_tiny:
        leave_cuda_alone()
    device = torch.device("cpu") if is_tiny else torch.device("cuda", 0)

    def one(combination: Combination) -> dict[str, Any]:
        shape = "tiny" if is_tiny else combination.shape
        model = random_model(shape, device, torch.float32 if is_tiny else torch.bfloat16)
        return run(combination, model, device, is_tiny) | {"machine": describe_machine(device)}

    chosen = [combination for combination in COMBINATIONS if combination.name in names]
    results = [one(c) if is_tiny else in_child(partial(one, c)) for c in chosen]
    return results, next(iter([result.pop("machine") for result in results]))


def acceptance(results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for result in results:
        error = abs(result["estimated"] - result["actual"]) / max(result["actual"], 1)
        bound = max(16 * MIB, 0.02 * result["driver_growth"])
        lines.append(f"{'PASS' if error <= 0.10 else 'FAIL'}  {result['name']}: estimate within 10% ({100 * error:.1f}%)")
        is_balanced = abs(result["unexplained"]) <= bound
        lines.append(
            f"{'PASS' if is_balanced else 'FAIL'}  {result['name']}: unexplained {result['unexplained'] / MIB:.1f} MiB, "
            f"bound {bound / MIB:.1f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on cpu")
    parser.add_argument("--only", action="append", choices=[c.name for c in COMBINATIONS], help="may be repeated")
    options = parser.parse_args()
    if options.tiny:
        torch.set_num_threads(min(2, torch.get_num_threads()))
    results, machine = run_all(options.only or DEFAULT, options.tiny)
    rows = [
        [
            r["name"], r["graphs"], r["actual"] / MIB, r["estimated"] / MIB, error_text(r["estimated"], r["actual"]),
            r["formula"] / MIB, error_text(r["formula"], r["actual"]), r["unexplained"] / MIB, r["measure_s"], "MiB, s",
        ]
        for r in results
    ]  # fmt: skip
    header = ["combination", "graphs", "actual", "ours", "error", "formula", "error", "unexplained", "measuring", "unit"]
    print(f"\n{table(header, rows)}\n")
    print("\n".join(acceptance(results)))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump({"machine": machine, "results": results}, out, indent=2)


if __name__ == "__main__":
    main()
