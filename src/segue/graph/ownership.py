"""Which tensors a recording must keep alive, and which must not outlive its capture.

*Owned.* A tensor that crosses a break or is read by a segment is owned by the recording, unless its memory is proved
to be a block of the recording's own pool allocated during this very capture. Then a non-owning alias is enough: within
one replay the blocks are written and read in the captured order, and between replays nothing reads them. That is how
all recordings of a lane share their memory. The proof is one snapshot of the pool at begin (what was live before is
foreign), an address look-up for each crossing tensor, and a new look at the pool only where an address is unknown.

*Escaped.* A block allocated during the capture that is still alive after the recording let go of everything is held by
somebody else: a cache that was filled during capture. It holds no data now and every replay will overwrite it, so the
recording is dropped and the holder named.
"""

from __future__ import annotations

import bisect
import gc
from types import ModuleType
from typing import Any

import torch

from segue._compat import data_address, storage_handle, storage_weakref
from segue.device import Device, Pool
from segue.device.operations import Operation, tensors
from segue.errors import CaptureError, EscapedTensorError


class Ownership:
    """The proof for one capture. Make it before the first `begin`."""

    def __init__(self, device: Device, pool: Pool, externals: dict[int, torch.Tensor] | None = None) -> None:
        self._device = device
        self._pool = pool
        self._externals = externals or {}
        before = pool.state()
        self._before = before
        self._foreign = _Ranges(before.live.items())
        self._segments = _Ranges(before.segments)
        self.grown_bytes = 0
        """what the pool grew by, known after `escaped`"""
        self.owned: dict[int, torch.Tensor] = {}
        """storage handle -> a tensor that keeps the storage alive"""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the recording holds instead of `tensor`: a non-owning alias, or an owning one."""
        if tensor.numel() == 0 or self.is_ours(tensor):
            return self._device.alias(tensor)
        kept = tensor.detach()
        self.owned[storage_handle(tensor)] = kept
        return kept

    def is_outside(self, kept: torch.Tensor) -> bool:
        """Whether the memory of a tensor that was kept is not the pool's."""
        if kept.layout is not torch.strided or kept.numel():
            return kept.layout is not torch.strided or storage_handle(kept) in self.owned
        start = data_address(kept) - int(kept.storage_offset()) * kept.itemsize
        return not kept.untyped_storage().nbytes() or start not in _Ranges(self._pool.state().segments)

    def is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether the memory is a block of the pool allocated since this object was made. What the trace met as an outside
        tensor never is: an alias of pool memory that nothing holds alive (an output of another recording)."""
        if storage_handle(tensor) in self._externals:
            return False
        address = data_address(tensor)
        if address in self._segments:
            return address not in self._foreign
        if tensor.device.type != self._device.kind or storage_handle(tensor) in self.owned:
            return False
        self._segments = _Ranges(self._pool.state().segments)
        return address in self._segments and address not in self._foreign

    def check_externals(self) -> None:
        """An outside tensor over free memory of the pool cannot be read at a replay: by then it holds something else.

        Raises:
            CaptureError: one of the trace's externals is such a tensor.
        """
        for tensor in self._externals.values():
            if tensor.numel() and tensor.device == self._device.device:
                address = data_address(tensor)
                if address in self._segments and address not in self._foreign:
                    raise CaptureError(
                        f"the pass reads a tensor of shape {list(tensor.shape)} that lies in the memory of its own lane: an "
                        "output of another recording, kept without a copy. The next replay overwrites it: clone it, or pass "
                        "it as an argument."
                    )

    def escaped(self) -> dict[int, int]:
        """Blocks (address -> bytes) allocated since begin that are still alive."""
        found = self._new_blocks()
        if found:
            gc.collect()  # a block that hangs in a reference cycle only looks escaped
            found = self._new_blocks()
        return found

    def _new_blocks(self) -> dict[int, int]:
        after = self._pool.state()
        self.grown_bytes = after.reserved_bytes - self._before.reserved_bytes
        return {a: n for a, n in after.live.items() if self._before.live.get(a) != n}


class OutsideAccess:
    """What a watched capture reads and writes of the outside world: the capture decides, where the trace predicted."""

    def __init__(self) -> None:
        self.externals: dict[int, torch.Tensor] = {}
        self.written: dict[int, torch.Tensor] = {}
        self.counted: dict[int, torch.Tensor] = {}
        """by object, whose version counters the writes raise: not all do"""
        self.restrided: dict[int, bool] = {}
        """storages of which `as_strided` made views, and whether one named its place in the storage"""
        self._made: dict[int, Any] = {}

    def note(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.note_read((*args, *kwargs.values()) if kwargs else args)
        if op.name == "aten.as_strided.default":
            handle, names_place = storage_handle(args[0]), len(args) > 3 and args[3] is not None
            self.restrided[handle] = names_place or self.restrided.get(handle, False)
        if op.may_write:
            for tensor in op.written(args, kwargs):
                if tensor.layout is torch.strided and storage_handle(tensor) in self.externals:
                    self.written[storage_handle(tensor)] = tensor.detach()
            for tensor in op.declared(args, kwargs):
                if tensor.layout is torch.strided and storage_handle(tensor) in self.externals and not tensor.is_inference():
                    counter = tensor if tensor._base is None else tensor._base
                    self.counted[id(counter)] = counter
        if op.returns_fresh:
            self.note_made(result)

    def note_read(self, value: Any) -> None:
        for tensor in tensors(value):
            if tensor.layout is torch.strided:
                handle = storage_handle(tensor)
                if handle not in self._made and handle not in self.externals:
                    self.externals[handle] = tensor.detach()

    def note_made(self, value: Any) -> None:
        for tensor in tensors(value):
            if tensor.layout is torch.strided:
                handle = storage_handle(tensor)
                if handle not in self._made and handle not in self.externals:  # out= hands an outside tensor back
                    self._made[handle] = storage_weakref(tensor)


class _Ranges:
    """Membership of an address in a set of disjoint (address, bytes) ranges."""

    def __init__(self, ranges: Any) -> None:
        ordered = sorted(ranges)
        self._starts = [a for a, _ in ordered]
        self._ends = [a + n for a, n in ordered]

    def __contains__(self, address: int) -> bool:
        at = bisect.bisect_right(self._starts, address)
        return at > 0 and address < self._ends[at - 1]


def escape_error(blocks: dict[int, int], made_at: dict[int, str]) -> EscapedTensorError:
    """Names who holds the escaped blocks, and where they were made if the capture was watched."""
    address, nbytes = max(blocks.items(), key=lambda item: item[1])
    holder = _holder(address, nbytes)
    line = made_at.get(address)
    where = f", made at {line}," if line else ""
    return EscapedTensorError(
        f"{len(blocks)} tensor(s) made during capture are still held after it; the largest{where} has {nbytes} bytes and "
        f"is held by {holder}. It holds no data, and every replay would overwrite it: fill that cache before the capture, "
        "or do not keep it.",
        operation=holder,
        location=line,
    )


def _holder(address: int, nbytes: int) -> str:
    gc.unfreeze()  # frozen objects cannot be found
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and _is_inside(candidate, address, nbytes):
            return _name_of(candidate)
    return "an object that the garbage collector does not see"


def _is_inside(tensor: torch.Tensor, address: int, nbytes: int) -> bool:
    try:
        is_small_enough = tensor.numel() > 0 and tensor.untyped_storage().nbytes() <= nbytes  # no view of a whole pool
        return is_small_enough and address <= data_address(tensor) < address + nbytes
    except RuntimeError:  # fake and functional tensors have no address
        return False


def _name_of(tensor: torch.Tensor) -> str:
    """An attribute or a global if one holds the tensor; otherwise the kinds of containers that do."""
    referrers = gc.get_referrers(tensor)
    for referrer in referrers:
        named = _attribute_of(referrer, tensor)
        if named is not None:
            return named
    kinds = sorted({type(r).__name__ for r in referrers} - {"frame", "cell", "list"}) or ["list"]
    return f"a {' / '.join(kinds)}"


def _attribute_of(holder: Any, tensor: torch.Tensor) -> str | None:
    """`holder` is an object whose attribute is the tensor, or the dictionary of one."""
    is_dict = isinstance(holder, dict)
    names = holder if is_dict else getattr(holder, "__dict__", {})
    key = next((k for k, v in list(names.items()) if v is tensor), None)
    if key is None:
        return None
    if not is_dict:
        return _label(holder, key)
    for owner in gc.get_referrers(holder):
        if getattr(owner, "__dict__", None) is holder:
            return _label(owner, key)
    return f"a dictionary under the key {key!r}"


def _label(owner: Any, key: Any) -> str:
    if isinstance(owner, ModuleType):
        return f"the global {owner.__name__}.{key}"
    return f"the attribute {type(owner).__name__}.{key}"
