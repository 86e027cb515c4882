"""How a pool begins: with one piece that blocks are cut from, where that makes it smaller.

The allocator rounds each new piece to 2 MiB (requests from 1 to 10 MiB get 20), and what is free in one piece cannot be
joined with what is free in another. So a pool that grew request by request holds more than was ever live at once, for
a transformer's prefill by a fifth to a half. If it begins with one piece of about what will be live, later blocks
are cut from that and joined again. Then, though, small blocks may cut the piece where a large one should have fitted,
and the pool grows beside it: it may end larger than without.

Which of the two it is depends on the order of the requests, which nobody knows but the capture. So the first, and
largest, recording of a pool is tried out: where it left much more reserved than was live, it is recorded again after a
piece of its peak; if there is still much, with one in the middle; and what took the least stays. Recording executes
nothing, so trying costs the host's time for one shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.backends import Replayable
from segue.errors import CaptureOutOfMemory
from segue.memory.lane import Lane

_MUCH = 16 << 20
_SHARE = 0.05
"""what is reserved beyond the peak is worth another recording from so many bytes, and such a share of the peak, on"""


def record_fitted(lane: Lane, record: Callable[[], Replayable]) -> Replayable:
    """What `record` makes, in a pool that begins with a piece where that is smaller; hold the lane. Where no other recording
    lives in the lane, `record` may be called up to four times, which `capture_s` adds up. It notes the peak.

    Raises:
        Exception: what `record` raises. Running out of memory with a piece is no failure.
    """
    is_first = lane.num_graphs == 0
    graph = record()
    peak = graph.record.peak_bytes
    if not is_first or not _is_much(lane.reserved_bytes, peak):
        return graph
    fitting = _Fitting(lane, record, graph)
    if fitting.attempt(peak) and _is_much(fitting.least_bytes, peak):
        fitting.attempt((peak + fitting.least_bytes) // 2)
    return fitting.best()


def _is_much(reserved: int, peak: int) -> bool:
    return reserved - peak > max(_MUCH, _SHARE * peak)


class _Fitting:
    """Recordings of one shape, each alone in a new pool. At most one is open."""

    def __init__(self, lane: Lane, record: Callable[[], Replayable], first: Replayable) -> None:
        self._lane = lane
        self._record = record
        self._reserved = {0: lane.reserved_bytes}
        """by the piece that a pool began with"""
        self._graph = first
        self._piece: int | None = 0
        """what the open recording's pool began with; None where none is open"""
        self._earlier_s = 0.0
        self._driver_bytes = first.record.driver_bytes

    @property
    def least_bytes(self) -> int:
        return min(self._reserved.values())

    def attempt(self, piece: int) -> bool:
        """Whether there was memory for it."""
        try:
            self._begin_with(piece)
        except (CaptureOutOfMemory, torch.OutOfMemoryError):
            return False
        return True

    def best(self) -> Replayable:
        """The recording whose pool took the least, made again if it is not the last one."""
        best = min(self._reserved, key=self._reserved.__getitem__)
        if best != self._piece:
            self._begin_with(best)
        record = self._graph.record
        record.capture_s += self._earlier_s
        record.driver_bytes = max(record.driver_bytes, self._driver_bytes)  # the driver re-uses what the first one had
        return self._graph

    def _begin_with(self, piece: int) -> None:
        if self._piece is not None:
            self._earlier_s += self._graph.record.capture_s
            self._graph.close()
        self._piece = None
        self._lane.release()
        self._lane.device.flush()  # or the allocator would keep the old pool beside the new one
        pool = self._lane.pool
        before = pool.state().reserved_bytes
        if piece:
            pool.carve(piece)
        self._graph = self._record()
        self._piece = piece
        self._reserved[piece] = self._lane.reserved_bytes
        self._graph.record.pool_bytes = self._lane.reserved_bytes - before
