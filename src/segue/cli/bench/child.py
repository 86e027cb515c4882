"""One piece of work in a process of its own, forked so that what is imported here is imported there.

A process keeps what it ever took: the CUDA driver re-uses the memory of graphs that were destroyed, libraries keep
workspaces. What is measured of them is only right the first time, hence once a process. A fork cannot use CUDA where
its parent already has, so the parent leaves CUDA alone, and asks even whether there is a GPU in a child.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from segue.cli.usage import UsageError
from segue.errors import SegueError

T = TypeVar("T")


class _Trail(Exception):
    """The traceback of a child, as text: shown below the parent's own under --debug."""


def leave_cuda_alone() -> None:
    """From now on torch answers whether there is a GPU without the CUDA driver, whose state no fork can use."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def in_child(function: Callable[[], T]) -> T:
    """What `function` returns in a forked process; it must be able to be pickled.

    Raises:
        UsageError: it raised one.
        SegueError: it raised anything else, or its process ended by itself.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(function, sender), daemon=True)
    process.start()
    sender.close()  # so that the child's end is the last one, and its death is noticed
    try:
        try:
            kind, value, trail = receiver.recv()
        except EOFError:
            process.join()
            raise SegueError(f"a process that measured ended by itself, with status {process.exitcode}") from None
    finally:
        receiver.close()
        process.terminate()  # it has answered, or nobody waits for it any more
        process.join()
    if kind is None:
        return value  # type: ignore[no-any-return]
    raise kind(value) from _Trail(f"in the process that measured:\n{trail}")


def _work(function: Callable[[], Any], sender: Connection) -> None:
    try:
        answer: tuple[Any, ...] = (None, function(), "")
    except KeyboardInterrupt:  # the parent was interrupted as well
        return
    except BaseException as error:
        kind = UsageError if isinstance(error, UsageError) else SegueError
        answer = (kind, " ".join(str(error).split()) or type(error).__name__, traceback.format_exc())
    _send(sender, answer)


def _send(sender: Connection, answer: tuple[Any, ...]) -> None:
    try:
        sender.send(answer)
    except Exception as error:  # the value cannot be pickled; nothing was sent
        sender.send((SegueError, " ".join(str(error).split()), traceback.format_exc()))
