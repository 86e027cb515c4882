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

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue._compat import (
    data_address,
    inference_guard,
    references_to_base,
    references_to_item,
    storage_bytes,
    storage_handle,
    storage_owners,
    tensor_at,
)
from segue.device.operations import extent_bytes, lazily
from segue.errors import BreakOutputError
from segue.graph.places import Place, place
from segue.graph.tree import Spec, flatten, same_value, unflatten


@dataclass(frozen=True, slots=True)
class Fresh:
    bridge: int
    place: Place
    """in the bridge"""


@dataclass(frozen=True, slots=True)
class Argument:
    leaf: int
    """which leaf of the arguments"""
    place: Place
    """from that argument's first element on"""
    is_whole: bool
    """whether it is all of that argument as it is, and no other view of its memory"""
    is_same: bool
    """whether it is that very object"""


@dataclass(frozen=True, slots=True, eq=False)
class External:
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Constant:
    value: Any


@dataclass(frozen=True, slots=True)
class Repeated:
    first: int
    """the leaf of the result that is the same object"""


Leaf = Fresh | Argument | External | Constant | Repeated

_KINDS = (torch.Tensor, torch.nn.Parameter)
_ITEM = 16
"""bytes of the largest dtype: a bridge of several views holds a whole number of them"""


@dataclass(frozen=True, slots=True)
class OutputNote:
    """What a break returned in the trace: `bridges` holds the bytes of each bridge."""

    spec: Spec
    leaves: tuple[Leaf, ...]
    bridges: tuple[int, ...]

    @property
    def fresh(self) -> list[Fresh]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Fresh)]


def note_output(spec: Spec, leaves: list[Any], arguments: Sequence[Any]) -> OutputNote:
    """Reads a live result, taken apart. `arguments` are the leaves that the body was called with.

    Whether a tensor lasts is told by who else holds it, so nothing but `leaves` may hold the result meanwhile.
    """
    owners = _argument_storages(arguments)
    notes: dict[int, Leaf] = {}
    bridges: list[int] = []
    repeated = _repeated(leaves)
    for handle, members in _storage_groups(leaves, repeated).items():
        owner = owners.get(handle)
        is_kept = owner is None and _is_kept(leaves, members)
        tensors = [leaves[i] for i in members]
        if owner is not None:
            found: list[Leaf] = [_argument_note(t, owner, arguments) for t in tensors]
        elif is_kept:
            found = [External(t.detach()) for t in tensors]
        else:
            fresh = _fresh_notes(tensors, len(bridges))
            bridges.append(max(p.offset + extent_bytes(p.dtype, p.size, p.stride) for p in (f.place for f in fresh)))
            found = [*fresh]
        notes.update(zip(members, found, strict=True))
    notes |= {i: Repeated(first) for i, first in repeated.items()}
    ordered = tuple(notes[i] if i in notes else Constant(leaf) for i, leaf in enumerate(leaves))
    return OutputNote(spec, ordered, tuple(bridges))


def _repeated(leaves: list[Any]) -> dict[int, int]:
    """Which tensors are the same object as an earlier one."""
    firsts: dict[int, int] = {}
    for index in range(len(leaves)):
        if isinstance(leaves[index], torch.Tensor):
            firsts.setdefault(id(leaves[index]), index)
    first_of = [firsts.get(id(leaf)) for leaf in leaves]
    return {i: first for i, first in enumerate(first_of) if first is not None and first != i}


def _storage_groups(leaves: list[Any], repeated: Mapping[int, int]) -> dict[int, list[int]]:
    """Indices of the tensors, each object once, by storage."""
    groups: dict[int, list[int]] = {}
    for index in range(len(leaves)):
        if isinstance(leaves[index], torch.Tensor) and index not in repeated:
            groups.setdefault(storage_handle(leaves[index]), []).append(index)
    return groups


def _is_kept(leaves: list[Any], members: Sequence[int]) -> bool:
    """Whether somebody beyond the result holds its storage: another tensor, or another holder of one of its tensors or
    of a base of one (a buffer of a module, returned as it is or as a view)."""
    bases = {id(base): base for base in (leaves[i]._base for i in members) if base is not None}
    holders = {id(leaves[i]) for i in members} | set(bases)
    is_lazy = any([base.is_complex() for base in bases.values()])  # torch keeps what lies between such a view and its base
    if not is_lazy and storage_owners(leaves[members[0]]) > len(holders):
        return True
    occurrences: dict[int, int] = {}
    for i in range(len(leaves)):
        occurrences[id(leaves[i])] = occurrences.get(id(leaves[i]), 0) + 1
    for key in bases:
        base = bases[key]
        if sys.getrefcount(base) > references_to_base() + 1 + occurrences.get(key, 0):
            return True
    return any(
        sys.getrefcount(leaves[i]) > occurrences[id(leaves[i])] + references_to_item()
        for i in members
        if id(leaves[i]) not in bases
    )


def _argument_storages(arguments: Sequence[Any]) -> dict[int, int]:
    owners: dict[int, int] = {}
    for index, leaf in enumerate(arguments):
        if isinstance(leaf, torch.Tensor):
            owners.setdefault(storage_handle(leaf), index)
    return owners


