"""Static inputs that come from the host: all of them in one buffer, so that a step costs one copy to the device.

The slots of a captured size lie behind one another, each at a multiple of 16 bytes, in a buffer as long as the largest
size needs. Each size has its own places; every load writes all of them, so nothing of another size is ever read. The
host side is pinned where the device is not the host, and there are two of it, taken in turn: the next step is written
while the copy of the one before may still be on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch

from segue._compat import inference_guard, mark_varying
from segue.errors import ConfigError, InputError
from segue.inputs.slots import Slot

_ALIGNMENT = 16


class _Layout(NamedTuple):
    """The places of one size: `views` of `used`, the front of the device's buffer, and arrays on each host side."""

    used: torch.Tensor
    views: dict[str, torch.Tensor]
    sides: list[tuple[torch.Tensor, dict[str, Any]]]


class PackedInputs:
    """Owns the buffers; addresses never change while this object lives. Not locked: a runner loads within its lane."""

    def __init__(self, slots: Iterable[Slot], device: torch.device | str, max_tokens: int, max_requests: int) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.max_tokens, self.max_requests = max_tokens, max_requests
        if max_tokens < 1 or max_requests < 1:
            raise ConfigError(f"max_tokens is {max_tokens}, max_requests {max_requests}; both must be at least 1")
        self._is_host = torch.device(device).type == "cpu"
        size = self._place(max_tokens, max_requests)[1]
        with inference_guard(False), torch.no_grad():
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
            sides = () if self._is_host else (0, 1)
            self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in sides]
        self._copied: list[Any] = [None for _ in sides]
        self._turn = 0
        self._layouts: dict[tuple[int, int], _Layout] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.nbytes

    def view(self, tokens: int, requests: int) -> dict[str, torch.Tensor]:
        """What a recording of `tokens` tokens and `requests` request slots reads: the same tensors at every call."""
        return self._layout(tokens, requests).views

    @contextmanager
    def loading(self, tokens: int, requests: int) -> Iterator[dict[str, Any]]:
        """NumPy arrays of a captured size, for the block to write each of them whole; then their one copy to the device is
        queued on the current stream. A block that raises queues nothing. On the host they are the views' own memory."""
        layout = self._layout(tokens, requests)
        if self._is_host:
            yield layout.sides[0][1]
            return
        turn = 1 - self._turn
        event = self._copied[turn]
        if event is None:
            event = self._copied[turn] = torch.cuda.Event()
        else:
            event.synchronize()
        side, arrays = layout.sides[turn]
        yield arrays
        self._turn = turn
        layout.used.copy_(side, non_blocking=True)
        event.record()

    def _layout(self, tokens: int, requests: int) -> _Layout:
        found = self._layouts.get((tokens, requests))
        if found is None:
            for name, size, most in (("tokens", tokens, self.max_tokens), ("requests", requests, self.max_requests)):
                if not 1 <= size <= most:
                    raise InputError(f"{name} is {size}; the static inputs hold 1 to {most}")
            places, nbytes = self._place(tokens, requests)
            with inference_guard(False), torch.no_grad():
                used, *sides = (buffer[:nbytes] for buffer in (self._buffer, *self._hosts))
                views = {name: _typed(used, *place) for name, place in places.items()}
                arrays = [{n: _typed(side, *place).numpy() for n, place in places.items()} for side in sides or [used]]
            for name, view in views.items():
                if self.slots[name].axis is not None:
                    mark_varying(view, 0)
            found = self._layouts[tokens, requests] = _Layout(used, views, list(zip(sides or [used], arrays)))
        return found

    def _place(self, tokens: int, requests: int) -> tuple[dict[str, tuple[int, torch.dtype, tuple[int, ...]]], int]:
        """Where each slot lies, its dtype and shape; and how many bytes there are."""
        places, at = {}, 0
        for name, slot in self.slots.items():
            shape = slot.full_shape(tokens, requests)
            places[name] = at, slot.dtype, shape
            at += -(-prod(shape) * slot.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return places, at


def _typed(buffer: torch.Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return buffer[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)
