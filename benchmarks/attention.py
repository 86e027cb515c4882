"""Attention over the paged cache, each backend inside a CUDA graph of many layers.

    PYTHONPATH=src python benchmarks/attention.py --json results.json     # one CUDA GPU, under 40 s
    PYTHONPATH=src python benchmarks/attention.py --tiny                  # cpu, seconds: does it run?
    PYTHONPATH=src python benchmarks/attention.py --sweep                 # decode: other block sizes, stages and splits

The heads are Llama-3-8B's (32 of 128, 8 KV heads) in bf16, and every layer has a cache of its own, so that layers do not
find each other's keys in the L2 cache. A decode reads the whole context; its floor is those bytes at the rate that this
GPU's memory was measured to read. An extend starts from an empty cache; its operations are those of the keys that are
seen. Replays of all backends take turns; the figures are medians, one layer's share of a replay. A backend's first launch
compiles it; that time is listed apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import describe_machine, progress, synchronize, table

from segue.errors import ConfigError
from segue.llm.attention import ATTENTIONS, LayerSpec, Needs, choose_attention
from segue.llm.batch import RequestRows, build_batch, to_device
from segue.llm.kv_cache import PagedKVCache
from segue.llm.pages import NUM_RESERVED_PAGES, PAGE_SIZE, pages_for
from segue.shapes.key import ShapeKey

READ_RATE = 4.0e12
"""bytes a second, an H200's memory as measured"""
MAX_CACHE_BYTES = 24 << 30
MAX_GATHERED_BYTES = 6 << 30
MAX_LAYERS = 32


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype

    def needs(self) -> Needs:
        return Needs(self.heads, self.kv_heads, self.dim, self.dim, self.dtype)

    def kv_bytes(self, tokens: int) -> int:
        return 2 * tokens * self.kv_heads * self.dim * self.dtype.itemsize


LLAMA_8B = Heads(32, 8, 128, torch.bfloat16)
TINY = Heads(4, 2, 16, torch.float32)


class Shape(NamedTuple):
    """`requests` bring `new` tokens each, after `cached` ones."""

    requests: int
    new: int
    cached: int

    @property
    def context(self) -> int:
        return self.new + self.cached

    def key(self) -> ShapeKey:
        phase: Any = "decode" if self.new == 1 else "prefill"
        return ShapeKey(phase, self.requests * self.new, self.requests, self.new == 1, 1, context=self.context)

    def __str__(self) -> str:
        return f"decode {self.requests} x {self.context}" if self.new == 1 else f"extend {self.requests} x {self.new}"


@dataclass(frozen=True)
class Row:
    """One backend on one shape. Times are of one layer."""

    shape: str
    backend: str
    layers: int
    us: float
    us_low: float
    us_high: float
    floor_us: float | None
    read_tb_s: float | None
    tflop_s: float | None
    first_launch_s: float
    setting: str = ""


class Arm(NamedTuple):
    name: str
    replay: Callable[[], None]
    first_launch_s: float
    setting: str = ""


