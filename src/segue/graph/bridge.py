"""How the result of a break reaches the next segment.

A traced break leaves an `OutputNote`: the structure of its result and, for each leaf, one of four kinds.

- *fresh*: a tensor the body made. It gets a *bridge*, memory in the graph pool that the next segment reads; each replay
  copies the live result there. Results that share a storage share a bridge, so that writing one shows in the other.
- *argument*: an argument or a view of one. The same memory, nothing is copied.
- *external*: a tensor that existed elsewhere, a cache say. That tensor, its address compared at each replay.
- *constant*: anything else, compared by value at each replay.

Bridges are allocated at the start of the segment that follows, while the break's arguments are still referenced, so
they never overlap them, and they die like any other tensor of that segment: a break that returns tensors costs no more
memory than one that writes in place. `Delivery` is what a replay runs; it compares and copies, and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue._compat import data_address, storage_handle, storage_owners
from segue.device.operations import extent_bytes
from segue.errors import BreakOutputError
from segue.graph.tree import Spec, flatten, same_value, unflatten


@dataclass(frozen=True, slots=True)
class Fresh:
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    bridge: int
    offset: int
    """bytes from the bridge's start"""


@dataclass(frozen=True, slots=True)
class Argument:
    leaf: int
    """which leaf of the arguments"""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """bytes from that argument's first element"""


@dataclass(frozen=True, slots=True, eq=False)
class External:
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Constant:
    value: Any


Leaf = Fresh | Argument | External | Constant


@dataclass(frozen=True, slots=True)
class OutputNote:
    """What a break returned in the trace: `bridges` holds the bytes of each bridge."""

    spec: Spec
    leaves: tuple[Leaf, ...]
    bridges: tuple[int, ...]

    @property
    def fresh(self) -> list[Fresh]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Fresh)]


def note_output(output: Any, arguments: Sequence[Any]) -> OutputNote:
    """Reads a live result. `arguments` are the leaves that the body was called with."""
    leaves, spec = flatten(output)
    owners = _argument_storages(arguments)
    groups: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            groups.setdefault(storage_handle(leaf), []).append(index)
    notes: dict[int, Leaf] = {}
    bridges: list[int] = []
    for handle, members in groups.items():
        tensors = [leaves[i] for i in members]
        if handle in owners:
            found: list[Leaf] = [_argument_note(t, owners[handle], arguments) for t in tensors]
        elif storage_owners(tensors[0]) > _num_holders(tensors):
            found = [External(t.detach()) for t in tensors]
        else:
            found = list(_fresh_notes(tensors, len(bridges)))
            bridges.append(max(f.offset + extent_bytes(f.dtype, f.size, f.stride) for f in found if isinstance(f, Fresh)))
        notes.update(zip(members, found, strict=True))
    ordered = tuple(notes[i] if i in notes else Constant(leaf) for i, leaf in enumerate(leaves))
    return OutputNote(spec, ordered, tuple(bridges))


def _num_holders(tensors: Sequence[torch.Tensor]) -> int:
    """References to a storage that the result itself accounts for: its tensors, and the bases of its views."""
    holders = {id(t) for t in tensors}
    holders.update(id(t._base) for t in tensors if t._base is not None)
    return len(holders)


def _argument_storages(arguments: Sequence[Any]) -> dict[int, int]:
    owners: dict[int, int] = {}
    for index, leaf in enumerate(arguments):
        if isinstance(leaf, torch.Tensor):
            owners.setdefault(storage_handle(leaf), index)
    return owners


def _argument_note(tensor: torch.Tensor, index: int, arguments: Sequence[Any]) -> Argument:
    offset = data_address(tensor) - data_address(arguments[index]) if tensor.numel() else 0
    return Argument(index, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)


def _fresh_notes(tensors: Sequence[torch.Tensor], bridge: int) -> Sequence[Fresh]:
    if len(tensors) == 1:
        tensor = tensors[0]
        stride = tensor.stride() if _is_writable(tensor) else _contiguous(tuple(tensor.shape))
        return [Fresh(tensor.dtype, tuple(tensor.shape), stride, bridge, 0)]
    base = min(data_address(t) for t in tensors)
    return [Fresh(t.dtype, tuple(t.shape), t.stride(), bridge, data_address(t) - base) for t in tensors]


