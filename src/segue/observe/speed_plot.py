"""The figures of `segue bench decode`, `prefill` and `throughput`, from what they write as JSON.

Each function writes a PNG and raises ImportError where matplotlib is not installed. Spreads are the fastest and the slowest
round. One colour is one arm in all figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = {
    "eager": "#9aa5b1", "full": "#2f6fb0", "breakable": "#d9822b", "tc_piecewise": "#7b5ea7", "replay": "#2f6fb0",
    "step": "#7fb3e0", "products": "#222222", "compiled": "#7b5ea7", "transformers": "#9aa5b1", "floor": "#222222",
}  # fmt: skip
_DECODE_LABELS = {
    "eager": "eager",
    "step": "step with its host work",
    "replay": "replay of the recorded step",
    "products": "its matrix products alone",
}


def draw_decode(result: Mapping[str, Any], file: str) -> None:
    """Milliseconds a step by batch size, beside the step's own matrix products; and the ratio of the two."""
    figure, axes = _figure(result, "A decode step", columns=2)
    left, right = axes
    rows = [row for row in result["rows"] if "seconds" in row]
    batches = [row["batch"] for row in rows]
    for arm, label in _DECODE_LABELS.items():
        _line(left, batches, [row["seconds"].get(arm) for row in rows], arm, label)
    if "compiled" in result:
        _line(left, batches[:1], [result["compiled"]["seconds"]], "compiled", "torch.compile, reduce-overhead", marker="D")
    context = rows[0]["context"] if rows else "?"
    _log(left, batches, "requests", f"ms a step, {context} tokens of context each")
    _legend(figure, left)
    ratios = [row["seconds"]["replay"]["median"] / row["seconds"]["products"]["median"] for row in rows]
    right.bar(range(len(rows)), ratios, color=_COLOURS["replay"], width=0.6)
    right.axhline(1, color=_COLOURS["products"], linewidth=1)
    for place, ratio in enumerate(ratios):
        right.annotate(f"{ratio:.2f}", (place, ratio), ha="center", va="bottom", fontsize="small")
    right.set_xticks(range(len(rows)), [str(batch) for batch in batches])
    right.set(xlabel="requests", ylabel="replay / matrix products alone")
    figure.savefig(file, dpi=150, format="png")


def draw_prefill(result: Mapping[str, Any], file: str) -> None:
    """Milliseconds a step by length, an arm a line; and how many times as fast as the first arm."""
    figure, axes = _figure(result, "A prefill step of one request", columns=2)
    left, right = axes
    rows = result["rows"]
    lengths, arms = [row["tokens"] for row in rows], list(rows[0]["seconds"])
    for arm in arms:
        _line(left, lengths, [row["seconds"][arm] for row in rows], arm, arm)
        ratios = [row["seconds"][arms[0]]["median"] / row["seconds"][arm]["median"] for row in rows]
        right.plot(lengths, ratios, color=_colour(arm), marker="o", markersize=4)
    _log(left, lengths, "tokens", "ms a step")
    _legend(figure, left)
    _log(right, lengths, "tokens", f"times as fast as {arms[0]}", is_y_log=False)
    right.set_ylim(bottom=0)
    figure.savefig(file, dpi=150, format="png")


def draw_throughput(result: Mapping[str, Any], file: str) -> None:
    """New tokens a second, beside the least time the job could take and beside transformers where it ran."""
    figure, axes = _figure(result, f"{result['prompts']} prompts, {result['new_tokens']} new tokens each", columns=1)
    produced = result["prompts"] * result["new_tokens"]
    seconds = {"floor": result["floor"]["prompt_s"] + result["floor"]["decode_s"]}
    seconds |= {"segue": statistics.median(result["seconds"])}
    if "transformers_s" in result:
        seconds["transformers"] = result["transformers_s"]
    names = {"floor": "the least time", "segue": "segue", "transformers": "transformers,\ncontinuous batching"}
    rates = [produced / value for value in seconds.values()]
    colours = [_COLOURS.get(name, _COLOURS["full"]) for name in seconds]
    axes[0].bar([names[name] for name in seconds], rates, color=colours, width=0.6)
    for place, rate in enumerate(rates):
        axes[0].annotate(f"{rate:,.0f}", (place, rate), ha="center", va="bottom", fontsize="small")
    axes[0].set(ylabel="new tokens / s")
    figure.savefig(file, dpi=150, format="png")


def _figure(result: Mapping[str, Any], title: str, columns: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 4.2), layout="constrained")
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "cuda") if machine.get(name))
    figure.suptitle(f"{title}: {result['shape']} on {machine['device']}\n{versions}", fontsize="medium")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _line(
    axes: Any, sizes: Sequence[int], samples: Sequence[Mapping[str, float] | None], arm: str, label: str, marker: str = "o"
) -> None:
    points = [(size, sample) for size, sample in zip(sizes, samples, strict=True) if sample is not None]
    if not points:
        return
    medians = [1e3 * sample["median"] for _, sample in points]
    spread = [[1e3 * (s["median"] - s["low"]) for _, s in points], [1e3 * (s["high"] - s["median"]) for _, s in points]]
    axes.errorbar(
        [size for size, _ in points], medians, yerr=spread, label=label, color=_colour(arm), marker=marker, markersize=4,
        linestyle="--" if arm == "products" else "-", capsize=2,
    )  # fmt: skip


def _log(axes: Any, sizes: Sequence[int], x_label: str, y_label: str, *, is_y_log: bool = True) -> None:
    """Sizes as they are measured on a logarithmic axis; seconds in plain numbers on another."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    if is_y_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.set(xlabel=x_label, ylabel=y_label)


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")


def _colour(arm: str) -> str:
    return _COLOURS.get(arm, "#555555")
