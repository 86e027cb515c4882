"""The cpu device: records ATen calls and replays them at the same addresses. It is no accelerator.

It exists so that every rule of the package is developed, tested and checked without a GPU, and so it keeps CUDA's
manners: capture executes nothing, results hold poison, live state is not written, no generator advances, a host read
raises with the operation and the user's line, and memory dies and is re-used as in CUDA's allocator.

The one hard idea is where shapes come from, since nothing runs: from the *memo* that the trace filled with what the
real kernels returned, and from meta kernels only where the memo has no answer (meta kernels are wrong for some
operations: bf16 layer norm, batch norm's saved statistics). A refusal is sticky: code that catches our error and goes
on gets it again at the end, so no recording is built on a guess.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from segue._compat import AllocationWatch, forbid_data_access, inference_guard, without_autocast, without_modes
from segue.device.base import Device, DeviceGraph, MemoryReading, Observer, Peak, ShapeMemo
from segue.device.cpu_lend import LentMode
from segue.device.cpu_pool import CpuPool, Mapped
from segue.device.cpu_tape import Step, TapeArguments, fresh_results, functional_step, rebuilt
from segue.device.operations import LIFT, RESIZED, Geometry, Operation, geometry, is_strided, signature, tensors
from segue.device.streams import NUM_STREAMS, StreamPool
from segue.device.watch import GRAD, HostReads, OperationMode, describe_line, error_line, strange_text, user_line
from segue.errors import CaptureError, CaptureOutOfMemory, HostReadError


class CpuDevice(Device):
    """Ordinary memory as a recording device. What it calls memory is that of its pools, exact to the byte.

    Args:
        capacity: bytes that its pools may reserve together, beyond which they are out of memory as a GPU would be; None
            where nothing but the machine bounds them.
    """

    kind = "cpu"
    traces_shapes = True

    def __init__(self, capacity: int | None = None) -> None:
        self.device = torch.device("cpu")
        self._mapped = Mapped(capacity)
        numbers = itertools.cycle(range(NUM_STREAMS))  # in turn, as torch hands out CUDA's
        self._streams = StreamPool(lambda: next(numbers))

    def open_pool(self, stream: Any = None) -> CpuPool:
        return CpuPool(self._mapped)

    @contextlib.contextmanager
    def capture(
        self,
        pool: Any,
        stream: Any = None,
        observer: Observer | None = None,
        shapes: ShapeMemo | None = None,
        *,
        notes_unseen: bool = False,
    ) -> Iterator[CpuCapture]:
        session = CpuCapture(pool, observer, {} if shapes is None else shapes)
        with HostReads(session.refuse_read), _CaptureMode(session):
            yield session

    def lend(self, pool: Any) -> AbstractContextManager[Any]:
        return LentMode(pool)

    def make_workspaces(self) -> None:
        return None

    def take_stream(self) -> int:
        return self._streams.take()

    def give_stream_back(self, stream: int) -> None:
        self._streams.give_back(stream)

    def current_stream(self) -> None:
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def order(self, before: Any, after: Any) -> None:
        return None

    def flush(self) -> None:
        return None

    def make_room(self) -> None:
        return None

    def driver_used(self) -> int:
        return self._mapped.nbytes

    def memory(self) -> MemoryReading:
        mapped = self._mapped
        total = mapped.capacity or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryReading(mapped.nbytes, total, mapped.nbytes, mapped.live_bytes)

    @contextlib.contextmanager
    def measure_peak(self, pool: Any = None) -> Iterator[Peak]:
        peak = Peak()
        if pool is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes lines of its own
            with AllocationWatch() as watch:
                yield peak
            peak.nbytes = peak.held_bytes = watch.peak_bytes
            return
        before, reserved = pool.begin_peak(), pool.reserved_bytes
        try:
            yield peak
        finally:
            peak.nbytes, peak.held_bytes = pool.peak_bytes - before, pool.reserved_bytes - reserved


class CpuGraph:
    """A tape. Replays under one `inference_mode`, where in-place and `out=` work for every kind of tensor; what autocast
    casts was recorded, so the replaying caller's autocast must not cast again."""

    instantiate_s = 0.0

    def __init__(self, steps: list[Step], pool: CpuPool) -> None:
        self._steps = steps
        self._pool = pool
        self._is_open = True
        pool.num_graphs += 1
        self.nodes: int | None = len(steps)

    def replay(self) -> None:
        with inference_guard(True), without_autocast():
            for call, args, kwargs in self._steps:
                call(*args, **kwargs)

    def primer(self, *, is_first: bool) -> None:
        return None

    def close(self) -> None:
        self._steps = []
        if self._is_open:
            self._is_open = False
            self._pool.num_graphs -= 1


