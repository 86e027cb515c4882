"""`segue bench throughput`: tokens a second of a whole job, beside the least time it could take and beside transformers."""

from __future__ import annotations

import argparse
import statistics
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
from segue.cli.output import import_torch, note
from segue.cli.usage import UsageError, usage
from segue.llm.engine_config import MOST_TOKENS
from segue.observe.speed_plot import draw_throughput

_DEFAULTS: dict[str, tuple[int, tuple[int, ...], int]] = {"cuda": (64, (64, 512), 128), "cpu": (4, (8, 32), 8)}
_MOST = 65_536
HELP = "tokens a second of a whole job, beside its floor and transformers' continuous batching"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=int, metavar="N", help="how many prompts (64 on cuda)")
    parser.add_argument("--lengths", metavar="MIN,MAX", help="tokens of a prompt (64,512 on cuda)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="new tokens of each (128 on cuda)")
    parser.add_argument("--transformers", action="store_true", help="also transformers' continuous batching (cuda)")
    add_png_argument(parser)


def run(options: argparse.Namespace) -> int:
    check_results(options)
    asked = sizes_of(options.lengths, "lengths", MOST_TOKENS) or ()
    is_a_range = asked == () or options.lengths.split(",") in ([str(asked[0]), str(asked[-1])], [str(asked[0])])
    if not is_a_range or any(size is not None and size < 1 for size in (options.prompts, options.new_tokens)):
        raise UsageError(
            "--lengths takes the shortest prompt and the longest, such as 64,512; --prompts and --new-tokens at least 1"
        )
    if max(options.prompts or 1, options.new_tokens or 1) > _MOST:
        raise UsageError(f"--prompts and --new-tokens are at most {_MOST:,}")
    import_torch()
    from segue.llm import Engine, EngineConfig
    from segue.llm.bench.throughput import floor_seconds, make_prompts, measure_engine, measure_transformers
    from segue.llm.config import torch_device

    device = torch_device(options.device)
    if options.transformers and device.type != "cuda":
        raise UsageError(f"--transformers measures on cuda, and this runs on {device.type}: leave it out")
    count, lengths, new_tokens = _DEFAULTS[device.type]
    count, new_tokens = options.prompts or count, options.new_tokens or new_tokens
    lengths = asked or lengths
    with usage():
        config = EngineConfig(
            device=device,
            attention=options.attention,
            experts=options.experts,
            max_requests=count,
            max_context=lengths[-1] + new_tokens + 1,
        )
        model = make_model(options, device)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = make_prompts(count, lengths[0], lengths[-1], vocabulary)
    result: dict[str, Any] = {
        "shape": options.shape, "machine": describe_machine(device), "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)), "new_tokens": new_tokens,
    }  # fmt: skip
    if options.transformers:
        note("transformers' continuous batching ...")
        result["transformers_s"] = measure_transformers(model, prompts, new_tokens)
    with usage(), Engine(model, config) as engine:
        result["seconds"] = measure_engine(engine, prompts, new_tokens)
        result["floor"] = floor_seconds(engine, prompts, new_tokens)
        result["phases"] = engine.stats()["phases"]
    produced = len(prompts) * new_tokens
    seconds = statistics.median(result["seconds"])
    floor = result["floor"]["prompt_s"] + result["floor"]["decode_s"]
    print(f"{options.shape}, {result['machine']['device']}: {len(prompts)} prompts")
    print(
        f"segue         {produced / seconds:9.0f} tokens/s  ({seconds:.3f} s; {min(result['seconds']):.3f} - "
        f"{max(result['seconds']):.3f})"
    )
    print(f"floor         {produced / floor:9.0f} tokens/s  ({floor:.3f} s; segue reaches {floor / seconds:.0%} of it)")
    if options.transformers:
        peer = result["transformers_s"]
        print(f"transformers  {produced / peer:9.0f} tokens/s  ({peer:.3f} s; segue is {peer / seconds:.1f} times as fast)")
    write_results(options, result, draw_throughput)
    return 0
