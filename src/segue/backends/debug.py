"""Two ways to look for a fault, both through the same runner, static inputs and replay path as a graph.

`forward` runs the whole pass as one eager piece: if a fault goes away, it lies in the graphs; if it stays, in the path
around them. `ops` records every operation as a graph of its own, so that a fault can be followed to one of them
(`graph.bisect`). Neither is fast.
"""

from __future__ import annotations

from typing import ClassVar

from segue.backends.base import RecordingBackend
from segue.backends.eager import EagerBackend


class ForwardBackend(EagerBackend):
    """The pass as one eager piece."""

    name: ClassVar[str] = "forward"


class OperationsBackend(RecordingBackend):
    """A graph an operation; marked functions are breaks."""

    name: ClassVar[str] = "ops"
    is_segmented: ClassVar[bool] = True
    per_operation: ClassVar[bool] = True
