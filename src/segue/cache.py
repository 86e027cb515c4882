"""Where Segue keeps what it made once and can use again: converted checkpoints, compiled code."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$SEGUE_CACHE``, else ``~/.cache/segue``. Need not exist yet."""
    chosen = os.environ.get("SEGUE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "segue"
