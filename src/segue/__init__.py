"""Segue removes kernel-launch overhead from PyTorch inference with CUDA graphs, in pieces where a whole will not do."""

from segue.errors import SegueError
from segue.graph import break_graph, current, eager_on_graph

__all__ = ["SegueError", "break_graph", "current", "eager_on_graph"]
