"""What subcommands share: notes, JSON files that are whole or not there, a progress bar, and the wait for torch."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from segue.cli.usage import UsageError
from segue_command import leaving_at_once


def note(text: str) -> None:
    """A line on standard error, which is a comfort: where it cannot be written, the work goes on."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def import_torch() -> None:
    """Takes seconds, so a command checks before what it can, and an interrupt meanwhile ends the process at once."""
    with leaving_at_once():
        import torch  # noqa: F401


def check_writable(file: str | None, option: str = "--json") -> None:
    """Refuses a result file that could not be written, before any work is done.

    Raises:
        UsageError: its folder is missing or not writable; or it is a folder, a link to nothing, or read-only.
    """
    if file is None:
        return
    if not file:
        raise UsageError(f"{option} is empty: name a file")
    path = Path(file)
    if path.is_dir():
        raise UsageError(f"{option} {file} is a folder: name a file")
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{option} {file} is a link to nothing: remove it, or name another file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{option} {file} is read-only: name another file")
    if _is_special(path):
        return
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{option} {file}: the folder {path.parent} does not exist or cannot be written")


def write_json(file: str | None, value: Any) -> None:
    """Writes `value`, whole or not at all; nothing for None. What is no regular file (/dev/stdout) is written into.

    A new file gets the permissions that the umask leaves, one that was there keeps its own.

    Raises:
        OSError: it cannot be written; the error names the file. A reader that went away is a `BrokenPipeError`.
    """
    if file is None:
        return
    try:
        _write_json(Path(file), value)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror or error}") from error


def _write_json(path: Path, value: Any) -> None:
    if _is_special(path):
        with path.open("w") as out:
            _dump(value, out)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with temporary.open("x") as out:
            _dump(value, out)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _dump(value: Any, out: Any) -> None:
    json.dump(value, out, indent=2)
    out.write("\n")


def _is_special(path: Path) -> bool:
    """A link, a pipe or a device: it must stay what it is."""
    return path.is_symlink() or (path.exists() and not path.is_file())


def is_terminal() -> bool:
    """Whether somebody watches standard error."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is being done now: a moving line on a terminal, nothing elsewhere."""
    try:
        from rich.console import Console
        from rich.status import Status
    except ImportError:
        yield lambda text: None
        return
    if not is_terminal():
        yield lambda text: None
        return
    with Status(title, console=Console(stderr=True)) as status:
        yield lambda text: status.update(f"{title}: {text}")
