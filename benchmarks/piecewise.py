"""Compiled pieces against eager, breakable and full graphs: what 42 prefill shapes cost to build, and to replay.

    PYTHONPATH=src python benchmarks/piecewise.py --json results.json     # one CUDA GPU, under 200 s
    PYTHONPATH=src python benchmarks/piecewise.py --tiny                  # cpu, a minute: does it run?

Two models of Llama-3-8B's shape: the lean one (`lean_llama`), whose small operations a compiler can fuse, and transformers'
own, fused by `segue.llm.fuse`, where little is left to fuse. Each is measured in a process of its own, with an empty cache
for compiled code. After an eager pass over every shape, which loads the libraries' kernels, the arms are built one after
another, and their replays are timed in turns: the rounds interleave. A second process builds the pieces again, with the
cache that the first one left. `--budget` seconds bound the whole: what does not fit any more is left out, and named.

A build of pieces has four parts: Dynamo's trace, the compiler, the warm-ups, and the captures. On the cpu device, and with
`--compiler eager`, nothing is compiled.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import describe_machine, progress, read_memory, synchronize, table
from lean_llama import LLAMA_8B, TINY, LeanLlama, Shape, attention, plain_attention

from segue.backends import make_backend
from segue.backends.base import Forward, GraphReplay
from segue.backends.piecewise import PiecewiseBackend
from segue.device import get_device
from segue.errors import CaptureError
from segue.inputs import mark_varying
from segue.memory.lane import Lane
from segue.shapes import sglang_prefill
from segue.shapes.key import ShapeKey

ARMS = ("full", "breakable", "tc_piecewise")
MODELS = ("lean", "fused")
SEED = 20261129
SOURCE = Path(__file__).parents[1] / "src" / "segue"
SHARED = (
    "graph/breaks.py",
    "graph/bridge.py",
    "graph/ownership.py",
    "graph/recording.py",
    "graph/trace.py",
    "backends/base.py",
)
OWN = {
    "breakable": ("backends/breakable.py",),
    "tc_piecewise": ("backends/piecewise.py", "backends/pieces.py", "backends/split.py"),
}


class Plan(NamedTuple):
    device: torch.device
    rungs: tuple[int, ...]
    timed: tuple[int, ...]
    lean: Shape
    layers: int
    compiler: str
    rounds: int
    calls: int


def make_plan(is_tiny: bool, compiler: str) -> Plan:
    if is_tiny:
        return Plan(torch.device("cpu"), (4, 8, 16), (4, 16), TINY, 2, "eager" if compiler == "auto" else compiler, 3, 2)
    rungs = sglang_prefill(2048)
    return Plan(torch.device("cuda", 0), rungs, (4, 16, 128, 512, 2048), LLAMA_8B, 32, compiler, 7, 10)


# -- one process ------------------------------------------------------------------------------------------------------


class Built(NamedTuple):
    """The recordings of one arm."""

    cost: dict[str, Any]
    replays: dict[int, Callable[[], Any]]
    lane: Lane
    close: Callable[[], None]


def build_lean(model: LeanLlama, plan: Plan, arm: str) -> Built:
    lane = Lane(get_device(plan.device))
    backend = make_backend(arm, lane, compiler=plan.compiler)
    forwards = {tokens: _lean_forward(model, tokens) for tokens in plan.rungs}
    recorded: dict[int, GraphReplay] = {}
    before, start, largest = read_memory(plan.device), time.perf_counter(), None
    with torch.inference_mode(), lane.exclusive(), lane.capture_pass():
        for tokens in plan.rungs[::-1]:
            _, trace = backend.trace(forwards[tokens], like=largest)
            largest = largest or trace
            found = backend.record(ShapeKey("prefill", tokens), forwards[tokens], trace)
            assert isinstance(found, GraphReplay)
            recorded[tokens] = found
        synchronize(plan.device)
    seconds = time.perf_counter() - start
    growth = read_memory(plan.device).growth_since(before)

    def close() -> None:
        for found in recorded.values():
            found.close()
        lane.close()

    records = [found.record for found in recorded.values()]
    cost = _cost(seconds, records, backend) | {"pool_bytes": lane.reserved_bytes, "driver_growth_bytes": growth.driver_used}
    return Built(cost, {tokens: found.replay for tokens, found in recorded.items()}, lane, close)


def _lean_forward(model: LeanLlama, tokens: int) -> Forward:
    ids, positions = model.ids[:tokens], model.positions[:tokens]
    mark_varying(ids, 0)
    mark_varying(positions, 0)
    return lambda: model.run(ids, positions, attention)


def _cost(seconds: float, records: list[Any], backend: Any) -> dict[str, Any]:
    build = backend.build if isinstance(backend, PiecewiseBackend) else None
    return {
        "total_s": seconds,
        "trace_s": None if build is None else build.trace_s,
        "compile_s": None if build is None else build.compile_s,
        "programs": None if build is None else build.programs,
        "pieces": None if build is None else build.pieces,
        "warmup_s": sum(record.warmup_s for record in records),
        "capture_s": sum(record.capture_s for record in records),
        "shapes": len(records),
        "segments": sum(record.segments for record in records),
        "nodes": sum(record.nodes or 0 for record in records),
        "driver_bytes": sum(record.driver_bytes for record in records),
    }


def run_lean(plan: Plan, arms: tuple[str, ...], *, is_timed: bool) -> dict[str, Any]:
    with torch.inference_mode():
        model = LeanLlama(plan.lean, plan.device, plan.rungs[-1])
        model.fill(plan.rungs[-1], plan.rungs[-1], torch.Generator(plan.device).manual_seed(SEED))
        for tokens in plan.rungs:
            model.forward(tokens, plain_attention)
    synchronize(plan.device)
    progress("lean: weights in memory, every shape run eagerly")
    built: dict[str, Built] = {}
    for arm in arms:
        built[arm] = build_lean(model, plan, arm)
        progress(f"lean: {arm} built in {built[arm].cost['total_s']:.2f} s")
    result: dict[str, Any] = {"build": {arm: b.cost for arm, b in built.items()}}
    if is_timed:
        eager = {n: (lambda n=n: model.forward(n, plain_attention)) for n in plan.timed}
        with torch.inference_mode(), _held(built):
            result["replay_s"] = time_replays(plan, built, eager)
            result["difference"] = {
                arm: max(_difference(b.replays[n](), eager[n]()) for n in plan.timed) for arm, b in built.items()
            }
        result["untraceable"] = run_untraceable(plan, model)
    for arm_built in built.values():
        arm_built.close()
    return result


def run_untraceable(plan: Plan, model: LeanLlama) -> dict[str, str]:
    """The same model with a branch on host data between two layers: what each arm says of one shape."""
    import numpy

    flags = numpy.array([0, 1])
    tokens = plan.rungs[0]
    plain = _lean_forward(model, tokens)

    def forward() -> Any:
        out = plain()
        return out + 1 if flags.sum() > 0 else out

    found = {}
    for arm in ARMS:
        lane = Lane(get_device(plan.device))
        backend = make_backend(arm, lane, compiler=plan.compiler)
        try:
            with torch.inference_mode(), lane.exclusive():
                _, trace = backend.trace(forward)
                recorded = backend.record(ShapeKey("prefill", tokens), forward, trace)
                is_equal = torch.equal(recorded.replay(), forward())
                found[arm] = "recorded" if is_equal else "recorded, and the result differs from eager's"
                recorded.close()
        except CaptureError as error:
            found[arm] = f"refused: {error.operation} at {Path(str(error.location)).name}"
        lane.close()
    return found


def run_fused(plan: Plan, arms: tuple[str, ...], *, is_timed: bool) -> dict[str, Any]:
    from segue.config import GraphConfig, PhaseConfig
    from segue.llm import Engine, EngineConfig
    from segue.llm.bench.models import random_model
    from segue.llm.bench.prefill import prefill_batch
    from segue.llm.pages import PAGE_SIZE, pages_for

    model = _transformers_model(plan, random_model)
    longest = plan.rungs[-1]
    progress("fused: weights in memory")
    engines: dict[str, Any] = {}
    result: dict[str, Any] = {"build": {}}
    for arm in arms:
        prefill = PhaseConfig(backend=arm, ladder=plan.rungs, compiler=plan.compiler)
        config = EngineConfig(
            device=plan.device, chunk_size=longest, max_requests=8, max_context=longest + PAGE_SIZE, fuse=True,
            num_pages=2 * pages_for(longest + PAGE_SIZE, PAGE_SIZE) + 64,
            graphs=GraphConfig(prefill=prefill, decode="disabled", capture="manual"),
        )  # fmt: skip
        engine = engines[arm] = Engine(model, config)
        with torch.inference_mode():
            for tokens in plan.rungs:
                engine.prefill.execute(prefill_batch(tokens))
        before, start = read_memory(plan.device), time.perf_counter()
        report = engine.capture()["prefill"]
        synchronize(plan.device)
        seconds = time.perf_counter() - start
        growth = read_memory(plan.device).growth_since(before)
        cost = _cost(seconds, report.records, engine.prefill.backend)
        result["build"][arm] = cost | {
            "pool_bytes": engine.lane.reserved_bytes,
            "driver_growth_bytes": growth.driver_used,
            "attention": engine.attention.name,
        }
        progress(f"fused: {arm} built in {seconds:.2f} s")
    if is_timed:
        result["replay_s"], result["difference"] = _time_engines(plan, engines, prefill_batch)
    for engine in engines.values():
        engine.close()
    return result


def _time_engines(plan: Plan, engines: dict[str, Any], prefill_batch: Callable[[int], Any]) -> tuple[Any, Any]:
    """A step of each engine: load, replay, and the wait for the device. Eager is the unrecorded pass of one of them."""
    some = next(iter(engines.values()))
    samples: dict[str, Any] = {}
    difference = dict.fromkeys(engines, 0.0)
    for tokens in plan.timed:
        host = prefill_batch(tokens)

        def step(engine: Any, host: Any = host) -> Any:
            with torch.inference_mode():
                return engine.prefill.execute(host).logits

        def eager(host: Any = host) -> Any:
            with torch.inference_mode():
                return some.prefill.run_eagerly(host).logits

        expected = eager().clone()
        for arm, engine in engines.items():
            difference[arm] = max(difference[arm], _difference(step(engine), expected))
        calls: dict[str, Callable[[], Any]] = {arm: (lambda e=engine: step(e)) for arm, engine in engines.items()}
        samples[str(tokens)] = _interleaved(plan, calls | {"eager": eager})
    return samples, difference


def _transformers_model(plan: Plan, random_model: Any) -> Any:
    if plan.device.type == "cuda":
        return random_model("llama-3-8b", plan.device, torch.bfloat16)
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=plan.layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=512,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def time_replays(plan: Plan, built: dict[str, Built], eager: dict[int, Callable[[], Any]]) -> dict[str, Any]:
    return {
        str(tokens): _interleaved(plan, {arm: b.replays[tokens] for arm, b in built.items()} | {"eager": eager[tokens]})
        for tokens in plan.timed
    }


def _interleaved(plan: Plan, calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    from segue.llm.bench.measure import interleaved

    gc.collect()
    timed = interleaved(calls, plan.device, rounds=plan.rounds, calls=plan.calls)
    return {arm: sample._asdict() for arm, sample in timed.items()}


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    return ((got.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


@contextmanager
def _held(built: dict[str, Built]) -> Iterator[None]:
    with ExitStack() as stack:
        for arm_built in built.values():
            stack.enter_context(arm_built.lane.exclusive())
        yield


# -- the parent -------------------------------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    found: dict[str, Any] = {"models": {}, "warm": {}, "left_out": [], "lines": count_lines()}
    with tempfile.TemporaryDirectory() as cache:
        for is_warm in (False, True):
            for model in options.models:
                left = options.budget - (time.perf_counter() - start)
                name = f"{model}{', with the cache' if is_warm else ''}"
                if left < 20:
                    found["left_out"].append(name)
                    continue
                result = _run_child(options, model, cache, left, is_warm=is_warm)
                if result is None:
                    found["left_out"].append(name)
                    continue
                found["machine"] = result.pop("machine")
                found["warm" if is_warm else "models"][model] = result
    found["elapsed_s"] = time.perf_counter() - start
    return found


def _run_child(options: argparse.Namespace, model: str, cache: str, left: float, *, is_warm: bool) -> dict[str, Any] | None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"} | {"SEGUE_CACHE": cache}
    path = Path(cache) / "result.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", model, "--json", str(path), "--compiler", options.compiler]
    command += ["--tiny"] * options.tiny + ["--warm"] * is_warm
    try:
        subprocess.run(command, check=True, timeout=left, env=environment)
    except subprocess.SubprocessError as error:
        progress(f"{model}: {type(error).__name__}")
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def count_lines() -> dict[str, int]:
    """Lines of each backend's own files, and of the recorder that both stand on."""

    def lines(files: tuple[str, ...]) -> int:
        return sum(len((SOURCE / file).read_text(encoding="utf-8").splitlines()) for file in files)

    return {arm: lines(files) for arm, files in OWN.items()} | {"shared": lines(SHARED)}


