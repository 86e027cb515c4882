"""The entry of the `segue` command, outside the package so that it runs before anything of it is imported.

Importing torch takes seconds. An interrupt meanwhile ends the process in one line: there is nothing to clean up, and
libraries under import swallow an exception or turn it into another. A closed standard error is replaced before a library
could open a file under its number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


def main() -> int:
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    with leaving_at_once():
        from segue.cli import main as run
    return run()


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """An interrupt inside ends the process, unless the caller has asked for something of its own."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.default_int_handler, _interrupt) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def noticing_interrupts() -> Iterator[None]:
    """An interrupt inside arrives as `KeyboardInterrupt` also where it falls into a finaliser, in which Python would only
    print it. Leaves a caller's own handlers alone."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGALRM) if hasattr(signal, "SIGALRM") and is_main else ()
    before = [signal.getsignal(number) for number in numbers]
    if before != [signal.default_int_handler, signal.SIG_DFL]:
        yield
        return
    for number in numbers:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # and again
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _leave(*_: object) -> NoReturn:
    print("segue: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