def fill_cache(heads: Heads, shape: Shape, device: torch.device, max_layers: int) -> tuple[PagedKVCache, Any]:
    """A cache of as many layers as fit, random, and the device batch over pages in random order."""
    per_request = pages_for(shape.context)
    num_pages = shape.requests * per_request + NUM_RESERVED_PAGES
    layers = max(2, min(max_layers, MAX_CACHE_BYTES // heads.kv_bytes(num_pages * PAGE_SIZE)))
    cache = PagedKVCache(layers, num_pages, heads.kv_heads, heads.dim, heads.dtype, device)
    for tensor in (*cache.keys, *cache.values):
        tensor[PAGE_SIZE:].normal_()
    order = (torch.randperm(num_pages - NUM_RESERVED_PAGES) + NUM_RESERVED_PAGES).tolist()
    rows = [
        RequestRows([0] * shape.new, shape.cached, order[i * per_request : (i + 1) * per_request])
        for i in range(shape.requests)
    ]
    return cache, to_device(build_batch(rows), device)


def make_arm(name: str, heads: Heads, shape: Shape, cache: PagedKVCache, batch: Any, setting: str = "") -> Arm | None:
    """All layers as one graph; None where the backend cannot run it. On a cpu a plain loop stands for the graph."""
    device = cache.keys[0].device
    gathered = heads.kv_bytes(shape.requests * shape.context) * heads.heads // heads.kv_heads
    if name == "torch_sdpa" and gathered > MAX_GATHERED_BYTES:
        return None
    try:
        attention = choose_attention(name, heads.needs(), device).make(cache)
    except ConfigError as error:
        progress(f"left out: {error}")
        return None
    plan = attention.static_plan(shape.key())
    plan.update(batch)
    tokens = shape.requests * shape.new
    q = torch.randn(tokens, heads.heads, heads.dim, dtype=heads.dtype, device=device)
    k, v = torch.randn(2, tokens, heads.kv_heads, heads.dim, dtype=heads.dtype, device=device)

    def forward() -> None:
        for layer in range(cache.num_layers):
            plan.run(q, k, v, LayerSpec(layer, heads.dim**-0.5), None)

    start = time.perf_counter()
    plan.run(q, k, v, LayerSpec(0, heads.dim**-0.5), None)
    synchronize(device)
    first_s = time.perf_counter() - start
    if device.type != "cuda":
        return Arm(name, forward, first_s, setting)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    graph.replay()
    return Arm(name, graph.replay, first_s, setting)


def measure(arms: Sequence[Arm], device: torch.device, num_rounds: int) -> list[list[float]]:
    """Seconds of each arm's replays, taking turns."""
    samples: list[list[float]] = [[] for _ in arms]
    for _ in range(num_rounds):
        for arm, found in zip(arms, samples, strict=True):
            found.append(_seconds(arm.replay, device))
    return samples


def _seconds(replay: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        replay()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def rows_of(heads: Heads, shape: Shape, layers: int, arms: Sequence[Arm], samples: list[list[float]]) -> list[Row]:
    made = []
    for arm, found in zip(arms, samples, strict=True):
        ordered = sorted(found)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        us, us_low, us_high = (seconds / layers * 1e6 for seconds in (statistics.median(found), low, high))
        nbytes = heads.kv_bytes(shape.requests * shape.context)
        seen = shape.requests * sum(range(shape.cached + 1, shape.context + 1))
        is_decode = shape.new == 1
        made.append(
            Row(
                shape=str(shape),
                backend=arm.name,
                layers=layers,
                us=us,
                us_low=us_low,
                us_high=us_high,
                floor_us=nbytes / READ_RATE * 1e6 if is_decode else None,
                read_tb_s=nbytes / us / 1e6 if is_decode else None,
                tflop_s=None if is_decode else 4 * heads.heads * heads.dim * seen / us / 1e6,
                first_launch_s=arm.first_launch_s,
                setting=arm.setting,
            )
        )
    return made


def sweep_arms(heads: Heads, shape: Shape, cache: PagedKVCache, batch: Any) -> list[Arm]:
    """The Triton decode with other settings; those of the package come first, and are put back."""
    from segue.llm.attention import triton_ops

    names = ("DECODE_KEYS_BYTES", "DECODE_STAGES", "PROGRAMS_PER_PROCESSOR")
    given = tuple(getattr(triton_ops, name) for name in names)
    grid = itertools.product((4 << 10, 8 << 10, 16 << 10), (3, 5, 7), (2, 4, 8))
    arms = []
    try:
        for values in (given, *grid):
            for name, value in zip(names, values, strict=True):
                setattr(triton_ops, name, value)
            triton_ops.decode_constants.cache_clear()
            setting = f"{values[0] >> 10} KiB, {values[1]} stages, {values[2]} programs"
            arms.append(make_arm("triton", heads, shape, cache, batch, setting))
    finally:
        for name, value in zip(names, given, strict=True):
            setattr(triton_ops, name, value)
        triton_ops.decode_constants.cache_clear()
    return [arm for arm in arms if arm is not None]


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    if options.tiny:
        return [Shape(1, 1, 40), Shape(3, 1, 70), Shape(2, 20, 0)]
    decodes = [Shape(n, 1, context - 1) for n, context in itertools.product((1, 8, 64, 256), (512, 2048, 8192))]
    return decodes if options.sweep else decodes + [Shape(1, tokens, 0) for tokens in (128, 512, 2048)]


def run(options: argparse.Namespace) -> list[Row]:
    device = torch.device("cpu" if options.tiny else "cuda")
    heads = TINY if options.tiny else LLAMA_8B
    num_rounds = 2 if options.tiny else options.rounds
    rows: list[Row] = []
    for shape in shapes_of(options):
        cache, batch = fill_cache(heads, shape, device, 2 if options.tiny else MAX_LAYERS)
        if options.sweep:
            arms = sweep_arms(heads, shape, cache, batch)
        else:
            found = [make_arm(name, heads, shape, cache, batch) for name in options.backends]
            arms = [arm for arm in found if arm is not None]
        samples = measure(arms, device, num_rounds)
        rows += rows_of(heads, shape, cache.num_layers, arms, samples)
        progress(f"{shape}: {', '.join(f'{row.backend} {row.us:.1f} us' for row in rows[-len(arms) :])}")
        del arms
        cache.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def render(rows: Sequence[Row]) -> str:
    header = ("shape", "backend", "layers", "us", "low", "high", "floor us", "x floor", "TB/s", "TFLOP/s", "first s", "")
    cells = []
    for row in sorted(rows, key=_by_shape) if any(row.setting for row in rows) else rows:
        ratio = None if row.floor_us is None else row.us / row.floor_us
        cells.append(
            (
                row.shape,
                row.backend,
                row.layers,
                row.us,
                row.us_low,
                row.us_high,
                row.floor_us,
                ratio,
                row.read_tb_s,
                row.tflop_s,
                row.first_launch_s,
                row.setting,
            )
        )
    return table(header, cells)


def _by_shape(row: Row) -> tuple[str, float]:
    return row.shape, row.us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    parser.add_argument("--tiny", action="store_true", help="small, on the cpu, with Triton's interpreter")
    parser.add_argument("--sweep", action="store_true", help="the Triton decode with other settings")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each backend and shape (15)")
    parser.add_argument(
        "--backends", nargs="+", choices=ATTENTIONS[1:], default=["triton", "torch_sdpa"], help="which to measure"
    )
    options = parser.parse_args()
    if options.tiny:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = run(options)
    print(render(rows))
    if options.json is not None:
        machine = describe_machine(torch.device("cpu" if options.tiny else "cuda"))
        options.json.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
