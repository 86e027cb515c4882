"""Which arguments of a call are tensors that the callable holds itself: a buffer of the module, a global, a closure's.

Code may ask (`c is self.null`, `x.data_ptr() == self.cache.data_ptr()`, `any(x is p for p in pool)`), and a recording, whose
arguments lie in buffers of its own, holds one answer. So which argument is what of which held tensor makes calls another
kind, by `Held.marks`; the first admission of a key learns what is held. Such calls are recorded where the code turns out not
to ask: where the run over copies does what the run over the held tensors did (`admission`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch

from segue._compat import data_address, storage_handle
from segue.graph import Recording, Trace
from segue.graph.reach import Reach
from segue.graph.tree import flatten


class Held:
    """Where tensors lie that a callable reaches. Keeps none alive: what it says of one that is gone makes a call another
    kind for a while, and is learnt anew with the next recording."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._objects: set[int] = set()
        self._addresses: set[int] = set()
        spans: list[tuple[int, int]] = []
        for tensor in tensors:
            self._objects.add(id(tensor))
            try:
                if tensor.layout is torch.strided and tensor.numel():
                    address, storage = data_address(tensor), tensor.untyped_storage()
                    start = address - int(tensor.storage_offset()) * tensor.itemsize
                    spans.append((start, start + int(storage.nbytes())))
                    self._addresses.add(address)
            except RuntimeError:  # a wrapper around others, which lies nowhere
                continue
        self._edges: list[int] = []
        """where what is held begins and ends, in turn"""
        for start, end in sorted(spans):
            if self._edges and start < self._edges[-1]:  # one memory may be several storages
                self._edges[-1] = max(self._edges[-1], end)
            else:
                self._edges += start, end

    def has_none_of(self, addresses: Sequence[int], first: int, last: int) -> bool:
        """Whether all these, from `first` to `last`, lie outside of what is held."""
        edges = self._edges
        at = bisect_right(edges, first)
        if not at & 1 and (at == len(edges) or last < edges[at]):  # nothing that is held lies between them
            return True
        return not any([at & 1 for at in map(bisect_right, repeat(edges), addresses)])

    def marks(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
        """Of each argument the held memory that it lies in, and the held tensor that it is, or begins where that does. None
        where no argument is held."""
        found = [self._mark(t) for t in tensors]
        return tuple(found) if any(found) else None

    def _mark(self, tensor: torch.Tensor) -> Any:
        itself = id(tensor) if id(tensor) in self._objects else None
        if not tensor.numel():
            return itself and (itself,)
        address = tensor.data_ptr()
        at = bisect_right(self._edges, address)
        if not at & 1:  # an object that took the place of one that is gone
            return None
        return self._edges[at - 1], address if address in self._addresses else None, itself


class Asking:
    """Tells whether a callable asks which of its arguments are tensors that it holds: it did something else with them than
    with copies, which a recording is made of. `handles` are the arguments' storages, `output` the answer about them."""

    def __init__(self, handles: set[int], output: Any) -> None:
        self._handles, self._answer = handles, _without_tensors(output)

    def shows_in(self, recording: Recording, trace: Trace, buffers: Sequence[torch.Tensor], reach: Reach) -> bool:
        """In other operations, other outside tensors, or another result beside tensors; not in another order of tensors."""
        ours = self._handles.union(map(storage_handle, buffers))
        reached = {storage_handle(t) for t in reach.tensors() if t.layout is torch.strided}
        traced, recorded = (
            {h for h, t in found.items() if h not in ours and (h in reached or (t.numel() and t.dim()))}
            for found in (trace.externals, recording.externals)
        )
        is_another = recording.difference is not None or traced != recorded
        return is_another or _without_tensors(recording.output) != self._answer


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _without_tensors(output: Any) -> Any:
    leaves, spec = flatten(output)
    return spec, [repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf) for leaf in leaves]
