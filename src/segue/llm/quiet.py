"""transformers without its own lines on standard error: progress bars, reports of loading, notices of retries.

What they say is looked at where it matters (`segue.llm.load`) and ends in an error or a line of ours. The switches are
global, so that other threads are quiet meanwhile too; all are set back afterwards.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOGGERS = ("transformers", "huggingface_hub", "httpx", "urllib3", "gguf")


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing but our own lines inside."""
    from transformers.utils import logging as theirs

    was_enabled = theirs.is_progress_bar_enabled()
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    theirs.disable_progress_bar()
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if was_enabled:
            theirs.enable_progress_bar()


@contextmanager
def without_gguf_bar() -> Iterator[None]:
    """transformers' reader of GGUF files shows a bar of tqdm's that nothing switches off: the name it calls is lent."""
    from transformers import modeling_gguf_pytorch_utils as reader

    module: Any = reader
    before = getattr(module, "tqdm", None)
    module.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        module.tqdm = before
