"""The crossed experiment: compiler on and off, graphs on and off, backend, rung; every arm in turn, step by step.

A step goes from the batch on the host to its tokens on the host. *Submission* is the host's time until all of it is queued,
*device* the time between two events around it on the device's stream, which has its gaps in it: where both agree with the
latency, launches bind. On cpu the host is the device, and there are no events.

The arm `compiled` runs the pieces of ``tc_piecewise`` without recording them: what the compiler gives without graphs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from segue.backends.piecewise import PiecewiseBackend
from segue.config import BACKENDS, GraphConfig, PhaseConfig
from segue.llm.batch import HostBatch
from segue.llm.bench.decode import decode_batch
from segue.llm.bench.prefill import prefill_batch
from segue.llm.engine import Engine
from segue.llm.engine_config import EngineConfig
from segue.llm.pages import NUM_RESERVED_PAGES, pages_for
from segue.llm.runners import BatchRunner
from segue.llm.runners.base import StepOutput

_COMPILED, _COMPILING = "compiled", "tc_piecewise"
ARMS = ("disabled", _COMPILED, *(name for name in BACKENDS if name not in ("auto", "disabled")))
_WARMUPS = 3
_PERCENTILES = (50, 90, 99)


class _Step(NamedTuple):
    """Seconds of one step."""

    submit: float
    device: float | None
    latency: float


def measure_matrix(
    model: Any,
    device: torch.device,
    attention: str,
    experts: str,
    arms: Sequence[str],
    rungs: Mapping[str, Sequence[int]],
    context: int,
    *,
    calls: int,
) -> dict[str, Any]:
    """`rungs` has the sizes of ``decode`` (requests with `context` tokens each) and ``prefill`` (tokens of one request).
    Batches fill their rung."""
    with ExitStack() as stack, torch.inference_mode():
        engines: dict[str, Engine] = {}
        builds = []
        for name in dict.fromkeys(_COMPILING if name == _COMPILED else name for name in arms):
            begun = time.perf_counter()
            engines[name] = stack.enter_context(Engine(model, _config(device, attention, experts, name, rungs, context)))
            builds.append(_build(name, engines[name]) | {"start_s": time.perf_counter() - begun})
        rows = []
        for phase, sizes in rungs.items():
            for size in sizes:
                host = decode_batch(size, context) if phase == "decode" else prefill_batch(size)
                runners = {name: _runner(engine, phase) for name, engine in engines.items()}
                rows += _rows([_Arm(name, runners.get(name) or runners[_COMPILING], host) for name in arms], calls)
    return {"arms": builds, "rows": rows, "context": context, "calls": calls}


def _config(
    device: torch.device, attention: str, experts: str, backend: str, rungs: Mapping[str, Sequence[int]], context: int
) -> EngineConfig:
    requests, tokens = max(rungs["decode"]), max(rungs["prefill"])
    longest = max(context + 1, tokens) + 1
    pages = NUM_RESERVED_PAGES + max(requests * pages_for(context + 1), 2 * pages_for(longest))
    decode, prefill = (PhaseConfig(backend=backend, ladder=tuple(rungs[phase])) for phase in ("decode", "prefill"))
    return EngineConfig(
        device=device, attention=attention, experts=experts,
        max_requests=requests, chunk_size=tokens, max_context=longest, num_pages=pages,
        graphs=GraphConfig(decode=decode, prefill=prefill),
    )  # fmt: skip


def _build(name: str, engine: Engine) -> dict[str, Any]:
    records = [record for runner in engine.runners for record in runner.store.records()]
    return {
        "arm": name,
        "resolved": {runner.phase: runner.backend.name for runner in engine.runners},
        "choices": [f"{c.phase}.{c.field}: {c.asked} -> {c.got}: {c.why}" for c in engine.resolved.choices],
        "attention": engine.attention.name,
        "shapes": len(records),
        "capture_s": sum(report.seconds for report in engine.capture_reports.values()),
        "pool_bytes": engine.lane.reserved_bytes,
        "driver_bytes": sum(record.driver_bytes for record in records),
    }


class _Arm:
    """One way of running one batch."""

    def __init__(self, name: str, runner: BatchRunner, host: HostBatch) -> None:
        self.name, self.runner, self.host = name, runner, host
        self.decision = runner.decide(host)
        self.is_unrecorded = name == _COMPILED

    def run(self) -> StepOutput:
        key, backend = self.decision.key, self.runner.backend
        if self.is_unrecorded and key is not None and isinstance(backend, PiecewiseBackend):
            return self.runner.run_padded_eagerly(self.host, key, backend.run_unrecorded)
        return self.runner.execute(self.host)


def _rows(arms: Sequence[_Arm], calls: int) -> list[dict[str, Any]]:
    taken: dict[str, list[_Step]] = {arm.name: [] for arm in arms}
    for number in range(_WARMUPS + calls):
        for arm in arms:
            step = _timed(arm)
            if number >= _WARMUPS:
                taken[arm.name].append(step)
    return [_row(arm, taken[arm.name]) for arm in arms]


def _runner(engine: Engine, phase: str) -> BatchRunner:
    return engine.decode if phase == "decode" else engine.prefill


def _timed(arm: _Arm) -> _Step:
    device = arm.runner.lane.device
    is_cuda = device.kind == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []
    if is_cuda:
        torch.cuda.synchronize(device.device)
    start = time.perf_counter()
    if events:
        events[0].record()
    output = arm.run()
    if events:
        events[1].record()
    queued = time.perf_counter()
    output.chosen.tolist()
    end = time.perf_counter()
    on_device = events[0].elapsed_time(events[1]) / 1e3 if events else None
    return _Step(queued - start, on_device, end - start)


def _row(arm: _Arm, steps: Sequence[_Step]) -> dict[str, Any]:
    decision, host = arm.decision, arm.host
    record = None if decision.key is None or arm.is_unrecorded else arm.runner.store.get(decision.key).record
    on_device = [step.device for step in steps if step.device is not None]
    return {
        "phase": arm.runner.phase,
        "rung": host.num_requests if arm.runner.phase == "decode" else host.num_tokens,
        "arm": arm.name,
        "backend": decision.backend,
        "compile": decision.backend == _COMPILING,
        "graphs": record is not None and record.segments > 0,
        "reason": None if decision.reason is None else str(decision.reason),
        "pool_bytes": 0 if record is None else max(record.pool_bytes, record.peak_bytes),
        "nodes": None if record is None else record.nodes,
        "submit_s": _percentile([step.submit for step in steps], 50),
        "device_s": _percentile(on_device, 50) if on_device else None,
        "latency_s": {f"p{p}": _percentile([step.latency for step in steps], p) for p in _PERCENTILES},
        "samples_s": [step.latency for step in steps],
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many per cent do not exceed."""
    return sorted(values)[max(-(-len(values) * percent // 100) - 1, 0)]
