"""What `step.explain()`, `step.capture()` and `step.report()` answer with. All of them print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from segue.observe.decision import Decision, GraphRecord
from segue.observe.report import format_bytes, format_table
from segue.runners.base import CaptureReport

_MOST_LINES = 40


@dataclass(frozen=True, slots=True)
class CallDecision(Decision):
    """A decision with its cause in words."""

    detail: str = ""

    def __str__(self) -> str:
        if self.is_replay:
            return f"replays {self.key} ({self.backend})" + (f": {self.detail}" if self.detail else "")
        return f"runs eagerly: {self.reason}" + (f": {self.detail}" if self.detail else "")


@dataclass(slots=True)
class CallCaptureReport(CaptureReport):
    """What `step.capture(...)` did; `output` is the call's answer."""

    output: Any = None
    decision: Decision | None = None

    def __str__(self) -> str:
        lines = [f"{r.key}: {r.segments} segments, {r.breaks} breaks, {format_bytes(r.pool_bytes)}" for r in self.records]
        lines += [f"{key}: {error}" for key, error in self.failures]
        return "\n".join(lines or [str(self.decision)])


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One recording: what it costs, how often it was used, and what would be freed without it."""

    record: GraphRecord
    calls: int
    effects: tuple[str, ...] = ()
    verified: int = 0
    unverified: str = ""
    difference: str = ""

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self.record)
        row["key"] = str(self.record.key)
        row |= {
            "calls": self.calls,
            "effects": list(self.effects),
            "verified": self.verified,
            "unverified": self.unverified,
            "difference": self.difference,
            "freed_if_evicted": self.record.driver_bytes + self.record.static_bytes,
        }
        return row


@dataclass(frozen=True, slots=True)
class CallReport:
    """The state of one `segue.graph`. Bytes as measured; `refused` lists keys that run eagerly, with reason and cause."""

    name: str
    backend: str
    rows: tuple[GraphRow, ...]
    replays: int
    captures: int
    evictions: int
    eager: Mapping[str, int]
    refused: tuple[tuple[str, str, str], ...] = ()
    pool_bytes: int = 0
    used_bytes: int = 0
    budget_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``["graphs"]`` has one entry a recording."""
        return {
            "name": self.name,
            "backend": self.backend,
            "graphs": [row.to_dict() for row in self.rows],
            "replays": self.replays,
            "captures": self.captures,
            "evictions": self.evictions,
            "eager": dict(self.eager),
            "refused": [{"key": k, "reason": r, "detail": d} for k, r, d in self.refused],
            "notes": list(self.notes),
            "pool_bytes": self.pool_bytes,
            "used_bytes": self.used_bytes,
            "budget_bytes": self.budget_bytes,
        }

    def __str__(self) -> str:
        eager = ", ".join(f"{count} {reason}" for reason, count in self.eager.items()) or "none"
        head = (
            f"{self.name} ({self.backend}): {self.replays} replays of {len(self.rows)} graphs, {self.captures} captures, "
            f"{self.evictions} evictions; eager calls: {eager}"
        )
        memory = f"memory: {format_bytes(self.used_bytes)}, of which the pool {format_bytes(self.pool_bytes)}"
        if self.budget_bytes is not None:
            memory += f"; budget {format_bytes(self.budget_bytes)}"
        lines = [head, memory]
        if self.rows:
            headers = ["shape", "segments", "breaks", "nodes", "hits", "padded / real", "seconds", "freed if evicted"]
            lines.append(format_table(headers, [_cells(row) for row in self.rows]))
        lines += [f"{row.record.key}: {effect}" for row in self.rows for effect in row.effects]
        lines += [f"{row.record.key}: unverified: {row.unverified}" for row in self.rows if row.unverified]
        lines += [f"{key}: {reason}: {detail}" for key, reason, detail in self.refused[:_MOST_LINES]]
        if len(self.refused) > _MOST_LINES:
            lines.append(f"and {len(self.refused) - _MOST_LINES} more kinds of call that ran eagerly: to_dict()['refused']")
        lines += self.notes
        return "\n".join(lines)


def _cells(row: GraphRow) -> list[str]:
    record = row.record
    return [
        str(record.key),
        str(record.segments),
        str(record.breaks),
        "-" if record.nodes is None else str(record.nodes),
        str(record.hits),
        f"{record.padded} / {record.real}",
        f"{record.warmup_s + record.capture_s:.3f}",
        format_bytes(record.driver_bytes + record.static_bytes),
    ]
