"""Which arguments of a call are tensors that the callable holds itself: a buffer of the module, a global, a closure's.

Code may ask (`c is self.null`, `x.data_ptr() == self.cache.data_ptr()`, `any(x is p for p in pool)`), and a recording,
whose arguments lie in buffers of its own, holds one answer. So which argument is what of which held tensor makes calls
another kind, by `Held.marks`; the first admission of a key learns what is held. A held tensor is told by where the callable
holds it, for that is what code asks for: another tensor in the same place is the same. Such calls are recorded where the
code turns out not to ask: where the run over copies does what the run over the held tensors did (`admission`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch

from segue._compat import data_address, storage_handle
from segue.graph import Recording, Trace
from segue.graph.reach import Reach
from segue.graph.tree import flatten

_Places = frozenset[Any]


class Mark(NamedTuple):
    """What of held tensors an argument is: the places where the callable holds memory that it lies in, tensors that begin
    where it does, and itself. `pool` is the container of all these places, where they are items of one."""

    inside: _Places
    begins: _Places
    itself: _Places
    pool: str | None


class Held:
    """Where a callable holds tensors, and where these lie. Keeps none alive: what it says of one that is gone makes a call
    another kind for a while, and is learnt anew with the next recording."""

    def __init__(self, reach: Reach) -> None:
        objects: dict[int, set[Any]] = {}
        addresses: dict[int, set[Any]] = {}
        spans: list[tuple[int, int, Any]] = []
        self._pools: dict[Any, str] = {}
        """of places that are items of a container, what it is called"""
        for tensor, place, pool in _places(reach):
            if pool is not None:
                self._pools[place] = pool
            objects.setdefault(id(tensor), set()).add(place)
            try:
                if tensor.layout is torch.strided and tensor.numel():
                    address, storage = data_address(tensor), tensor.untyped_storage()
                    start = address - int(tensor.storage_offset()) * tensor.itemsize
                    spans.append((start, start + int(storage.nbytes()), place))
                    addresses.setdefault(address, set()).add(place)
            except RuntimeError:  # a wrapper around others, which lies nowhere
                continue
        self._objects, self._addresses = ({at: frozenset(p) for at, p in of.items()} for of in (objects, addresses))
        self._edges: list[int] = []
        """where what is held begins and ends, in turn"""
        inside: list[set[Any]] = []
        for start, end, place in sorted(spans, key=lambda span: span[:2]):
            if self._edges and start < self._edges[-1]:  # one memory may be several storages
                self._edges[-1] = max(self._edges[-1], end)
                inside[-1].add(place)
            else:
                self._edges += start, end
                inside.append({place})
        self._inside = list(map(frozenset, inside))

    def has_none_of(self, addresses: Sequence[int], first: int, last: int) -> bool:
        """Whether all these, from `first` to `last`, lie outside of what is held."""
        edges = self._edges
        at = bisect_right(edges, first)
        if not at & 1 and (at == len(edges) or last < edges[at]):  # nothing that is held lies between them
            return True
        return not any([at & 1 for at in map(bisect_right, repeat(edges), addresses)])

    def marks(self, tensors: Sequence[torch.Tensor]) -> tuple[Mark | None, ...] | None:
        """One for each argument. None where no argument is held."""
        found = [self._mark(t) for t in tensors]
        return tuple(found) if any(found) else None

    def _mark(self, tensor: torch.Tensor) -> Mark | None:
        itself = self._objects.get(id(tensor), _NOWHERE)
        if not tensor.numel():
            return Mark(_NOWHERE, _NOWHERE, itself, self._pool(itself)) if itself else None
        address = tensor.data_ptr()
        at = bisect_right(self._edges, address)
        if not at & 1:  # an object that took the place of one that is gone
            return None
        inside = self._inside[at >> 1]
        return Mark(inside, self._addresses.get(address, _NOWHERE), itself, self._pool(inside | itself))

    def _pool(self, places: _Places) -> str | None:
        pools = set(map(self._pools.get, places))
        return pools.pop() if len(pools) == 1 else None


_NOWHERE: _Places = frozenset()


def _places(reach: Reach) -> Iterator[tuple[torch.Tensor, Any, str | None]]:
    """Each tensor that is held, a name for its place that stays while others come to lie there, and what the container is
    called whose item it is: nothing for attributes."""
    for at, module in enumerate(reach.modules):
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield tensor, (at, name), None
    counts: Counter[str] = Counter()
    for link in reach.links:
        if isinstance(link.value, torch.Tensor):
            counts[link.label] += 1
            yield link.value, (link.label, counts[link.label]), reach.pool_of(link)


class Asking:
    """Tells whether a callable asks which of its arguments are tensors that it holds: it did something else with them than
    with copies, which a recording is made of. `arguments` are their storages in turn, `read` those that the trace read, and
    `output` is the answer about them."""

    def __init__(self, arguments: Sequence[int], read: set[int], output: Any) -> None:
        self._arguments, self._read, self._answer = arguments, read, _without_tensors(output)

    def shows_in(self, recording: Recording, trace: Trace, buffers: Sequence[torch.Tensor], reach: Reach) -> bool:
        """In other operations, in other tensors that are read, an argument's buffer standing for the argument, or in another
        result beside tensors; not in another order of tensors."""
        of_buffer = dict(zip(map(storage_handle, buffers), self._arguments, strict=True))
        reached = {storage_handle(t) for t in reach.tensors() if t.layout is torch.strided}.union(of_buffer)
        traced, recorded = (
            {of_buffer.get(h, h) for h, t in found.items() if h in reached or (t.numel() and t.dim())}
            for found in (trace.externals, recording.externals)
        )
        is_another = recording.difference is not None or traced | self._read != recorded
        return is_another or _without_tensors(recording.output) != self._answer


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _without_tensors(output: Any) -> Any:
    leaves, spec = flatten(output)
    return spec, [repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf) for leaf in leaves]
