"""What benches share: the model they run, and the machine that they ran on."""

from __future__ import annotations

import argparse
import platform
from typing import Any

from segue.cli.usage import UsageError

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="tiny", metavar="SHAPE",
        help="llama-3-8b, qwen3-8b, qwen3-30b-a3b, smollm2, tiny, or a folder with a config.json (tiny); weights are random",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the weights (bfloat16 on cuda, float32 on cpu)")
    parser.add_argument("--attention", default="auto", metavar="NAME", help="which attention runs")


def make_model(options: argparse.Namespace) -> Any:
    """The model of the options, on their device."""
    import torch

    from segue.llm.config import torch_device
    from segue.llm.random_model import random_model

    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    return random_model(options.shape, torch_device(options.device), dtype)


def describe_machine(device: Any) -> dict[str, str | None]:
    """Hardware and versions: numbers mean nothing without."""
    import torch
    import transformers

    found = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    found |= {"transformers": transformers.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda or ""}
    return dict(found)


def sizes_of(text: str | None, name: str) -> tuple[int, ...] | None:
    """Numbers between commas, ascending and each once; None for None. Raises UsageError for anything else."""
    if text is None:
        return None
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise UsageError(f"--{name} is {text!r}; give positive numbers between commas, such as 64,256,1024")
    return sizes
