"""What benches share: the model they run, and the machine that they ran on."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from collections.abc import Callable
from typing import Any

from segue.cli.output import check_writable, write_json
from segue.cli.usage import UsageError
from segue.errors import MissingExtraError

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="tiny", metavar="SHAPE",
        help="llama-3-8b, qwen3-8b, qwen3-30b-a3b, moe-78-layers, smollm2, tiny, or a folder with config.json (tiny)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the weights (bfloat16 on cuda, float32 on cpu)")
    parser.add_argument("--attention", default="auto", metavar="NAME", help="which attention runs")
    parser.add_argument("--experts", default="auto", metavar="NAME", help="which code runs a mixture's experts")


def check_context(asked: int | None) -> None:
    """Raises UsageError for a `--context` that no engine has room for."""
    from segue.llm.engine_config import MOST_CONTEXT

    if asked is not None and not 1 <= asked <= MOST_CONTEXT // 2:
        raise UsageError(f"--context is {asked}; it must be from 1 to {MOST_CONTEXT // 2}")


def add_png_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--png", metavar="FILE", help="draw the figures as well (needs matplotlib)")


def check_results(options: argparse.Namespace) -> None:
    """Refuses result files that could not be written, before any work is done.

    Raises:
        UsageError: see `check_writable`.
        MissingExtraError: a figure is asked for, and matplotlib is not installed.
    """
    check_writable(options.json)
    if "png" not in options or options.png is None:
        return
    check_writable(options.png, "--png")
    if not options.png.lower().endswith(".png"):
        raise UsageError(f"--png {options.png}: name a file that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        from segue.llm.checkpoints import extra_remedy

        raise MissingExtraError(f"--png needs matplotlib, which is not installed; {extra_remedy('report')}")


def write_results(options: argparse.Namespace, result: Any, draw: Callable[[Any, str], None]) -> None:
    """The result as JSON, and its figure where one is asked for."""
    write_json(options.json, result)
    if options.png is not None:
        draw(result, options.png)


def make_model(options: argparse.Namespace, device: Any, max_context: int = 4096) -> Any:
    """The model of the options."""
    import torch

    from segue.llm.bench.models import random_model

    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = default if options.dtype == "auto" else getattr(torch, options.dtype)
    return random_model(options.shape, device, dtype, max_context)


def describe_machine(device: Any) -> dict[str, str | None]:
    """Hardware and versions: numbers mean nothing without."""
    import torch
    import transformers

    found = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    found |= {"transformers": transformers.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda or ""}
    return dict(found)


def sizes_of(text: str | None, name: str, most: int | None = None) -> tuple[int, ...] | None:
    """Numbers between commas, ascending and each once; None for None. Raises UsageError for anything else, and for numbers
    above `most`."""
    if text is None:
        return None
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise UsageError(f"--{name} is {text!r}; give positive numbers between commas, such as 64,256,1024")
    if most is not None and sizes[-1] > most:
        raise UsageError(f"--{name} is {text!r}; {most:,} is the most")
    return sizes
