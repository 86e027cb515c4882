"""The CUDA device: `torch.cuda.CUDAGraph`, driven by `capture_begin` and `capture_end` directly.

`torch.cuda.graph` synchronises, collects garbage and empties the cache at every entry; with a segment between each
pair of breaks that would be most of the build time. Here a capture pass does it once (`memory.lane`).

The hard idea is recovery. A capture that the driver invalidated (a host read, say) leaves torch's allocators routing to
its pool, the pool's id unusable and the device's generator broken in every thread. `_recover` undoes all of it except
the id, so the pool is *retired*: its graphs live on, its lane opens another. A capture that is still valid when a
Python exception leaves it ends cleanly as long as another graph of the pool is alive; each pool keeps an *anchor*, one
tiny graph, for that (and so that the pool's memory stays reserved while recordings come and go).

Tried on torch 2.11 with CUDA 13.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from segue._compat import (
    current_raw_stream,
    inference_guard,
    pool_snapshot,
    routing_to_pool,
    stop_routing_to_pool,
    without_modes,
)
from segue.device.base import Device, DeviceGraph, MemoryReading, Observer, Peak, PoolState, ShapeMemo
from segue.device.driver import PRIME_BEHIND_FROM, PRIME_FROM, CaptureProbe, primer
from segue.device.operations import Operation
from segue.device.streams import StreamPool
from segue.device.watch import OperationMode, describe_line, error_line, user_line
from segue.errors import CaptureError, CaptureOutOfMemory, HostReadError

_MODE = "thread_local"
_SPARE_BYTES = 2 << 30
"""free memory beyond what is cached, below which a capture makes room first: a capture cannot free cached memory"""
_REFUSALS = ("graph capture", "stream is capturing", "StreamCapture", "capturing stream")
"""words of torch's own refusals, which leave the capture valid"""


