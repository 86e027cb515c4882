"""What flows, per phase: the contract in `base`, recordings by key in `store`."""

from segue.runners.base import CaptureReport, Live, Progress, Runner, Settings
from segue.runners.store import GraphStore

__all__ = ["CaptureReport", "GraphStore", "Live", "Progress", "Runner", "Settings"]
