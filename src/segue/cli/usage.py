"""Bad usage of the command line, which is what exit status 2 means; every other error is a failure (1)."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """An option or an argument that cannot be."""


@contextmanager
def usage(where: str = "") -> Iterator[None]:
    """A ValueError or TypeError inside is due to what the user typed; `where` is put before the message."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(where + str(error)) from error


def model_source(text: str) -> str:
    """The value of `--model`."""
    if not text.strip():
        raise ArgumentTypeError("it is empty; give a checkpoint folder, a GGUF file or a hub id")
    return text


def name_options(message: str, options: Collection[str]) -> str:
    """Parameters of the library as the options they come from: ``max_tokens is 0`` becomes ``--max-tokens is 0``."""
    for name in options:
        option = f"--{name.replace('_', '-')}"
        pattern = rf"(?<![\w.'-]){name}(?![\w'])" if "_" in name else rf"^{name}(?= is )"
        message = re.sub(pattern, option, message)
    return message
