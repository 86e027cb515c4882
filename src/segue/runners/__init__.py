"""What flows, per phase: the contract in `base`, recordings by key in `store`."""

from segue.runners.base import CaptureReport, Live, Progress, Runner, Settings
from segue.runners.capture import capture_all
from segue.runners.store import GraphStore

__all__ = ["CaptureReport", "GraphStore", "Live", "Progress", "Runner", "Settings", "capture_all"]
