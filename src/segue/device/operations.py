"""What is known of an ATen operation before it runs: does it write, is it a view, does it read data on the host.

The trace, the checker and the cpu device all ask these questions about the same stream of primitive operations, so the
answers are worked out once per overload (from its schema and its tags) and kept. Composite operations are no part of
the stream: `device.watch` decomposes them first.

`signature` names a call by everything that decides the geometry of its results; the trace fills a memo under that name
from real kernels, and the cpu device reads it when it records the same call.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from segue._compat import has_kernel

Geometry = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""dtype, size and stride of one tensor."""

RESIZED = "resized"
"""in a memo, the answer for an `out=` call that gave its `out` another shape"""

LIFT = "aten.lift_fresh.default"
"""torch.tensor(...), torch.as_tensor(...): host data becomes a tensor"""
_HIDDEN_VIEWS = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"}
_ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_DATA_READS = {
    "aten::_linalg_check_errors",
    "aten::_local_scalar_dense",
    "aten::_pack_padded_sequence",
    "aten::_pad_packed_sequence",
    "aten::equal",
    "aten::gru.data",
    "aten::is_nonzero",
    "aten::lstm.data",
    "aten::rnn_relu.data",
    "aten::rnn_tanh.data",
    "aten::tensor_split.tensor_indices_or_sections",
}
_WHOLE = {
    "aten::linalg_cond",
    "aten::linalg_eigvals",
    "aten::linalg_eigvalsh",
    "aten::linalg_matrix_norm",
    "aten::linalg_matrix_rank",
    "aten::linalg_norm",
    "aten::linalg_pinv",
    "aten::linalg_svdvals",
    "aten::nuclear_norm",
    "aten::pinverse",
}
"""composites that take another algorithm where they are watched: not taken apart"""
_OF_TORCH = ("aten::", "prim::", "prims::", "profiler::")
_RESIZES = {"aten::resize_", "aten::set_", "aten::resize_as_", "aten::resize"}
_STATISTICS = ("running_mean", "running_var")
_UNDECLARED_WRITES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "aten::native_batch_norm": (_STATISTICS, "training"),
    "aten::cudnn_batch_norm": (_STATISTICS, "training"),
    "aten::miopen_batch_norm": (_STATISTICS, "training"),
    "aten::batch_norm_update_stats": (_STATISTICS, None),
    "aten::batch_norm_gather_stats": (_STATISTICS, None),
    "aten::batch_norm_gather_stats_with_counts": (_STATISTICS, None),
    "aten::_cudnn_rnn": (("dropout_state",), "train"),
    "aten::miopen_rnn": (("dropout_state",), "train"),
    "aten::_copy_from": (("dst",), None),
    "aten::_copy_from_and_resize": (("dst",), None),
}
"""arguments that an operation writes although its schema does not say so, and the flag that switches that on"""


