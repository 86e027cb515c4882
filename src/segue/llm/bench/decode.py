"""How long a decode step takes, beside what it cannot do without.

Floors: the step's own matrix products, alone in one graph over the same weights and the same rows; and the bytes of all
weights at the best read rate. Arms: the recorded step, the same step run eagerly on the same padded batch.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from segue.graph import calling
from segue.llm.batch import HostBatch, RequestRows, build_batch
from segue.llm.bench.measure import interleaved
from segue.llm.engine import Engine
from segue.llm.pages import PAGE_SIZE, pages_for
from segue.llm.runners import BatchRunner


def decode_batch(requests: int, context: int, first_page: int = 2) -> HostBatch:
    """One new token for each of `requests` requests with `context` tokens before it, on pages of their own."""
    pages = pages_for(context + 1, PAGE_SIZE)
    starts = (first_page + i * pages for i in range(requests))
    return build_batch([RequestRows((7,), context, range(start, start + pages)) for start in starts])


def matrix_products(engine: Engine) -> list[torch.Tensor]:
    """The weights that a decode step multiplies by, merged ones once: 2-D, each storage's widest view."""
    model: Any = engine._model
    found: dict[int, list[torch.Tensor]] = {}
    for module in model.modules():
        if type(module) is nn.Linear:
            found.setdefault(module.weight.untyped_storage().data_ptr(), []).append(module.weight)
    whole = []
    for views in found.values():
        rows = sum(view.shape[0] for view in views)
        whole.append(views[0].as_strided((rows, views[0].shape[1]), views[0].stride(), 0) if len(views) > 1 else views[0])
    return whole


def products_graph(weights: Sequence[torch.Tensor], rows: int) -> Callable[[], None]:
    """All products with `rows` rows, recorded as one graph; run directly where there is no CUDA."""
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def run() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    if weights[0].device.type != "cuda":
        return run
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph.replay


def measure_decode(
    engine: Engine, batches: Sequence[int], context: int, *, rounds: int = 7, calls: int = 20, with_eager: bool = True
) -> list[dict[str, Any]]:
    """One row a batch size: seconds of each arm, kernels of the recorded step, and bytes of weights."""
    weights = matrix_products(engine)
    runner, rows = engine.decode, []
    for requests in batches:
        host = decode_batch(requests, context)
        decision = runner.decide(host)
        if decision.key is None:
            rows.append({"batch": requests, "context": context, "eager_reason": str(decision.reason)})
            continue
        graph = runner.store.get(decision.key)
        arms: dict[str, Callable[[], object]] = {"products": products_graph(weights, requests), "replay": graph.replay}
        with torch.inference_mode(), runner.lane.exclusive(), calling(runner.load(host, decision)):
            if with_eager:
                arms["eager"] = runner.forward(decision.key)
            timed = interleaved(arms, engine.device.device, rounds=rounds, calls=calls)
        with torch.inference_mode():
            timed |= interleaved({"step": partial(_step, runner, host)}, engine.device.device, rounds=rounds)
        rows.append(
            {
                "batch": requests,
                "context": context,
                "rung": decision.key.tokens,
                "kernels": graph.record.nodes,
                "weight_bytes": sum(w.nbytes for w in weights),
                "kv_bytes": requests * context * 2 * engine.cache.keys[0][0].nbytes * engine.facts.num_layers,
                "seconds": {name: sample._asdict() for name, sample in timed.items()},
            }
        )
    return rows


def _step(runner: BatchRunner, host: HostBatch) -> Any:
    return runner.execute(host).chosen.tolist()


def measure_compiled(model: Any, device: torch.device, context: int, *, rounds: int = 5) -> dict[str, Any]:
    """transformers' own decode step at batch 1 over a static cache, under torch.compile(mode="reduce-overhead")."""
    from transformers import StaticCache

    model.set_attn_implementation("sdpa")
    cache = StaticCache(config=model.config, max_cache_len=context + 256)  # each step, timed or not, takes one place
    position = torch.full((1, 1), context, device=device)
    token = torch.full((1, 1), 7, device=device)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=False)
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(input_ids=token, position_ids=position, use_cache=True, **{name: cache}).logits

    with torch.inference_mode():
        model(input_ids=token.expand(1, context), use_cache=True, **{name: cache})
        start = time.perf_counter()
        for _ in range(4):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        compile_s = time.perf_counter() - start
        timed = interleaved({"compiled": step}, device, rounds=rounds)
    return {"compile_s": compile_s, "seconds": timed["compiled"]._asdict()}
