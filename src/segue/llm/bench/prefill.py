"""How long a prefill takes: one request at a time, of a fixed length, with one token of output and no decode graphs.

Arms: eager, the full graph, the breakable one; each a whole step, from the tokens on the host to the token on the host.
Every length is a rung of its own, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from segue.config import GraphConfig, PhaseConfig
from segue.llm.batch import HostBatch, RequestRows, build_batch
from segue.llm.bench.measure import interleaved
from segue.llm.engine import Engine
from segue.llm.engine_config import EngineConfig
from segue.llm.pages import NUM_RESERVED_PAGES, PAGE_SIZE, pages_for
from segue.llm.runners import BatchRunner

ARMS = ("full", "breakable", "tc_piecewise")


def prefill_batch(tokens: int, requests: int = 1) -> HostBatch:
    """`tokens` new tokens of `requests` requests, on pages of their own."""
    rows, page = [], NUM_RESERVED_PAGES
    for index in range(requests):
        count = tokens // requests + (index < tokens % requests)
        pages = pages_for(count, PAGE_SIZE)
        rows.append(RequestRows([7] * count, 0, list(range(page, page + pages))))
        page += pages
    return build_batch(rows)


def prefill_engine(
    model: Any, device: torch.device, backend: str, lengths: Sequence[int], attention: str, experts: str = "auto"
) -> Engine:
    graphs = GraphConfig(
        prefill=PhaseConfig(backend=backend, ladder=tuple(lengths)) if backend != "eager" else "disabled", decode="disabled"
    )
    longest = max(lengths)
    return Engine(
        model,
        EngineConfig(
            device=device, attention=attention, experts=experts, chunk_size=longest, max_requests=max(8, longest // 64),
            max_context=longest + PAGE_SIZE, num_pages=2 * pages_for(longest) + 64, graphs=graphs,
        ),
    )  # fmt: skip


def step_of(runner: BatchRunner, host: HostBatch) -> Any:
    """One whole step, until its token is on the host."""
    with torch.inference_mode():
        return runner.execute(host).chosen.tolist()


def measure_prefill(
    model: Any,
    device: torch.device,
    arms: Sequence[str],
    lengths: Sequence[int],
    attention: str = "auto",
    experts: str = "auto",
    *,
    rounds: int = 9,
) -> dict[str, Any]:
    """Seconds of a step by length and arm; start-up seconds and bytes of each arm's graphs."""
    engines = {name: prefill_engine(model, device, name, lengths, attention, experts) for name in arms}
    found: dict[str, Any] = {"rows": [], "build": {name: _build(engine) for name, engine in engines.items()}}
    for tokens in lengths:
        host = prefill_batch(tokens)
        calls: dict[str, Callable[[], object]] = {
            name: partial(step_of, engine.prefill, host) for name, engine in engines.items()
        }
        timed = interleaved(calls, device, rounds=rounds, calls=10)
        found["rows"].append({"tokens": tokens, "seconds": {name: sample._asdict() for name, sample in timed.items()}})
    for engine in engines.values():
        engine.close()
    return found


def _build(engine: Engine) -> dict[str, Any]:
    records = engine.prefill.store.records()
    return {
        "shapes": len(records),
        "seconds": sum(r.warmup_s + r.capture_s for r in records),
        "pool_bytes": engine.lane.reserved_bytes,
        "driver_bytes": sum(r.driver_bytes for r in records),
    }
