"""Recording a forward pass as an ordered list of segments and breaks, and replaying it.

Capture is a transaction. It either yields a `Recording`, or raises with everything back in its place: partial segments
destroyed, stream, modes and generators as before, memory given back, the next capture working. A fault of the capture
is raised as `CaptureError`, naming operation and line; an exception of the user's own code passes unchanged.

At a break (`Recorder.on_break`) the open segment ends, the break's arguments are kept by alias or by ownership, the next
segment begins, and the break's result is built in it from what the trace noted. The body does not run: its inputs hold
no data yet. A segment that recorded nothing is dropped.

The output needs no memory of its own. It is an alias of where the last operations wrote it, in the pool, and stays valid
until the lane's next replay or capture, since nothing else writes there; whoever keeps it longer copies it (`lease`).
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from segue._compat import data_address, inference_guard
from segue.device import Capture, Device, DeviceGraph, Pool
from segue.device.operations import Operation, is_strided, plain_arguments, tensors, touched
from segue.device.watch import Location, describe_line, user_line
from segue.errors import CaptureError, ReplayError, TraceMismatchError
from segue.graph.break_step import Break, break_step
from segue.graph.breaks import Mark, handling
from segue.graph.bridge import Fresh, build_output, delivery
from segue.graph.guard import CaptureInterrupted, capturing, interruption, is_lent
from segue.graph.lease import Returned, as_returned
from segue.graph.modes import Modes, current_modes
from segue.graph.ownership import OutsideAccess, Ownership, escape_error
from segue.graph.ranges import ranged, wants_ranges
from segue.graph.streams import after_joining
from segue.graph.trace import Trace, expect_break, without_autocast_cache
from segue.graph.tree import flatten, unflatten


@dataclass(frozen=True, slots=True)
class Difference:
    """The first operation in which a watched capture differed from its trace."""

    index: int
    traced: str
    captured: str


@dataclass(frozen=True, slots=True)
class OperationNote:
    """One recorded operation that is a segment of its own: its place among all operations of the pass, its name and the
    user's line, and aliases of the tensors that it leaves behind."""

    index: int
    operation: str
    location: str | None
    results: tuple[torch.Tensor, ...]


class Recording:
    """Ordered steps and their output. Owns its graphs and the outside tensors it reads, until `close`; its memory
    belongs to the pool. Not locked: the lane serialises replays."""

    def __init__(self, steps: list[DeviceGraph | Break], output: Any, owned: list[torch.Tensor]) -> None:
        self.steps = steps
        self.output = output
        self.owned = owned
        self.capture_s = 0.0
        self.pool_bytes = 0
        self.difference: Difference | None = None
        self.externals: dict[int, torch.Tensor] = {}
        """the outside tensors that are read, by storage handle; of these, `written` are also written"""
        self.written: dict[int, torch.Tensor] = {}
        self.counted: list[torch.Tensor] = []
        """the outside tensors whose versions a replay must raise, as eager does"""
        self.restrided: dict[int, bool] = {}
        """storages of which `as_strided` made views, and whether one named its place in the storage"""
        self.returned: list[Returned] = []
        """of each leaf of the output, how the pass returned it"""
        self.generators: list[torch.Generator] = []
        """those that it draws from"""
        self.unseen: list[str] = []
        """where work was recorded that no torch operation launched, if that was looked for: what it reads is not known"""
        self.operations: dict[int, OperationNote] = {}
        """by step, where each operation was recorded as a segment of its own"""
        self._calls: list[Callable[[], None]] = []
        for at, step in enumerate(steps):
            prime = None if isinstance(step, Break) else step.primer(is_first=at == 0)
            if prime is not None:
                self._calls.append(_unless_primed(steps[at - 1], prime))
            self._calls.append(ranged(_step_name(at, step), step.replay) if wants_ranges() else step.replay)

    @property
    def segments(self) -> list[DeviceGraph]:
        return [step for step in self.steps if not isinstance(step, Break)]

    @property
    def breaks(self) -> list[Break]:
        return [step for step in self.steps if isinstance(step, Break)]

    @property
    def memory(self) -> list[torch.Tensor]:
        """What a replay may write: what the recording owns, and what bodies of breaks are called with."""
        return [*self.owned, *[tensor for met in self.breaks for tensor in met.tensors]]

    @property
    def nodes(self) -> int | None:
        counts = [segment.nodes for segment in self.segments]
        return None if None in counts else sum(n for n in counts if n is not None)

    @property
    def instantiate_s(self) -> float:
        return sum(segment.instantiate_s for segment in self.segments)

    def replay(self) -> Any:
        """Runs the steps in order on the current stream and returns the output, valid until the lane's next replay.

        Raises:
            BreakOutputError: a break's result does not fit; later steps have not run.
        """
        for call in self._calls:
            call()
        return self.output

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        self.steps = []
        self._calls = [_closed]
        self.output = None
        self.owned = []
        self.externals = {}
        self.written = {}
        self.counted = []
        self.returned = []