def _is_writable(tensor: torch.Tensor) -> bool:
    """Expanded dimensions overlap themselves, and nothing can be copied into them."""
    return all(s > 0 or n <= 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def build_output(note: OutputNote, arguments: Sequence[Any], device: torch.device) -> tuple[Any, list[Any]]:
    """The result that the recorded code goes on with, and its leaves. Allocates the bridges: call it inside the capture
    of the segment that follows, with the live `arguments`."""
    with torch.inference_mode(False), torch.no_grad():
        buffers = [_allocate(note, index, nbytes, device) for index, nbytes in enumerate(note.bridges)]
        leaves = [_live_leaf(leaf, arguments, buffers) for leaf in note.leaves]
    return unflatten(note.spec, iter(leaves)), leaves


def _allocate(note: OutputNote, index: int, nbytes: int, device: torch.device) -> torch.Tensor:
    members = [f for f in note.fresh if f.bridge == index]
    if len(members) == 1:
        only = members[0]
        return torch.empty_strided(only.size, only.stride, dtype=only.dtype, device=device)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _live_leaf(leaf: Leaf, arguments: Sequence[Any], buffers: Sequence[torch.Tensor]) -> Any:
    if isinstance(leaf, Constant):
        return leaf.value
    if isinstance(leaf, External):
        return leaf.tensor
    if isinstance(leaf, Argument):
        argument = arguments[leaf.leaf]
        is_same = leaf.offset == 0 and leaf.dtype == argument.dtype
        if is_same and leaf.size == tuple(argument.shape) and leaf.stride == argument.stride():
            return argument
        typed = argument if leaf.dtype == argument.dtype else argument.view(leaf.dtype)
        start = typed.storage_offset() + leaf.offset // leaf.dtype.itemsize
        return typed.as_strided(leaf.size, leaf.stride, start)
    buffer = buffers[leaf.bridge]
    if buffer.dtype == leaf.dtype and tuple(buffer.shape) == leaf.size:
        return buffer
    return buffer.view(leaf.dtype).as_strided(leaf.size, leaf.stride, leaf.offset // leaf.dtype.itemsize)


# -- replay -----------------------------------------------------------------------------------------------------------


def delivery(name: str, note: OutputNote, targets: Sequence[Any]) -> Callable[[Any], None]:
    """What takes a live result to the captured memory. `targets` are the recording's own aliases of the output leaves:
    the bridges' views, and tensors at the expected addresses for argument and external leaves.

    The function raises `BreakOutputError` where the result differs from the note; nothing is copied then but leaves
    that come before the one at fault.
    """
    if note.spec.is_leaf and isinstance(note.leaves[0], Fresh):
        return _deliver_tensor(name, targets[0])
    if note.spec.is_leaf and isinstance(note.leaves[0], Constant) and note.leaves[0].value is None:
        return _deliver_none(name)
    checks = [_leaf_delivery(f"{name}, result {i}", n, t) for i, (n, t) in enumerate(zip(note.leaves, targets, strict=True))]

    def deliver(output: Any) -> None:
        leaves, spec = flatten(output)
        if spec != note.spec:
            raise BreakOutputError(
                f"break {name} returned the structure {spec!r}, where its warm-up returned {note.spec!r}: an eager "
                "break must return the same structure at every call"
            )
        for check, leaf in zip(checks, leaves, strict=True):
            check(leaf)

    return deliver


def _leaf_delivery(name: str, note: Leaf, target: Any) -> Callable[[Any], None]:
    if isinstance(note, Constant):
        return _deliver_constant(name, note.value)
    if isinstance(note, Fresh):
        return _deliver_tensor(name, target)
    return _deliver_address(name, target, "an argument" if isinstance(note, Argument) else "a lasting tensor")


def _deliver_tensor(name: str, bridge: torch.Tensor) -> Callable[[Any], None]:
    shape, dtype, device, copy = bridge.shape, bridge.dtype, bridge.device, bridge.copy_
    is_grad_enabled = torch.is_grad_enabled

    def deliver(output: Any) -> None:
        if output is bridge:  # written in place through `out`
            return
        if not isinstance(output, torch.Tensor) or output.shape != shape or output.dtype != dtype or output.device != device:
            raise _mismatch(name, bridge, output)
        if is_grad_enabled():
            with torch.no_grad():
                copy(output)
        else:
            copy(output)

    return deliver


def _deliver_none(name: str) -> Callable[[Any], None]:
    def deliver(output: Any) -> None:
        if output is not None:
            raise _mismatch(name, None, output)

    return deliver


def _deliver_constant(name: str, value: Any) -> Callable[[Any], None]:
    def deliver(output: Any) -> None:
        if not same_value(output, value):
            raise _mismatch(name, value, output)

    return deliver


def _deliver_address(name: str, target: torch.Tensor, what: str) -> Callable[[Any], None]:
    address = data_address(target)

    def deliver(output: Any) -> None:
        if (
            not isinstance(output, torch.Tensor)
            or output.shape != target.shape
            or output.dtype != target.dtype
            or output.stride() != target.stride()
        ):
            raise _mismatch(name, target, output)
        if output.numel() and data_address(output) != address:
            raise BreakOutputError(
                f"break {name} returned other memory than in its warm-up, where the result was {what}: return the same "
                "tensor at every call, or a fresh one that nothing else keeps"
            )

    return deliver


def _mismatch(name: str, expected: Any, got: Any) -> BreakOutputError:
    return BreakOutputError(
        f"break {name} returned {_describe(got)}, where its warm-up returned {_describe(expected)}: an eager break must "
        "return the same structure, shapes, dtypes and plain values at every call"
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
