"""The contract of a backend: how one shape is recorded and replayed.

A backend knows a lane, a key and a function of no arguments; it knows no runner, no phase, no engine. The function
reads its inputs from static memory that its runner prepared, and returns the outputs.

Recording takes two calls: `trace` runs the function once, watched, and answers with its result; `record` captures it and
executes nothing. `like` is the trace of a
larger rung of the same function: the new rung is then traced lightly and shares what the other found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from segue._compat import keeping_mode_stacks
from segue.graph import Recorder, Recording, Trace, traced
from segue.graph.tree import flatten
from segue.memory.lane import Lane
from segue.observe.decision import GraphRecord
from segue.shapes.key import ShapeKey

Forward = Callable[[], Any]


class Replayable(Protocol):
    """One recorded shape. `replay` returns the output, valid until the lane's next replay; hold the lane meanwhile."""

    record: GraphRecord
    replay: Callable[[], Any]

    def close(self) -> None: ...


class Backend(ABC):
    """Records shapes into one lane. `is_segmented` says whether its recordings break at marked functions, so that what
    a break reads need not be part of the key."""

    name: ClassVar[str]
    is_segmented: ClassVar[bool]

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    @abstractmethod
    def trace(self, forward: Forward, like: Trace | None = None) -> tuple[Any, Trace]:
        """Runs `forward` once and returns its result and the trace; ordered with the current stream's work."""

    @abstractmethod
    def record(self, key: ShapeKey, forward: Forward, trace: Trace) -> Replayable:
        """Captures `forward`. Executes nothing; raises `CaptureError` with everything back in its place."""


class GraphReplay:
    """A `Recording` with its row of the ledger."""

    def __init__(self, recording: Recording, record: GraphRecord) -> None:
        self.recording = recording
        self.record = record
        self.replay: Callable[[], Any] = recording.replay
        self.keep: Any = None
        """what must live as long, the program whose kernels are recorded"""

    def close(self) -> None:
        self.recording.close()
        self.keep = None


class RecordingBackend(Backend):
    """What `full` and `breakable` share: the recorder, told whether to break."""

    per_operation: ClassVar[bool] = False
    notes_unseen = False
    """whether recordings of full traces tell work that no torch operation launched; set it where no one vouches for it"""

    def trace(self, forward: Forward, like: Trace | None = None) -> tuple[Any, Trace]:
        """On the lane's stream, whose library workspaces the capture then finds made."""
        device = self.lane.device
        with device.on_stream(self.lane.stream):
            if like is not None and not device.traces_shapes and not self.per_operation:
                output, trace = traced(forward, device, is_full=False, segmented=self.is_segmented)
                if trace.has_same_breaks(like):
                    trace.share(like)
                    return output, trace
            return traced(forward, device, is_full=True, segmented=self.is_segmented)

    def record(self, key: ShapeKey, forward: Forward, trace: Trace) -> GraphReplay:
        lane = self.lane
        used_before = lane.device.driver_used()
        recorder = Recorder(
            lane.device,
            lane.pool,
            lane.stream,
            trace,
            segmented=self.is_segmented,
            per_operation=self.per_operation,
            notes_unseen=self.notes_unseen,
        )
        with keeping_mode_stacks():
            recording = recorder.record(forward)
        taken = lane.device.driver_used() - used_before - recording.pool_bytes
        record = GraphRecord(
            key=key,
            backend=self.name,
            segments=len(recording.segments),
            breaks=len(recording.breaks),
            nodes=recording.nodes,
            pool_bytes=recording.pool_bytes,
            driver_bytes=own_driver_bytes(taken, recording.nodes or 0) if lane.device.kind == "cuda" else 0,
            output_bytes=sum(leaf.nbytes for leaf in flatten(recording.output)[0] if isinstance(leaf, torch.Tensor)),
            warmup_s=trace.seconds,
            capture_s=recording.capture_s,
            instantiate_s=recording.instantiate_s,
        )
        return GraphReplay(recording, record)


_MOST_BYTES, _MOST_BYTES_A_NODE = 32 << 20, 128 << 10


def own_driver_bytes(taken: int, nodes: int) -> int:
    """Driver bytes of a recording, of those that the device lost meanwhile. The driver counts for all processes, and another
    one may have allocated: what is beyond any recording (9 to 15 KiB a node were seen, 130 KiB a segment) is not its own."""
    return min(max(taken, 0), _MOST_BYTES + nodes * _MOST_BYTES_A_NODE)
