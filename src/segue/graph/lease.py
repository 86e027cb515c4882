"""How an output leaves its recording: as a copy, as a lease, or copied where the caller says.

A recording's output lies in the lane's memory, and the next replay overwrites it. By default it is copied out, and then
it behaves as eager's result: what eager would have made afresh is fresh, two results that share memory share it, what is
an argument (or a view of one) *is* the caller's argument, and a lasting tensor (a buffer of the module) is that tensor.

A `Lease` spares the copy. Its value is valid until the lane's next replay or capture; later use raises. The next replay
waits for reads queued on the stream of the call, and on those named with `record_stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from segue._compat import data_address, storage_handle, tensor_at
from segue.device.operations import extent_bytes
from segue.errors import LeaseError
from segue.graph.tree import flatten, unflatten

Cut = Callable[[torch.Tensor], torch.Tensor]


class Lease:
    """An output in static memory. Not thread-safe: it belongs to the caller that got it."""

    __slots__ = ("_is_valid", "_record_stream", "_value")

    def __init__(self, value: Any, is_valid: Callable[[], bool], record_stream: Callable[[Any], None]) -> None:
        self._value = value
        self._is_valid = is_valid
        self._record_stream = record_stream

    @property
    def is_valid(self) -> bool:
        return self._is_valid()

    @property
    def value(self) -> Any:
        """The output, as views of static memory.

        Raises:
            LeaseError: the lane has replayed or captured since.
        """
        if not self._is_valid():
            raise LeaseError(
                "this output was leased until its lane's next replay, which has happened: use it earlier, take "
                "lease.clone(), or use outputs='clone'"
            )
        return self._value

    def clone(self) -> Any:
        """A copy that lasts."""
        leaves, spec = flatten(self.value)
        return unflatten(spec, iter([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))

    def record_stream(self, stream: Any) -> None:
        """The next replay waits for what is queued on `stream` by then."""
        self._record_stream(stream)


def copy_to(target: Any) -> Callable[[Any], Any]:
    """For `outputs=`: copies each result into the tensors of `target`, which has the output's structure, and answers with
    `target`. Nothing broadcasts or casts."""
    targets, spec = flatten(target)

    def copy(output: Any) -> Any:
        leaves, found = flatten(output)
        if found != spec:
            raise ValueError(f"copy_to: the output has the structure {found!r}, its target has {spec!r}")
        pairs = [(t, leaf) for t, leaf in zip(targets, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
        for into, leaf in pairs:
            if not isinstance(into, torch.Tensor) or into.shape != leaf.shape or into.dtype != leaf.dtype:
                raise ValueError(f"copy_to: a result of shape {list(leaf.shape)} and {leaf.dtype} does not fit its target")
        with torch.no_grad():
            for into, leaf in pairs:
                into.copy_(leaf)
        return target

    return copy


class _Input(NamedTuple):
    place: int
    is_whole: bool
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Member(NamedTuple):
    """One of several results that overlap: a view of a copy of the bytes under all of them."""

    group: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Outputs:
    """What each leaf of a recorded output is. `inputs` are the static inputs, in order of the tensors of a call."""

    def __init__(self, output: Any, inputs: Sequence[torch.Tensor], externals: dict[int, torch.Tensor]) -> None:
        leaves, self._spec = flatten(output)
        places = {storage_handle(t): i for i, t in reversed(list(enumerate(inputs)))}
        self._inputs = list(inputs)
        self._kinds: list[Any] = []
        fresh: list[int] = []
        for index, leaf in enumerate(leaves):
            handle = storage_handle(leaf) if _has_memory(leaf) else None
            if handle in places:
                self._kinds.append(_input_kind(leaf, places[handle], inputs[places[handle]]))
            elif handle in externals or not isinstance(leaf, torch.Tensor):
                self._kinds.append(None)
            else:
                fresh.append(index)
                self._kinds.append(torch.clone)
        self._leaves = leaves
        self._groups = self._find_groups(fresh)
        self.needs_strides = sorted({k.place for k in self._kinds if isinstance(k, _Input) and not k.is_whole})
        """inputs of which a view is returned: a live one must lie as the static one does"""
        self._only = leaves[0] if self._spec.is_leaf and self._kinds == [torch.clone] else None

    def copied(self, live: Sequence[torch.Tensor], cut: Cut | None) -> Any:
        """The output of a call as eager would give it, out of static memory."""
        if self._only is not None:
            return (self._only if cut is None else cut(self._only)).clone()
        bases = [base.clone() for base in self._groups]
        made: dict[Any, Any] = {}
        results = []
        for leaf, kind in zip(self._leaves, self._kinds, strict=True):
            if kind is torch.clone:
                results.append((leaf if cut is None else cut(leaf)).clone())
            elif kind is None:
                results.append(leaf)
            elif isinstance(kind, _Input):
                results.append(self._of_input(leaf, kind, live, cut))
            else:
                if kind not in made:
                    made[kind] = _member(kind, bases[kind.group], cut)
                results.append(made[kind])
        return unflatten(self._spec, iter(results))

    def viewed(self, live: Sequence[torch.Tensor], cut: Cut | None) -> Any:
        """The output as views of static memory."""
        results = [
            _live_view(kind, live[kind.place])
            if isinstance(kind, _Input) and (kind.is_whole or cut is None)
            else cut(leaf)
            if cut is not None and kind is not None
            else leaf
            for leaf, kind in zip(self._leaves, self._kinds, strict=True)
        ]
        return unflatten(self._spec, iter(results))

    def _of_input(self, leaf: torch.Tensor, kind: _Input, live: Sequence[torch.Tensor], cut: Cut | None) -> torch.Tensor:
        """A view of the live input; a copy where that lies otherwise than the static one, or has fewer rows."""
        if kind.is_whole or (cut is None and live[kind.place].stride() == self._inputs[kind.place].stride()):
            return _live_view(kind, live[kind.place])
        return (leaf if cut is None else cut(leaf)).clone()

    def _find_groups(self, fresh: Iterable[int]) -> list[torch.Tensor]:
        """Results that overlap get `_Member` kinds; answers with the bytes under each group."""
        spans = sorted(
            (data_address(self._leaves[i]), _extent(self._leaves[i]), i) for i in fresh if _has_memory(self._leaves[i])
        )
        runs: list[list[tuple[int, int, int]]] = []
        end = -1
        for start, nbytes, index in spans:
            if start < end:
                runs[-1].append((start, nbytes, index))
            else:
                runs.append([(start, nbytes, index)])
            end = max(end, start + nbytes)
        groups: list[torch.Tensor] = []
        for run in runs:
            start = run[0][0]
            if len(run) == 1 and _is_simple(self._leaves[run[0][2]]):
                continue
            if any((a - start) % self._leaves[i].itemsize for a, _, i in run):
                continue
            nbytes = -(-(max(a + n for a, n, _ in run) - start) // 16) * 16
            for address, _, index in run:
                leaf = self._leaves[index]
                self._kinds[index] = _Member(len(groups), leaf.dtype, tuple(leaf.shape), leaf.stride(), address - start)
            with torch.inference_mode(False):
                device = self._leaves[run[0][2]].device
                groups.append(tensor_at(start, nbytes, torch.uint8, device, (nbytes,), (1,)))
        return groups


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel() > 0


def _extent(tensor: torch.Tensor) -> int:
    return extent_bytes(tensor.dtype, tuple(tensor.shape), tensor.stride())


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a clone has the same strides; lazily conjugated ones are values of their own."""
    return tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or _extent(tensor) == tensor.nbytes


def _input_kind(leaf: torch.Tensor, place: int, static: torch.Tensor) -> _Input:
    offset = data_address(leaf) - data_address(static)
    is_whole = offset == 0 and leaf.dtype == static.dtype and leaf.shape == static.shape and leaf.stride() == static.stride()
    return _Input(place, is_whole, leaf.dtype, tuple(leaf.shape), leaf.stride(), offset)


def _live_view(kind: _Input, live: torch.Tensor) -> torch.Tensor:
    if kind.is_whole:
        return live
    typed = live if live.dtype == kind.dtype else live.view(kind.dtype)
    start = typed.storage_offset() + kind.offset // kind.dtype.itemsize
    return typed.as_strided(kind.size, kind.stride, start)


def _member(kind: _Member, base: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    view = base.view(kind.dtype).as_strided(kind.size, kind.stride, kind.offset // kind.dtype.itemsize)
    return view if cut is None else cut(view)
