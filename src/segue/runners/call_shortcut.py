"""A shortcut to the recording of a call that looks as an earlier one did.

Taking a call apart and looking its key up costs some 10 microseconds. But most calls look like the one before, and torch
can tell that in C++: `_compat.tensor_check` compares each argument's kind, dtype, device, sizes and strides. So the last
few kinds of call that were replayed are tried first. A shortcut knows less than a key does and is never wrong: calls of
plain positional tensors alone, that share no memory with each other or with what the callable holds, in the same modes; all
others are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from segue._compat import tensor_check
from segue.graph.modes import kernel_modes
from segue.runners.call_key import Scan, extent
from segue.runners.call_store import Entry

_MOST = 4
_EVERY = 64
_MOST_APART = 64


@dataclass(slots=True, eq=False)
class Known:
    """A kind of call that was replayed. `apart` are addresses of arguments that were found to share no memory, with each
    other or with what the callable held then, which stands before them."""

    look_alike: Callable[..., bool]
    extents: tuple[int, ...]
    device_type: str
    modes: tuple[Any, ...]
    entry: Entry
    site: Any
    apart: tuple[Any, set[tuple[int, ...]]]

    def are_apart(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether no two share memory, and none is held by the callable, of tensors that look alike."""
        addresses = tuple(map(_data_ptr, tensors))
        held = self.entry.held
        before, apart = self.apart
        if held is before and addresses in apart:
            return True
        ordered = sorted(zip(addresses, self.extents))
        if held is None or not held.has_none_of(addresses, ordered[0][0], ordered[-1][0]):
            return False
        end = 0
        for start, nbytes in ordered:
            if start < end and nbytes:
                return False
            end = start + nbytes
        if held is before and len(apart) < _MOST_APART:
            apart.add(addresses)
        else:
            self.apart = held, {addresses}
        return True


_data_ptr, _Tensor = torch.Tensor.data_ptr, torch.Tensor


class Shortcuts:
    """The latest few kinds of call. Lists are replaced, never changed, and sets only grow, so that threads need no lock."""

    def __init__(self) -> None:
        self._known: list[Known] = []

    def find(self, args: tuple[Any, ...]) -> Known | None:
        """What is known of a call that looks as `args` do, if it still has its recording."""
        if not self._known:
            return None
        for arg in args:
            if not isinstance(arg, _Tensor) or arg.is_nested:  # a nested one would end the process below
                return None
        for known in self._known:
            if (
                len(args) == len(known.extents)
                and known.look_alike(*args)
                and known.entry.graph is not None
                and kernel_modes(known.device_type) == known.modes
            ):
                return known if known.are_apart(args) else None
        return None

    def learn(self, scan: Scan, entry: Entry, site: Any) -> None:
        """Takes a call that was found by its key and is about to be replayed: the first one of an entry, and then every
        64th, so that calls which never look alike do not pay for shortcuts."""
        if entry.replays % _EVERY:
            return
        structure, _, alias, device, modes = scan.key
        if structure != len(scan.tensors) or alias is not None:
            return
        look_alike = tensor_check(scan.tensors)
        extents = tuple(map(extent, scan.tensors))
        if look_alike is not None and all(extents):  # where an empty one lies says nothing
            new = Known(look_alike, extents, device.type, modes, entry, site, (None, set()))
            self._known = [new, *[k for k in self._known if k.entry is not entry][: _MOST - 1]]

    def forget(self) -> None:
        self._known = []