def render(report: dict[str, Any]) -> str:
    lines = []
    for model, result in report["models"].items():
        build = result["build"]
        lines += ["", f"{model}: building {build['breakable']['shapes']} shapes"]
        rows: list[list[Any]] = [_build_row(arm, cost) for arm, cost in build.items()]
        if model in report["warm"]:
            rows.append(_build_row("tc_piecewise, cached", report["warm"][model]["build"]["tc_piecewise"]))
        header = [
            "arm",
            "total",
            "Dynamo",
            "compiler",
            "warm-up",
            "capture",
            "programs",
            "pieces",
            "pool MB",
            "driver MB",
            "",
        ]
        lines.append(table(header, rows))
        cold, breakable = build["tc_piecewise"]["total_s"], build["breakable"]["total_s"]
        lines.append(f"breakable builds {cold / breakable:.1f} times as fast as tc_piecewise with an empty cache (goal: 10)")
        arms = list(next(iter(result["replay_s"].values())))
        lines += ["", f"{model}: ms a pass, medians of rounds in turn"]
        timed = [[f"{n} tokens", *(1e3 * s[arm]["median"] for arm in arms), "ms"] for n, s in result["replay_s"].items()]
        lines.append(table(["", *arms, ""], timed))
        lines.append(f"largest difference from eager, of the largest value: {result['difference']}")
        if "untraceable" in result:
            lines.append(f"with a branch on host data: {result['untraceable']}")
    counts = report["lines"]
    lines += ["", "lines of code: " + ", ".join(f"{name} {count}" for name, count in counts.items())]
    if report["left_out"]:
        lines.append(f"left out: {', '.join(report['left_out'])}")
    return "\n".join(lines)


