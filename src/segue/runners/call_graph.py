"""One recorded call of `segue.graph`: its static inputs, and a replay that behaves as an eager call.

A recording reads its arguments at fixed addresses, so each distinct tensor of a call has one buffer, refreshed at every
call by a grouped copy. What the pass writes into an argument is copied back, so the caller sees it as after an eager
call: which arguments those are the trace says, and where breaks run, the buffers' version counters.

What one buffer a tensor cannot express is told before the replay (`cannot_answer`): arguments that overlap each other
where one is written, or that overlap an outside tensor of the recording where either is.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from segue._compat import data_address, inference_guard, storage_handle
from segue.backends.base import Replayable
from segue.graph import Call, calling
from segue.graph.audit import Audit
from segue.graph.lease import Cut, Outputs
from segue.graph.tree import Spec, unflatten
from segue.observe.decision import GraphRecord, Reason
from segue.runners.call_key import Alias, Scan, dense_strides, extent, facts, grown_strides, layout, without_overlap
from segue.runners.call_padding import Padded

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


_MOST_SIZES = 1024
"""of padded calls whose views of static memory are kept, 2 KiB each"""


class StaticCall:
    """Buffers for the tensors of one key. Owns them; normal tensors, whatever the caller's modes are."""

    def __init__(self, scan: Scan, padded: Padded | None) -> None:
        structure, _, alias, device, modes = scan.key
        self.is_inference = bool(modes[0])
        self.device: torch.device = device
        places = range(len(scan.tensors))
        found: Alias = alias or Alias(tuple(places), tuple(places), False)
        self.firsts, objects, self.overlaps = found
        self.distinct = [i for i in places if self.firsts[i] == i]
        self._leaves, self._places, self._structure = scan.leaves, scan.places, structure
        made: dict[int, torch.Tensor] = {}
        self._overlapping: list[tuple[torch.Tensor, int]] = []
        """arguments that overlap themselves, and what is copied of them"""
        self.with_gaps: set[int] = set()
        """storages of buffers with gaps, where nothing is copied"""
        with inference_guard(False), torch.no_grad():
            for i in self.distinct:
                made[i] = _buffer(scan.tensors[i], None if padded is None else padded.shapes[i])
                memory = without_overlap(made[i])
                memory.zero_()
                if memory.nbytes < extent(made[i]):
                    self.with_gaps.add(storage_handle(made[i]))
                if memory is not made[i]:
                    self._overlapping.append((memory, i))
            for i in places:  # arguments may be one tensor, or several over the same memory
                made.setdefault(objects[i], made[self.firsts[i]].detach())
        self.buffers = [made[i] for i in objects]
        self._pads = [] if padded is None else [(i, *padded.fills[i]) for i in self.distinct if padded.shapes[i] is not None]
        self._own = {i: made[i].detach() for i in self.distinct}  # the pass may turn or mark what it is given
        self._heads = {i: t for i, t in self._own.items() if i not in [place for _, place in self._overlapping]}
        self._groups = _group(self._heads)
        is_whole = not self._pads and [places for _, places in self._groups] == [list(range(len(scan.tensors)))]
        self._whole = self.buffers if is_whole else None
        self._by_size: dict[Any, Any] = {}
        self.uncounted: set[int] = set()
        """tensors that the pass writes without raising their versions (through `.data`, by batch norm)"""
        self._facts = facts(self.buffers)
        self.args, self.kwargs = self._arguments()
        self._leaves = None

    def is_like(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the live tensors lie as the buffers do, so that a pass over them tells of a pass over the buffers."""
        return all(t.shape == b.shape and layout(t) == layout(b) for t, b in zip(tensors, self.buffers, strict=True))

    def is_intact(self) -> bool:
        """Whether the buffers are what they were but for their data."""
        return facts(self.buffers) == self._facts

    @property
    def nbytes(self) -> int:
        return sum(self.buffers[i].untyped_storage().nbytes() for i in self.distinct)

    def load(self, tensors: Tensors) -> None:
        """Copies a live call in; rows beyond the live ones get their filling."""
        if self._whole is not None:
            torch._foreach_copy_(self._whole, tensors)
            return
        groups = self._groups
        if self._pads:
            sizes = tuple([tensors[i].shape[dim] for i, dim, _ in self._pads])
            found = self._by_size.get(sizes)
            if found is None:
                if len(self._by_size) >= _MOST_SIZES:
                    self._by_size.clear()
                found = self._by_size[sizes] = self._fit(sizes)
            groups, tails = found
            for tail, fill in tails:
                tail.fill_(fill)
        for into, places in groups:
            torch._foreach_copy_(into, [tensors[i] for i in places])
        for memory, i in self._overlapping:
            memory.copy_(without_overlap(tensors[i]))

    def _fit(self, sizes: tuple[int, ...]) -> tuple[Any, Any]:
        heads, tails = dict(self._heads), []
        with inference_guard(False), torch.no_grad():
            for (i, dim, fill), real in zip(self._pads, sizes, strict=True):
                rung = heads[i].shape[dim]
                if real < rung:
                    tails.append((heads[i].narrow(dim, real, rung - real), fill))
                    heads[i] = heads[i].narrow(dim, 0, real)
        return _group(heads), tails

    def write_back(self, index: int, live: torch.Tensor) -> None:
        """Copies into a live tensor what its buffer holds."""
        live = live.data if index in self.uncounted else live
        without_overlap(live).copy_(without_overlap(self.live_part(index, live)))

    def live_part(self, index: int, live: torch.Tensor) -> torch.Tensor:
        """What of a buffer belongs to the live tensor."""
        part = self._own[self.firsts[index]]
        for dim, size in enumerate(live.shape):
            if part.shape[dim] != size:
                part = part.narrow(dim, 0, size)
        return part

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._leaves)
        for place, buffer in zip(self._places, self.buffers, strict=True):
            leaves[place] = buffer
        if not isinstance(self._structure, Spec):
            return tuple(leaves), {}
        args, kwargs = unflatten(self._structure, iter(leaves))
        return args, kwargs


def _buffer(live: torch.Tensor, grown: tuple[int, ...] | None) -> torch.Tensor:
    """Memory that lies as a live tensor does, or as that would if it were as large as its padding makes it."""
    if grown is not None:
        size, stride = grown, grown_strides(live, grown)
    else:
        size, stride = tuple(live.shape), live.stride() if layout(live) else dense_strides(live.shape)
    return torch.empty_strided(size, stride, dtype=live.dtype, device=live.device)


def _group(destinations: dict[int, torch.Tensor]) -> list[tuple[list[torch.Tensor], list[int]]]:
    groups: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
    for place, tensor in destinations.items():
        if tensor.numel():
            into, places = groups.setdefault(tensor.dtype, ([], []))
            into.append(tensor)
            places.append(place)
    return list(groups.values())


class CallGraph:
    """A recording with what its calls need. Guarded by the lane's lock; owns the recording until `close`."""

    def __init__(
        self,
        graph: Replayable,
        static: StaticCall,
        written: set[int],
        audit: Audit,
        lasting: Sequence[Any],
        beyond: Sequence[torch.Tensor] = (),
    ) -> None:
        """`lasting` are what the traced call returned, as far as that is there; `beyond` what bodies of breaks reach."""
        recording = graph.recording  # type: ignore[attr-defined]
        buffers = {storage_handle(b): i for i, b in enumerate(static.buffers)}
        outside = {h: t for h, t in recording.externals.items() if h not in buffers}
        self.graph = graph
        self.recording = recording
        self.static = static
        self.audit = audit
        self.outputs = Outputs(
            recording.output, recording.returned, lasting, static.buffers, outside, is_inference=static.is_inference
        )
        self.record: GraphRecord = graph.record
        self.record.static_bytes = static.nbytes
        self.has_breaks = bool(recording.breaks)
        if self.has_breaks and static.is_inference:  # no version counter moves there, so what a body may write it wrote
            reached = {storage_handle(t) for b in recording.breaks for t in b.tensors if t.layout is torch.strided}
            written = written | {i for h, i in buffers.items() if h in reached}
        declared = {storage_handle(t): t for b in recording.breaks for t in b.written}
        self.written = sorted(written | {i for h, i in buffers.items() if h in declared})
        self.outside_written = {
            h: t for h, t in (declared | recording.written).items() if h not in buffers and h in recording.externals
        }
        self._counted = [t for t in recording.counted if storage_handle(t) not in buffers]
        self.difference = recording.difference
        self.breaks = recording.breaks
        self._are_prepared = any(b.mark.prepare is not None for b in recording.breaks)
        self._replay = graph.replay
        self._watched = self._ranges(outside | {storage_handle(t): t for t in beyond if t.layout is torch.strided})
        self._exact = self.outputs.needs_strides
        overlaps = static.overlaps and bool(self.written or self.has_breaks)
        self.answers_all = not (overlaps or self._exact or self._watched[0])
        """whether no argument of its key needs a look by `cannot_answer`"""

    def _ranges(self, outside: dict[int, torch.Tensor]) -> tuple[list[int], list[int]]:
        """Memory of outside tensors that an argument must not be part of."""
        if not (self.written or self.has_breaks):
            outside = {h: t for h, t in outside.items() if h in self.outside_written}
        spans: list[tuple[int, int]] = []
        for tensor in outside.values():
            if tensor.numel():
                start = data_address(tensor) - int(tensor.storage_offset()) * tensor.itemsize
                spans.append((start, start + int(tensor.untyped_storage().nbytes())))
        spans.sort()
        return [a for a, _ in spans], [b for _, b in spans]

    def cannot_answer(self, tensors: Sequence[torch.Tensor]) -> Reason | None:
        """Why this call's arguments do not fit static buffers, if so."""
        if self.static.overlaps and (self.written or self.has_breaks):
            return Reason.ALIASED_INPUTS
        for place in self._exact:
            if not self.outputs.lies_alike(tensors, place):
                return Reason.ALIASED_INPUTS
        starts, ends = self._watched
        if starts:
            for tensor in tensors:
                address = tensor.data_ptr()
                at = bisect.bisect_left(starts, address + extent(tensor)) - 1
                if at >= 0 and address < ends[at]:
                    return Reason.ALIASED_INPUTS
        return None

    def run(self, tensors: Tensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Loads, replays, and writes back. Hold the lane."""
        static = self.static
        static.load(tensors)
        if not self.has_breaks:
            try:
                self._replay()
            finally:  # an operation may raise on the cpu device: what was written before stays written
                if self._counted:
                    increment_version(self._counted)
                if self.written:
                    self._write_back(self.written, tensors)
            return
        counters: list[Any] = static.buffers
        before = [counters[i]._version for i in static.distinct]
        try:
            with calling(Call(args, kwargs)):
                self._replay()
        finally:
            if self._counted:
                increment_version(self._counted)
            changed = {i for i, v in zip(static.distinct, before, strict=True) if counters[i]._version != v}
            written = sorted(changed.union(self.written))
            if self._are_prepared:  # what a body wrote, what is called in its place writes too, and may count nothing
                self.written = written
            self._write_back(written, tensors)

    def _write_back(self, places: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for i in places:
                self.static.write_back(i, tensors[i])

    def answer(
        self, tensors: Tensors, args: tuple[Any, ...], kwargs: dict[str, Any], cut: Cut | None, *, is_view: bool = False
    ) -> Any:
        """A replay's output: the caller's own, or with `is_view` static memory."""
        self.run(tensors, args, kwargs)
        return self.outputs.viewed(tensors, cut) if is_view else self.outputs.copied(tensors, cut)

    def close(self) -> None:
        self.graph.close()
