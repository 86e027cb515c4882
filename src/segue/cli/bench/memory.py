"""`segue bench memory`: resident, graph and peak bytes by capture ceiling and by decode rungs, with and without graphs.

The question is what graphs really cost. Below the chunk size they come on top of the memory that eager prefills need;
from the chunk size on a prefill of any length runs in the pool, and that eager memory is not needed any more. So each
ceiling starts an engine, runs one prefill of exactly the chunk size, and adds up: what is there all the time, the
graphs, and what that prefill held on top. All ceilings have the same weights and the same cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any, NamedTuple

from segue.cli.bench.common import (
    add_model_arguments,
    add_png_argument,
    check_results,
    describe_machine,
    make_model,
    sizes_of,
    write_results,
)
from segue.cli.output import import_torch, note
from segue.cli.usage import UsageError, usage
from segue.observe.memory_plot import draw
from segue.observe.report import format_bytes, format_table

HELP = "bytes of graphs, residents and eager peaks, by capture ceiling and by decode rungs"
_CHUNK = {"cuda": 2048, "cpu": 64}
_REQUESTS = {"cuda": 64, "cpu": 4}
_ROOM = 16
"""tokens of context beyond twice the chunk"""


class Reading(NamedTuple):
    """One engine. Bytes; `ceiling` 0 is the engine without graphs. `resident` are weights, cache and what else stays
    outside of the graph pools; `peak` is what one prefill (or decode) held on top of all that."""

    ceiling: int
    graphs: int
    resident: int
    pool: int
    driver: int
    peak: int
    seconds: float

    @property
    def graph_bytes(self) -> int:
        return self.pool + self.driver

    @property
    def total(self) -> int:
        return self.resident + self.graph_bytes + self.peak

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"graph_bytes": self.graph_bytes, "total": self.total}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--chunk-size", type=int, metavar="N", help="tokens of the prefill that is measured (2048 on cuda)")
    parser.add_argument("--max-requests", type=int, metavar="N", help="the largest decode rung (64 on cuda)")
    parser.add_argument("--ceilings", metavar="LIST", help="capture ceilings of prefill, such as 64,512,2048")
    parser.add_argument("--prefill", choices=("breakable", "full"), default="breakable", help="backend of prefill graphs")
    add_png_argument(parser)


def run(options: argparse.Namespace) -> int:
    check_results(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which measures on cpu, writes lines of its own
    asked = sizes_of(options.ceilings, "ceilings")
    if any(size is not None and size < 1 for size in (options.chunk_size, options.max_requests)):
        raise UsageError("--chunk-size and --max-requests must be at least 1")
    start = time.perf_counter()
    import_torch()
    from segue.llm.config import torch_device

    device = torch_device(options.device)
    chunk = _CHUNK[device.type] if options.chunk_size is None else options.chunk_size
    most = _REQUESTS[device.type] if options.max_requests is None else options.max_requests
    with usage():
        model = make_model(options, device, max_context=2 * chunk + _ROOM)
    note(f"{options.shape}: weights after {time.perf_counter() - start:.1f} s on {device}")
    sweep = _Sweep(model, options, chunk, most)
    prefill = [sweep.prefill(ceiling) for ceiling in (0, *(asked or default_ceilings(chunk)))]
    decode = [sweep.decode(rung) for rung in (0, *doubling(most))]
    print(_table(f"prefill of {chunk} tokens, by capture ceiling", "ceiling", prefill))
    print("\n" + _table("one decode step of all requests, by largest rung", "requests", decode))
    result = {
        "shape": options.shape, "chunk_size": chunk, "max_requests": most, "backend": options.prefill,
        "machine": describe_machine(device), "seconds": time.perf_counter() - start,
        "prefill": [reading.to_dict() for reading in prefill], "decode": [reading.to_dict() for reading in decode],
    }  # fmt: skip
    write_results(options, result, draw)
    return 0


def default_ceilings(chunk: int) -> tuple[int, ...]:
    """From 64 (or an eighth of a small chunk) by fours to the chunk, and once beyond."""
    first = min(64, max(chunk // 8, 1))
    below = []
    while first < chunk:
        below.append(first)
        first *= 4
    if chunk // 2 > (below[-1] if below else 0):
        below.append(chunk // 2)
    return (*below, chunk, 2 * chunk)


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4 .. and `most`."""
    return tuple(sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}))


