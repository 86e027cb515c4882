"""Segments with eager breaks between them, without a compiler.

A function marked `@segue.eager_on_graph` runs as ordinary Python at every replay, so whatever it does (read lengths on
the host, choose a kernel, allocate) need not be recordable, and one recording serves every value of what it reads.
"""

from __future__ import annotations

from typing import ClassVar

from segue.backends.base import RecordingBackend


class BreakableBackend(RecordingBackend):
    """A replay costs one submission a segment and one Python call a break."""

    name: ClassVar[str] = "breakable"
    is_segmented: ClassVar[bool] = True
