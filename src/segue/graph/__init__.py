"""Recordings: how a forward pass is traced once, recorded as segments and breaks, and replayed.

Read in this order: `breaks` (the mark), `trace` (what a watched run notes), `bridge` (how a break's result goes on),
`ownership` (what is kept alive), `recording` (capture as a transaction, replay), `guard`, `lease`.
"""

from segue.graph.breaks import Call, break_graph, calling, current, eager_on_graph, is_calling, is_splitting
from segue.graph.guard import CaptureGuard
from segue.graph.recording import Recorder, Recording
from segue.graph.trace import Trace, traced

__all__ = [
    "Call",
    "CaptureGuard",
    "Recorder",
    "Recording",
    "Trace",
    "break_graph",
    "calling",
    "current",
    "eager_on_graph",
    "is_calling",
    "is_splitting",
    "traced",
]
