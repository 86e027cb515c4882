"""Segue removes kernel-launch overhead from PyTorch inference with CUDA graphs, in pieces where a whole will not do."""

from segue.config import GraphConfig, PhaseConfig
from segue.errors import SegueError
from segue.graph import break_graph, current, eager_on_graph
from segue.graph.lease import Lease, copy_to
from segue.memory.workspace import Workspace
from segue.observe.decision import Decision, Reason
from segue.runners.call_bisect import bisect
from segue.runners.call_padding import Pad
from segue.runners.callable import disabled, graph  # `segue.graph` is this function; the folder of that name is private

__all__ = [
    "Decision",
    "GraphConfig",
    "Lease",
    "Pad",
    "PhaseConfig",
    "Reason",
    "SegueError",
    "Workspace",
    "bisect",
    "break_graph",
    "copy_to",
    "current",
    "disabled",
    "eager_on_graph",
    "graph",
]
