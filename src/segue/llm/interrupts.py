"""Ctrl-C while an engine works: it waits for the end of what it would tear apart."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class uninterrupted:
    """Inside, a first Ctrl-C is kept, and raised at the end, when requests, pages and locks are whole; a second one does not
    wait. In the main thread, where Python raises it, and where nobody else handles it; elsewhere nothing changes."""

    __slots__ = ("_is_held", "_is_pending")

    def __enter__(self) -> None:
        self._is_pending = False
        is_main = threading.current_thread() is threading.main_thread()
        self._is_held = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_held:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._is_held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._is_pending:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True
