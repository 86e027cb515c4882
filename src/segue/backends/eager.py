"""No recording: each replay runs the function, on the same static inputs and through the same path as a graph would."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from segue.backends.base import Backend, Forward
from segue.graph import Trace
from segue.observe.decision import GraphRecord
from segue.shapes.key import ShapeKey


class EagerReplay:
    """Calls the function."""

    def __init__(self, forward: Forward, record: GraphRecord) -> None:
        self.replay = forward
        self.record = record

    def close(self) -> None:
        return None


class EagerBackend(Backend):
    """For finding out whether a fault lies in the graphs or in the path around them."""

    name: ClassVar[str] = "disabled"
    is_segmented: ClassVar[bool] = True

    def trace(self, forward: Forward, like: Trace | None = None) -> tuple[Any, Trace]:
        start = time.perf_counter()
        output = forward()
        return output, Trace(is_full=False, seconds=time.perf_counter() - start)

    def record(self, key: ShapeKey, forward: Forward, trace: Trace) -> EagerReplay:
        return EagerReplay(forward, GraphRecord(key=key, backend=self.name, warmup_s=trace.seconds))