class CudaDevice(Device):
    """One CUDA device by index."""

    kind = "cuda"
    traces_shapes = False

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._index = index
        self._streams = StreamPool(lambda: torch.cuda.Stream(self.device))

    def open_pool(self, stream: Any) -> CudaPool:
        return CudaPool(self.device, stream)

    @contextlib.contextmanager
    def capture(
        self,
        pool: Any,
        stream: Any,
        observer: Observer | None = None,
        shapes: ShapeMemo | None = None,
        *,
        notes_unseen: bool = False,
    ) -> Iterator[CudaCapture]:
        session = CudaCapture(pool, stream, is_watched=observer is not None, notes_unseen=notes_unseen)
        watch = contextlib.nullcontext() if observer is None else _ObserverMode(observer, session)
        with self.on_stream(stream), watch:
            try:
                yield session
            finally:
                session.abort()

    def lend(self, pool: Any) -> contextlib.AbstractContextManager[None]:
        return routing_to_pool(self.device.index, pool.id)

    def make_workspaces(self) -> None:
        with torch.no_grad(), without_modes():
            x = torch.zeros(16, 16, device=self.device)
            torch.addmm(x[0], x @ x, x)  # cuBLAS, and with a bias cuBLASLt

    def take_stream(self) -> torch.cuda.Stream:
        return self._streams.take()

    def give_stream_back(self, stream: torch.cuda.Stream) -> None:
        self._streams.give_back(stream)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def stream_key(self) -> int:
        return current_raw_stream(self._index)

    @contextlib.contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        caller = torch.cuda.current_stream(self.device)
        self.order(caller, stream)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self.order(stream, caller)

    def order(self, before: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
        if before != after:
            after.wait_stream(before)

    def flush(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def make_room(self) -> None:
        free, total = torch.cuda.mem_get_info(self.device)
        if free > total // 4:
            return
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if free < cached + _SPARE_BYTES:
            self.flush()

    def why_not_beside_others(self) -> str:
        if _can_draw_beside_capture(self.device.index):
            return ""
        return f"with torch {torch.__version__}, random draws of other threads on this device fail while one thread captures"

    def driver_used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def memory(self) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved, allocated = (stats[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
        return MemoryReading(total - free, total, reserved, allocated)

    @contextlib.contextmanager
    def measure_peak(self, pool: Any = None) -> Iterator[Peak]:
        peak = Peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_stats_as_nested_dict(self.device)
        try:
            yield peak
        finally:
            after = torch.cuda.memory_stats_as_nested_dict(self.device)
            peak.nbytes, peak.held_bytes = (
                after[kind]["all"]["peak"] - before[kind]["all"]["current"] for kind in ("allocated_bytes", "reserved_bytes")
            )


@functools.lru_cache
def _can_draw_beside_capture(index: int) -> bool:
    """Tried out once: a capture is opened, and another thread draws a number. The generator is put back."""
    device = torch.device("cuda", index)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    state = torch.cuda.get_rng_state(device)
    failures: list[RuntimeError] = []

    def draw() -> None:
        try:
            torch.rand(1, device=device)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=draw)
    with inference_guard(False), torch.no_grad(), without_modes(), torch.cuda.stream(stream):
        held = torch.zeros(1, device=device)
        graph.capture_begin(capture_error_mode=_MODE)
        try:
            held.add_(1)
            thread.start()
            thread.join()
        finally:
            graph.capture_end()
    graph.reset()
    torch.cuda.set_rng_state(state, device)
    return not failures


class CudaPool:
    """A private pool of the caching allocator, with its anchor. Used by one lane, under that lane's lock."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.stream = stream
        self.is_retired = False
        self.id: Any = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = _tiny_graph(device, stream, self.id)
        self._num_graphs = 0
        self.primer = primer(device.index)

    @property
    def num_graphs(self) -> int:
        return self._num_graphs

    def carve(self, nbytes: int) -> None:
        with torch.cuda.stream(self.stream), routing_to_pool(self.device.index, self.id):  # a block belongs to its stream
            torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def state(self) -> PoolState:
        segments: list[tuple[int, int]] = []
        live: dict[int, int] = {}
        for segment in pool_snapshot(self.id):
            segments.append((segment["address"], segment["total_size"]))
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    live[block["address"]] = block["size"]
        return PoolState(segments, live)

    def close(self) -> None:
        anchor, self._anchor = self._anchor, None
        if anchor is not None:
            anchor.reset()

    def retire(self) -> None:
        """No capture may use this pool any more; its memory goes with the last graph that lives in it."""
        self.is_retired = True
        if self._num_graphs == 0:
            self.close()

    def count_graph(self, change: int) -> None:
        self._num_graphs += change
        if self.is_retired and self._num_graphs == 0:
            self.close()


class CudaGraph:
    """One executable graph. The pool's memory lives at least as long."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nodes: int, instantiate_s: float, pool: CudaPool) -> None:
        pool.count_graph(1)
        self._pool = pool
        self.instantiate_s = instantiate_s
        self._graph = graph
        self._is_open = True
        self.nodes: int | None = nodes
        self.replay = graph.replay  # the hot path: no frame of ours in between

    def primer(self, *, is_first: bool) -> Callable[[], None] | None:
        primer = self._pool.primer
        if primer is None or (self.nodes or 0) < (PRIME_FROM if is_first else PRIME_BEHIND_FROM):
            return None
        return primer.first if is_first else primer.behind

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._graph.reset()
            self._pool.count_graph(-1)


class CudaCapture:
    """One session on one stream. Nothing here allocates device memory; torch's allocator does, from the pool."""

    def __init__(self, pool: CudaPool, stream: torch.cuda.Stream, *, is_watched: bool, notes_unseen: bool = False) -> None:
        self._is_watched = is_watched
        self._notes_unseen = notes_unseen
        self._num_seen = 0
        self.unseen: list[str] = []
        self._pool = pool
        self._stream = stream
        self._probe = CaptureProbe(stream)
        self._open: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        if self._open is not None:
            raise CaptureError("a capture is already open in this session")
        graph = torch.cuda.CUDAGraph()
        self._open = graph
        with self.unrecorded():  # torch fills the generators' own tensors here
            graph.capture_begin(pool=self._pool.id, capture_error_mode=_MODE)
        self.mark_seen()

    def end(self) -> DeviceGraph | None:
        graph = self._open
        assert graph is not None, "end() without begin()"
        self.note_unseen("the end of a segment")
        status, nodes = self._probe.ask()
        start = time.perf_counter()
        try:
            if status == "invalidated":
                raise RuntimeError("it was invalidated by an operation that a CUDA graph cannot hold")
            with self.unrecorded():
                _end_quietly(graph) if nodes == 0 else graph.capture_end()
        except RuntimeError as error:
            self.abort()
            raise CaptureError(f"the capture could not be ended: {_first_line(error)}") from error
        self._open = None
        if nodes == 0:
            graph.reset()
            return None
        return CudaGraph(graph, nodes, time.perf_counter() - start, self._pool)

    def abort(self) -> None:
        graph, self._open = self._open, None
        if graph is None:
            return
        status, _ = self._probe.ask()
        try:
            _end_quietly(graph)
        except RuntimeError:
            status = "invalidated"
        with contextlib.suppress(RuntimeError):
            graph.reset()
        if status != "active":
            with self.unrecorded():
                self._recover()

    def note_unseen(self, where: str | None = None) -> None:
        """Whether something was launched since the last operation that the dispatcher told of."""
        if self._notes_unseen and self._open is not None and self._probe.ask()[1] > self._num_seen:
            self.unseen.append(where or describe_line(user_line()) or "an unknown line")

    def mark_seen(self) -> None:
        """What is recorded until now is accounted for."""
        if self._notes_unseen:
            self._num_seen = self._probe.ask()[1]

    def unrecorded(self) -> contextlib.AbstractContextManager[Any]:
        return without_modes() if self._is_watched else contextlib.nullcontext()

    def failure(self, error: BaseException) -> BaseException | None:
        if isinstance(error, CaptureError):
            return error
        location = error_line(error)
        where = f" ({location})" if location else ""
        if isinstance(error, torch.OutOfMemoryError):
            return CaptureOutOfMemory(f"the device ran out of memory while recording{where}: {error}", location=location)
        text = _first_line(error)
        was_refused = isinstance(error, RuntimeError) and any(words in text for words in _REFUSALS)
        if not was_refused and (self._open is None or self._probe.ask()[0] != "invalidated"):
            return None
        return HostReadError(
            f"{text}{where}: a recording cannot wait for the device or read its data on the host. Keep the value on the "
            "device, or do it inside an @segue.eager_on_graph function.",
            location=location,
        )

    def _recover(self) -> None:
        device = self._pool.device
        stop_routing_to_pool(device.index, self._pool.id)
        _tiny_graph(device, self._stream, torch.cuda.graph_pool_handle()).reset()
        self._pool.retire()


class _ObserverMode(OperationMode):
    def __init__(self, observer: Observer, session: CudaCapture) -> None:
        super().__init__("cuda")
        self._observer = observer
        self._session = session

    def handle(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._session.note_unseen()
        result = op.overload(*args, **kwargs)
        self._session.mark_seen()
        self._observer(op, args, kwargs, result)
        return result


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture whose graph is thrown away; torch warns where it is empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph.capture_end()


def _tiny_graph(device: torch.device, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with inference_guard(False), torch.cuda.stream(stream):
        word = torch.zeros(1, device=device)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=pool, capture_error_mode=_MODE)
            word.add_(1)
            graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()
    return graph
