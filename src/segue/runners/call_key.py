"""The key of a call: everything that decides which recording may answer it.

Structure of the arguments; each tensor's shape, dtype, device and strides; which arguments are one tensor; every
plain value by type and value; the modes that select kernels. Never an `id`: a plain value must say by itself whether it
equals another, otherwise the call has no key and runs eagerly.

This is the hot path: one pass over the arguments, one tuple. `scan` knows flat positional arguments at sight and takes
anything else apart with `graph.tree`.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, NamedTuple

import torch

from segue.graph.modes import kernel_modes
from segue.graph.tree import Spec, flatten
from segue.observe.decision import Reason

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_BY_VALUE = frozenset({int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format})
_INEXACT = frozenset({float, complex})  # nan differs from itself, and 0.0 equals -0.0
_BY_IDENTITY: Any = object.__eq__


MOST_SPREAD = 8
_SPARE_BYTES = 1 << 20


_COMPILERS = ("_dynamo", "_has_dynamo")


class Scan(NamedTuple):
    """One call taken apart. `reason` says why it has no key, `detail` what is at fault. `leaves` are all, `places` says
    which are tensors."""

    key: Any
    reason: Reason | None
    leaves: Any
    tensors: list[torch.Tensor]
    places: list[int]
    structure: Any
    detail: str = ""


def scan(args: tuple[Any, ...], kwargs: dict[str, Any], home: Callable[[], torch.device]) -> Scan:
    """The key of a call. `home` says where a call without tensors runs."""
    leaves, structure = args, len(args)  # type: Any, Any
    if kwargs or not _are_leaves(args):
        leaves, structure = flatten((args, kwargs))
    parts: list[Any] = []
    found: list[torch.Tensor] = []
    places: list[int] = []
    device = None
    reason: Reason | None = None
    detail = ""
    if type(structure) is Spec and structure.objects:
        for held in structure.objects:
            if not _is_plain(held):
                reason, detail = Reason.UNHASHABLE_ARGUMENT, f"a {type(held).__name__}, as a key or in a registered node"
    for place, leaf in enumerate(leaves):
        kind = type(leaf)
        if kind in _TENSORS:
            # one without one shape says so by ending the process; others have no memory that a copy could fill
            if leaf.is_nested or leaf.layout is not _strided or leaf.is_quantized:
                what = "a nested" if leaf.is_nested else "a quantized" if leaf.is_quantized else f"a {leaf.layout}"
                reason, detail = Reason.UNHASHABLE_ARGUMENT, f"{what.replace('torch.', '')} tensor"
                continue
            if leaf.is_contiguous() and (leaf.dim() < 4 or 1 not in leaf.shape):
                parts.append((leaf.shape, leaf.dtype, False))
            else:
                parts.append((leaf.shape, leaf.dtype, layout(leaf)))
            if device is None:
                device = leaf.device
            elif device != leaf.device:
                reason = Reason.OTHER_DEVICE
            if leaf.is_conj() or leaf.is_neg():
                reason, detail = Reason.UNHASHABLE_ARGUMENT, "a lazily conjugated or negated tensor"
            found.append(leaf)
            places.append(place)
        elif kind in _BY_VALUE:
            parts.append((kind, leaf))
        elif kind in _INEXACT:
            parts.append((kind, repr(leaf)))
        elif kind.__module__ == "numpy" and isinstance(leaf, sys.modules["numpy"].generic):
            parts.append((kind, leaf.dtype, leaf.tobytes()))  # a scalar; of a dtype with a unit, or with fields
        elif has_value(leaf):
            parts.append((kind, leaf))
        else:
            reason, detail = Reason.UNHASHABLE_ARGUMENT, f"a {kind.__name__}, which has no value to compare"
    if device is None:
        device = home()
    if device.type not in ("cpu", "cuda"):
        reason = reason or Reason.OTHER_DEVICE
    if reason is not None:
        return Scan(None, reason, leaves, found, places, structure, detail)
    alias = aliases(found) if len(found) > 1 else None
    key = structure, tuple(parts), alias, device, kernel_modes(device.type)
    return Scan(key, None, leaves, found, places, structure)


_strided = torch.strided
_LEAF_KINDS = _TENSORS | _BY_VALUE | _INEXACT


def _are_leaves(args: tuple[Any, ...]) -> bool:
    return all([type(arg) in _LEAF_KINDS for arg in args])


def layout(tensor: torch.Tensor) -> Any:
    """False where the elements lie in the ordinary order without gaps, otherwise the strides of all dimensions but single
    ones, and of images, whose single dimensions leave that open, whether kernels take them for channels-last."""
    strides, shape = tensor.stride(), tensor.shape
    is_last = len(shape) in (4, 5) and 1 in shape and _is_channels_last(strides, shape)
    if tensor.is_contiguous() and not is_last:
        return False
    return (*[s if n != 1 else 0 for s, n in zip(strides, shape)], is_last)


def _is_channels_last(strides: Sequence[int], shape: Sequence[int]) -> bool:
    """As torch tells it, for the formats of results (c10/core/MemoryFormat.h, torch 2.11)."""
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if not shape[dim] or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * shape[dim]
    return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may be one, as where a dimension is expanded."""
    if tensor.is_contiguous():
        return False
    inner = 1
    for stride, size in sorted([(s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1]):
        if stride < inner:
            return True
        inner += stride * (size - 1)
    return False


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a buffer of the tensor's layout would be mostly gaps, and more than a MiB."""
    return extent(tensor) > MOST_SPREAD * tensor.nbytes + _SPARE_BYTES


def without_overlap(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same elements that can be copied from and into: without the expanded dimensions, and where that is
    not enough, all memory from the first to the last element."""
    if not overlaps_itself(tensor):
        return tensor
    shape, strides = zip(*[(n, s) for n, s in zip(tensor.shape, tensor.stride()) if s]) if any(tensor.stride()) else ((), ())
    once = tensor.as_strided(shape, strides)
    return tensor.as_strided((extent(tensor) // tensor.itemsize,), (1,)) if overlaps_itself(once) else once


def stride_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost."""
    strides, sizes = tensor.stride(), tensor.shape
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], -sizes[d])))