def _step_name(at: int, step: DeviceGraph | Break) -> str:
    return f"segue {at} {step.mark.name if isinstance(step, Break) else 'segment'}"


def _unless_primed(before: DeviceGraph | Break, prime: Callable[[], None]) -> Callable[[], None]:
    if not isinstance(before, Break):
        return prime

    def run() -> None:
        if not before.primes:
            prime()

    return run


def _closed() -> None:
    raise ReplayError("this recording was closed (evicted, or its owner was closed): capture it again")


class Recorder:
    """Records one forward pass. Use one object for one attempt.

    With `per_operation` (needs a full trace) each operation becomes a segment of its own, so that a fault can be
    followed to one of them. With `notes_unseen` (likewise) the recording tells work that no torch operation launched.
    """

    def __init__(
        self,
        device: Device,
        pool: Pool,
        stream: Any,
        trace: Trace,
        *,
        segmented: bool,
        per_operation: bool = False,
        notes_unseen: bool = False,
    ) -> None:
        self._device = device
        self._pool = pool
        self._stream = stream
        self._trace = trace
        self._segmented = segmented
        self._notes_unseen = notes_unseen
        self._ownership = Ownership(device, pool, trace.externals)
        self._steps: list[DeviceGraph | Break] = []
        self._num_breaks = 0
        self._operations: dict[int, OperationNote] = {}
        self._watch = _CaptureWatch(trace, self._split_after if per_operation else None) if trace.is_full else None
        self._session: Capture | None = None
        self._modes = current_modes(device.kind)

    def record(self, forward: Callable[[], Any]) -> Recording:
        """Captures `forward`, which must do what the trace saw. Executes nothing.

        Raises:
            CaptureError: the pass cannot be recorded; what is at fault is named.
            Exception: what `forward` itself raised, unchanged.
        """
        if self._trace.refusal is not None:
            raise self._trace.refusal
        if self._trace.has_backward:
            raise CaptureError(
                "the pass was run with grad mode on and its result requires grad: a recording has no backward. Record it "
                "under torch.no_grad() or torch.inference_mode()."
            )
        if is_lent():
            raise CaptureError(
                "a capture was asked for inside Lane.lend(), where this thread's allocations go to the lent pool: capture "
                "before, or call without a loan"
            )
        start = time.perf_counter()
        self._ownership.check_externals()
        recording = self._capture(forward)
        escaped = self._ownership.escaped()
        if escaped:
            recording.close()
            raise escape_error(escaped, self._watch.made_at if self._watch is not None else {})
        recording.pool_bytes = self._ownership.grown_bytes
        recording.capture_s = time.perf_counter() - start
        if self._watch is not None:
            recording.difference = self._watch.first_difference()
            recording.operations = self._operations
        return recording

    def _capture(self, forward: Callable[[], Any]) -> Recording:
        shapes = self._trace.shapes
        with capturing(), _no_collection(), without_autocast_cache(), handling(self if self._segmented else None):
            noting = self._notes_unseen
            with self._device.capture(self._pool, self._stream, self._watch, shapes, notes_unseen=noting) as session:
                self._session = session
                try:
                    session.begin()
                    output = forward()
                    self._end_segment(self._trace.streams)
                    self._expect_all_breaks()
                except BaseException as error:
                    failure = self._undo(session, error)
                    if failure is None:
                        raise
                    raise failure from None
        leaves, spec = flatten(output)
        del output
        kept = [self._keep(leaf) for leaf in leaves]
        returned = as_returned(leaves, self._ownership.is_outside)
        if self._watch is not None:
            self._watch.outside.note_read(leaves)  # an outside tensor may be returned without any operation
        del leaves
        outside = self._trace if self._watch is None else self._watch.outside
        owned = list(self._ownership.owned.values()) + list(outside.externals.values())
        recording = Recording(self._steps, unflatten(spec, iter(kept)), owned)
        recording.externals, recording.written = outside.externals, outside.written
        recording.returned = returned
        recording.generators = self._trace.draws.generators
        if self._watch is not None:
            recording.counted = list(self._watch.outside.counted.values())
            recording.restrided = self._watch.outside.restrided
        recording.unseen = list(dict.fromkeys(session.unseen))
        return recording

    def _undo(self, session: Capture, error: BaseException) -> BaseException | None:
        """Puts everything back and returns the fault of the capture, or None for the user's own exception."""
        failure = session.failure(error)
        session.abort()
        for step in self._steps:
            if not isinstance(step, Break):
                step.close()
        self._steps = []
        if failure is not None:
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the pool
        return failure

    def _end_segment(self, streams: tuple[Any, ...]) -> None:
        assert self._session is not None
        for stream in streams:
            self._device.order(stream, self._stream)
        segment = self._session.end()
        if segment is not None:
            self._steps.append(segment)

    def _split_after(self, index: int, op: Operation, location: Location | None, results: list[torch.Tensor]) -> None:
        """Ends the segment that holds `op` alone; operations that are no work (views) leave none."""
        assert self._session is not None
        with self._session.unrecorded(), inference_guard(False), torch.no_grad():
            aliases = tuple([self._ownership.keep(r) for r in results])
        num_steps = len(self._steps)
        self._end_segment(())
        self._session.begin()
        if len(self._steps) > num_steps:
            self._operations[num_steps] = OperationNote(index, op.name, describe_line(location), aliases)

    def _expect_all_breaks(self) -> None:
        if self._segmented and self._num_breaks < len(self._trace.breaks):
            missing = self._trace.breaks[self._num_breaks]
            raise TraceMismatchError(
                f"the capture ended without the break {missing.mark.name}, which the warm-up met",
                operation=missing.mark.name,
                location=describe_line(missing.location),
            )

    def _keep(self, leaf: Any) -> Any:
        return self._ownership.keep(leaf) if isinstance(leaf, torch.Tensor) else leaf

    # -- BreakHandler -------------------------------------------------------------------------------------------------

    def on_break(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        modes = current_modes(self._device.kind)
        with inference_guard(False), torch.no_grad():
            return self._on_break(mark, None if modes == self._modes else modes, args, kwargs)

    def _on_break(self, mark: Mark, modes: Modes | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = flatten((args, kwargs))
        note = expect_break(self._trace, self._num_breaks, mark, spec)
        self._num_breaks += 1
        assert self._session is not None
        with self._session.unrecorded():
            once = {id(leaf): self._keep(leaf) for leaf in leaves}  # one tensor stays one
        kept = [once[id(leaf)] for leaf in leaves]
        self._end_segment(note.streams)
        self._session.begin()
        for stream in note.streams:
            self._device.order(self._stream, stream)
        with self._unwatched():
            output, results = build_output(note.output, leaves, self._device.device)
        with self._session.unrecorded():
            targets = [self._keep(leaf) for leaf in results]
            deliver = after_joining(self._device, note.joins, delivery(mark.name, note.output, targets, kept))
            if self._watch is not None:
                self._watch.outside.note_read(leaves)
                self._watch.outside.note_made([r for r, n in zip(results, note.output.leaves) if isinstance(n, Fresh)])
                self._watch.outside.note_read(results)
        out = targets[0] if mark.can_take_out(args, kwargs) and len(note.output.fresh) == len(targets) == 1 else None
        self._steps.append(break_step(mark, modes, spec, kept, deliver, out, note))
        return output

    def _unwatched(self) -> AbstractContextManager[Any]:
        return _NOTHING if self._watch is None else self._watch.paused()


_NOTHING = nullcontext()


class _CaptureWatch:
    """Compares a capture with its trace, operation by operation, and notes where blocks were made."""

    def __init__(
        self,
        trace: Trace,
        after: Callable[[int, Operation, Location | None, list[torch.Tensor]], None] | None,
    ) -> None:
        self._traced, self._told = trace.operations, trace.plain_arguments
        self._after = after
        self._should_stop = interruption.get()
        self._index = 0
        self.is_paused = False
        self._difference: Difference | None = None
        self.made_at: dict[int, str] = {}
        self.outside = OutsideAccess()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is our own bookkeeping."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def first_difference(self) -> Difference | None:
        """Once the capture is over."""
        if self._difference is None and self._index < len(self._traced):
            return Difference(self._index, _describe(self._traced[self._index]), _describe(None))
        return self._difference

    def __call__(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.is_paused:
            return
        if self._should_stop is not None and self._should_stop():
            raise CaptureInterrupted
        self.outside.note(op, args, kwargs, result)
        location = user_line()
        index, self._index = self._index, self._index + 1
        if self._difference is None:
            expected = self._traced[index] if index < len(self._traced) else None
            if expected is None or expected[0] is not op or self._told[index] != plain_arguments(args, kwargs):
                self._difference = Difference(index, _describe(expected), _describe((op, location)))
        if op.returns_fresh and is_strided(result):
            line = describe_line(location)
            for tensor in tensors(result):
                if line is not None and tensor.numel():
                    self.made_at[data_address(tensor)] = line
        if self._after is not None:
            self._after(index, op, location, touched(op, args, kwargs, result))


def _describe(operation: tuple[Operation, Location | None] | None) -> str:
    if operation is None:
        return "nothing"
    return f"{operation[0].name} at {describe_line(operation[1]) or 'an unknown line'}"


class _no_collection:
    """Addresses must not depend on when the cyclic collector runs, nor may it free device memory during capture."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()


__all__ = ["Break", "Difference", "Recorder", "Recording"]
