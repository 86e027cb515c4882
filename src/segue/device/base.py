"""The contract of a device: what can record work, and replay it at the same addresses.

A `Pool` is the memory of one lane: everything that is allocated while a capture of that pool is open comes out of it,
and a block is re-used as soon as its last tensor dies, by the same recording or a later one. That is sound because
recordings of one pool never overlap in time.

A `Capture` is one session over one forward pass. It may hold several segments: `begin`, work, `end`, `begin`, work,
`end`. Capture executes nothing. Whatever goes wrong, `abort` puts the device back: the next capture works, memory
returns to its level, generators are where they were. After a fault that the pool cannot survive `pool.is_retired` is
true: its graphs live on, new ones need a new pool.

Two implementations, `cuda` and `cpu`, pass one contract test suite. This folder knows nothing of what stands above it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from segue._compat import data_address, inference_guard, tensor_at
from segue.device.operations import Operation, extent_bytes, lazily_as

Observer = Callable[[Operation, tuple[Any, ...], dict[str, Any], Any], None]
"""Told of every primitive operation that a watched capture meets: operation, arguments, keyword arguments, result."""

ShapeMemo = dict[Any, Any]
"""`operations.signature` of a call -> geometries of its results, filled by a trace from real kernels."""


class PoolState(NamedTuple):
    """One look at a pool: the pieces of memory it reserved as (address, bytes), and its blocks in use, address -> bytes."""

    segments: list[tuple[int, int]]
    live: dict[int, int]

    @property
    def reserved_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.segments)


class MemoryReading(NamedTuple):
    """One look at a device, in bytes: what the driver says is in use and how much there is, and of the former what the
    allocators reserved and handed out, graph pools included."""

    driver_used: int
    driver_total: int
    reserved: int
    allocated: int

    @property
    def driver_free(self) -> int:
        return self.driver_total - self.driver_used

    @property
    def unreserved(self) -> int:
        """In use, and by no allocator: executable graphs, kernels that were loaded, handles, other processes."""
        return self.driver_used - self.reserved


class Peak:
    """What was allocated at most, above what there was at the beginning; known at the end of `Device.measure_peak`."""

    nbytes = 0
    held_bytes = 0
    """what the allocators took from the driver for that, and keep; `nbytes` where memory is not cached (cpu, eager)"""


class DeviceGraph(Protocol):
    """One recorded segment. `nodes` counts what a replay submits; None where the device cannot tell."""

    nodes: int | None
    instantiate_s: float

    def replay(self) -> None: ...

    def primer(self, *, is_first: bool) -> Callable[[], None] | None:
        """What to call before a replay to make it faster; None where nothing does. `is_first`: of its recording's steps, the
        others follow a break."""
        ...

    def close(self) -> None: ...


class Pool(Protocol):
    """Memory of one lane."""

    is_retired: bool

    @property
    def num_graphs(self) -> int:
        """Segments that live in it."""
        ...

    def state(self) -> PoolState: ...

    def carve(self, nbytes: int) -> None:
        """Reserves one piece of so many bytes, or a little more, and leaves it free: later blocks are cut from it.

        Raises:
            torch.OutOfMemoryError: there is no such piece.
        """
        ...

    def close(self) -> None: ...


class Capture(Protocol):
    """One recording session. `is_valid` turns false when the device refused something that cannot be taken back."""

    unseen: list[str]
    """where work was recorded that no torch operation launched, in a session that was asked to look for it"""

    def begin(self) -> None: ...

    def end(self) -> DeviceGraph | None:
        """Closes the segment; None where it recorded nothing. Raises what the device refused, if anything."""
        ...

    def abort(self) -> None: ...

    def unrecorded(self) -> AbstractContextManager[Any]:
        """Inside, our own bookkeeping is neither recorded nor observed."""
        ...

    def failure(self, error: BaseException) -> BaseException | None:
        """The `CaptureError` behind `error`, or None where `error` is the user's own."""
        ...


class Device(ABC):
    """What can record and replay. Stateless apart from its streams; safe to share between lanes and threads."""

    kind: str
    device: torch.device
    traces_shapes: bool
    """Whether every capture needs a full trace's shape memo."""

    @abstractmethod
    def open_pool(self, stream: Any) -> Pool: ...

    @abstractmethod
    def capture(
        self,
        pool: Pool,
        stream: Any,
        observer: Observer | None = None,
        shapes: ShapeMemo | None = None,
        *,
        notes_unseen: bool = False,
    ) -> AbstractContextManager[Capture]:
        """A session on `stream`; entered before the first `begin`, left after the last `end` or `abort`.

        With `notes_unseen` an observed session tells work that torch's dispatcher did not launch, at the price of two
        questions to the driver for each operation.
        """

    @abstractmethod
    def lend(self, pool: Pool) -> AbstractContextManager[Any]:
        """Inside, what this thread allocates comes out of `pool`; its work runs eagerly, on the pool's stream. No capture of
        that pool may be open."""

    @abstractmethod
    def make_workspaces(self) -> None:
        """Makes what torch's matrix products keep for this thread on the current stream."""

    @abstractmethod
    def take_stream(self) -> Any:
        """A stream for one lane: one that was given back where there is one, and not one that is held now as long as torch
        has another (see `device.streams`). Thread-safe."""

    @abstractmethod
    def give_stream_back(self, stream: Any) -> None:
        """The stream may be taken again. Work that its next holder must wait for is ordered before it."""

    @abstractmethod
    def current_stream(self) -> Any: ...

    def stream_key(self) -> int:
        """A number that tells the current stream from others: asked at each replay."""
        return 0

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Runs a block on `stream`, ordered behind the current stream's work and before what follows on it."""

    @abstractmethod
    def order(self, before: Any, after: Any) -> None:
        """Work queued on `after` from now on waits for what `before` has queued until now."""

    @abstractmethod
    def flush(self) -> None:
        """Waits for the device and gives cached memory back."""

    @abstractmethod
    def make_room(self) -> None:
        """Flushes if a capture, which cannot free cached memory, might otherwise run short."""

    @abstractmethod
    def driver_used(self) -> int:
        """Bytes in use on the whole device, as the driver sees it."""

    @abstractmethod
    def memory(self) -> MemoryReading:
        """A reading, without waiting for the device."""

    @abstractmethod
    def measure_peak(self, pool: Pool | None = None) -> AbstractContextManager[Peak]:
        """What a block allocates at most: from `pool`, which a capture inside uses, or (None) while it runs eagerly.

        On CUDA torch's own peak statistics start again, and what other threads allocate meanwhile counts as well.
        """

    def why_not_beside_others(self) -> str:
        """Why a capture in one thread might hurt other threads' work on the device; empty where it does not."""
        return ""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A normal tensor over the same memory that keeps nothing alive: its storage spans exactly the tensor."""
        if torch.is_inference_mode_enabled():
            with inference_guard(False):
                return self.alias(tensor)
        size, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        if 0 in size:
            return lazily_as(tensor, torch.empty_strided(size, stride, dtype=dtype, device=tensor.device))
        nbytes = tensor.nbytes if tensor.is_contiguous() else extent_bytes(dtype, size, stride)
        return lazily_as(tensor, tensor_at(data_address(tensor), nbytes, dtype, tensor.device, size, stride))
