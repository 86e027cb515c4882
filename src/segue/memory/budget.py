"""A bound on what the graphs of one lane cost: the pools' high water, and the driver's bytes of the executable graphs.

The pool is shared, so a recording that is closed again gives back its executable graph alone; the pool stays as large as
it was made, until no recording is left in it. Two ways to live with that when a shape turns out too large: leave it out
and go on in the pool as it is ("eager": shapes after it may not fit where they would have), or make the lane anew without
it ("rebuild": everything else is recorded again).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from segue.memory.lane import Lane
from segue.observe.decision import GraphRecord
from segue.shapes.key import ShapeKey


class Budget:
    """Counts the recordings of every source that was named to it. Guarded by the lane."""

    def __init__(self, lane: Lane, limit: int, *, may_rebuild: bool = False) -> None:
        self.lane = lane
        self.limit = limit
        self.may_rebuild = may_rebuild
        self.refused: dict[ShapeKey, GraphRecord] = {}
        """what was recorded and closed again, since the pool was last made anew"""
        self._sources: list[Callable[[], Iterable[GraphRecord]]] = []

    def count(self, records: Callable[[], Iterable[GraphRecord]]) -> None:
        """From now on, what `records` returns counts as well."""
        self._sources.append(records)

    @property
    def used_bytes(self) -> int:
        return self.lane.reserved_bytes + sum(record.driver_bytes for record in self._records())

    @property
    def is_exceeded(self) -> bool:
        return self.used_bytes > self.limit

    def refuse(self, record: GraphRecord) -> None:
        """Notes a recording that was closed again. An empty pool is given back, so that the next shape finds a fresh one."""
        self.refused[record.key] = record
        if not self._records():
            self.lane.release()

    def too_large(self) -> set[ShapeKey]:
        """The refused shapes that no pool made anew could hold beside what is kept: those that made the pool grow, and
        those that hold more of it than the budget allows. Empty where making the lane anew would change nothing."""
        driver_bytes = sum(record.driver_bytes for record in self._records())
        if not self.lane.reserved_bytes or not any(record.pool_bytes for record in self.refused.values()):
            return set()
        return {
            key
            for key, record in self.refused.items()
            if record.pool_bytes or record.peak_bytes + record.driver_bytes + driver_bytes > self.limit
        }

    def _records(self) -> list[GraphRecord]:
        return [record for source in self._sources for record in source()]