def is_alias_unseen(results: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """Whether a result lies in an argument's memory by a storage of its own, as DLPack and NumPy make them."""
    owners, spans = _argument_storages(arguments), _spans(arguments)
    return any(
        isinstance(leaf, torch.Tensor) and storage_handle(leaf) not in owners and _lies_in(leaf, spans) for leaf in results
    )


def _spans(arguments: Sequence[Any]) -> list[tuple[int, int]]:
    """The memory under tensors, from address to address."""
    held = [arguments[i] for i in _argument_storages(arguments).values()]
    starts = [data_address(t) - t.storage_offset() * t.itemsize for t in held]
    return [(start, start + t.untyped_storage().nbytes()) for start, t in zip(starts, held, strict=True)]


def _lies_in(tensor: torch.Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    if not spans or not tensor.numel():
        return False
    address = data_address(tensor)
    return any([start <= address < end for start, end in spans])


def _argument_note(tensor: torch.Tensor, index: int, arguments: Sequence[Any]) -> Argument:
    index = next((i for i, a in enumerate(arguments) if a is tensor), index)
    start = data_address(arguments[index])
    found = place(tensor, start)
    return Argument(index, found, found == place(arguments[index], start), tensor is arguments[index])


def _fresh_notes(tensors: Sequence[torch.Tensor], bridge: int) -> list[Fresh]:
    if len(tensors) == 1:
        found = place(tensors[0], data_address(tensors[0]))
        return [Fresh(bridge, found if _is_writable(tensors[0]) else found._replace(stride=_contiguous(found.size)))]
    base = min((data_address(t) for t in tensors if t.numel()), default=0)
    return [Fresh(bridge, place(t, base)) for t in tensors]


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
    of the segment that follows, with the live `arguments`, outside inference mode and under `no_grad`."""
    buffers = [_allocate(note, index, nbytes, device) for index, nbytes in enumerate(note.bridges)]
    leaves: list[Any] = []
    for leaf in note.leaves:
        leaves.append(leaves[leaf.first] if isinstance(leaf, Repeated) else _live_leaf(leaf, arguments, buffers))
    return unflatten(note.spec, iter(leaves)), leaves


def _allocate(note: OutputNote, index: int, nbytes: int, device: torch.device) -> torch.Tensor:
    members = [f for f in note.fresh if f.bridge == index]
    if len(members) == 1:
        only = members[0].place
        return torch.empty_strided(only.size, only.stride, dtype=only.dtype, device=device)
    return torch.empty(-(-nbytes // _ITEM) * _ITEM, dtype=torch.uint8, device=device)


def _live_leaf(
    leaf: Fresh | Argument | External | Constant, arguments: Sequence[Any], buffers: Sequence[torch.Tensor]
) -> Any:
    if isinstance(leaf, Constant):
        return leaf.value
    if isinstance(leaf, External):
        return leaf.tensor
    if isinstance(leaf, Argument):
        return arguments[leaf.leaf] if leaf.is_same else leaf.place.of(arguments[leaf.leaf])
    buffer = buffers[leaf.bridge]
    found = leaf.place
    if buffer.dtype == found.dtype and tuple(buffer.shape) == found.size:
        return lazily(buffer, found.is_conj, found.is_neg)
    return found.of(buffer)


# -- replay -----------------------------------------------------------------------------------------------------------


def delivery(name: str, note: OutputNote, targets: Sequence[Any], arguments: Sequence[Any]) -> Callable[[Any], None]:
    """What takes a live result to the captured memory. `targets` are the recording's own aliases of the output leaves:
    the bridges' views, and tensors at the expected addresses for argument and external leaves; `arguments` are the leaves
    that the body is called with.

    The function raises `BreakOutputError` where the result differs from the note; nothing is copied then but leaves
    that come before the one at fault.
    """
    held = _spans(arguments)
    if note.spec.is_leaf and isinstance(note.leaves[0], Fresh):
        return _deliver_tensor(name, targets[0], held)
    if note.spec.is_leaf and isinstance(note.leaves[0], Constant) and note.leaves[0].value is None:
        return _deliver_none(name)
    shared = [_shared_delivery(name, note, bridge, targets) for bridge in _shared_bridges(note)]
    members = {i for bridge in _shared_bridges(note) for i in _members(note, bridge)}
    checks = [
        _leaf_delivery(f"{name}, result {i}", note.leaves[i], targets[i], held, is_shared=i in members)
        for i in range(len(targets))
    ]
    apart = [_members(note, bridge)[0] for bridge in range(len(note.bridges))]
    repeated = [(i, leaf.first) for i, leaf in enumerate(note.leaves) if isinstance(leaf, Repeated)]

    def deliver(output: Any) -> None:
        leaves, spec = flatten(output)
        if spec != note.spec:
            raise BreakOutputError(
                f"break {name} returned the structure {spec!r}, where its warm-up returned {note.spec!r}: an eager "
                "break must return the same structure at every call"
            )
        for i, first in repeated:
            if leaves[i] is not leaves[first]:
                raise BreakOutputError(
                    f"break {name} returned results {first} and {i} apart, which were one tensor in its warm-up"
                )
        for check, leaf in zip(checks, leaves, strict=True):
            check(leaf)
        if len(apart) > 1 and len({storage_handle(leaves[i]) for i in apart}) < len(apart):
            raise BreakOutputError(
                f"break {name} returned results that share memory, and did not in its warm-up: return the same views of one "
                "tensor at every call, or copies"
            )
        for copy in shared:
            copy(leaves)

    return deliver


def _members(note: OutputNote, bridge: int) -> list[int]:
    return [i for i, leaf in enumerate(note.leaves) if isinstance(leaf, Fresh) and leaf.bridge == bridge]


def _shared_bridges(note: OutputNote) -> list[int]:
    return [bridge for bridge in range(len(note.bridges)) if len(_members(note, bridge)) > 1]


def _shared_delivery(name: str, note: OutputNote, bridge: int, targets: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
    """Copies the memory under several results at once, where they lie to each other as they did."""
    places = [
        (i, leaf.place)
        for i, leaf in enumerate(note.leaves)
        if isinstance(leaf, Fresh) and leaf.bridge == bridge and targets[i].numel()
    ]
    if not places:
        return lambda leaves: None
    nbytes, (first, first_place) = note.bridges[bridge], places[0]
    with inference_guard(False):
        start = data_address(targets[first]) - first_place.offset
        memory = tensor_at(start, nbytes, torch.uint8, targets[first].device, (nbytes,), (1,))

    def copy(leaves: Sequence[Any]) -> None:
        base = data_address(leaves[first]) - first_place.offset
        for i, expected in places:
            if place(leaves[i], base) != expected:
                raise BreakOutputError(
                    f"break {name} returned results {first} and {i} that do not share memory as they did in its "
                    "warm-up: return the same views of one tensor at every call, or copies"
                )
        memory.copy_(storage_bytes(leaves[first], base, nbytes))

    return copy


def _leaf_delivery(
    name: str, note: Leaf, target: Any, held: Sequence[tuple[int, int]], *, is_shared: bool
) -> Callable[[Any], None]:
    if isinstance(note, Repeated):
        return lambda output: None
    if isinstance(note, Constant):
        return _deliver_constant(name, note.value)
    if isinstance(note, Fresh):
        return _check_tensor(name, target, held) if is_shared else _deliver_tensor(name, target, held)
    return _deliver_address(name, target, "an argument" if isinstance(note, Argument) else "a lasting tensor")


def _deliver_tensor(name: str, bridge: torch.Tensor, held: Sequence[tuple[int, int]]) -> Callable[[Any], None]:
    shape, dtype, device, copy = bridge.shape, bridge.dtype, bridge.device, bridge.copy_
    is_grad_enabled = torch.is_grad_enabled

    def deliver(output: Any) -> None:
        if output is bridge:  # written in place through `out`
            return
        if type(output) not in _KINDS or output.shape != shape or output.dtype != dtype or output.device != device:
            raise _mismatch(name, bridge, output)
        if _lies_in(output, held):
            raise _no_longer_fresh(name)
        if is_grad_enabled():
            _refuse_grad(name, output)
            with torch.no_grad():
                copy(output)
        else:
            copy(output)

    return deliver


def _check_tensor(name: str, bridge: torch.Tensor, held: Sequence[tuple[int, int]]) -> Callable[[Any], None]:
    shape, dtype, device = bridge.shape, bridge.dtype, bridge.device

    def check(output: Any) -> None:
        if type(output) not in _KINDS or output.shape != shape or output.dtype != dtype or output.device != device:
            raise _mismatch(name, bridge, output)
        if _lies_in(output, held):
            raise _no_longer_fresh(name)
        _refuse_grad(name, output)

    return check


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
            or output.is_conj() != target.is_conj()
            or output.is_neg() != target.is_neg()
        ):
            raise _mismatch(name, target, output)
        if output.numel() and data_address(output) != address:
            raise BreakOutputError(
                f"break {name} returned other memory than in its warm-up, where the result was {what}: return the same "
                "tensor at every call, or a fresh one that nothing else keeps"
            )

    return deliver


def _refuse_grad(name: str, output: torch.Tensor) -> None:
    if output.requires_grad and torch.is_grad_enabled():
        raise BreakOutputError(
            f"break {name} returned a tensor that requires grad, and none in its warm-up: a recording has no backward. "
            "Call it under torch.no_grad(); the next calls run eagerly."
        )


def _no_longer_fresh(name: str) -> BreakOutputError:
    return BreakOutputError(
        f"break {name} returned memory of an argument, and a tensor of its own in its warm-up, which the recorded code "
        "reads in another place: return one or the other at every call (x.clone() is a tensor of its own)"
    )


def _mismatch(name: str, expected: Any, got: Any) -> BreakOutputError:
    found, before = _describe(got), _describe(expected)
    before = "one with other strides, or otherwise conjugated or negated" if found == before else before
    return BreakOutputError(
        f"break {name} returned {found}, where its warm-up returned {before}: an eager break must return the same "
        "structure, shapes, dtypes and plain values at every call"
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
