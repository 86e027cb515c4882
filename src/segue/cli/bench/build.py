"""`segue bench build`: start-up of an engine's graphs, all decode rungs and all prefill shapes, twice in one process.

The first start loads every kernel of the libraries and compiles those of Triton; the second finds them there.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from segue.cli.bench.common import add_model_arguments, describe_machine, make_model
from segue.cli.output import check_writable, import_torch, write_json
from segue.cli.usage import usage
from segue.observe.report import format_bytes, format_table

_DEFAULTS = {"cuda": (2048, 256), "cpu": (64, 8)}
HELP = "seconds and bytes of an engine's graphs at start-up"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--chunk-size", type=int, metavar="N", help="the largest prefill (2048 on cuda)")
    parser.add_argument("--max-requests", type=int, metavar="N", help="the largest decode batch (256 on cuda)")
    parser.add_argument(
        "--prefill",
        choices=("breakable", "full", "tc_piecewise", "disabled"),
        default="breakable",
        help="backend of prefill (breakable)",
    )
    parser.add_argument("--sampling-graphs", default="", metavar="LIST", help="also decode graphs that sample: drawn,sorted")


def run(options: argparse.Namespace) -> int:
    check_writable(options.json)
    import_torch()
    from segue.config import GraphConfig
    from segue.llm import Engine, EngineConfig
    from segue.llm.config import torch_device
    from segue.llm.pages import NUM_RESERVED_PAGES, pages_for

    device = torch_device(options.device)
    chunk, most = _DEFAULTS[device.type]
    chunk = chunk if options.chunk_size is None else options.chunk_size
    most = most if options.max_requests is None else options.max_requests
    with usage():
        model = make_model(options, device)
    context = min(4096, model.config.get_text_config().max_position_embeddings)
    variants = tuple(filter(None, options.sampling_graphs.split(",")))
    with usage():
        config = EngineConfig(
            device=device, attention=options.attention, experts=options.experts, chunk_size=chunk, max_requests=most,
            max_context=context, num_pages=NUM_RESERVED_PAGES + 8 * pages_for(context) + most,
            graphs=GraphConfig(prefill=options.prefill), sampling_graphs=variants,
        )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for start in ("first", "second"):
        begun = time.perf_counter()
        with usage(), Engine(model, config) as engine:
            seconds = time.perf_counter() - begun
            for phase, report in engine.capture_reports.items():
                records = report.records
                rows.append(
                    {
                        "start": start, "phase": phase, "shapes": len(records), "seconds": report.seconds,
                        "warmup_s": sum(r.warmup_s for r in records), "capture_s": sum(r.capture_s for r in records),
                        "nodes": sum(r.nodes or 0 for r in records),
                        "driver_bytes": sum(r.driver_bytes for r in records), "engine_s": seconds,
                        "pool_bytes": engine.lane.reserved_bytes,
                    }
                )  # fmt: skip
    result = {"shape": options.shape, "machine": describe_machine(device), "rows": rows}
    print(f"{options.shape}, {result['machine']['device']}: start-up of the graphs, weights in memory")
    headers = ["start", "phase", "shapes", "s", "warm-up s", "capture s", "nodes", "driver", "pool of both", "engine s"]
    table = [
        [
            r["start"], r["phase"], str(r["shapes"]), f"{r['seconds']:.2f}", f"{r['warmup_s']:.2f}", f"{r['capture_s']:.2f}",
            str(r["nodes"]), format_bytes(r["driver_bytes"]), format_bytes(r["pool_bytes"]), f"{r['engine_s']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip
    print(format_table(headers, table))
    write_json(options.json, result)
    return 0
