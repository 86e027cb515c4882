"""The entry of the `segue` command, outside the package so that it runs before torch is imported, which takes a second.

An interrupt in that second ends the process in one line: there is nothing to clean up, and libraries under import swallow
an exception or turn it into another. A closed standard error is replaced before a library could open a file under its
number.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> int:
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else the caller has asked for something of its own
        signal.signal(signal.SIGINT, _leave)
    from segue.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()


def _leave(*_: object) -> NoReturn:
    print("segue: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
