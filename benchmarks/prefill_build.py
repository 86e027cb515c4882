"""Building the 42 prefill shapes of a Llama-3-8B-shaped model, and replaying them: Segue, a peer, and eager.

    PYTHONPATH=src python benchmarks/prefill_build.py --json results.json     # one CUDA GPU, under 150 s
    PYTHONPATH=src python benchmarks/prefill_build.py --tiny                  # cpu, seconds: does it run?
    PYTHONPATH=src python benchmarks/prefill_build.py --arm segue-breakable --profile     # one build, profiled

A build is measured in a process of its own, after the weights are in memory and one eager forward has started cuBLAS;
warm-ups count. Rounds go through all arms in turn, and replays are measured in one more process that holds the full and
the breakable recordings together, so that their rounds interleave. There every shape is compared with eager on the same
padded batch, bit for bit, in random order. Standard output has the tables and the acceptance lines; the JSON has every
raw sample. `--budget` seconds bound the whole: further rounds of builds start only while they fit.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lean_llama
import torch
from common import churn, describe_machine, progress, read_memory, synchronize
from lean_llama import LLAMA_8B, TINY, LeanLlama, plain_attention
from prefill_arms import Build, EagerBuild, PeerBuild, Plan, SegmentsAlone, SegueBuild, all_held, poison
from prefill_report import acceptance, render

from segue.shapes import sglang_prefill

SEGUE_ARMS = ("segue-full", "segue-breakable")
ARMS = (*SEGUE_ARMS, "peer", "eager")
REPLAY = "replay"
"""not an arm: the process that holds both kinds of recordings and times replays"""
SEED = 20261129
MAX_ARM_S = 100.0
WHEEL = Path(__file__).parents[1] / ".whl" / "breakable_cuda_graphs-0.1.0-py3-none-any.whl"


def make_plan(is_tiny: bool) -> Plan:
    if is_tiny:
        return Plan(
            shape=TINY, device=torch.device("cpu"), rungs=(4, 8, 16, 32), timed=(4, 16, 32), host=16,
            num_rounds=3, num_replays=3, num_eager=3, num_host=5,
        )  # fmt: skip
    return Plan(
        shape=LLAMA_8B, device=torch.device("cuda", 0), rungs=sglang_prefill(2048), timed=(4, 16, 128, 512, 2048), host=128,
        num_rounds=7, num_replays=20, num_eager=5, num_host=50,
    )  # fmt: skip


def make_build(arm: str, model: LeanLlama, plan: Plan, wheel: Path) -> Build:
    if arm == "peer":
        return PeerBuild(model, plan, wheel)
    return EagerBuild(model, plan) if arm == "eager" else SegueBuild(model, plan, arm.removeprefix("segue-"))


# -- one process ------------------------------------------------------------------------------------------------------


def prepare(plan: Plan) -> LeanLlama:
    """The model, and one eager forward."""
    if plan.device.type == "cpu":
        torch.set_num_threads(min(2, torch.get_num_threads()))
    else:
        torch.cuda.set_device(plan.device)
        torch.cuda.Stream(plan.device)  # torch makes all its streams with the first: 73 MB of driver memory, no arm's own
        torch.backends.cuda.enable_cudnn_sdp(False)  # flash: cuDNN would plan each shape on its first call, for every arm
    with torch.inference_mode():
        model = LeanLlama(plan.shape, plan.device, plan.rungs[-1])
        model.fill(plan.rungs[-1], plan.rungs[-1], torch.Generator(plan.device).manual_seed(SEED))
        model.forward(plan.rungs[-1], plain_attention)
    synchronize(plan.device)
    progress(f"weights: {model.weight_bytes / 1e9:.1f} GB")
    return model


def run_arm(arm: str, plan: Plan, wheel: Path, is_profiled: bool) -> dict[str, Any]:
    """Builds twice. The first build is the measured one; the second finds every kernel loaded."""
    model = prepare(plan)
    build = make_build(arm, model, plan, wheel)
    before = read_memory(plan.device)
    seconds = build.build()
    growth = read_memory(plan.device).growth_since(before)
    progress(f"{arm}: built {len(plan.rungs)} shapes in {seconds.total:.3f} s")
    result = {
        "seconds": asdict(seconds),
        "reserved_growth_bytes": growth.reserved,
        "driver_growth_bytes": growth.driver_used,
        **build.describe(),
    }
    if arm == "peer":
        result["check"] = check(model, plan, {arm: build})[arm]
    build.close()
    gc.collect()
    profile = cProfile.Profile()
    if is_profiled:
        profile.enable()
    result["rebuild_seconds"] = asdict(build.build())
    profile.disable()
    if is_profiled:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    build.close()
    return result


def run_replay(plan: Plan) -> dict[str, Any]:
    model = prepare(plan)
    arms = [*SEGUE_ARMS, *(["peer"] if plan.device.type == "cuda" else [])]
    builds: dict[str, Build] = {arm: make_build(arm, model, plan, WHEEL) for arm in arms}
    for build in builds.values():
        build.build()
    progress("replay: both recordings built")
    result: dict[str, Any] = {"check": check(model, plan, builds)}
    progress("replay: compared with eager")
    builds["eager"] = make_build("eager", model, plan, WHEEL)
    breakable = builds["segue-breakable"]
    assert isinstance(breakable, SegueBuild)
    builds["segments-alone"] = SegmentsAlone(model, plan, breakable)
    gc.collect()
    gc.disable()
    with torch.inference_mode(), all_held(builds):
        result["wall_s"] = time_replays(plan, builds)
        progress("replay: wall times taken")
        result["host_s"] = time_submission(plan, builds)
    gc.enable()
    return result


def check(model: LeanLlama, plan: Plan, builds: dict[str, Build]) -> dict[str, Any]:
    """Compares each shape's replay with eager on the same padded batch, in random order, twice: after the allocator was
    churned, and after every byte of the graph pool was overwritten as well."""
    order = random.Random(SEED)
    generator = torch.Generator(plan.device).manual_seed(SEED + 1)
    found: dict[str, Any] = {arm: {"compared": 0, "equal": 0, "different": []} for arm in builds}
    with torch.inference_mode():
        for poisoned in ("allocator", "pool"):
            for tokens in order.sample(plan.rungs, len(plan.rungs)):
                below = max((n for n in plan.rungs if n < tokens), default=0)
                real = order.randint(below + 1, tokens)
                model.fill(tokens, real, generator)
                expected = model.forward(tokens, plain_attention)
                for arm, build in builds.items():
                    churn(plan.device, plan.shape.dtype, 1 << 25 if plan.device.type == "cuda" else 1 << 18)
                    with build.held():
                        if poisoned == "pool":
                            poison(build, plan.device)
                        got = build.replayable(tokens)()
                        row = found[arm]
                        row["compared"] += 1
                        if torch.equal(got, expected):
                            row["equal"] += 1
                        else:
                            largest = (got.float() - expected.float()).abs().max().item()
                            row["different"].append({"tokens": tokens, "real": real, "poisoned": poisoned, "max": largest})
    return found


def time_replays(plan: Plan, builds: dict[str, Build]) -> dict[str, dict[str, list[float]]]:
    """tokens -> arm -> seconds of one replay in each round, device and host together."""
    samples: dict[str, dict[str, list[float]]] = {str(n): {arm: [] for arm in builds} for n in plan.timed}
    calls = {(n, arm): build.replayable(n) for n in plan.timed for arm, build in builds.items()}
    for call in calls.values():
        call()
    for _ in range(plan.num_rounds):
        for (tokens, arm), call in calls.items():
            count = plan.num_eager if arm == "eager" else plan.num_replays
            _wall(call, count, plan.device)  # an arm that lets the device idle leaves a faster one behind
            samples[str(tokens)][arm].append(_wall(call, count, plan.device))
    return samples


def _wall(call: Callable[[], Any], count: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / count


def time_submission(plan: Plan, builds: dict[str, Build]) -> dict[str, list[float]]:
    """Host seconds until a replay's call returns, from an empty queue, and of its attention calls in a plain loop."""
    breakable = builds["segue-breakable"].replayable(plan.host)
    arguments: list[tuple[torch.Tensor, ...]] = []
    lean_llama.attention_probe = arguments
    breakable()
    lean_llama.attention_probe = None
    assert len(arguments) == plan.shape.layers

    def loop() -> None:
        for q, k, v in arguments:
            plain_attention(q, k, v)

    calls = {arm: builds[arm].replayable(plan.host) for arm in SEGUE_ARMS} | {"attention-loop": loop}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(plan.num_host):
        for name, call in calls.items():
            synchronize(plan.device)
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    synchronize(plan.device)
    return samples


