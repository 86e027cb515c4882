"""What subcommands share for output: JSON files that are whole or not there, and a progress bar on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def check_writable(file: str | None) -> None:
    """Refuses a result file that could not be written, before any work is done.

    Raises:
        ValueError: its folder is missing or not writable, or it is a folder.
    """
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"--json {file} is a folder: name a file")
    if _is_special(path):
        return
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--json {file}: the folder {path.parent} does not exist or cannot be written")


def write_json(file: str | None, value: Any) -> None:
    """Writes `value`, whole or not at all; nothing for None. What is no regular file (/dev/stdout) is written into."""
    if file is None:
        return
    path = Path(file)
    if _is_special(path):
        with path.open("w") as out:
            json.dump(value, out, indent=2)
            out.write("\n")
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as out:
            json.dump(value, out, indent=2)
            out.write("\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _is_special(path: Path) -> bool:
    """A link, a pipe or a device: it must stay what it is."""
    return path.is_symlink() or (path.exists() and not path.is_file())


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is being done now: a moving line on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.status import Status

    with Status(title, console=Console(stderr=True)) as status:
        yield lambda text: status.update(f"{title}: {text}")
