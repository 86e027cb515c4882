"""A prefill of the lean model (`lean_llama`), eager, in one graph and with breaks, by length and by what a break returns.

    PYTHONPATH=src python benchmarks/lean_prefill.py --json results.json     # one CUDA GPU, a minute
    PYTHONPATH=src python benchmarks/lean_prefill.py --tiny                  # cpu, seconds: does it run?

*Fresh*: the break is torch's scaled_dot_product_attention, which makes its result, so each replay copies it to where the
next segment reads. *Paged*: the break is attention over the pages of a KV cache, as an engine has it, which writes there.
Every length is a rung of its own, one request; rounds interleave. *One at a time* waits for each step, as a server that
answers one request at a time does; *behind one another* waits after ten. Each arm runs untimed for `--settle` seconds first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import describe_machine, progress, table
from lean_llama import LLAMA_8B, TINY, Attend, LeanLlama, Shape, attention

import segue
from segue.backends import make_backend
from segue.backends.base import GraphReplay
from segue.device import get_device
from segue.llm.attention import LayerSpec, Needs, choose_attention
from segue.llm.batch import RequestRows, build_batch, to_device
from segue.llm.bench.measure import interleaved
from segue.llm.kernels.launch import Launches
from segue.llm.kv_cache import PagedKVCache
from segue.llm.pages import NUM_RESERVED_PAGES, pages_for
from segue.memory.lane import Lane
from segue.shapes.key import ShapeKey

LENGTHS = (4, 16, 64, 128, 512, 1024, 2048)


class Paged:
    """Attention of one request of `tokens` tokens. All layers share one layer of cache, which costs the same."""

    def __init__(self, shape: Shape, device: torch.device, tokens: int) -> None:
        pages = list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + pages_for(tokens)))
        cache = PagedKVCache(1, pages[-1] + 1, shape.kv_heads, shape.head_dim, shape.dtype, device)
        needs = Needs(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, shape.dtype)
        key = ShapeKey("prefill", tokens, requests=1, context=tokens)
        self._plan = choose_attention("auto", needs, device).make(cache).static_plan(key)
        self._plan.update(to_device(build_batch([RequestRows([0] * tokens, 0, pages)]), device))
        self._spec = LayerSpec(0, shape.head_dim**-0.5)

    def _prepared(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Any:
        launches = self._plan.prepared(q, k, v, self._spec, None, out.view(q.shape))
        return None if launches is None else Launches(launches, q.device.index)

    @segue.eager_on_graph(prepare=_prepared)
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        given = None if out is None else out.view(q.shape)
        found = self._plan.run(q, k, v, self._spec, None, given)
        return out if out is not None and found is given else found.flatten(1)


def record(lane: Lane, backend: str, tokens: int, forward: Callable[[], torch.Tensor]) -> GraphReplay:
    made = make_backend(backend, lane)
    with lane.exclusive(), lane.capture_pass():
        recorded = made.record(ShapeKey("prefill", tokens), forward, made.trace(forward)[1])
    assert isinstance(recorded, GraphReplay)
    return recorded


def measure(
    model: LeanLlama, device: torch.device, tokens: int, attend: Attend, options: argparse.Namespace
) -> dict[str, Any]:
    def forward() -> torch.Tensor:
        return model.forward(tokens, attend)

    lane = Lane(get_device(device))
    recorded = {backend: record(lane, backend, tokens, forward) for backend in ("full", "breakable")}
    with lane.exclusive():
        expected = forward().clone()
        is_equal = {name: bool(torch.equal(graph.replay(), expected)) for name, graph in recorded.items() for _ in range(3)}
        calls: dict[str, Callable[[], object]] = {"eager": forward} | {n: graph.replay for n, graph in recorded.items()}
        timed = {
            name: interleaved(calls, device, rounds=options.rounds, calls=10, settle=options.settle, waits=waits)
            for name, waits in (("one at a time", True), ("behind one another", False))
        }
    for graph in recorded.values():
        graph.close()
    lane.close()
    seconds = {way: {name: sample._asdict() for name, sample in samples.items()} for way, samples in timed.items()}
    return {"seconds": seconds, "equal to eager": is_equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a 2-layer model on the cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--settle", type=float, default=0.0, metavar="S", help="untimed seconds before each timing (0)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians with their spread")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda:0")
    shape, lengths = (TINY, (4, 16)) if options.tiny else (LLAMA_8B, sorted(options.lengths))
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # flash: cuDNN would plan each shape on its first call
    rows, found = [], []
    with torch.inference_mode():
        model = LeanLlama(shape, device, lengths[-1])
        model.fill(lengths[-1], lengths[-1], torch.Generator(device).manual_seed(0))
        for kind in ("fresh", "paged"):
            for tokens in lengths:
                attend = attention if kind == "fresh" else Paged(shape, device, tokens).attend
                result = measure(model, device, tokens, attend, options)
                found.append({"break": kind, "tokens": tokens} | result)
                is_equal = all(result["equal to eager"].values())
                for way, seconds in result["seconds"].items():
                    eager, full, broken = (1e3 * seconds[name]["median"] for name in ("eager", "full", "breakable"))
                    rows.append([kind, tokens, way, eager, full, broken, full / broken, "yes" if is_equal else "NO"])
                    progress(f"{kind}, {tokens} tokens, {way}: full {full:.3f} ms, breakable {broken:.3f} ms")
    print(
        table(["break", "tokens", "steps", "eager ms", "full ms", "breakable ms", "full / breakable", "bits of eager"], rows)
    )
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(device), "rows": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
