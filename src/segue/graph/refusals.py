"""What no recording can hold, as a trace meets it: the errors that say so."""

from __future__ import annotations

from typing import Any

import torch

from segue.device.operations import Operation
from segue.device.watch import Location, describe_line, strange_text
from segue.errors import CaptureError
from segue.graph.breaks import Mark
from segue.graph.bridge import is_alias_unseen
from segue.graph.modes import SETTINGS, kernel_settings


def _refused(text: str, at: Operation | Mark, location: Location | None) -> CaptureError:
    return CaptureError(text, operation=at.name, location=describe_line(location))


def set_inside(op: Operation, location: Location | None, settings: tuple[Any, ...]) -> CaptureError:
    changed = [n for n, a, b in zip(SETTINGS, settings, kernel_settings(), strict=True) if a != b]
    return _refused(
        f"{op.name} runs under {' and '.join(changed)} that the pass has set ({describe_line(location)}): a recording on "
        "the cpu device runs under the caller's. Set it outside, or inside an @segue.eager_on_graph function",
        op,
        location,
    )


def without_one_memory(op: Operation, results: list[torch.Tensor], location: Location | None) -> CaptureError:
    kind = "quantized" if any(t.is_quantized for t in results) else "nested"
    return _refused(
        f"{op.name} makes a {kind} tensor ({describe_line(location)}), which a recording on the cpu device cannot hold",
        op,
        location,
    )


def strange(op: Operation, kind: type, location: Location | None) -> CaptureError:
    return _refused(f"{strange_text(op.name, kind)} ({describe_line(location)})", op, location)


def unwatchable(op: Operation, error: Exception, location: Location | None) -> CaptureError:
    return _refused(
        f"{op.name} takes or returns what cannot be watched ({describe_line(location)}; {type(error).__name__}: {error}): "
        "put it behind @segue.eager_on_graph",
        op,
        location,
    )


def caught(op: Operation, error: Exception, location: Location | None) -> CaptureError:
    return _refused(
        f"{op.name} raised {type(error).__name__}, which the pass caught ({describe_line(location)}): in a recording on the "
        "cpu device nothing runs, so nothing is raised either",
        op,
        location,
    )


def holds_itself(mark: Mark, location: Location | None) -> CaptureError:
    return _refused(
        f"break {mark.name} takes or returns a container that holds itself, or is nested too deeply to be taken apart: "
        "pass its parts",
        mark,
        location,
    )


def break_refusal(
    mark: Mark,
    location: Location | None,
    arguments: list[Any],
    results: list[Any],
    *,
    is_moved: bool,
    entered: list[str],
    sets_modes: bool,
) -> CaptureError | None:
    """Why a break with these arguments and results cannot be recorded, if so."""
    if any(type(leaf) in (list, dict, tuple) for leaf in (*arguments, *results)):
        return holds_itself(mark, location)
    others = [t.layout for t in (*arguments, *results) if isinstance(t, torch.Tensor) and t.layout is not torch.strided]
    kinds = [type(t) for t in results if isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, torch.nn.Parameter)]
    if others:
        text = (
            f"takes or returns a {str(others[0]).removeprefix('torch.')} tensor, which has no one memory that a recording "
            "could fill: keep it inside the break, or pass its parts"
        )
    elif kinds:
        text = (
            f"returns a {kinds[0].__name__}, a kind of tensor with operations of its own, which memory that a recording "
            "fills is not: return plain tensors (as_subclass(torch.Tensor))"
        )
    elif entered:
        text = (
            f"is called inside {' and '.join(entered)} that the pass has set, and a replay has not: set it inside the break"
        )
    elif sets_modes:
        text = (
            "sets a mode (grad mode, autocast, a dtype, a device, threads or the like) and leaves it set, which at a replay "
            "nothing behind it would put back: put it back inside the break, or set it outside the call"
        )
    elif is_moved:
        text = (
            "resizes an argument or puts it elsewhere (resize_, .data), which the recorded code around it would not see: "
            "return a new tensor"
        )
    elif is_alias_unseen(results, arguments):
        text = (
            "returns the memory of an argument as another storage (through DLPack or NumPy), so that torch does not know "
            "of it: return the argument, a view of it, or a copy"
        )
    else:
        return None
    return _refused(f"break {mark.name} {text}", mark, location)
