"""The figures of `segue bench memory`: bars of what tensors and graphs take besides weights and cache, by ceiling and by
rung; and marks where the memory that the allocator holds for them ends, after one pass and after passes of many lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MIB = 1 << 20
_PARTS = (
    ("extra", "residents beyond those without graphs", "#9aa5b1"),
    ("pool", "graph pool", "#2f6fb0"),
    ("driver", "executable graphs", "#7fb3e0"),
    ("peak", "peak of the eager pass", "#d9822b"),
)
_MARKS = (("held", "held by the allocator", "_"), ("mixed", "held after mixed lengths", "x"))


def draw(result: Mapping[str, Any], file: str) -> None:
    """Writes a PNG. `result` is what the bench writes as JSON. Raises ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    shape, device = result["shape"], result["machine"]["device"]
    figure.suptitle(f"Memory above weights and cache: {shape}, {device}, torch {result['machine']['torch']}")
    _bars(left, result["prefill"], f"prefill of {result['chunk_size']} tokens", "capture ceiling (tokens)")
    _bars(right, result["decode"], f"decode of {result['max_requests']} requests", "largest rung (requests)")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=len(_PARTS) + len(_MARKS), fontsize="small"
    )
    figure.savefig(file, dpi=150, format="png")


def _bars(axes: Any, readings: Sequence[Mapping[str, Any]], title: str, label: str) -> None:
    base = readings[0]
    names = [str(reading["ceiling"] or "no graphs") for reading in readings]
    bottoms = [0.0] * len(readings)
    for part, text, colour in _PARTS:
        if part == "extra":
            heights = [max(reading["resident"] - base["resident"], 0) / _MIB for reading in readings]
        else:
            heights = [reading[part] / _MIB for reading in readings]
        axes.bar(names, heights, bottom=bottoms, label=text, color=colour)
        bottoms = [low + height for low, height in zip(bottoms, heights)]
    for part, text, marker in _MARKS:
        held = [reading["reserved"] - base["reserved"] + reading["driver"] + (reading[part] or 0) for reading in readings]
        if base[part] is not None:
            axes.scatter(names, [nbytes / _MIB for nbytes in held], marker=marker, s=90, color="black", label=text, zorder=3)
    axes.axhline(base["peak"] / _MIB, color="black", linewidth=0.8, linestyle="--")
    axes.set(title=title, xlabel=label, ylabel="MiB")
