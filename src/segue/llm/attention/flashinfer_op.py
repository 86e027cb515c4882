"""FlashInfer's wrappers as a registered operation, so that traces and recordings see a call of theirs as one.

An operation takes tensors and numbers, so a wrapper goes by a number. Plans own their wrappers; a number is good for as
long as its wrapper lives. Importing this module registers the operation with torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

_LIBRARY = torch.library.Library("segue_flashinfer", "DEF")
_LIBRARY.define("run(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) out, int page_size, int wrapper) -> ()")
_WRAPPERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = itertools.count()


def register_wrapper(wrapper: Any) -> int:
    """The number that `run_wrapper` knows a planned wrapper by."""
    number = next(_NUMBERS)
    _WRAPPERS[number] = wrapper
    return number


def _run(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, page_size: int, wrapper: int
) -> None:
    """Rows that belong to no request come out as zeros."""
    out.zero_()
    pages = (k_cache.unflatten(0, (-1, page_size)), v_cache.unflatten(0, (-1, page_size)))
    _WRAPPERS[wrapper].run(q.contiguous(), pages, out=out)


def _nothing(*_: Any) -> None:
    """What the operation returns: its result is written."""


_LIBRARY.impl("run", _run, "CUDA")
_LIBRARY.impl("run", _nothing, "Meta")

run_wrapper: Callable[..., None] = torch.ops.segue_flashinfer.run.default
