"""What a phase did and cost, as plain values ready for JSON: the part of `Engine.stats` that comes from its runners.

Counts come from the runner's decisions, bytes and seconds from the ledger's rows of its recordings. Sums over
`graphs` are those of the phase.
"""

from __future__ import annotations

from typing import Any

from segue.llm.runners import BatchRunner
from segue.runners import CaptureReport


def phase_stats(runner: BatchRunner, report: CaptureReport | None) -> dict[str, Any]:
    """What `runner` has done since start-up; `report` is that of its capture, None before it."""
    records = runner.store.records()
    return {
        "backend": runner.backend.name,
        "captures": len(records),
        "replays": runner.decisions.num_replays,
        "eager": {str(reason): count for reason, count in runner.decisions.eager.items()},
        "real_tokens": sum(r.real for r in records),
        "padded_tokens": sum(r.padded for r in records),
        "capture_s": report.seconds if report is not None else 0.0,
        "pool_bytes": sum(r.pool_bytes for r in records),
        "driver_bytes": sum(r.driver_bytes for r in records),
        "static_bytes": runner.static_bytes,
        "graphs": [
            {
                "tokens": r.key.tokens,
                "context": r.key.context,
                "variant": r.key.variant,
                "segments": r.segments,
                "breaks": r.breaks,
                "nodes": r.nodes,
                "hits": r.hits,
                "real": r.real,
                "padded": r.padded,
                "pool_bytes": r.pool_bytes,
                "driver_bytes": r.driver_bytes,
                "warmup_s": r.warmup_s,
                "capture_s": r.capture_s,
            }
            for r in records
        ],
    }
