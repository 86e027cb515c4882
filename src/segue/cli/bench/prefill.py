"""`segue bench prefill`: a prefill by length and arm; one request at a time, one token of output, no decode graphs."""

from __future__ import annotations

import argparse
from typing import Any

from segue.cli.bench.common import (
    add_model_arguments,
    add_png_argument,
    check_results,
    describe_machine,
    make_model,
    sizes_of,
    write_results,
)
from segue.cli.output import import_torch
from segue.cli.usage import UsageError, usage
from segue.llm.engine_config import MOST_TOKENS
from segue.observe.report import format_bytes, format_table
from segue.observe.speed_plot import draw_prefill

_LENGTHS = {"cuda": (4, 16, 64, 128, 512, 1024, 2048), "cpu": (4, 16, 64)}
HELP = "a prefill by length, eager and in each kind of graph"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--lengths", metavar="LIST", help="tokens of the prompt (4 to 2048 on cuda)")
    parser.add_argument(
        "--arms", default="eager,full,breakable", metavar="LIST", help="eager, full, breakable, tc_piecewise"
    )
    add_png_argument(parser)


def run(options: argparse.Namespace) -> int:
    check_results(options)
    asked = sizes_of(options.lengths, "lengths", MOST_TOKENS)
    arms = tuple(dict.fromkeys(options.arms.split(",")))
    import_torch()
    from segue.llm.bench.prefill import ARMS, measure_prefill
    from segue.llm.config import torch_device

    if not arms or not set(arms) <= {"eager", *ARMS}:
        raise UsageError(f"--arms is {options.arms!r}; choose from eager, {', '.join(ARMS)}, with commas between")
    device = torch_device(options.device)
    lengths = asked or _LENGTHS[device.type]
    with usage():
        model = make_model(options, device, max_context=max(4096, 2 * lengths[-1]))
        result: dict[str, Any] = {"shape": options.shape, "machine": describe_machine(device)}
        result |= measure_prefill(model, device, arms, lengths, options.attention, options.experts)
    print(f"{options.shape}, {result['machine']['device']}: ms a prefill step (fastest - slowest round)")
    headers = ["tokens", *arms, *(f"{arm} / {arms[0]}" for arm in arms[1:])]
    print(format_table(headers, [_row(row, arms) for row in result["rows"]]))
    for arm, build in result["build"].items():
        if build["shapes"]:
            print(
                f"{arm}: {build['shapes']} shapes built in {build['seconds']:.2f} s, "
                f"pool {format_bytes(build['pool_bytes'])}, executable graphs {format_bytes(build['driver_bytes'])}"
            )
    write_results(options, result, draw_prefill)
    return 0


def _row(row: dict[str, Any], arms: tuple[str, ...]) -> list[str]:
    seconds = row["seconds"]
    shown = [f"{1e3 * s['median']:.3f} ({1e3 * s['low']:.3f}-{1e3 * s['high']:.3f})" for s in (seconds[a] for a in arms)]
    ratios = [f"{seconds[arm]['median'] / seconds[arms[0]]['median']:.3f}" for arm in arms[1:]]
    return [str(row["tokens"]), *shown, *ratios]
