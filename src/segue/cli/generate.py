"""`segue generate`: a prompt, or a file of prompts, through a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from segue.cli.output import check_writable, import_torch, is_terminal, note, progress_bar, write_json
from segue.cli.usage import UsageError, model_source, usage
from segue.config import GraphConfig
from segue.llm import EngineConfig, SamplingParams
from segue.llm.arguments import check_text

HELP = "generate text from a checkpoint, and show which graphs did it"

_ATTENTION = ("auto", "torch_sdpa", "triton", "flashinfer", "fa4")
_EXPERTS = ("auto", "grouped_mm", "batched_mm", "segue", "by_rows")
_DECODE = ("auto", "full", "breakable", "tc_piecewise", "disabled")
N = TypeVar("N", int, float)

_PREFILL = ("auto", "breakable", "full", "tc_piecewise", "disabled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to say to the model")
    parser.add_argument("--prompts-file", metavar="FILE", help="one prompt a line, run as one batch; - is standard input")
    parser.add_argument(
        "--model", type=model_source, metavar="DIR",
        help="checkpoint folder, GGUF file or hub id (default: SmolLM2-135M-Instruct)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--attention", choices=_ATTENTION, default="auto", help="what computes attention over the cache")
    parser.add_argument("--experts", choices=_EXPERTS, default="auto", help="what multiplies the experts of a mixture")
    parser.add_argument("--decode", choices=_DECODE, default="auto", help="backend of decode steps")
    parser.add_argument("--prefill", choices=_PREFILL, default="auto", help="backend of prefill steps")
    parser.add_argument(
        "--debug-graphs", choices=("forward", "ops"), help="one eager piece, or a graph an operation, on the replay path"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens to generate at most (64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens up to P in all")
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="keep tokens of at least P times the likeliest"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    parser.add_argument("--max-context", type=_size, metavar="N", help="tokens of prompt and output together")
    parser.add_argument("--chunk-size", type=_size, metavar="N", help="tokens of one prefill step")
    parser.add_argument("--max-requests", type=_size, metavar="N", help="requests that run at once")
    parser.add_argument(
        "--memory-fraction",
        type=_share,
        metavar="F",
        help="of a GPU's memory, what may be in use; sizes the KV cache (0.9)",
    )
    parser.add_argument("--memory-budget", metavar="SIZE", help="what graphs may cost, such as 2GiB; the rest runs eagerly")
    parser.add_argument("--stats", action="store_true", help="print the table of graphs at the end")


class _Prompt(NamedTuple):
    text: str
    where: str = ""  # before an error about it: the line of the file


def _size(text: str) -> int | None:
    return _number(text, int, "a whole number")


def _share(text: str) -> float | None:
    return _number(text, float, "a number from 0 to 1")


def _number(text: str, kind: Callable[[str], N], what: str) -> N | None:
    """None for "auto"."""
    try:
        return None if text == "auto" else kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {what} nor auto") from None


def run(options: argparse.Namespace) -> int:
    check_writable(options.json)
    prompts = _read_prompts(options)
    with usage():
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            stop=tuple(options.stop),
        )
        config = _engine_config(options)
    start = time.perf_counter()
    import_torch()
    from segue.llm import Engine, default_model
    from segue.llm.fuse import explain_fusion

    with progress_bar("starting") as show:
        source = options.model if options.model is not None else default_model(show if is_terminal() else None)
        engine = Engine(source, config, progress=lambda key, what: show(f"{what} of {key}"))
    with engine:
        if engine.tokenizer is None:
            raise UsageError(f"--model {source} has no tokenizer.json, which text needs (in Python token ids do without)")
        seconds = time.perf_counter() - start
        names = [_queue(engine, prompt, params, is_raw=options.raw) for prompt in prompts]
        lines = [engine.sizes.explain(), engine.attention.explain(), explain_fusion(engine.fusion)]
        lines += [] if engine.experts is None else [engine.experts.explain()]
        note("\n".join((*lines, engine.resolved.explain())))
        note(f"ready after {seconds:.1f} s on {engine.device.device}")
        outputs = _generate(engine, prompts, names)
        stats = engine.stats()
        if options.stats:
            from segue.observe.report import phase_table

            print(f"\n{phase_table(stats['phases'])}\n\n{engine.ledger()}")
        write_json(options.json, {"outputs": outputs, "stats": stats, "startup_s": seconds})
    return 0


def _read_prompts(options: argparse.Namespace) -> list[_Prompt]:
    """Raises UsageError where there is no prompt, or one is empty or no text."""
    if (options.prompt is None) == (options.prompts_file is None):
        raise UsageError("give a PROMPT, or --prompts-file FILE (one of the two)")
    if options.prompt is not None:
        prompts = [_Prompt(options.prompt)]
    else:
        lines = enumerate(_read_text(options.prompts_file).split("\n"), 1)
        prompts = [_Prompt(line.removesuffix("\r"), f"line {number}: ") for number, line in lines if line.strip()]
    if not prompts or not all(prompt.text.strip() for prompt in prompts):
        raise UsageError("the prompt is empty: say something")
    for prompt in prompts:
        with usage(prompt.where):
            check_text(prompt.text)
    return prompts


def _read_text(file: str) -> str:
    """A file, or standard input for ``-``; UTF-8, with or without a byte order mark."""
    if not file:
        raise UsageError("--prompts-file is empty: name a file, or - for standard input")
    if file == "-" and sys.stdin is None:
        raise UsageError("--prompts-file -: standard input is closed")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts-file {file} cannot be read: {error}") from None


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    sizes = {name: getattr(options, name) for name in ("max_context", "chunk_size", "max_requests", "memory_fraction")}
    graphs = GraphConfig(
        decode=options.decode, prefill=options.prefill, debug=options.debug_graphs, memory_budget=options.memory_budget,
        on_budget="rebuild",
    )  # fmt: skip
    given = {name: size for name, size in sizes.items() if size is not None}
    return EngineConfig(device=options.device, attention=options.attention, experts=options.experts, graphs=graphs, **given)


def _queue(engine: Any, prompt: _Prompt, params: Any, *, is_raw: bool) -> str:
    """The name of the request. Raises UsageError where the prompt does not fit, before anything is printed."""
    is_chat = not is_raw and bool(getattr(engine.tokenizer, "chat_template", None))
    with usage(prompt.where):
        ids = engine.chat_prompt([{"role": "user", "content": prompt.text}]) if is_chat else prompt.text
        return engine.add_request(ids, params)


def _generate(engine: Any, prompts: Sequence[_Prompt], names: Sequence[str]) -> list[dict[str, Any]]:
    """One prompt streams; several run as a batch, and are printed when all are done."""
    if len(names) == 1:
        for piece in engine.pieces(names[0]):
            print(piece, end="", flush=True)
        print()
    else:
        while engine.step():
            pass
    outputs = [{"prompt": p.text, **asdict(engine.take_output(n))} for p, n in zip(prompts, names, strict=True)]
    if len(outputs) > 1:
        for output in outputs:
            print(f"> {output['prompt']}\n{output['text']}\n", flush=True)
    return outputs