def _build_row(arm: str, cost: dict[str, Any]) -> list[Any]:
    times = [cost[name] for name in ("total_s", "trace_s", "compile_s", "warmup_s", "capture_s")]
    counts = [cost["programs"], cost["pieces"]]
    return [arm, *times, *counts, cost["pool_bytes"] / 1e6, cost["driver_growth_bytes"] / 1e6, "s"]


def main() -> int:
    options = parse()
    plan = make_plan(options.tiny, options.compiler)
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        print("piecewise: torch finds no CUDA GPU here; --tiny runs small models on the cpu", file=sys.stderr)
        return 1
    if options.child is None:
        report = run_all(options)
        print(render(report))
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
        return 1 if not report["models"] else 0
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
        torch.cuda.Stream(plan.device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan each shape on its first call, for every arm
    run = run_lean if options.child == "lean" else run_fused
    arms = ("tc_piecewise",) if options.warm else ARMS
    result = run(plan, arms, is_timed=not options.warm) | {"machine": describe_machine(plan.device)}
    options.json.write_text(json.dumps(result), encoding="utf-8")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report with every sample")
    parser.add_argument("--tiny", action="store_true", help="2-layer models and 3 shapes on the cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which models (both)")
    parser.add_argument("--compiler", choices=("auto", "inductor", "eager"), default="auto", help="of the pieces")
    parser.add_argument("--budget", type=float, default=190.0, metavar="S", help="seconds for the whole (190)")
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
