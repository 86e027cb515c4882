"""Are tensors still where they were, and dicts as they were? Asked before each replay, of some hundred parameters in some
hundred modules, each of which has its tables of parameters, buffers, children and hooks, and its attributes.

One by one, in loops of C's, that costs 70 ns a tensor and 20 ns a dict, and shapes cost more. But what would tell are words
in this process's memory: which C++ tensor each Python object holds, that one's storage, offset, sizes, strides and keys (is
it conjugated lazily), where each storage lies, and of each dict the version that the interpreter gives it, another one at
every change. So those are read at once, by a gather.

The hard part is that all that is read must be there. Python objects and dicts are held. A C++ tensor lives while its object
holds it, so a first gather reads which one that is, and only if it is unchanged a second one reads the C++ tensors. (A weak
reference would keep them there, and make `torch.utils.swap_tensors` an error.) A weak reference keeps a storage's own words,
which say that it is gone, though not its memory.

A version says that a dict was changed, not whether it is another one now: then the caller compares, and if all is equal the
new versions are taken, those that were read before it compared. Where the words stand is found on objects made for that
(`_compat`), and tried out on every tensor given; where they are not as expected (another build of Python or torch), tensors
are asked one by one, as few always are, and dicts compared each time.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from segue._compat import (
    MOST_INLINE,
    TensorLayout,
    dispatch_keys,
    inference_guard,
    storage_handle,
    storage_weakref,
    tensor_at,
    tensor_handle,
    tensor_layout,
)
from segue.graph.versions import dict_tag

_TENSORS_FROM = 6
"""fewer are asked one by one"""
_CLASS = 8
"""at which byte an object holds its class; tried out on every object given"""


class Watch:
    """Tensors and dicts, held alive, as they are now. Thread-safe: what is learnt is replaced, never changed, and of two
    threads that read at once each sees words as they were after it began."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        dicts: Sequence[dict[Any, Any]],
        objects: Sequence[Any] = (),
        loose: Sequence[dict[Any, Any]] = (),
        *,
        at_once: bool = True,
    ) -> None:
        """`objects` stay of their class. `loose` dicts are looked at one by one, and only where changes are seen. Without
        `at_once` nothing is gathered."""
        self._tensors, self._dicts, self._objects = tensors, [*dicts, *loose], list(objects)
        self._classes = list(map(type, objects))
        self._places = _places(tensors)
        self._storages = [storage_weakref(t) for t in tensors]
        layout = tensor_layout() if at_once and len(tensors) >= _TENSORS_FROM else None
        cells, places, expected = ([], [], []) if layout is None else _tensor_words(tensors, layout)
        tag = dict_tag() if at_once and dicts and all(map(is_plain, self._dicts)) else None
        self.sees_dicts = tag is not None
        """whether a dict that nothing has changed since need not be compared"""
        self.sees_tensors = bool(cells)
        tags = [] if tag is None else [id(d) + tag for d in self._dicts]
        kinds = [id(o) + _CLASS for o in self._objects] if tags else []
        self._first_loose = len(cells + kinds) + len(dicts)
        if kinds and _Words(kinds).seen != _as_bytes(list(map(id, self._classes))):
            self._first_loose, kinds = self._first_loose - len(kinds), []
        self._sees_classes = bool(kinds)
        self._first = _Words(cells + kinds + tags) if cells or tags else None
        self._second = _Words(places) if places else None
        self._num_fixed_bytes = 8 * len(cells + kinds)
        if self._second is not None and self._second.seen != _as_bytes(expected):
            self._first, self._second, self.sees_dicts, self.sees_tensors, self._sees_classes = (
                None,
                None,
                False,
                False,
                False,
            )

    def hold(self, are_equal: Callable[[], bool], is_alike: Callable[[int], bool] = bool) -> bool:
        """Whether each tensor lies where it lay, and each dict holds what it held. The latter `are_equal` says, which is
        asked where a dict was changed, or may have been, and `is_alike` of each loose one that was changed; what they raise
        is raised."""
        first, second = self._first, self._second
        if not self._sees_classes and list(map(type, self._objects)) != self._classes:
            return False
        if first is None:
            return are_equal() and _places(self._tensors) == self._places
        before = first.seen
        _gather(first.memory, 0, first.index, out=first.now)
        if first.buffer != before:
            now = bytes(first.buffer)
            fixed, firm = self._num_fixed_bytes, 8 * self._first_loose
            if now[:fixed] != before[:fixed] or (now[fixed:firm] != before[fixed:firm] and not are_equal()):
                return False
            if now[firm:] != before[firm:]:
                changed = [at for at in range(firm, len(now), 8) if now[at : at + 8] != before[at : at + 8]]
                if not all([is_alike((at - firm) // 8) for at in changed]):
                    return False
            first.seen = now
        elif not self.sees_dicts and not are_equal():
            return False
        if second is None:
            return _places(self._tensors) == self._places
        _gather(second.memory, 0, second.index, out=second.now)
        return second.buffer == second.seen


_gather = torch.index_select


def _places(tensors: list[torch.Tensor]) -> list[Any]:
    return [(t.data_ptr(), t.shape, t.stride(), t.is_conj(), t.is_neg()) for t in tensors]


class _Words:
    """Machine words in this process's memory, gathered into a `buffer`, and what was `seen` there when this was made."""

    __slots__ = ("buffer", "index", "memory", "now", "seen")

    def __init__(self, places: list[int]) -> None:
        start, end = min(places), max(places) + 8
        self.buffer = bytearray(8 * len(places))
        with inference_guard(False):
            self.memory = tensor_at(start, end - start, torch.int64, torch.device("cpu"), ((end - start) // 8,), (1,))
            self.index = torch.tensor([(p - start) // 8 for p in places], dtype=torch.int64, device="cpu")
            self.now = torch.frombuffer(self.buffer, dtype=torch.int64)
            _gather(self.memory, 0, self.index, out=self.now)
        self.seen = bytes(self.buffer)


def _tensor_words(tensors: list[torch.Tensor], layout: TensorLayout) -> tuple[list[int], list[int], list[int]]:
    """Where each object holds its C++ tensor; where those hold their storages, offsets and shapes, and storages their
    addresses; and what must stand in the latter. Nothing, where an object does not hold its own as expected."""
    cells = [id(t) + layout.cell for t in tensors]
    if _Words(cells).seen != _as_bytes([tensor_handle(t) for t in tensors]):
        return [], [], []
    words: dict[int, int] = {}
    for tensor in tensors:
        handle, store, shape = tensor_handle(tensor), storage_handle(tensor), tensor_handle(tensor) + layout.shape
        words[handle + layout.storage], words[handle + layout.offset] = store, int(tensor.storage_offset())
        words[store + layout.data], words[shape] = tensor.untyped_storage().data_ptr(), tensor.dim()
        words[handle + layout.keys] = dispatch_keys(tensor)
        if tensor.dim() <= MOST_INLINE:
            words.update({shape + 8 * (1 + i): n for i, n in enumerate(tensor.shape)})
            words.update({shape + 8 * (1 + MOST_INLINE + i): n for i, n in enumerate(tensor.stride())})
    return cells, list(words), list(words.values())


def _as_bytes(words: list[int]) -> bytes:
    return b"".join([word.to_bytes(8, sys.byteorder) for word in words])


def is_plain(table: Any) -> bool:
    """Whether its changes are seen, where any are."""
    return type(table) in (dict, OrderedDict)
