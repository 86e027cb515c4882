"""One graph a shape. Marked functions are recorded with everything else, so they must be recordable themselves."""

from __future__ import annotations

from typing import ClassVar

from segue.backends.base import RecordingBackend


class FullBackend(RecordingBackend):
    """A replay is one submission: the least host time there is."""

    name: ClassVar[str] = "full"
    is_segmented: ClassVar[bool] = False