def gaps(tensor: torch.Tensor) -> tuple[bool, ...]:
    """Before which dimensions' next elements memory is left out; an alias and a copy of a tensor differ by that."""
    return tuple([s > d for s, d in zip(tensor.stride(), _tight_strides(tensor))])


def _tight_strides(tensor: torch.Tensor) -> list[int]:
    """The least stride of each dimension, given those further in; of single ones their own."""
    found, step = list(tensor.stride()), 1
    for dim in reversed(stride_order(tensor)):
        if tensor.shape[dim] > 1:
            found[dim] = step
            step = tensor.stride(dim) * tensor.shape[dim]
    return found


def grown_strides(tensor: torch.Tensor, size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a larger tensor that lies as `tensor` does: in its order, with its gaps."""
    if not layout(tensor):
        return dense_strides(size)
    strides, step, tight = [0] * len(size), 1, _tight_strides(tensor)
    for dim in reversed(stride_order(tensor)):
        strides[dim] = step + max(tensor.stride(dim) - tight[dim], 0)
        step = strides[dim] * max(size[dim], 1)
    return tuple(strides)


def dense_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Strides in the ordinary order, without gaps."""
    strides, step = [0] * len(size), 1
    for dim in reversed(range(len(size))):
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)


def facts(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """What of tensors is not data, and a replay would leave as it is."""
    return [
        (
            (t.data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg(), t.requires_grad),
            None if t.grad_fn is not None else id(t.grad),
            [(name, id(value)) for name, value in vars(t).items() if not name.startswith(_COMPILERS)],
        )
        for t in tensors
    ]


class Alias(NamedTuple):
    """Which arguments share memory: for each the place of the first one that lies as it does, and of the first one that is
    the same object; and whether some overlap without lying alike."""

    firsts: tuple[int, ...]
    objects: tuple[int, ...]
    overlaps: bool


def aliases(tensors: list[torch.Tensor]) -> Alias | None:
    """None where no two share memory."""
    end = 0
    for start, nbytes in sorted([(t.data_ptr(), t.nbytes if t.is_contiguous() else extent(t)) for t in tensors]):
        if start < end and nbytes:
            return _alias_groups(tensors)
        end = start + nbytes
    return None


def _alias_groups(tensors: list[torch.Tensor]) -> Alias:
    seen: dict[Any, int] = {}
    firsts = [
        seen.setdefault((t.data_ptr(), t.shape, t.stride(), t.dtype) if t.numel() else i, i) for i, t in enumerate(tensors)
    ]
    objects = [seen.setdefault(id(t), i) for i, t in enumerate(tensors)]
    distinct = sorted([(t.data_ptr(), extent(t)) for i, t in enumerate(tensors) if firsts[i] == i and t.numel()])
    overlaps = any(a + n > b for (a, n), (b, _) in pairwise(distinct))
    return Alias(tuple(firsts), tuple(objects), overlaps)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    if tensor.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * tensor.itemsize


def inconstant(result: Any) -> Any:
    """What of a result is neither a plain tensor nor a value that is the same at every call of one key, if anything."""
    leaves, spec = flatten(result)
    others = [leaf for leaf in leaves if type(leaf) not in _TENSORS or leaf.is_quantized]
    return next((found for found in (*others, *spec.objects) if not _is_plain(found)), None)


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in _BY_VALUE or type(leaf) in _INEXACT or has_value(leaf)


def has_value(leaf: Any) -> bool:
    """Whether a plain object says by itself what equals it. Enumeration members, classes and functions without a
    closure are constants of the program. Methods are not: they do what their object says, which the key would keep alive."""
    kind = type(leaf)
    if isinstance(leaf, (enum.Enum, type)):
        return True
    if isinstance(leaf, (BuiltinFunctionType, MethodType, MethodWrapperType)):
        return isinstance(leaf.__self__, (ModuleType, type(None), type))
    if isinstance(leaf, FunctionType):
        return leaf.__closure__ is None and leaf.__defaults__ is None
    if isinstance(leaf, (tuple, frozenset)) and (getattr(leaf, "__dict__", None) or not all(map(_is_plain, leaf))):
        return False
    if isinstance(leaf, (torch.Tensor, torch.nn.Module, torch.Generator)) or kind.__eq__ is _BY_IDENTITY:
        return False
    try:
        hash(leaf)
        equal: Callable[[Any], Any] = leaf.__eq__
        return equal(leaf) is True
    except Exception:  # whatever the user's methods raise
        return False