class _Sweep:
    """Engines one after another over one model, all with the same cache."""

    def __init__(self, model: Any, options: argparse.Namespace, chunk: int, most: int) -> None:
        from segue.llm.pages import NUM_RESERVED_PAGES, pages_for

        self._model, self._options = model, options
        self._chunk, self._most = chunk, most
        self._context = min(2 * chunk + _ROOM, model.config.get_text_config().max_position_embeddings)
        if chunk >= self._context:
            raise UsageError(
                f"--chunk-size is {chunk}, and the shape's context holds {self._context} tokens with the output"
            )
        self._pages = NUM_RESERVED_PAGES + pages_for(self._context) + 2 * most

    def prefill(self, ceiling: int) -> Reading:
        from segue.config import GraphConfig, PhaseConfig

        phase = PhaseConfig(backend=self._options.prefill if ceiling else "disabled", max_size=ceiling or None)
        graphs = GraphConfig(prefill=phase, decode="disabled")
        prompts = [[token % 97 for token in range(self._chunk)]]
        return self._measure(graphs, ceiling, max(self._chunk, ceiling), prompts, num_tokens=1)

    def decode(self, rung: int) -> Reading:
        from segue.config import GraphConfig, PhaseConfig

        phase = PhaseConfig(backend="full" if rung else "disabled", max_size=rung or None)
        graphs = GraphConfig(prefill="disabled", decode=phase)
        return self._measure(graphs, rung, self._chunk, [[token % 97] for token in range(self._most)], num_tokens=3)

    def _measure(self, graphs: Any, ceiling: int, chunk: int, prompts: list[list[int]], num_tokens: int) -> Reading:
        from segue.llm import Engine, EngineConfig, SamplingParams

        start = time.perf_counter()
        config = EngineConfig(
            device=self._options.device, attention=self._options.attention, graphs=graphs, chunk_size=chunk,
            max_requests=self._most, max_context=self._context, num_pages=self._pages,
        )  # fmt: skip
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        with Engine(self._model, config) as engine:
            seconds = time.perf_counter() - start
            engine.generate(prompts, params)  # first calls load kernels and make workspaces
            names = [engine.add_request(prompt, params) for prompt in prompts]
            decoded = engine.stats()["steps"]["decode"]
            while num_tokens > 1 and engine.stats()["steps"]["decode"] == decoded:  # the next step is one of decoding
                engine.step()
            ledger, device = engine.ledger(), engine.device
            device.flush()
            resident = _outside(engine, ledger.pool_bytes)
            with device.measure_peak() as peak:
                engine.step()
            for name in names:
                engine.abort(name)
        gc.collect()
        device.flush()
        note(f"  {ceiling or 'no graphs'}: {seconds:.1f} s")
        num_graphs = len(ledger.graphs)
        return Reading(ceiling, num_graphs, resident, ledger.pool_bytes, ledger.driver_bytes, peak.nbytes, seconds)


def _outside(engine: Any, pool_bytes: int) -> int:
    """Bytes of tensors that stay, outside of the graph pools: as the allocator says on CUDA, counted on cpu."""
    if engine.device.kind == "cuda":
        return int(engine.device.memory().allocated)
    model = engine.model
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values()) + engine.cache.nbytes + sum(r.static_bytes for r in engine.runners)


def _table(title: str, name: str, readings: list[Reading]) -> str:
    base = readings[0]
    headers = [name, "graphs", "resident", "graph pool", "driver", "eager peak", "in all", "against no graphs", "start s"]
    rows = [
        [
            str(r.ceiling) if r.ceiling else "none",
            str(r.graphs),
            format_bytes(r.resident),
            format_bytes(r.pool),
            format_bytes(r.driver),
            format_bytes(r.peak),
            format_bytes(r.total),
            "" if r is base else ("+" if r.total >= base.total else "-") + format_bytes(abs(r.total - base.total)),
            f"{r.seconds:.1f}",
        ]
        for r in readings
    ]
    return f"{title}\n{format_table(headers, rows)}"
