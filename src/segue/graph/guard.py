"""The guard: after start-up a capture is a mistake, and it must be loud.

A capture in the steady state stalls every request behind it. An engine's runners close their guard when start-up is
over; a `segue.graph` stays open until `freeze()`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

from segue.errors import CaptureNotAllowed
from segue.graph.context import setting

_capturing: ContextVar[bool | None] = ContextVar("segue_capturing", default=None)


def is_capturing() -> bool:
    """Whether this thread is recording right now, on whatever device."""
    return bool(_capturing.get())


def capturing() -> AbstractContextManager[None]:
    """`is_capturing()` is true inside."""
    return setting(_capturing, True)


_lent: ContextVar[bool | None] = ContextVar("segue_lent", default=None)


def is_lent() -> bool:
    """Whether this thread's allocations come out of a lane's pool right now, outside of a capture."""
    return bool(_lent.get())


def lent() -> AbstractContextManager[None]:
    """`is_lent()` is true inside."""
    return setting(_lent, True)


class CaptureInterrupted(BaseException):
    """A capture was asked to end. Nobody's error, and nothing that user code should catch."""


interruption: ContextVar[Callable[[], bool] | None] = ContextVar("segue_capture_interruption", default=None)
"""asked at each operation of a watched capture: whether to end it"""


def interruptible(should_stop: Callable[[], bool]) -> AbstractContextManager[None]:
    """A capture inside ends with `CaptureInterrupted` at the first operation at which `should_stop` says so."""
    return setting(interruption, should_stop)


class CaptureGuard:
    """Open until closed; `check` raises when closed. One a runner."""

    def __init__(self) -> None:
        self._closed_because: str | None = None

    @property
    def is_open(self) -> bool:
        return self._closed_because is None

    def close(self, because: str = "start-up is over") -> None:
        self._closed_because = because

    def reopen(self) -> None:
        self._closed_because = None

    def check(self, what: object) -> None:
        """Raises CaptureNotAllowed, naming `what` was to be captured, if the guard is closed."""
        if self._closed_because is not None:
            raise CaptureNotAllowed(
                f"{what} was to be captured although {self._closed_because}: capture it at start-up (add it to the "
                "ladder), or let such calls run eagerly"
            )
