"""Streams that a break's body works on, and may leave running when it returns.

A segment after a break must not start before work that the body put on a stream of its own has ended, or it reads
memory that is still being written (and whether it does depends on how busy the host is). So each such stream is joined
after the body, in the trace and at every replay. Joining a stream that the body joined itself changes nothing.

Which streams those are is learnt in the full trace: torch has no hook for it, so the interpreter's profile function
watches, for the length of the body, for the one builtin that makes a stream current. A library that switches streams
below Python is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from segue._compat import set_stream_builtin
from segue.device import Device


@contextmanager
def noting_streams(device: Device) -> Iterator[list[Any]]:
    """Yields a list that holds, at the end, the streams other than the present one that were made current inside."""
    found: list[Any] = []
    builtin = set_stream_builtin() if device.kind == "cuda" else None
    if builtin is None:
        yield found
        return
    main = device.current_stream()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_return" and argument is builtin:
            stream = device.current_stream()
            if stream != main and stream not in found:
                found.append(stream)

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(previous)


def join(device: Device, streams: list[Any] | tuple[Any, ...]) -> None:
    """What is queued on the current stream from now on waits for what `streams` have queued until now."""
    current = device.current_stream() if streams else None
    for stream in streams:
        device.order(stream, current)


def after_joining(device: Device, streams: tuple[Any, ...], deliver: Callable[[Any], None]) -> Callable[[Any], None]:
    """`deliver`, once `streams` have been joined; the same function where there are none."""
    if not streams:
        return deliver

    def run(output: Any) -> None:
        join(device, streams)
        deliver(output)

    return run