# -- the parent -------------------------------------------------------------------------------------------------------


class Parent:
    """Runs arms in processes of their own and merges what they report."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._start = time.perf_counter()
        self._longest = 0.0
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def run(self, arm: str) -> None:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "arm.json"
            command = [sys.executable, __file__, "--arm", arm, "--json", str(path)]
            command += ["--peer-wheel", str(self._options.peer_wheel), *(["--tiny"] if self._options.tiny else [])]
            progress(f"{arm} ...")
            try:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=MAX_ARM_S)
                self.runs.setdefault(arm, []).append(json.loads(path.read_text(encoding="utf-8")))
            except subprocess.SubprocessError as error:
                self.failed[arm] = str(error).replace(str(path), "FILE")
        self._longest = max(self._longest, time.perf_counter() - start) if arm in ARMS else self._longest

    def run_all(self) -> None:
        arms = [arm for arm in ARMS if not (self._options.tiny and arm == "peer")]
        for arm in arms:
            self.run(arm)
        self.run(REPLAY)
        for _ in range(self._options.rounds - 1):
            for arm in reversed(arms[:-1]):  # eager has no second round: it is a floor, not a rival
                if arm not in self.failed and self.elapsed_s + 1.3 * self._longest < self._options.budget:
                    self.run(arm)

    def report(self, plan: Plan) -> dict[str, Any]:
        machine = next((runs[0]["machine"] for runs in self.runs.values()), None)
        return {
            "benchmark": "prefill_build",
            "machine": machine,
            "model": {**asdict(plan.shape), "dtype": str(plan.shape.dtype)},
            "rungs": plan.rungs,
            "settings": {
                "num_warmups": 1,
                "num_rounds": plan.num_rounds,
                "num_replays": plan.num_replays,
                "num_eager": plan.num_eager,
                "num_host": plan.num_host,
                "host_tokens": plan.host,
                "attention": "scaled_dot_product_attention, cuDNN off",
            },
            "runs": {arm: self.runs[arm] for arm in ARMS if arm in self.runs},
            "replay": self.runs[REPLAY][0] if REPLAY in self.runs else None,
            "failed": self.failed,
            "elapsed_s": self.elapsed_s,
        }


def main() -> int:
    options = parse()
    plan = make_plan(options.tiny)
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        print("prefill_build: torch finds no CUDA GPU here; --tiny runs a small model on the cpu", file=sys.stderr)
        return 1
    if options.arm is not None:
        if options.arm == REPLAY:
            result = run_replay(plan)
        else:
            result = run_arm(options.arm, plan, options.peer_wheel, options.profile)
        result["machine"] = describe_machine(plan.device)
        text = json.dumps(result, indent=1)
        if options.json is None:
            print(text)
        else:
            options.json.write_text(text, encoding="utf-8")
        return 0
    parent = Parent(options)
    parent.run_all()
    report = parent.report(plan)
    report["medians"] = medians(report)
    report["acceptance"] = acceptance(report)
    print(render(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 1 if parent.failed else 0


def medians(report: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of each arm's builds and of each replay."""
    replay = report["replay"] or {"wall_s": {}, "host_s": {}}
    return {
        "build_s": {arm: statistics.median(r["seconds"]["total"] for r in runs) for arm, runs in report["runs"].items()},
        "replay_s": {n: {a: statistics.median(s) for a, s in arms.items()} for n, arms in replay["wall_s"].items()},
        "host_s": {name: statistics.median(samples) for name, samples in replay["host_s"].items()},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arm", choices=(*ARMS, REPLAY), help="run one part in this process and print its JSON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report with every raw sample")
    parser.add_argument("--tiny", action="store_true", help="a 2-layer model and 4 shapes on the cpu, without the peer")
    parser.add_argument("--rounds", type=int, help="builds of each arm, at most (default 3, tiny 1)")
    parser.add_argument("--budget", type=float, default=135.0, metavar="S", help="seconds for the whole (default 135)")
    parser.add_argument("--peer-wheel", type=Path, default=WHEEL, metavar="FILE", help="the peer's wheel, if not installed")
    parser.add_argument("--profile", action="store_true", help="with --arm: profile the second build, on standard error")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 1 if options.tiny else 3
    if options.profile and options.arm is None:
        parser.error("--profile needs --arm")
    return options


if __name__ == "__main__":
    sys.exit(main())
