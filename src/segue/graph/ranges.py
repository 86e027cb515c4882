"""Names for profilers: an NVTX range around each segment and each break of a replay.

Off unless the environment variable SEGUE_NVTX is set when a recording is made, so the ordinary hot path has no trace of
it. A range costs about a microsecond.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def wants_ranges() -> bool:
    """Whether recordings made now should name their steps."""
    return os.environ.get("SEGUE_NVTX", "0") not in ("", "0") and torch.cuda.is_available()


def ranged(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """`call`, shown as `name` on a profiler's time line."""

    def run() -> Any:
        torch.cuda.nvtx.range_push(name)
        try:
            return call()
        finally:
            torch.cuda.nvtx.range_pop()

    return run
