"""How an output leaves its recording: as a copy, as a lease, or copied where the caller says.

A recording's output lies in the lane's memory, and the next replay overwrites it. By default it is copied out, and then
it behaves as eager's result: what eager would have made afresh is fresh, two results that share memory share it. A tensor of
the caller's, or a lasting one (a buffer of the module), comes back as itself only where the pass returned that very object;
a view, a detached or a conjugated alias of one is a new tensor over its memory at every call, as in eager.

A `Lease` spares the copy. Its value is valid until the lane's next replay or capture; later use raises. The next replay
waits for reads queued on the stream of the call, and on those named with `record_stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from segue._compat import data_address, inference_guard, storage_handle, tensor_at
from segue.device.operations import extent_bytes
from segue.errors import LeaseError
from segue.graph.places import Place, place
from segue.graph.tree import flatten, same_value, unflatten

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
        """The output, as views of static memory: read none of them once the lease has ended. After `close()` that memory
        may be unmapped.

        Raises:
            LeaseError: the lane has replayed or captured since, or was closed.
        """
        if not self._is_valid():
            raise LeaseError(
                "this output was leased until its lane's next replay or capture, or until that is closed, which has "
                "happened: use it earlier, take lease.clone(), or use outputs='clone'"
            )
        return self._value

    def clone(self) -> Any:
        """A copy that lasts."""
        leaves, spec = flatten(self.value)
        return unflatten(spec, iter([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))

    def record_stream(self, stream: Any) -> None:
        """The next replay waits for what is queued on `stream` by then."""
        self._record_stream(stream)


def _told(into: Any) -> str:
    return f"of shape {list(into.shape)} and {into.dtype}" if isinstance(into, torch.Tensor) else repr(into)


def copy_to(target: Any) -> Callable[[Any], Any]:
    """For `outputs=`: copies each result into the tensors of `target`, which has the output's structure, and answers with
    `target`. Nothing broadcasts or casts; what is no tensor must be in `target` as each call returns it."""
    targets, spec = flatten(target)
    if not any(isinstance(into, torch.Tensor) for into in targets):
        raise ValueError(f"copy_to: its target is {target!r}, which holds no tensor to copy into")

    def copy(output: Any) -> Any:
        leaves, found = flatten(output)
        if found != spec:
            raise ValueError(f"copy_to: the output has the structure {found!r}, its target has {spec!r}")
        pairs = [(t, leaf) for t, leaf in zip(targets, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
        for into, leaf in zip(targets, leaves, strict=True):
            if not isinstance(leaf, torch.Tensor) and not same_value(into, leaf):
                raise ValueError(
                    f"copy_to: a call returned {leaf!r} where its target holds {into!r}, and only tensors are copied: "
                    "return it as a tensor, leave it out of what is returned, or use outputs='clone'"
                )
        for into, leaf in pairs:
            if not isinstance(into, torch.Tensor) or into.shape != leaf.shape or into.dtype != leaf.dtype:
                raise ValueError(f"copy_to: a result {_told(leaf)} does not fit its target, {_told(into)}")
        with torch.no_grad():
            for into, leaf in pairs:
                into.copy_(leaf)
        return target

    return copy


class Returned(NamedTuple):
    """A leaf of an output as the pass returned it. `tensor` is that object, where its memory is not the recording's own;
    `first` is the first leaf that is the same object."""

    tensor: torch.Tensor | None
    first: int
    requires_grad: bool
    is_inference: bool


def as_returned(leaves: Sequence[Any], is_outside: Callable[[torch.Tensor], bool]) -> list[Returned]:
    notes, seen = [], dict[int, int]()
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            first = seen.setdefault(id(leaf), index)
            notes.append(Returned(leaf if is_outside(leaf) else None, first, leaf.requires_grad, leaf.is_inference()))
        else:
            notes.append(Returned(None, index, False, False))
    return notes


class _Repeated(NamedTuple):
    """The same object as an earlier result."""

    first: int


class _Input(NamedTuple):
    """A view of an argument, or of a detached alias of it."""

    argument: int
    place: Place
    is_detached: bool


class _Same(NamedTuple):
    """An argument itself."""

    argument: int


class _Alias(NamedTuple):
    """A view of an outside tensor, or a detached alias of one."""

    tensor: torch.Tensor


class _Member(NamedTuple):
    """One of several results that overlap: a view of a copy of the bytes under all of them."""

    group: int
    place: Place


class Outputs:
    """What each leaf of a recorded output is. `inputs` are the static inputs, in order of the tensors of a call. `returned`
    tells of each leaf how the recorded pass returned it, `lasting` which object an earlier pass had returned there: one that
    both returned is the same at every call."""

    def __init__(
        self,
        output: Any,
        returned: Sequence[Returned],
        lasting: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        externals: dict[int, torch.Tensor],
        *,
        is_inference: bool,
    ) -> None:
        leaves, self._spec = flatten(output)
        places = {storage_handle(t): i for i, t in reversed(list(enumerate(inputs)))}
        objects = {id(t): i for i, t in reversed(list(enumerate(inputs)))}
        self._inputs = list(inputs)
        self._kinds: list[Any] = []
        fresh: list[int] = []
        for index, (leaf, note) in enumerate(zip(leaves, returned, strict=True)):
            shown = leaf if note.tensor is None else note.tensor
            is_empty = note.tensor is None and not _has_memory(leaf)
            handle = None if is_empty or shown.layout is not torch.strided else storage_handle(shown)
            if note.first != index:
                self._kinds.append(_Repeated(note.first))
            elif note.tensor is not None and id(note.tensor) in objects:
                self._kinds.append(_Same(objects[id(note.tensor)]))
            elif handle in places:
                self._kinds.append(_input(shown, places[handle], inputs))
            elif note.tensor is not None and index < len(lasting) and note.tensor is lasting[index]:
                leaves[index] = note.tensor
                self._kinds.append(None)
            elif handle in externals:
                self._kinds.append(_Alias(shown))
            elif not isinstance(leaf, torch.Tensor):
                self._kinds.append(None)
            else:
                fresh.append(index)
                self._kinds.append(torch.clone)
        self._leaves = leaves
        self._groups = self._find_groups(fresh)
        self._trained = [i for i, note in enumerate(returned) if note.requires_grad and _is_made(self._kinds[i])]
        self._is_inference = not is_inference and bool(fresh) and all([returned[i].is_inference for i in fresh])
        """whether the pass enters inference mode by itself"""
        self.needs_strides = sorted({k.argument for k in self._kinds if isinstance(k, _Input)})
        """inputs of which a view is returned: a live one must lie as the static one does"""
        is_plain = not self._trained and not self._is_inference
        self._only = leaves[0] if self._spec.is_leaf and self._kinds == [torch.clone] and is_plain else None

    def copied(self, live: Sequence[torch.Tensor], cut: Cut | None) -> Any:
        """The output of a call as eager would give it, out of static memory."""
        if self._only is not None:
            return (self._only if cut is None else cut(self._only)).clone()
        if self._is_inference:
            with inference_guard(True):
                results = self._copies(live, cut)
        else:
            results = self._copies(live, cut)
        for index in self._trained:
            results[index].requires_grad_()
        return unflatten(self._spec, iter(results))

    def viewed(self, live: Sequence[torch.Tensor], cut: Cut | None) -> Any:
        """The output as views of static memory."""
        results = []
        for leaf, kind in zip(self._leaves, self._kinds, strict=True):
            if isinstance(kind, _Same) or (isinstance(kind, _Input) and cut is None):
                results.append(_of_live(kind, live))
            elif isinstance(kind, _Alias):
                results.append(_another(kind.tensor))
            elif isinstance(kind, _Repeated):
                results.append(results[kind.first])
            else:
                results.append(leaf if cut is None or kind is None else cut(leaf))
        for index in self._trained:
            if isinstance(self._kinds[index], (_Input, _Alias)):
                results[index].requires_grad_()
        return unflatten(self._spec, iter(results))

    def lies_alike(self, live: Sequence[torch.Tensor], index: int) -> bool:
        """Whether a view of the static input is the same one of the live."""
        ours, theirs = self._inputs[index], live[index]
        return ours.stride() == theirs.stride() or all(
            [n == m and (s == t or n == 1) for n, m, s, t in zip(ours.shape, theirs.shape, ours.stride(), theirs.stride())]
        )

    def _copies(self, live: Sequence[torch.Tensor], cut: Cut | None) -> list[Any]:
        bases = [base.clone() for base in self._groups]
        results: list[Any] = []
        for leaf, kind in zip(self._leaves, self._kinds, strict=True):
            if kind is torch.clone:
                results.append((leaf if cut is None else cut(leaf)).clone())
            elif kind is None:
                results.append(leaf)
            elif isinstance(kind, _Member):
                view = kind.place.of(bases[kind.group])
                results.append(view if cut is None else cut(view))
            elif isinstance(kind, _Repeated):
                results.append(results[kind.first])
            elif isinstance(kind, _Alias):
                results.append(_another(kind.tensor))
            elif isinstance(kind, _Same) or (cut is None and self.lies_alike(live, kind.argument)):
                results.append(_of_live(kind, live))
            else:  # the live argument has fewer rows, or lies otherwise
                results.append((leaf if cut is None else cut(leaf)).clone())
        return results

    def _find_groups(self, fresh: Sequence[int]) -> list[torch.Tensor]:
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
        for index in fresh:
            leaf = self._leaves[index]
            if not leaf.numel() and (leaf.is_conj() or leaf.is_neg()):  # which a clone would not be
                self._kinds[index] = _Member(len(groups), place(leaf, 0))
                groups.append(torch.empty(0, dtype=leaf.dtype, device=leaf.device))
        for run in runs:
            start = run[0][0]
            if len(run) == 1 and _is_simple(self._leaves[run[0][2]]):
                continue
            if any((a - start) % self._leaves[i].itemsize for a, _, i in run):
                continue
            nbytes = -(-(max(a + n for a, n, _ in run) - start) // 16) * 16
            for _, _, index in run:
                self._kinds[index] = _Member(len(groups), place(self._leaves[index], start))
            with inference_guard(False):
                device = self._leaves[run[0][2]].device
                groups.append(tensor_at(start, nbytes, torch.uint8, device, (nbytes,), (1,)))
        return groups


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel() > 0


def _is_made(kind: Any) -> bool:
    """Whether a result is a new tensor at every call."""
    return kind is not None and not isinstance(kind, (_Same, _Repeated))


def _extent(tensor: torch.Tensor) -> int:
    return extent_bytes(tensor.dtype, tuple(tensor.shape), tensor.stride())


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a clone has the same strides, and is neither conjugated nor negated lazily."""
    is_dense = tensor.is_contiguous() or _extent(tensor) == tensor.nbytes
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


def _input(leaf: torch.Tensor, index: int, inputs: Sequence[torch.Tensor]) -> _Input:
    is_detached = not any([leaf._base is t for t in inputs])
    return _Input(index, place(leaf, data_address(inputs[index])), is_detached)


def _of_live(kind: _Same | _Input, live: Sequence[torch.Tensor]) -> torch.Tensor:
    tensor = live[kind.argument]
    if isinstance(kind, _Same):
        return tensor
    return kind.place.of(tensor.detach() if kind.is_detached else tensor)


def _another(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor that is to its base what `tensor` is: a view of it requires grad where it does."""
    return torch.ops.aten.alias.default(tensor) if tensor._is_view() else tensor.detach()
