"""The cpu device's pool: the CUDA caching allocator's policy over ordinary memory.

Requests are rounded to 512 bytes; small ones (up to 1 MiB) come from 2 MiB chunks, others from 20 MiB chunks, from
10 MiB on from chunks of their own in multiples of 2 MiB; best fit by (size, address); a remainder is split off from
512 bytes (small) or 1 MiB (large) on; neighbours merge when freed. So a stale read that CUDA would show shows here,
and peaks compare. Addresses do not.

A block is free as soon as its last tensor dies: the tensor's memory is a ctypes array over the block, and a weakref on
that array notes the death (in whatever thread it happens); the note is acted on before the next allocation.

What is live is told by those weakrefs alone. Everything else follows from them, and is made anew where a signal's handler
interrupted what changes it.

Policy and constants: c10/cuda/CUDACachingAllocator.cpp (torch 2.11).
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
import weakref
from collections import deque
from typing import Any

import torch

from segue._compat import data_address, inference_guard, tensor_at
from segue.device.base import PoolState
from segue.device.operations import extent_bytes
from segue.forks import at_fork

_ROUND = 512
_SMALL = 1 << 20
_SMALL_CHUNK = 2 << 20
_LARGE_CHUNK = 20 << 20
_MIN_LARGE_CHUNK = 10 << 20
_ROUND_LARGE = 2 << 20


class _Block:
    __slots__ = ("address", "chunk", "following", "is_free", "nbytes", "preceding")

    def __init__(self, address: int, nbytes: int, chunk: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.chunk = chunk
        self.is_free = True
        self.preceding: _Block | None = None
        self.following: _Block | None = None


class Mapped:
    """What all pools of one device hold: bytes reserved and in use, and how many may be reserved (None: no bound)."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._pools: weakref.WeakSet[CpuPool] = weakref.WeakSet()
        self._lock = threading.Lock()
        at_fork(self, Mapped._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()

    def add(self, pool: CpuPool) -> None:
        with self._lock:
            self._pools.add(pool)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(pool.reserved_bytes for pool in self._pools)

    @property
    def live_bytes(self) -> int:
        with self._lock:
            return sum(pool.live_bytes for pool in self._pools)


class CpuPool:
    """Owns its chunks until `close`; tensors handed out must not be used after that. Guarded by the lane's lock.

    Raises torch.OutOfMemoryError where its device's capacity is reached.
    """

    def __init__(self, mapped: Mapped | None = None) -> None:
        self.is_retired = False
        self.num_graphs = 0
        self.peak_bytes = 0
        """bytes in use at most since `begin_peak`"""
        self.reserved_bytes = 0
        self.live_bytes = 0
        self._mapped = Mapped() if mapped is None else mapped
        self._mapped.add(self)
        self._chunks: list[torch.Tensor] = []
        self._starts: list[int] = []  # sorted addresses of chunks
        self._by_start: dict[int, int] = {}
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # small, large: (bytes, address)
        self._blocks: dict[int, _Block] = {}
        self._guards: dict[int, _Guard] = {}
        self._live: dict[int, int] = {}
        self._dead: deque[weakref.ref[Any]] = deque()
        self._is_torn = False
        """what follows from the guards is being changed, or that was interrupted"""

    def state(self) -> PoolState:
        self._collect()
        segments = [(start, self._chunks[self._by_start[start]].numel()) for start in self._starts]
        return PoolState(segments, dict(self._live))

    def carve(self, nbytes: int) -> None:
        """Reserves one piece that later blocks are cut from."""
        self._put_back(self._take(nbytes))
        self._is_torn = False

    def begin_peak(self) -> int:
        """Measures the peak anew, and returns the bytes in use now."""
        self._collect()
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def close(self) -> None:
        self.reserved_bytes = self.live_bytes = 0
        before = self._chunks, self._guards  # they go with this frame: nothing below calls anything, to be interrupted at
        self._chunks, self._starts, self._by_start, self._views = [], [], {}, {}
        self._guards, self._live, self._blocks, self._free = {}, {}, {}, ([], [])
        del before

    def allocate(self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """A tensor in a block of its own, filled with poison: NaN, or a large integer."""
        nbytes = extent_bytes(dtype, size, stride)
        if nbytes == 0:
            return torch.empty_strided(size, stride, dtype=dtype)
        block = self._take(nbytes)
        memory = (ctypes.c_char * nbytes).from_address(block.address)
        memory.chunk = self._chunks[block.chunk]  # type: ignore[attr-defined]  # outlives the pool with its last tensor
        ctypes.memset(block.address, _poison(dtype), nbytes)
        guard = _Guard(memory, self._dead.append)
        guard.address, guard.nbytes = block.address, block.nbytes
        self._guards[block.address] = guard
        self._live[block.address] = block.nbytes
        self._note_live(block.nbytes)
        self._is_torn = False
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same memory without owning its block, or None where the tensor is not in the pool."""
        address = data_address(tensor)
        chunk = self._chunk_of(address)
        if chunk is None:
            return None
        offset = address - data_address(self._chunks[chunk])
        itemsize = tensor.dtype.itemsize
        if offset % itemsize:
            nbytes = extent_bytes(tensor.dtype, tuple(tensor.shape), tensor.stride())
            return tensor_at(address, nbytes, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())
        typed = self._views.get((chunk, tensor.dtype))
        if typed is None:
            typed = self._views[chunk, tensor.dtype] = self._chunks[chunk].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), offset // itemsize)

    def fill_free_memory(self, byte: int) -> None:
        """Overwrites every free block, so that a test shows who reads memory that nothing keeps."""
        self._collect()
        for free in self._free:
            for nbytes, address in free:
                ctypes.memset(address, byte, nbytes)

    def _chunk_of(self, address: int) -> int | None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start = self._starts[at]
        chunk = self._by_start[start]
        return chunk if address < start + self._chunks[chunk].numel() else None

    def _note_live(self, change: int) -> None:
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _take(self, nbytes: int) -> _Block:
        """A block that no tensor has yet: until then the pool is torn."""
        self._collect()
        self._is_torn = True
        wanted = -(-nbytes // _ROUND) * _ROUND
        is_small = wanted <= _SMALL
        free = self._free[0 if is_small else 1]
        at = bisect.bisect_left(free, (wanted, 0))
        block = self._blocks[free.pop(at)[1]] if at < len(free) else self._grow(wanted, is_small)
        block.is_free = False
        rest = block.nbytes - wanted
        if rest >= _ROUND if is_small else rest > _SMALL:
            self._split(block, wanted, free)
        return block

    def _split(self, block: _Block, wanted: int, free: list[tuple[int, int]]) -> None:
        rest = _Block(block.address + wanted, block.nbytes - wanted, block.chunk)
        block.nbytes = wanted
        rest.preceding, rest.following = block, block.following
        if block.following is not None:
            block.following.preceding = rest
        block.following = rest
        self._blocks[rest.address] = rest
        bisect.insort(free, (rest.nbytes, rest.address))

    def _grow(self, wanted: int, is_small: bool) -> _Block:
        if is_small:
            nbytes = _SMALL_CHUNK
        elif wanted < _MIN_LARGE_CHUNK:
            nbytes = _LARGE_CHUNK
        else:
            nbytes = -(-wanted // _ROUND_LARGE) * _ROUND_LARGE
        mapped = self._mapped
        if mapped.capacity is not None and mapped.nbytes + nbytes > mapped.capacity:
            raise torch.OutOfMemoryError(
                f"the cpu device is out of memory: {nbytes} bytes wanted, {mapped.capacity - mapped.nbytes} of "
                f"{mapped.capacity} left"
            )
        with inference_guard(False):  # mapped memory starts on a page, and so every block on 512 bytes
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk = torch.frombuffer(memory, dtype=torch.uint8)
        start = data_address(chunk)
        self._chunks.append(chunk)
        self.reserved_bytes += nbytes
        self._by_start[start] = len(self._chunks) - 1
        bisect.insort(self._starts, start)
        block = self._blocks[start] = _Block(start, nbytes, len(self._chunks) - 1)
        return block

    def _collect(self) -> None:
        if self._is_torn:
            self._mend()
        if self._dead:
            self._is_torn = True
            while self._dead:
                self._release(self._dead.popleft())
            self._is_torn = False

    def _mend(self) -> None:
        """Makes anew all that follows from the chunks and from the guards of what is live."""
        self._dead.clear()
        self._guards = {address: guard for address, guard in self._guards.items() if guard() is not None}
        self._live = {address: guard.nbytes for address, guard in self._guards.items()}
        self._by_start = {data_address(chunk): at for at, chunk in enumerate(self._chunks)}
        self._starts = sorted(self._by_start)
        self._blocks, self._free = {}, ([], [])
        for start, at in self._by_start.items():
            end = start + self._chunks[at].numel()
            known, preceding = start, None
            for address in [*sorted(a for a in self._live if start <= a < end), end]:
                if known < address:
                    preceding = self._append(_Block(known, address - known, at), preceding)
                    bisect.insort(self._free_of(preceding), (preceding.nbytes, known))
                if address < end:
                    preceding = self._append(_Block(address, self._live[address], at), preceding)
                    preceding.is_free = False
                    known = address + preceding.nbytes
        self.reserved_bytes = sum(chunk.numel() for chunk in self._chunks)
        self.live_bytes = sum(self._live.values())
        self._is_torn = False

    def _append(self, block: _Block, preceding: _Block | None) -> _Block:
        block.preceding = preceding
        if preceding is not None:
            preceding.following = block
        self._blocks[block.address] = block
        return block

    def _free_of(self, block: _Block) -> list[tuple[int, int]]:
        """Where it is noted when it is free."""
        return self._free[0 if self._chunks[block.chunk].numel() == _SMALL_CHUNK else 1]

    def _release(self, dead: weakref.ref[Any]) -> None:
        assert isinstance(dead, _Guard)
        if self._guards.get(dead.address) is not dead:  # the pool was closed first, or mended
            return
        del self._guards[dead.address]
        self._note_live(-self._live.pop(dead.address))
        self._put_back(self._blocks[dead.address])

    def _put_back(self, block: _Block) -> None:
        free = self._free_of(block)
        block.is_free = True
        for neighbour in (block.preceding, block.following):
            if neighbour is not None and neighbour.is_free:
                free.remove((neighbour.nbytes, neighbour.address))
                low, high = (neighbour, block) if neighbour.address < block.address else (block, neighbour)
                block = self._merge(low, high)
        bisect.insort(free, (block.nbytes, block.address))

    def _merge(self, low: _Block, high: _Block) -> _Block:
        del self._blocks[high.address]
        low.nbytes += high.nbytes
        low.following = high.following
        if high.following is not None:
            high.following.preceding = low
        return low


class _Guard(weakref.ref[Any]):
    """Tells that a block is live: of the memory object over it. A builtin is called when that dies, since what a signal's
    handler raised in one of Python's would be lost, and the note with it."""

    __slots__ = ("address", "nbytes")
    address: int
    nbytes: int


def _poison(dtype: torch.dtype) -> int:
    if dtype.is_floating_point or dtype.is_complex:
        return 0xFF
    return 0x01 if dtype is torch.bool else 0x7F
