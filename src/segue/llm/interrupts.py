"""Ctrl-C while an engine works: it waits for the end of what it would tear apart."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType


class uninterrupted:
    """Inside, a first Ctrl-C is kept, and raised at the end, when requests, pages and locks are whole; a second one does not
    wait. In the main thread, where Python raises it, and where nobody else handles it; elsewhere nothing changes.

    A handler of another signal may raise between the two halves of this, so that nothing puts Ctrl-C's own handler back.
    Then the function that the block is in is no longer running, which the handler and the next block find out."""

    __slots__ = ("_frame", "_is_held", "_is_pending")

    def __enter__(self) -> uninterrupted:
        self._is_pending = False
        self._frame: FrameType | None = sys._getframe(1)
        is_main = threading.current_thread() is threading.main_thread()
        self._is_held = is_main and _is_default(signal.getsignal(signal.SIGINT), self._frame)
        if self._is_held:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._frame = None
        if self._is_held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._is_pending:
                raise KeyboardInterrupt

    def is_around(self, frame: FrameType | None) -> bool:
        """Whether the block is under way where `frame` runs."""
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.is_around(frame):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True


def _is_default(handler: object, frame: FrameType) -> bool:
    """Python's own, or what a block left that is over."""
    if handler is signal.default_int_handler:
        return True
    block = getattr(handler, "__self__", None)
    return isinstance(block, uninterrupted) and not block.is_around(frame)
