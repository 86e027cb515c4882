"""A shortcut to the recording of a call that looks as an earlier one did.

Taking a call apart and looking its key up costs some 10 microseconds. But most calls look like the one before, and torch
can tell that in C++: `_compat.tensor_check` compares each argument's kind, dtype, device, sizes and strides. So the last
few kinds of call that were replayed are tried first. A shortcut knows less than a key does and is never wrong: calls of
plain positional tensors alone, that share no memory, in the same modes; all others are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from segue._compat import tensor_check
from segue.graph.modes import kernel_modes
from segue.runners.call_key import Scan, extent
from segue.runners.call_store import Entry

_MOST = 4
_EVERY = 64


class _Known(NamedTuple):
    look_alike: Callable[..., bool]
    extents: tuple[int, ...]
    device_type: str
    key: Any
    places: list[int]
    entry: Entry
    site: Any


class Shortcuts:
    """The latest few kinds of call. Lists are replaced, never changed, so that threads need no lock."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def find(self, args: tuple[Any, ...]) -> _Known | None:
        """What is known of a call that looks as `args` do, if it still has its recording."""
        if any([isinstance(a, torch.Tensor) and a.is_nested for a in args]):
            return None
        for known in self._known:
            if (
                len(args) == len(known.extents)
                and known.look_alike(*args)
                and known.entry.graph is not None
                and kernel_modes(known.device_type) == known.key[-1]
            ):
                return known if len(args) == 1 or _are_apart(args, known.extents) else None
        return None

    def learn(self, scan: Scan, entry: Entry, site: Any) -> None:
        """Takes a call that was found by its key and is about to be replayed: the first one of an entry, and then every
        64th, so that calls which never look alike do not pay for shortcuts."""
        if entry.replays % _EVERY:
            return
        structure, _, alias, device, _ = scan.key
        if structure != len(scan.tensors) or alias is not None:
            return
        look_alike = tensor_check(scan.tensors)
        if look_alike is not None:
            extents = tuple(map(extent, scan.tensors))
            new = _Known(look_alike, extents, device.type, scan.key, scan.places, entry, site)
            self._known = [new, *[k for k in self._known if k.entry is not entry][: _MOST - 1]]

    def forget(self) -> None:
        self._known = []


def _are_apart(tensors: tuple[torch.Tensor, ...], extents: tuple[int, ...]) -> bool:
    end = 0
    for start, nbytes in sorted(zip(map(torch.Tensor.data_ptr, tensors), extents)):
        if start < end and nbytes:
            return False
        end = start + nbytes
    return True