class Operation:
    """Facts of one overload. Immutable after construction; get it from `operation`."""

    __slots__ = (
        "allocates",
        "call",
        "composite_on",
        "has_out",
        "is_index",
        "is_random",
        "is_view",
        "may_write",
        "moves_storage",
        "name",
        "overload",
        "reads_data",
        "returns",
        "returns_fresh",
        "returns_list",
        "returns_tensors",
        "undeclared",
        "writes",
        "writes_names",
    )

    def __init__(self, overload: OpOverload) -> None:
        schema = overload._schema
        base = schema.name
        self.overload = overload
        self.call = overload._op
        self.name = str(overload)
        is_decomposable = base not in _HIDDEN_VIEWS | _WHOLE and _full_name(overload) not in _DATA_READS
        self.composite_on = _composite_on(_full_name(overload)) if is_decomposable else frozenset()
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.moves_storage = base in _RESIZES
        turns_in_place = torch.Tag.inplace_view in overload.tags and not self.moves_storage  # t_, squeeze_: no data
        if turns_in_place:
            written = []
        self.writes = tuple(i for i, a in enumerate(schema.arguments) if a in written and not a.kwarg_only)
        self.writes_names = tuple(a.name for a in written)
        names, switch = _UNDECLARED_WRITES.get(base, ((), None))
        places = {a.name: i for i, a in enumerate(schema.arguments)}
        self.undeclared = tuple((places[n], n) for n in names), None if switch is None else (places[switch], switch)
        self.may_write = bool(written or names)
        self.has_out = any(a.is_out for a in schema.arguments)
        aliases = [r for r in schema.returns if r.alias_info is not None]
        self.is_view = (bool(aliases) and not written) or base in _HIDDEN_VIEWS
        self.allocates = base in _ALLOCATIONS and not written
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags
        self.is_index = base in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
        dynamic = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(overload.tags)
        self.reads_data = base in _DATA_READS or _full_name(overload) in _DATA_READS or (bool(dynamic) and not self.is_index)
        if not base.startswith(_OF_TORCH):  # a number that somebody's own operation returns, it read
            self.reads_data = self.reads_data or any("Tensor" not in str(r.type) for r in schema.returns)
        self.returns = len(schema.returns)
        self.returns_list = len(schema.returns) == 1 and "List[" in str(schema.returns[0].type)
        self.returns_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        makes_some = any(r.alias_info is None or not r.alias_info.is_write for r in schema.returns)
        self.returns_fresh = self.returns_tensors and not self.is_view and makes_some

    def reads_host(self, args: tuple[Any, ...]) -> bool:
        """Whether this call waits for device data on the host (or uploads a host list, which waits as well)."""
        if self.reads_data:
            return True
        if self.is_index and len(args) > 1:
            masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
            return bool(masks)
        if self.name == LIFT:
            return bool(args[0].dim() > 0 and args[0].numel() > 0)
        return False

    def declared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that this call writes, as far as its schema says so."""
        found = [args[i] for i in self.writes if i < len(args)]
        found += [kwargs[n] for n in self.writes_names if n in kwargs]
        return tensors(found)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that this call writes."""
        declared = self.declared(args, kwargs) if self.writes_names else []
        names, switch = self.undeclared
        if not names or (switch is not None and not _argument(args, kwargs, *switch)):
            return declared
        return declared + tensors([_argument(args, kwargs, *name) for name in names])


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _composite_on(name: str) -> frozenset[str]:
    """Device kinds on which the operation is made of others. Some have a kernel of their own on one device alone
    (`_fused_rms_norm` on CUDA), and taking them apart there would compute something else than eager does."""
    if not has_kernel(name, "CompositeImplicitAutograd"):
        return frozenset()
    return frozenset(kind for kind, key in (("cpu", "CPU"), ("cuda", "CUDA")) if not has_kernel(name, key))


def _full_name(overload: OpOverload) -> str:
    return str(overload.name())  # type: ignore[no-untyped-call]


@functools.cache
def operation(overload: OpOverload) -> Operation:
    return Operation(overload)


class _TensorMark(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Object:
    """An argument that is equal to itself alone."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def signature(op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hashable name of the call, or None where an argument cannot be hashed, or is a tensor without strides."""
    try:
        key = (op.overload, _mark(args), _mark(tuple(kwargs.items())) if kwargs else ())
        hash(key)
    except (RuntimeError, TypeError):
        return None
    return key


def plain_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What an operation is told beside tensors, as text: numbers, dtypes, sizes."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) in (list, tuple):
            found += [None if isinstance(v, torch.Tensor) else v for v in value]
        elif not isinstance(value, (torch.Tensor, torch.Generator)):
            found.append(value)
    return repr(found)


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TensorMark(value.dtype, tuple(value.shape), value.stride())
    if isinstance(value, (list, tuple)):
        return tuple(_mark(v) for v in value)
    if isinstance(value, torch.ScriptObject):  # whose own equality raises
        return _Object(value)
    return (type(value), value)  # 1 == True == 1.0 as dictionary keys


def is_strided(value: Any) -> bool:
    """Whether every tensor in an argument has ordinary memory (sparse, nested and opaque ones have none)."""
    return all(t.layout is torch.strided and not t.is_nested for t in tensors(value))


def geometry(value: Any) -> Geometry | None:
    """dtype, size and stride of a tensor; None for an undefined one."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return None


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument: itself, or in lists and tuples at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple)):
                found += tensors(item)
    return found


def lazily_as(tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    """`alias`, conjugated or negated lazily where `tensor`, over the same memory, is."""
    return lazily(alias, tensor.is_conj(), tensor.is_neg())


def lazily(alias: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    if is_conj:
        alias = alias.conj()
    return torch._neg_view(alias) if is_neg else alias


def extent_bytes(dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes from the first to behind the last element."""
    if 0 in size:
        return 0
    return (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * dtype.itemsize


def touched(op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[torch.Tensor]:
    """The tensors that a call left behind: those it made, and those it wrote."""
    made = tensors(result) if op.returns_fresh else []
    written = op.written(args, kwargs) if op.may_write else []
    return [t for t in (*made, *written) if t.layout is torch.strided]
