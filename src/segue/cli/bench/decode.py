"""`segue bench decode`: a decode step by batch size, beside its matrix products alone in one graph."""

from __future__ import annotations

import argparse
from typing import Any

from segue.cli.bench.common import (
    add_model_arguments,
    add_png_argument,
    check_context,
    check_results,
    describe_machine,
    make_model,
    sizes_of,
    write_results,
)
from segue.cli.output import import_torch, note
from segue.cli.usage import usage
from segue.llm.engine_config import MOST_REQUESTS
from segue.observe.report import format_table
from segue.observe.speed_plot import draw_decode

_DEFAULTS = {"cuda": ((1, 8, 64, 256), 512), "cpu": ((1, 4), 64)}
HELP = "a decode step by batch size, beside its matrix products alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--batches", metavar="LIST", help="requests of a step (1,8,64,256 on cuda)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens before each request's new one (512 on cuda)")
    parser.add_argument("--compile", action="store_true", help="also torch.compile(mode='reduce-overhead'), at batch 1")
    add_png_argument(parser)


def run(options: argparse.Namespace) -> int:
    check_results(options)
    asked = sizes_of(options.batches, "batches", MOST_REQUESTS)
    import_torch()
    check_context(options.context)
    from segue.config import GraphConfig, PhaseConfig
    from segue.llm import Engine, EngineConfig
    from segue.llm.bench.decode import measure_compiled, measure_decode
    from segue.llm.config import torch_device
    from segue.llm.pages import NUM_RESERVED_PAGES, pages_for

    device = torch_device(options.device)
    batches, context = _DEFAULTS[device.type]
    batches, context = asked or batches, options.context or context
    with usage():
        config = EngineConfig(
            device=device, attention=options.attention, experts=options.experts,
            max_requests=batches[-1], max_context=context + 16,
            num_pages=NUM_RESERVED_PAGES + batches[-1] * pages_for(context + 2),
            graphs=GraphConfig(prefill="disabled", decode=PhaseConfig(backend="full", ladder=batches)),
        )  # fmt: skip
        model = make_model(options, device, max_context=max(4096, context + 16))
    result: dict[str, Any] = {"shape": options.shape, "machine": describe_machine(device)}
    if options.compile:
        note("torch.compile(mode='reduce-overhead') ...")
        result["compiled"] = measure_compiled(model, device, context)
    with usage(), Engine(model, config) as engine:
        note(f"{engine.attention.explain()}; start-up of {len(batches)} rungs {_capture_s(engine):.2f} s")
        result["rows"] = measure_decode(engine, batches, context)
        result["fusion"] = [] if engine.fusion is None else engine.fusion.lines()
    print(f"{options.shape}, {result['machine']['device']}, context {context}: ms a decode step (fastest - slowest round)")
    print(
        format_table(["batch", "kernels", "products", "replay", "/ products", "whole step", "eager"], _rows(result["rows"]))
    )
    if options.compile:
        compiled = result["compiled"]
        print(
            f"torch.compile(mode='reduce-overhead'), batch 1: {1e3 * compiled['seconds']['median']:.3f} ms a step after "
            f"{compiled['compile_s']:.1f} s of compiling"
        )
    write_results(options, result, draw_decode)
    return 0


def _capture_s(engine: Any) -> float:
    return float(sum(report.seconds for report in engine.capture_reports.values()))


def _rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = []
    for row in rows:
        if "seconds" not in row:
            table.append([str(row["batch"]), "", "", "", "", "", row["eager_reason"]])
            continue
        seconds = row["seconds"]
        shown = {n: f"{1e3 * s['median']:.3f} ({1e3 * s['low']:.3f}-{1e3 * s['high']:.3f})" for n, s in seconds.items()}
        ratio = seconds["replay"]["median"] / seconds["products"]["median"]
        table.append(
            [str(row["batch"]), str(row["kernels"]), shown["products"], shown["replay"], f"{ratio:.3f}", shown["step"],
             shown["eager"]]
        )  # fmt: skip
    return table
