"""`segue doctor`: what works on this machine, what is missing, and the remedy, a line each.

With `--model` also what an engine would make of a checkpoint here: its attention, and which parts are fused, which not,
and why.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from segue.cache import cache_folder
from segue.cli.output import check_writable, import_torch, write_json
from segue.cli.usage import UsageError, model_source
from segue.errors import SegueError
from segue.llm.checkpoints import converted_folder, extra_remedy, find_default_model, is_whole
from segue.observe.report import format_table

HELP = "say what works here, what is missing, and the remedy"

_EXTRAS = {
    "llm": ("transformers", "safetensors", "gguf", "rich", "jinja2"),
    "report": ("matplotlib",),
}
_CONVERSION_BYTES = 300 << 20  # what the default model's conversion writes, and a little


class Finding(NamedTuple):
    """One line. `state` is ``ok``, ``optional`` (not here, and not needed to run), ``missing`` (part of Segue cannot run)
    or ``failed``; only ``failed`` makes the exit status 1."""

    what: str
    state: str
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=model_source, metavar="DIR", help="also say how this checkpoint (or GGUF file, or hub id) would run"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where it would run")


def run(options: argparse.Namespace) -> int:
    check_writable(options.json)
    if options.device != "auto" and options.model is None:
        raise UsageError("--device says where --model would run: give both, or neither")
    import_torch()
    findings = [_python(), _torch(), _recording("cpu"), _cuda()]
    findings += [_extra(name, modules) for name, modules in _EXTRAS.items()]
    findings.append(_guarded("default model", _default_model))
    print(format_table(["what", "state", "detail", "remedy"], [list(f) for f in findings]))
    if options.model is not None:
        try:
            of_model = _model(options.model, options.device)
        except Exception as error:
            write_json(options.json, [f._asdict() for f in (*findings, _failed("model", error))])
            raise
        print("\n" + "\n".join(f"{f.what}: {f.detail}" for f in of_model))
        findings += of_model
    write_json(options.json, [f._asdict() for f in findings])
    return 1 if any(f.state == "failed" for f in findings) else 0


def _model(source: str, device_name: str) -> list[Finding]:
    """The checkpoint, its attention, and each kind of part with what was fused. Raises as loading it in an engine does."""
    from segue.llm.attention import choose_attention, needs_of, register
    from segue.llm.config import torch_device
    from segue.llm.fuse import fuse
    from segue.llm.load import load_model

    device = torch_device(device_name)
    register()
    loaded = load_model(source, device=device)
    facts = loaded.facts
    size = f"{facts.num_layers} layers, {facts.dtype}, context {facts.max_context}".replace("torch.", "")
    attention = choose_attention("auto", needs_of(facts), device).explain().removeprefix("attention: ")
    default = "on by default here" if device.type == "cuda" else f"off by default on {device.type}"
    found = [
        Finding("model", "ok", f"{facts.architecture} on {device}, {size}"),
        Finding("attention", "ok", attention),
    ]
    if loaded.tokenizer is None:
        found.append(Finding("tokenizer", "optional", "none in the folder: prompts can only be token ids"))
    if loaded.experts is not None:
        found.append(Finding("experts", "ok", loaded.experts.explain().removeprefix("experts: ")))
    found.append(Finding("fusion", "ok", default))
    for line in fuse(loaded.model, facts, facts.max_context).lines():
        kind, _, what = line.partition(": ")
        found.append(Finding(f"  {kind}", "ok", what))
    return found


def _guarded(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        return _failed(what, error)


def _failed(what: str, error: Exception) -> Finding:
    return Finding(what, "failed", " ".join(str(error).split())[:120] or type(error).__name__)


def _python() -> Finding:
    return Finding("python", "ok", sys.version.split()[0])


def _torch() -> Finding:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= version < (2, 14):
        return Finding("torch", "failed", torch.__version__, 'pip install "torch>=2.11,<2.14"')
    return Finding("torch", "ok", torch.__version__)


def _recording(kind: str) -> Finding:
    return _guarded(f"record and replay on {kind}", lambda: _try_recording(kind))


def _try_recording(kind: str) -> Finding:
    """Records a function with a break and replays it with other data."""
    import torch

    from segue.backends import make_backend
    from segue.device import get_device
    from segue.graph import eager_on_graph
    from segue.memory.lane import Lane
    from segue.shapes.key import ShapeKey

    device = get_device(kind)
    lane = Lane(device)
    double = eager_on_graph(lambda x: x * 2)
    x = torch.ones(4, device=device.device)
    backend = make_backend("breakable", lane)

    def forward() -> torch.Tensor:
        return double(x + 1) - 1

    with torch.inference_mode(), lane.exclusive():
        with device.on_stream(lane.stream):
            _, trace = backend.trace(forward)
        graph = backend.record(ShapeKey("call", 4), forward, trace)
        x.fill_(3)
        is_right = graph.replay().tolist() == [7.0] * 4
        graph.close()
    lane.close()
    name = torch.cuda.get_device_name(device.device) if kind == "cuda" else f"{torch.get_num_threads()} threads"
    return Finding(f"record and replay on {kind}", "ok" if is_right else "failed", name)


def _cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        detail = "torch finds no CUDA GPU; the cpu device runs everything, without a speed-up"
        return Finding("record and replay on cuda", "optional", detail)
    return _recording("cuda")


def _extra(name: str, modules: tuple[str, ...]) -> Finding:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        state = "missing" if name == "llm" else "optional"
        return Finding(f"extra {name}", state, f"without {', '.join(missing)}", extra_remedy(name))
    return Finding(f"extra {name}", "ok", ", ".join(modules))


def _default_model() -> Finding:
    try:
        found = find_default_model()
    except SegueError as error:
        return Finding("default model", "missing", "SmolLM2-135M-Instruct is not here", " ".join(str(error).split()))
    if found.is_dir():
        return Finding("default model", "ok", str(found))
    converted = converted_folder(found)
    if is_whole(converted):
        return Finding("default model", "ok", f"{converted}, made from {found}")
    problem = _write_problem(cache_folder())
    if problem:
        remedy = "set SEGUE_CACHE to a folder that can be written"
        return Finding("default model", "failed", f"{found} has to be converted once, and {problem}", remedy)
    return Finding("default model", "ok", f"{found}; the first use converts it into {converted}")


def _write_problem(folder: Path) -> str:
    """Why nothing can be written into `folder`, found by writing; empty where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"segue")
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    free = shutil.disk_usage(folder).free
    if free < _CONVERSION_BYTES:
        return f"{folder} has {free >> 20} MiB free, where {_CONVERSION_BYTES >> 20} are needed"
    return ""
