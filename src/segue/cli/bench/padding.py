"""`segue bench padding`: what padded tokens and empty request slots cost a full prefill graph."""

from __future__ import annotations

import argparse
from typing import Any

from segue.cli.bench.common import add_model_arguments, describe_machine, make_model, sizes_of
from segue.cli.output import check_writable, import_torch, write_json
from segue.cli.usage import UsageError, usage
from segue.observe.report import format_table

_DEFAULTS = {"cuda": ("9:16,300:304,1100:2048", 304, "1,8,16,24,31", 10), "cpu": ("9:16,60:64", 64, "1,31", 3)}
HELP = "what padded tokens and empty request slots cost a full prefill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--tokens", metavar="LIST", help="real tokens and rung (9:16,300:304,1100:2048 on cuda)")
    parser.add_argument("--slot-tokens", type=int, metavar="N", help="tokens beside empty slots (304 on cuda)")
    parser.add_argument("--empty", metavar="LIST", help="empty slots of 32 (1,8,16,24,31 on cuda)")


def run(options: argparse.Namespace) -> int:
    check_writable(options.json)
    tokens, empty = options.tokens and _pairs(options.tokens), sizes_of(options.empty, "empty")
    import_torch()
    from segue.llm.bench.padding import NUM_SLOTS, measure_padding
    from segue.llm.config import torch_device

    device = torch_device(options.device)
    default_tokens, default_slot_tokens, default_empty, calls = _DEFAULTS[device.type]
    tokens = tokens or _pairs(default_tokens)
    empty = empty or sizes_of(default_empty, "empty") or (1,)
    slot_tokens = default_slot_tokens if options.slot_tokens is None else options.slot_tokens
    if empty[-1] >= NUM_SLOTS or slot_tokens < NUM_SLOTS:
        raise UsageError(f"--empty must stay below {NUM_SLOTS} slots, and --slot-tokens be at least as many")
    with usage():
        model = make_model(options, device, max_context=max(4096, 2 * tokens[-1][1]))
        result: dict[str, Any] = {"shape": options.shape, "machine": describe_machine(device)}
        result |= measure_padding(model, device, options.attention, options.experts, tokens, slot_tokens, empty, calls=calls)
    print(f"{options.shape}, {result['machine']['device']}, {result['attention']}: ms a replay (fastest - slowest round)")
    headers = ["real tokens", "rung", "rung that fits", "padded", "padding costs", "us a padded token", "rung filled"]
    print(format_table(headers, [_token_row(row) for row in result["tokens"]]))
    headers = ["requests", "empty slots", "slots that fit", f"{NUM_SLOTS} slots", "padding costs", "us an empty slot"]
    print("\n" + format_table(headers, [_slot_row(row) for row in result["slots"]]))
    print(
        f"\nthe dearest token padding costs {result['most_for_tokens']:+.1%}, the dearest slot padding "
        f"{result['most_for_slots']:+.1%}: token padding dear, slots cheap is "
        f"{'shown' if result['is_claim_shown'] else 'refuted'} here"
    )
    write_json(options.json, result)
    return 0


def _pairs(text: str) -> list[tuple[int, int]]:
    try:
        pairs = sorted((int(real), int(rung)) for real, rung in (part.split(":") for part in text.split(",")))
    except ValueError:
        pairs = []
    if not pairs or not all(0 < real < rung for real, rung in pairs):
        raise UsageError(f"--tokens is {text!r}; give real tokens and a larger rung, such as 9:16,300:304")
    return sorted(pairs, key=lambda pair: pair[1])


def _ms(sample: dict[str, float]) -> str:
    return f"{1e3 * sample['median']:.3f} ({1e3 * sample['low']:.3f}-{1e3 * sample['high']:.3f})"


def _token_row(row: dict[str, Any]) -> list[str]:
    fits, padded, filled = (_ms(row["seconds"][name]) for name in ("fits", "padded", "filled"))
    return [str(row["real"]), str(row["rung"]), fits, padded, f"{row['cost_share']:+.1%}", _us(row), filled]


def _slot_row(row: dict[str, Any]) -> list[str]:
    fits, padded = (_ms(row["seconds"][name]) for name in ("fits", "padded"))
    return [str(row["requests"]), str(row["empty"]), fits, padded, f"{row['cost_share']:+.1%}", _us(row)]


def _us(row: dict[str, Any]) -> str:
    return f"{1e6 * row['cost_each_s']:.2f}"
