"""Every error of ours, under one base.

A message says what happened, the likely cause and what to do, and names the key, break, slot or operation. Misuse of
an argument is a `ValueError` or `TypeError`; what can go wrong while recording, replaying or configuring is here.
An exception raised by the user's own code is never wrapped.
"""

from __future__ import annotations


class SegueError(RuntimeError):
    """Base of every error of ours."""


class ConfigError(SegueError, ValueError):
    """A setting is invalid or contradicts another; the message names field, value and bound."""


class MissingExtraError(SegueError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class CaptureError(SegueError):
    """Recording failed.

    `operation` is the operation or break at fault, `location` the user's source line (``file:line in function``);
    both are None where they are unknown.
    """

    def __init__(self, message: str, *, operation: str | None = None, location: str | None = None) -> None:
        super().__init__(message)
        self.operation = operation
        self.location = location


class HostReadError(CaptureError):
    """Code that was being recorded read device data on the host, which a recording cannot repeat."""


class TraceMismatchError(CaptureError):
    """The capture met other breaks, or another order, than the traced warm-up did."""


class EscapedTensorError(CaptureError):
    """A tensor made in the graph pool outlived its capture without being an output or a bridge."""


class CaptureNotAllowed(CaptureError):
    """A capture was asked for after the guard had been closed (start-up is over)."""


class CaptureOutOfMemory(CaptureError):
    """The device ran out of memory while a shape was being recorded."""


class ReplayError(SegueError):
    """A recording cannot be replayed: it is closed, nested in its own lane, or its inputs do not fit."""


class BreakOutputError(ReplayError):
    """An eager break returned something else at replay than it did when it was traced."""


class BreakStateError(ReplayError):
    """The body of an eager break changed, at a replay, state that the recording depends on; the recording is dropped."""


class LeaseError(ReplayError):
    """An output that is a view of static memory was used after the lane's next replay."""


class WorkspaceError(SegueError):
    """A workspace was asked to grow after it had been locked; the message names caller and sizes."""


class InputError(SegueError, ValueError):
    """A static input is missing, or has the wrong length, dtype or device; the message names the slot."""


class StrictModeError(SegueError):
    """Strict mode: a call would have run eagerly, or a setting would have been downgraded."""
