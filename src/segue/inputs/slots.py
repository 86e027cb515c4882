"""Static inputs: tensors at fixed addresses that a recording reads, and the rules by which a live batch enters them.

A recording reads the addresses it was captured with. So each input has one buffer, allocated once at the largest shape;
every captured shape sees the front of it (`view`), and every call writes the live batch there (`load`).

One load does the same for every slot: check the source, prepare the tail ``[real, rung)`` as the slot's policy says,
copy the head. How many rows are real is read off the sources: those that share an axis must agree. A source may also
bring the whole rung, where what a padded row holds depends on the batch (offsets parked after the last real token):
then it has no tail. A source that does not fit is an error naming the slot, before anything is written; nothing
broadcasts and nothing casts.

Buffers are normal tensors, also when they are made under inference mode, for a tensor of inference mode refuses
in-place writes outside it. Nothing here is locked: a runner loads within its lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from segue._compat import inference_guard
from segue.errors import ConfigError, InputError
from segue.inputs.copy import grouped_copy
from segue.inputs.padding import Padding

Axis = Literal["tokens", "requests"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One static input: ``[axis + extra, *shape]`` of `dtype`, or just `shape` where `axis` is None.

    `extra` counts rows beyond the axis (query offsets have one more than there are requests). `sentinel` is what
    FILL_SENTINEL and FILL_ONCE fill with. `why` states why a KEEP_PAD tail is never read; only that policy needs it.
    """

    name: str
    axis: Axis | None
    dtype: torch.dtype
    padding: Padding
    shape: tuple[int, ...] = ()
    extra: int = 0
    sentinel: int | float = 0
    why: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("slot name is empty; errors name slots by it")
        if self.axis not in ("tokens", "requests", None):
            raise ConfigError(f"slot {self.name}: axis is {self.axis!r}; choose 'tokens', 'requests' or None")
        if self.extra < 0 or (self.extra and self.axis is None):
            raise ConfigError(f"slot {self.name}: extra is {self.extra}; it must be 0, or at least 0 along an axis")
        if any(size < 0 for size in self.shape):
            raise ConfigError(f"slot {self.name}: shape is {self.shape}; sizes must be at least 0")
        if self.padding is Padding.KEEP_PAD and not self.why:
            raise ConfigError(f"slot {self.name}: padding is KEEP_PAD; why must state why its tail is never read")
        if not _can_hold(self.dtype, self.sentinel):
            raise ConfigError(f"slot {self.name}: sentinel is {self.sentinel!r}; {self.dtype} cannot hold it")

    def full_shape(self, tokens: int, requests: int) -> tuple[int, ...]:
        """The shape that a recording of so many tokens and request slots sees."""
        if self.axis is None:
            return self.shape
        return ((tokens if self.axis == "tokens" else requests) + self.extra, *self.shape)


