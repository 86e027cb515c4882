"""The recordings of one runner, by key, and what became of the shapes that could not be recorded."""

from __future__ import annotations

from collections.abc import Iterator

from segue.backends import Replayable
from segue.observe.decision import GraphRecord, Reason
from segue.shapes.key import ShapeKey


class GraphStore:
    """Owns recordings until they are removed or the store is closed. Guarded by the lane that they live in."""

    def __init__(self) -> None:
        self._graphs: dict[ShapeKey, Replayable] = {}
        self.failed: dict[ShapeKey, Reason] = {}

    def add(self, graph: Replayable) -> None:
        self.failed.pop(graph.record.key, None)
        self._graphs[graph.record.key] = graph

    def get(self, key: ShapeKey) -> Replayable:
        return self._graphs[key]

    def remove(self, key: ShapeKey) -> None:
        """Closes the recording of `key`, if there is one."""
        graph = self._graphs.pop(key, None)
        if graph is not None:
            graph.close()

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
