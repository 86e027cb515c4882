"""`segue bench memory`: resident, graph and peak bytes by capture ceiling and by decode rungs, with and without graphs.

The question is what graphs really cost. Below the chunk size they come on top of the memory that eager prefills need;
from the chunk size on a prefill of any length runs in the pool, and that eager memory is not needed any more. So each
ceiling starts an engine, runs one prefill of exactly the chunk size, and adds up: what is there all the time, the
graphs, and what that prefill held on top. All ceilings have the same weights and the same cache.

It adds up twice. A pool is memory that the allocator took and keeps; the eager peak is of tensors, and the allocator took
more for them and keeps that too (*held*; *mixed held* after prefills of many lengths). Tensors say what is needed at once,
held bytes what nobody else can have.

On CUDA each engine has a process of its own: the driver keeps memory of graphs that were destroyed and gives it to the
next ones, so in one process only the first engine's driver bytes are its own.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

from segue.cli.bench.child import in_child, leave_cuda_alone
from segue.cli.bench.common import (
    add_model_arguments,
    add_png_argument,
    check_results,
    describe_machine,
    make_model,
    sizes_of,
    write_results,
)
from segue.cli.bench.memory_sweep import Reading, Sweep, context_for
from segue.cli.output import import_torch, note
from segue.cli.usage import UsageError, usage
from segue.llm.engine_config import MOST_TOKENS
from segue.observe.memory_plot import draw
from segue.observe.report import format_bytes, format_table

HELP = "bytes of graphs, residents and eager peaks, by capture ceiling and by decode rungs"
_CHUNK = {"cuda": 2048, "cpu": 64}
_REQUESTS = {"cuda": 64, "cpu": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--chunk-size", type=int, metavar="N", help="tokens of the prefill that is measured (2048 on cuda)")
    parser.add_argument("--max-requests", type=int, metavar="N", help="the largest decode rung (64 on cuda)")
    parser.add_argument("--ceilings", metavar="LIST", help="capture ceilings of prefill, such as 64,512,2048")
    parser.add_argument("--ladder", metavar="LIST", help="rungs of prefill up to each ceiling (the default ladder)")
    parser.add_argument("--prefill", choices=("breakable", "full"), default="breakable", help="backend of prefill graphs")
    parser.add_argument("--lend", action="store_true", help="lend the idle graph pool to eager passes")
    add_png_argument(parser)


def run(options: argparse.Namespace) -> int:
    check_results(options)
    asked = sizes_of(options.ceilings, "ceilings", MOST_TOKENS)
    sizes_of(options.ladder, "ladder", MOST_TOKENS)
    if any(size is not None and size < 1 for size in (options.chunk_size, options.max_requests)):
        raise UsageError("--chunk-size and --max-requests must be at least 1")
    start = time.perf_counter()
    leave_cuda_alone()
    import_torch()
    kind, machine = in_child(lambda: _machine(options)) if _may_be_cuda(options) else _machine(options)
    chunk = _CHUNK[kind] if options.chunk_size is None else options.chunk_size
    most = _REQUESTS[kind] if options.max_requests is None else options.max_requests
    measure = _measuring(options, kind, chunk, most)
    prefill = [measure("prefill", ceiling) for ceiling in (0, *(asked or default_ceilings(chunk)))]
    decode = [measure("decode", rung) for rung in (0, *doubling(most))]
    print(_table(f"prefill of {chunk} tokens, by capture ceiling", "ceiling", prefill))
    print("\n" + _table("one decode step of all requests, by largest rung", "requests", decode))
    result = {
        "shape": options.shape, "chunk_size": chunk, "max_requests": most, "backend": options.prefill, "lend": options.lend,
        "ladder": options.ladder,
        "machine": machine, "seconds": time.perf_counter() - start,
        "prefill": [reading.to_dict() for reading in prefill], "decode": [reading.to_dict() for reading in decode],
    }  # fmt: skip
    write_results(options, result, draw)
    return 0


def _may_be_cuda(options: argparse.Namespace) -> bool:
    """Imports what children will need, once for all of them, and finds out no more than can be without CUDA."""
    import torch

    import segue.llm  # noqa: F401

    with contextlib.suppress(ImportError):
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    return options.device != "cpu" and torch.backends.cuda.is_built()


def _machine(options: argparse.Namespace) -> tuple[str, dict[str, str | None]]:
    from segue.llm.config import torch_device

    device = torch_device(options.device)
    return device.type, describe_machine(device)


def _measuring(options: argparse.Namespace, kind: str, chunk: int, most: int) -> Callable[[str, int], Reading]:
    """The function that measures one engine of a phase: in this process, or on CUDA in one of its own."""

    def sweep() -> Sweep:
        from segue.llm.config import torch_device

        start = time.perf_counter()
        device = torch_device(options.device)
        with usage():
            model = make_model(options, device, max_context=context_for(chunk))
        note(f"{options.shape}: weights after {time.perf_counter() - start:.1f} s on {device}")
        return Sweep(model, options, chunk, most)

    def run(made: Sweep, phase: str, size: int) -> Reading:
        return made.prefill(size) if phase == "prefill" else made.decode(size)

    if kind == "cuda":
        return lambda phase, size: in_child(lambda: run(sweep(), phase, size))
    made = sweep()
    return lambda phase, size: run(made, phase, size)


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


def _table(title: str, name: str, readings: list[Reading]) -> str:
    base = readings[0]
    headers = [
        name,
        "graphs",
        "resident",
        "pool",
        "driver",
        "peak",
        "in all",
        "+/-",
        "held",
        *(["mixed held"] if base.mixed is not None else []),
        "held in all",
        "+/-",
    ]
    rows = [
        [
            str(r.ceiling) if r.ceiling else "none",
            str(r.graphs),
            *map(format_bytes, (r.resident, r.pool, r.driver, r.peak, r.total)),
            "" if r is base else _signed(r.total - base.total),
            *map(format_bytes, (r.held, *([] if r.mixed is None else [r.mixed]), r.held_total)),
            "" if r is base else _signed(r.held_total - base.held_total),
        ]
        for r in readings
    ]
    return f"{title}; peak, held: of one pass; +/-: against no graphs\n{format_table(headers, rows)}"


def _signed(nbytes: int) -> str:
    return ("+" if nbytes >= 0 else "-") + format_bytes(abs(nbytes))
