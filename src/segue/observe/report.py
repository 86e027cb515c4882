"""Tables for people: aligned columns, units in the header or the cell, no markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: text to the left, numbers to the right."""
    table = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(headers))]
    is_number = [
        bool(rows) and all(row[i].lstrip("+-")[:1].isdigit() or row[i] in ("", "-") for row in rows)
        for i in range(len(headers))
    ]
    lines = [
        "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, is_number, strict=True)).rstrip()
        for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_bytes(count: int) -> str:
    """Binary units, three digits that count."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def phase_table(phases: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a rung that was used and one a phase's eager calls, from an engine's `stats()["phases"]`."""
    rows = []
    for name, phase in phases.items():
        rows.append(
            [
                name,
                phase["backend"],
                "all",
                str(phase["captures"]),
                str(phase["replays"]),
                _eager(phase["eager"]),
                f"{phase['padded_tokens']} / {phase['real_tokens']}",
                f"{phase['capture_s']:.2f}",
                format_bytes(phase["pool_bytes"] + phase["driver_bytes"] + phase["static_bytes"]),
            ]
        )
        used = [graph for graph in phase["graphs"] if graph["hits"]]
        rows += [_graph_row(graph) for graph in sorted(used, key=lambda g: (g["tokens"], g["context"] or 0))]
    headers = [
        "phase",
        "backend",
        "rung",
        "captures",
        "replays",
        "eager",
        "padded / real tokens",
        "capture s",
        "graph bytes",
    ]
    return format_table(headers, rows)


def _graph_row(graph: Mapping[str, Any]) -> list[str]:
    context = f" x {graph['context']}" if graph["context"] is not None else ""
    seconds = graph["warmup_s"] + graph["capture_s"]
    return [
        "",
        "",
        f"{graph['tokens']}{context} {graph['variant']}".rstrip(),
        "1",
        str(graph["hits"]),
        "",
        f"{graph['padded']} / {graph['real']}",
        f"{seconds:.2f}",
        format_bytes(graph["pool_bytes"] + graph["driver_bytes"]),
    ]


def _eager(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "0"