class StaticInputs:
    """Owns one buffer a slot, allocated once; addresses never change while this object lives."""

    def __init__(self, slots: Iterable[Slot], device: torch.device | str, max_tokens: int, max_requests: int) -> None:
        self.slots: dict[str, Slot] = {}
        for slot in slots:
            if slot.name in self.slots:
                raise ConfigError(f"slot {slot.name} is declared twice")
            self.slots[slot.name] = slot
        if max_tokens < 1 or max_requests < 1:
            raise ConfigError(f"max_tokens is {max_tokens}, max_requests {max_requests}; both must be at least 1")
        self.max_tokens, self.max_requests = max_tokens, max_requests
        with inference_guard(False), torch.no_grad():
            self._buffers = {name: self._allocate(slot, device) for name, slot in self.slots.items()}
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def view(self, tokens: int, requests: int) -> dict[str, torch.Tensor]:
        """What a recording of `tokens` tokens and `requests` request slots reads: the front of each buffer.

        The same tensor objects at every call with the same sizes; treat the mapping as read-only.
        """
        found = self._views.get((tokens, requests))
        if found is None:
            found = self._views[tokens, requests] = self._make_view(tokens, requests)
        return found

    def load(self, sources: Mapping[str, torch.Tensor], tokens: int, requests: int) -> dict[str, torch.Tensor]:
        """Write a live batch into the view of a captured size, tails by policy; returns that view.

        `tokens` and `requests` are the captured (padded) sizes; each source brings the real rows. Host sources may be
        overwritten as soon as this returns. Raises `InputError` naming the slot where a source is missing, unknown, on
        another device, or of another dtype, trailing shape or length; then no buffer has changed.
        """
        views = self.view(tokens, requests)
        self._check(sources, views)
        heads: list[torch.Tensor] = []
        with torch.no_grad():
            for name, slot in self.slots.items():
                static, source = views[name], sources[name]
                if slot.axis is None or source.shape[0] == static.shape[0]:
                    heads.append(static)
                    continue
                real = source.shape[0]
                _prepare_tail(slot, static[real:])
                heads.append(static[:real])
        grouped_copy(heads, [sources[name] for name in self.slots])
        return views

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers occupy."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def addresses(self) -> dict[str, int]:
        """Where each buffer lies, for an audit: a recording holds these numbers."""
        return {name: buffer.data_ptr() for name, buffer in self._buffers.items()}

    def _allocate(self, slot: Slot, device: torch.device | str) -> torch.Tensor:
        shape = slot.full_shape(self.max_tokens, self.max_requests)
        is_filled = slot.padding in (Padding.FILL_SENTINEL, Padding.FILL_ONCE)
        return torch.full(shape, slot.sentinel if is_filled else 0, dtype=slot.dtype, device=device)

    def _make_view(self, tokens: int, requests: int) -> dict[str, torch.Tensor]:
        for name, size, most in (("tokens", tokens, self.max_tokens), ("requests", requests, self.max_requests)):
            if not 1 <= size <= most:
                raise InputError(f"{name} is {size}; the static inputs hold 1 to {most}")
        with inference_guard(False), torch.no_grad():
            return {
                name: buffer if slot.axis is None else buffer[: slot.full_shape(tokens, requests)[0]]
                for (name, slot), buffer in zip(self.slots.items(), self._buffers.values())
            }

    def _check(self, sources: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]) -> None:
        unknown = [name for name in sources if name not in self.slots]
        if unknown:
            raise InputError(f"slot {unknown[0]} is not declared; the slots are {', '.join(self.slots)}")
        lengths: dict[str, tuple[int, str]] = {}
        for name, slot in self.slots.items():
            source = sources.get(name)
            if source is None:
                raise InputError(f"slot {name}: its source is missing; every slot is written at every load")
            _check_kind(slot, views[name], source)
            if slot.axis is None or source.shape[0] == views[name].shape[0]:
                continue
            real = source.shape[0] - slot.extra
            agreed, first = lengths.setdefault(slot.axis, (real, name))
            if not 0 <= real == agreed:
                raise InputError(
                    f"slot {name}: its source has {source.shape[0]} rows, which makes {real} {slot.axis}; "
                    f"slot {first} brings {agreed}"
                )


def _check_kind(slot: Slot, static: torch.Tensor, source: torch.Tensor) -> None:
    """Everything but the agreement between slots: dtype, device, trailing shape, and that the source fits."""
    if source.dtype != static.dtype:
        raise InputError(f"slot {slot.name}: its source is {source.dtype}; expected {static.dtype} (nothing casts)")
    if source.device != static.device and source.device.type != "cpu":
        raise InputError(f"slot {slot.name}: its source is on {source.device}; the buffer is on {static.device}")
    lead = 0 if slot.axis is None else 1
    if source.dim() != static.dim() or source.shape[lead:] != static.shape[lead:]:
        raise InputError(
            f"slot {slot.name}: its source has shape {tuple(source.shape)}; expected {tuple(static.shape)}"
            + (", or fewer rows" if lead else "")
        )
    if lead and source.shape[0] > static.shape[0]:
        raise InputError(
            f"slot {slot.name}: its source has {source.shape[0]} rows; the captured size holds {static.shape[0]}"
        )


def _prepare_tail(slot: Slot, tail: torch.Tensor) -> None:
    if slot.padding is Padding.FILL_SENTINEL:
        tail.fill_(slot.sentinel)
    elif slot.padding is Padding.ZERO:
        tail.zero_()


def _can_hold(dtype: torch.dtype, value: int | float) -> bool:
    if dtype == torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    limits = torch.iinfo(dtype)
    return float(value).is_integer() and limits.min <= value <= limits.max
