"""`segue bench matrix`: compiler on and off x graphs on and off x backend x rung, in one run."""

from __future__ import annotations

import argparse
from typing import Any

from segue.cli.bench.common import add_model_arguments, check_context, describe_machine, make_model, sizes_of
from segue.cli.output import check_writable, import_torch, write_json
from segue.cli.usage import UsageError, usage
from segue.llm.engine_config import MOST_REQUESTS, MOST_TOKENS
from segue.observe.report import format_bytes, format_table

HELP = "compiler x graphs x backend x rung: memory, host and device time, latencies"
_DEFAULTS = {"cuda": ("1,8,64", "16,128,512", 512, 100), "cpu": ("1,4", "16,64", 32, 20)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--arms", metavar="LIST", help="backends or compiled, such as disabled,full (all)")
    parser.add_argument("--decode", metavar="LIST", help="requests of a decode step (1,8,64 on cuda)")
    parser.add_argument("--prefill", metavar="LIST", help="tokens of a prefill (16,128,512 on cuda)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens before each decoded one (512 on cuda)")
    parser.add_argument("--calls", type=int, metavar="N", help="steps of each arm and rung (100 on cuda)")


def run(options: argparse.Namespace) -> int:
    check_writable(options.json)
    most = {"decode": MOST_REQUESTS, "prefill": MOST_TOKENS}
    asked = {phase: sizes_of(getattr(options, phase), phase, bound) for phase, bound in most.items()}
    if options.calls is not None and options.calls < 1:
        raise UsageError("--calls must be at least 1")
    import_torch()
    check_context(options.context)
    from segue.llm.bench.matrix import ARMS, measure_matrix
    from segue.llm.config import torch_device

    arms = ARMS if options.arms is None else tuple(dict.fromkeys(options.arms.split(",")))
    if not arms or not set(arms) <= set(ARMS):
        raise UsageError(f"--arms is {options.arms!r}; choose from {', '.join(ARMS)}, with commas between")
    device = torch_device(options.device)
    decode, prefill, context, calls = _DEFAULTS[device.type]
    defaults = {"decode": decode, "prefill": prefill}
    rungs = {phase: sizes or sizes_of(defaults[phase], phase) or (1,) for phase, sizes in asked.items()}
    context = context if options.context is None else options.context
    calls = calls if options.calls is None else options.calls
    with usage():
        model = make_model(options, device, max_context=max(4096, 2 * context, 2 * rungs["prefill"][-1]))
        result: dict[str, Any] = {"shape": options.shape, "machine": describe_machine(device)}
        result |= measure_matrix(model, device, options.attention, options.experts, arms, rungs, context, calls=calls)
    attention = result["arms"][0]["attention"]
    print(f"{options.shape}, {result['machine']['device']}, {attention}, context {context}: {calls} steps an arm, in turn")
    headers = ["arm", "decode", "prefill", "shapes", "capture s", "graph pool", "executable graphs"]
    print(format_table(headers, [_arm_row(arm) for arm in result["arms"]]))
    headers = [
        "phase", "rung", "compile", "graphs", "arm", "its pool", "submit us", "device ms", "p50 ms", "p90 ms", "p99 ms",
    ]  # fmt: skip
    print("\n" + format_table(headers, [_row(row) for row in result["rows"]]))
    if "compiled" in arms:
        print("\ncompiled: the pieces of tc_piecewise, each step run without a recording")
    write_json(options.json, result)
    return 0


def _arm_row(arm: dict[str, Any]) -> list[str]:
    return [
        arm["arm"], arm["resolved"]["decode"], arm["resolved"]["prefill"], str(arm["shapes"]), f"{arm['capture_s']:.2f}",
        format_bytes(arm["pool_bytes"]), format_bytes(arm["driver_bytes"]),
    ]  # fmt: skip


def _row(row: dict[str, Any]) -> list[str]:
    arm = row["arm"] if row["reason"] in (None, "disabled") else f"{row['arm']}, eager: {row['reason']}"
    device = "-" if row["device_s"] is None else f"{1e3 * row['device_s']:.3f}"
    return [
        row["phase"], str(row["rung"]), _on(row["compile"]), _on(row["graphs"]), arm, format_bytes(row["pool_bytes"]),
        f"{1e6 * row['submit_s']:.0f}", device, *(f"{1e3 * seconds:.3f}" for seconds in row["latency_s"].values()),
    ]  # fmt: skip


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"