class CpuCapture:
    """One session; `record` is called by the mode for every primitive operation between `begin` and `end`."""

    def __init__(self, pool: CpuPool, observer: Observer | None, shapes: ShapeMemo) -> None:
        self._pool = pool
        self._observer = observer
        self._shapes = shapes
        self._tape_arguments = TapeArguments(pool)
        self._steps: list[Step] | None = None
        self._refusal: CaptureError | None = None
        self.unseen: list[str] = []  # nothing but torch's operations runs here

    def begin(self) -> None:
        if self._steps is not None:
            raise CaptureError("a capture is already open in this session")
        self._steps = []

    def end(self) -> DeviceGraph | None:
        steps, self._steps = self._steps, None
        if self._refusal is not None:
            raise self._refusal
        return CpuGraph(steps, self._pool) if steps else None

    def abort(self) -> None:
        self._steps = None

    def failure(self, error: BaseException) -> BaseException | None:
        if isinstance(error, CaptureError):
            return error
        if self._refusal is not None:
            return self._refusal
        if isinstance(error, torch.OutOfMemoryError):
            location = error_line(error)
            where = f" ({location})" if location else ""
            return CaptureOutOfMemory(f"the device ran out of memory while recording{where}: {error}", location=location)
        return None

    def unrecorded(self) -> AbstractContextManager[Any]:
        return without_modes(HostReads)

    # -- what the modes call ------------------------------------------------------------------------------------------

    def record(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._steps is None or _is_elsewhere(args, kwargs):
            return op.overload(*args, **kwargs)
        result = self._record(op, args, kwargs)
        if self._observer is not None:
            self._observer(op, args, kwargs, result)
        return result

    def refuse_read(self, what: str) -> None:
        if self._steps is not None and what == LIFT:
            self._refuse(
                HostReadError,
                "host data is uploaded (torch.tensor, as_tensor, from_numpy), which a recording would do once, with what it "
                "holds then: make the tensor outside, pass it as an argument, or upload it inside an @segue.eager_on_graph "
                "function.",
                what,
            )
        if self._steps is not None and what != GRAD:
            self._refuse(
                HostReadError,
                f"{what} reads tensor data on the host, which a recording cannot repeat: keep the value on the device, "
                "pass it as an argument, or read it inside an @segue.eager_on_graph function.",
                what,
            )

    def run_strange(self, func: Any, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._steps is not None:
            self._refuse(CaptureError, strange_text(str(func), kind), str(func))
        return func(*args, **kwargs)

    def refuse_opaque(self, name: str) -> None:
        self._refuse(
            CaptureError,
            f"{name} runs a function inside an operator, which the cpu device cannot record: put the call behind "
            "@segue.eager_on_graph.",
            name,
        )

    def _refuse(self, kind: type[CaptureError], message: str, operation: str) -> None:
        if self._refusal is None:
            location = describe_line(user_line())
            where = f" ({location})" if location else ""
            self._refusal = kind(message + where, operation=operation, location=location)
        raise self._refusal

    def _record(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_strided(args):
            self._refuse(
                CaptureError, f"{op.name} takes a sparse or nested tensor: the cpu device cannot record it.", op.name
            )
        if op.reads_host(args):
            self.refuse_read(op.name)
        if op.moves_storage:
            self._refuse(CaptureError, f"{op.name} moves a tensor off its captured address.", op.name)
        if op.is_view or (op.returns and not op.returns_tensors):
            return op.overload(*args, **kwargs)
        if not op.returns_fresh:
            return self._record_write(op, args, kwargs)
        results = [self._allocate(g) for g in self._geometries(op, args, kwargs)]
        if not op.allocates:
            assert self._steps is not None
            held = self._tape_arguments.of  # an empty result too: torch detaches what somebody else holds
            views = [None if r is None else self._pool.view(r) if r.numel() else held(r) for r in results]
            tape_args, tape_kwargs = held(args), self._tape_kwargs(kwargs)
            self._steps.append(functional_step(op, tape_args, tape_kwargs, views))
        return rebuilt(op, args, kwargs, results)

    def _record_write(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op.has_out and self._shapes.get(signature(op, args, kwargs)) == RESIZED:
            self._refuse(CaptureError, f"{op.name} resizes its out=: give it the result's shape.", op.name)
        assert self._steps is not None
        self._steps.append(Step(op.call, self._tape_arguments.of(args), self._tape_kwargs(kwargs)))
        written = op.declared(args, kwargs)
        if op.returns == 0:
            return None
        return written[0] if op.returns == 1 else tuple(written)

    def _tape_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {k: self._tape_arguments.of(v) for k, v in kwargs.items()} if kwargs else kwargs

    def _allocate(self, wanted: Geometry | None) -> torch.Tensor | None:
        if wanted is None:
            return None
        result = self._pool.allocate(*wanted)
        if result.numel():  # empty tensors have no block
            forbid_data_access(result)
        return result

    def _geometries(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Geometry | None]:
        key = signature(op, args, kwargs)
        known = self._shapes.get(key) if key is not None else None
        if known is None:
            known = self._from_meta(op, args, kwargs)
            if key is not None:
                self._shapes[key] = known
        return known  # type: ignore[no-any-return]

    def _from_meta(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Geometry | None]:
        options = {k: _to_meta(v) for k, v in kwargs.items()}
        if "device" in options or not tensors(args):
            options["device"] = torch.device("meta")
        try:
            result = op.overload(*_to_meta(args), **options)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NotImplementedError) or "fake impl" in str(error) or "Meta" in str(error):
                self._refuse(
                    CaptureError,
                    f"the shape of {op.name}'s result is unknown: it has no meta kernel and the traced warm-up did not "
                    "call it with these shapes. Give the operator a fake implementation (torch.library.register_fake).",
                    op.name,
                )
            raise
        if not is_strided(result):
            self._refuse(
                CaptureError, f"{op.name} makes a sparse or nested tensor: the cpu device cannot record it.", op.name
            )
        return fresh_geometries(op, result)


class _CaptureMode(OperationMode):
    def __init__(self, session: CpuCapture) -> None:
        super().__init__("cpu")
        self._session = session

    def handle(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._session.record(op, args, kwargs)

    def handle_strange(self, func: Any, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._session.run_strange(func, kind, args, kwargs)

    def handle_opaque(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._session.refuse_opaque(str(func))


def fresh_geometries(op: Operation, result: Any) -> list[Geometry | None]:
    """Geometry of each tensor that the call made, in order, lists flattened; None for an undefined one."""
    return [geometry(r) for r in fresh_results(op, result)]


def _is_elsewhere(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Calls on the meta device and on other devices are none of ours."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return True
    return not all([t.is_cpu for t in tensors(args)])


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with inference_guard(torch.is_inference_mode_enabled()):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list):
        return [_to_meta(v) for v in value]
    if isinstance(value, tuple):
        return tuple(_to_meta(v) for v in value)
    return value
