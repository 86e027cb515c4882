"""Segue removes kernel-launch overhead from PyTorch inference with CUDA graphs, in pieces where a whole will not do.

Names are imported when they are first asked for, so that what needs no torch (`segue --help`) does not wait for it.
`segue.graph` is the function; the folder of that name is private, and importing from it does not change that.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segue.config import GraphConfig, PhaseConfig
    from segue.errors import SegueError
    from segue.graph import break_graph, current, eager_on_graph
    from segue.graph.lease import Lease, copy_to
    from segue.memory.workspace import Workspace
    from segue.observe.decision import Decision, Reason
    from segue.runners.call_bisect import bisect
    from segue.runners.call_padding import Pad
    from segue.runners.callable import disabled, graph

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

_HOMES = {
    "config": ("GraphConfig", "PhaseConfig"),
    "errors": ("SegueError",),
    "graph.breaks": ("break_graph", "current", "eager_on_graph"),
    "graph.lease": ("Lease", "copy_to"),
    "memory.workspace": ("Workspace",),
    "observe.decision": ("Decision", "Reason"),
    "runners.call_bisect": ("bisect",),
    "runners.call_padding": ("Pad",),
    "runners.callable": ("disabled", "graph"),
}


class _Package(ModuleType):
    """Python sets a subpackage as an attribute of its package; for the folder `graph` that name is taken."""

    def __getattr__(self, name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(importlib.import_module(f"segue.{home}"), name)
                setattr(self, name, value)
                return value
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
