"""What begins anew in a forked child: there the thread that forks is the only one, and locks that others held stay held.

Only the cpu device can be used on both sides of a fork; CUDA cannot be once it was initialised.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

_begun: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def at_fork(owner: Any, begin_anew: Callable[[Any], None]) -> None:
    """`begin_anew(owner)` is called in each forked child, as long as `owner` lives. It must wait for nobody."""
    _watch()
    _begun[owner] = begin_anew


@functools.cache
def _watch() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew() -> None:
    for owner, begin_anew in list(_begun.items()):
        begin_anew(owner)
