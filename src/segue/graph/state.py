"""What lies outside of a pass and changes with it: memory that it writes, and random generators; saved and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from segue._compat import inference_guard, storage_handle, tensor_handle
from segue.device.operations import Operation, tensors
from segue.device.watch import OperationMode
from segue.graph.breaks import Mark, around_bodies
from segue.graph.modes import kernel_modes


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a written tensor is part of: the noted one may be a view of another part."""
    storage = tensor.untyped_storage()
    with inference_guard(False):
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Ordinary tensors over all memory that one of any layout has: indices and values, or what lies under lazy bits."""
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [whole_storage(tensor) if tensor.is_conj() or tensor.is_neg() else tensor]


def generator_states(
    device: torch.device, more: Iterable[torch.Generator] = ()
) -> list[tuple[torch.Generator, torch.Tensor]]:
    """The default generators of the host and of `device`, and `more`, with the states that they are in."""
    return [(g, g.get_state()) for g in (torch.default_generator, default_generator(device), *more)]


def set_generator_states(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


class Draws:
    """How a trace's operations moved random generators, so that it shows where something else did: a seed set inside, or a
    state put back. Bodies of breaks, which draw anew at each replay, may move them."""

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        """those that were drawn from"""
        self._first: dict[int, torch.Tensor | None] = {}
        self._last: dict[int, torch.Tensor | None] = {}
        self._is_set = False
        self._is_paused = False

    def note(self, generator: torch.Generator, before: torch.Tensor, after: torch.Tensor) -> None:
        """An operation has drawn."""
        key = tensor_handle(generator)  # objects come and go
        if key not in self._first:
            self.generators.append(generator)
            self._first[key] = None if self._is_paused else before
        last = self._last.get(key)
        self._is_set = self._is_set or (last is not None and not torch.equal(last, before))
        self._last[key] = after

    def pause(self) -> None:
        """A body has run."""
        self._is_paused = True
        self._last = dict.fromkeys(self._last)

    def are_set(self, starts: list[tuple[torch.Generator, torch.Tensor]]) -> bool:
        """Whether generators that stood at `starts` before the trace were moved by other means than draws."""
        for generator, start in starts:
            untouched, key = None if self._is_paused else start, tensor_handle(generator)
            first, last = self._first.get(key, untouched), self._last.get(key, untouched)
            if first is not None and not torch.equal(first, start):
                return True
            if last is not None and not torch.equal(last, generator.get_state()):
                return True
        return self._is_set

    def are_from(self, generators: list[torch.Generator]) -> bool:
        """Whether no others were drawn from."""
        return set(self._first) <= set(map(tensor_handle, generators))


class keeping_modes:
    """Inside, a pass is recorded, and does nothing: the default dtype and the grad mode that it sets all the same are put
    back. `changed` says whether any mode was. Seeds are other threads' as well: they stay until `undo_seeds`."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._seeded = [(g, g.initial_seed(), g.get_state()) for g in (torch.default_generator, default_generator(device))]
        self.changed = False

    def __enter__(self) -> None:
        self._modes = kernel_modes(self._kind)
        self._dtype, self._is_grad = torch.get_default_dtype(), torch.is_grad_enabled()

    def __exit__(self, *_: Any) -> None:
        self.changed = kernel_modes(self._kind) != self._modes
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._is_grad)

    def undo_seeds(self) -> None:
        """Where it was this pass that set them."""
        for generator, seed, state in self._seeded:
            if generator.initial_seed() != seed:
                generator.set_state(state)


class unchanged:
    """What lies under `tensors`, and the generators of `device` and those of `more`, are after the block as before."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device, more: Iterable[torch.Generator] = ()) -> None:
        self._device, self._more = device, list(more)
        strided = [t for t in tensors if t.layout is torch.strided and t.numel()]
        self._storages = [whole_storage(t) for t in {storage_handle(t): t for t in strided}.values()]

    def __enter__(self) -> None:
        self._copies = [s.clone() for s in self._storages]
        self._generators = generator_states(self._device, self._more)

    def __exit__(self, *_: Any) -> None:
        with torch.no_grad():
            for storage, copy in zip(self._storages, self._copies, strict=True):
                storage.copy_(copy)
        set_generator_states(self._generators)


class undoing_writes(OperationMode):
    """What operations inside write into memory, what bodies of breaks write into their arguments, and what they draw, is
    undone at the end. What bodies write elsewhere is not seen."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self._device = device
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> Any:
        self._generators = generator_states(self._device)
        self._token = around_bodies.set(self._around)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        around_bodies.reset(self._token)
        with torch.no_grad():
            for storage, copy in self._saved.values():
                storage.copy_(copy)
        set_generator_states(self._generators)

    def handle(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._save(op.written(args, kwargs) if op.may_write else ())
        generator = kwargs.get("generator")
        if generator is not None and all(generator is not known for known, _ in self._generators):
            self._generators.append((generator, generator.get_state()))
        return op.overload(*args, **kwargs)

    @contextmanager
    def _around(self, mark: Mark, leaves: list[Any]) -> Iterator[None]:
        self._save(tensors(leaves))
        yield

    def _save(self, written: Iterable[torch.Tensor]) -> None:
        for tensor in written:
            handle = storage_handle(tensor) if tensor.layout is torch.strided else None
            if handle is not None and handle not in self._saved and tensor.numel():
                storage = whole_storage(tensor)
                self._saved[handle] = storage, storage.clone()
