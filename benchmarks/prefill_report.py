"""Tables and acceptance lines of `prefill_build`, from its report alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from common import table

MAX_BUILD_S = 1.2
MAX_PEER_MEMORY = 1.02
MAX_REPLAY = 1.03
REPLAY_TOKENS = "128"
MAX_HOST_S = 0.6e-3


def render(report: dict[str, Any]) -> str:
    parts = [_title(report), _build_table(report)]
    if report["replay"] is not None:
        parts += [_replay_table(report), _host_line(report)]
    parts.append("\n".join(_acceptance_line(line) for line in report["acceptance"]))
    parts += [f"FAILED: {arm}: {why}" for arm, why in report["failed"].items()]
    return "\n\n".join(parts) + f"\n\nin all {report['elapsed_s']:.0f} s"


def _title(report: dict[str, Any]) -> str:
    machine, model = report["machine"] or {}, report["model"]
    versions = ", ".join(f"{k} {machine[k]}" for k in ("torch", "cuda", "driver", "python") if machine.get(k))
    return (
        f"{machine.get('device')}, {machine.get('cpu')}; {versions}\n{len(report['rungs'])} prefill shapes "
        f"({report['rungs'][0]}..{report['rungs'][-1]} tokens), {model['layers']} layers, hidden {model['hidden']}, "
        f"{model['dtype'].removeprefix('torch.')}; medians of "
        + ", ".join(f"{arm} {len(runs)}" for arm, runs in report["runs"].items())
        + " builds"
    )


def _median(runs: list[dict[str, Any]], get: Callable[[dict[str, Any]], Any]) -> float | None:
    values = [get(run) for run in runs]
    return None if None in values else float(statistics.median(values))


def _seconds(name: str, of: str = "seconds") -> Callable[[dict[str, Any]], Any]:
    return lambda run: run[of][name]


_ROWS: tuple[tuple[str, Callable[[dict[str, Any]], Any], float, str], ...] = (
    ("build", _seconds("total"), 1, "s"),
    ("  warm-up", _seconds("warmup"), 1, "s"),
    ("  capture", _seconds("capture"), 1, "s"),
    ("  instantiate", _seconds("instantiate"), 1, "s"),
    ("built again", _seconds("total", "rebuild_seconds"), 1, "s"),
    ("  warm-up", _seconds("warmup", "rebuild_seconds"), 1, "s"),
    ("  capture", _seconds("capture", "rebuild_seconds"), 1, "s"),
    ("  instantiate", _seconds("instantiate", "rebuild_seconds"), 1, "s"),
    ("graph pool", lambda run: run["pool_bytes"], 1e-6, "MB"),
    ("reserved growth", lambda run: run["reserved_growth_bytes"], 1e-6, "MB"),
    ("driver growth", lambda run: run["driver_growth_bytes"], 1e-6, "MB"),
    ("segments", lambda run: run["segments"], 1, ""),
    ("nodes", lambda run: run["nodes"], 1, ""),
)


def _build_table(report: dict[str, Any]) -> str:
    runs = report["runs"]
    rows = []
    for name, get, scale, unit in _ROWS:
        cells = [_scaled(_median(runs[arm], get), scale, unit) for arm in runs]
        rows.append([name, *cells, unit])
    return table(["", *runs, ""], rows)


def _scaled(value: float | None, scale: float, unit: str) -> Any:
    if value is None:
        return None
    return f"{value * scale:,.1f}" if unit == "MB" else value * scale if unit else int(value)


def _replay_table(report: dict[str, Any]) -> str:
    rows = []
    for tokens, arms in report["medians"]["replay_s"].items():
        full, breakable = arms["segue-full"], arms["segue-breakable"]
        rows.append([f"{tokens} tokens", *(s * 1e3 for s in arms.values()), f"{breakable / full:.3f}", "ms"])
    names = next(iter(report["medians"]["replay_s"].values()))
    return table(["replay", *names, "breakable / full", ""], rows)


def _host_line(report: dict[str, Any]) -> str:
    rows = [[name, seconds * 1e3, "ms"] for name, seconds in report["medians"]["host_s"].items()]
    return table([f"host time, {report['settings']['host_tokens']} tokens", "", ""], rows)


# -- acceptance -------------------------------------------------------------------------------------------------------


def acceptance(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Each requirement with what was measured; `met` None where a part is missing."""
    runs, replay = report["runs"], report["replay"]
    ours, peer = runs.get("segue-breakable"), runs.get("peer")
    build = _median(ours, _seconds("total")) if ours else None
    peer_build = _median(peer, _seconds("total")) if peer else None
    lines = [_line("breakable build", build, MAX_BUILD_S, "s")]
    lines.append(_line("breakable build, against the peer's", build, peer_build, "s"))
    for key, name in (("pool_bytes", "graph pool"), ("driver_growth_bytes", "driver growth")):
        ratio = None
        if ours and peer:
            ratio = (_median(ours, lambda r, k=key: r[k]) or 0) / (_median(peer, lambda r, k=key: r[k]) or 1)  # type: ignore[misc]
        lines.append(_line(f"breakable {name} / peer", ratio, MAX_PEER_MEMORY, ""))
    medians = report["medians"]
    arms = medians["replay_s"].get(REPLAY_TOKENS)
    ratio = arms["segue-breakable"] / arms["segue-full"] if arms else None
    lines.append(_line(f"breakable / full replay, {REPLAY_TOKENS} tokens", ratio, MAX_REPLAY, ""))
    host = medians["host_s"]
    extra = 1e3 * (host["segue-breakable"] - host["attention-loop"]) if host else None
    lines.append(_line("host time of breakable replay less its attention calls", extra, 1e3 * MAX_HOST_S, "ms"))
    checks = dict(replay["check"]) if replay else {}
    if peer:
        checks["peer"] = peer[0]["check"]
    for arm, found in checks.items():
        lines.append(_line(f"replays equal to eager, {arm}", found["equal"], found["compared"], "", is_exact=True))
    return lines


def _line(name: str, measured: float | None, bound: float | None, unit: str, *, is_exact: bool = False) -> dict[str, Any]:
    met = None
    if measured is not None and bound is not None:
        met = measured == bound if is_exact else measured <= bound
    return {"what": name, "measured": measured, "bound": bound, "unit": unit, "is_exact": is_exact, "met": met}


def _acceptance_line(line: dict[str, Any]) -> str:
    answer = {None: "not measured", True: "yes", False: "NO"}[line["met"]]
    sign = "of" if line["is_exact"] else "<="
    measured, bound = (_figure(line[key]) for key in ("measured", "bound"))
    return f"{answer:12s}  {line['what']}: {measured} {sign} {bound} {line['unit']}".rstrip()


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
