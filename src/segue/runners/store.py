"""The recordings of one runner, by key, and what became of the shapes that have none."""

from __future__ import annotations

from collections.abc import Iterator

from segue.backends import Replayable
from segue.observe.decision import GraphRecord, Reason
from segue.shapes.key import ShapeKey
from segue.shapes.table import DispatchTable


class GraphStore:
    """Owns recordings until they are removed or the store is closed. Guarded by the lane that they live in.

    `table` dispatches to the recordings; `absent` holds the shapes that failed or were dropped, and `why` the reasons.
    """

    def __init__(self) -> None:
        self._graphs: dict[ShapeKey, Replayable] = {}
        self.table = DispatchTable()
        self.absent = DispatchTable()
        self.why: dict[ShapeKey, Reason] = {}

    def add(self, graph: Replayable) -> None:
        """Takes a recording of a key that has none."""
        key = graph.record.key
        assert key not in self._graphs
        if self.why.pop(key, None) is not None:
            self.absent.remove(key)
        self._graphs[key] = graph
        self.table.add(key)

    def get(self, key: ShapeKey) -> Replayable:
        return self._graphs[key]

    def remove(self, key: ShapeKey) -> None:
        """Closes the recording of `key`, if there is one."""
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self.table.remove(key)
            graph.close()

    def note_absent(self, key: ShapeKey, reason: Reason) -> None:
        """Calls that `key` would answer run eagerly for `reason`."""
        self.why[key] = reason
        self.absent.add(key)

    def forget_absent(self) -> None:
        """Nothing is known of shapes without a recording any more."""
        self.absent, self.why = DispatchTable(), {}

    def records(self) -> list[GraphRecord]:
        return [graph.record for graph in self._graphs.values()]

    def __contains__(self, key: ShapeKey) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[ShapeKey]:
        return iter(list(self._graphs))

    def __len__(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        for key in list(self._graphs):
            self.remove(key)
