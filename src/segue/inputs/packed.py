"""Static inputs that come from the host: all of them in one buffer, so that a step costs one copy to the device.

The slots of a captured size lie behind one another, each at a multiple of 16 bytes, in a buffer as long as the largest
size needs. Each size has its own places; every load writes all of them, so nothing of another size is ever read. The
host side is pinned where the device is not the host, and there are two of it, taken in turn: the next step is written
while the copy of the one before may still be on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from segue._compat import mark_varying
from segue.errors import ConfigError, InputError
from segue.inputs.slots import Slot

_ALIGNMENT = 16


class _Layout(NamedTuple):
    """The places of one size: `views` on the device, and as many on each host side; `nbytes` is copied."""

    nbytes: int
    views: dict[str, torch.Tensor]
    hosts: tuple[dict[str, torch.Tensor], ...]


class PackedInputs:
    """Owns the buffers; addresses never change while this object lives. Not locked: a runner loads within its lane."""

    def __init__(self, slots: Iterable[Slot], device: torch.device | str, max_tokens: int, max_requests: int) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.max_tokens, self.max_requests = max_tokens, max_requests
        if max_tokens < 1 or max_requests < 1:
            raise ConfigError(f"max_tokens is {max_tokens}, max_requests {max_requests}; both must be at least 1")
        self._is_host = torch.device(device).type == "cpu"
        size = self._place(max_tokens, max_requests)[1]
        with torch.inference_mode(False), torch.no_grad():
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

    def load(self, sources: Mapping[str, torch.Tensor], tokens: int, requests: int) -> None:
        """Writes a batch, padded to the captured size, and queues its one copy on the current stream.

        Sources lie on the host and may be overwritten as soon as this returns. Raises `InputError` naming the slot where
        one is missing or has another dtype or shape than the captured size; then nothing is copied.
        """
        layout = self._layout(tokens, requests)
        if self._is_host:
            self._fill(layout.views, sources)
            return
        turn = self._turn = 1 - self._turn
        event = self._copied[turn]
        if event is None:
            event = self._copied[turn] = torch.cuda.Event()
        else:
            event.synchronize()
        self._fill(layout.hosts[turn], sources)
        self._buffer[: layout.nbytes].copy_(self._hosts[turn][: layout.nbytes], non_blocking=True)
        event.record()

    def _fill(self, views: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        for name, view in views.items():
            source = sources.get(name)
            if source is None or source.dtype != view.dtype or source.shape != view.shape:
                got = "missing" if source is None else f"{source.dtype} of shape {tuple(source.shape)}"
                raise InputError(
                    f"slot {name}: its source is {got}; expected {view.dtype} of shape {tuple(view.shape)} "
                    "(nothing casts, nothing broadcasts)"
                )
        with torch.no_grad():
            for name, view in views.items():
                view.copy_(sources[name])

    def _layout(self, tokens: int, requests: int) -> _Layout:
        found = self._layouts.get((tokens, requests))
        if found is None:
            for name, size, most in (("tokens", tokens, self.max_tokens), ("requests", requests, self.max_requests)):
                if not 1 <= size <= most:
                    raise InputError(f"{name} is {size}; the static inputs hold 1 to {most}")
            places, nbytes = self._place(tokens, requests)
            with torch.inference_mode(False), torch.no_grad():
                views, *hosts = ({n: _typed(b, *p) for n, p in places.items()} for b in (self._buffer, *self._hosts))
            for name, view in views.items():
                if self.slots[name].axis is not None:
                    mark_varying(view, 0)
            found = self._layouts[tokens, requests] = _Layout(nbytes, views, tuple(hosts))
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
