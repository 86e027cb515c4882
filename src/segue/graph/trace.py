"""The trace: one eager, watched run of a forward pass, before it is captured.

Everything that a recording must know and that a capture cannot show is noted here, once: what each break returned, which
tensors of the outside world are read and written, host reads, random draws, side streams, the sequence of operations
with the user's lines. Breaks, ownership, error messages and the checker are readers of the trace; none looks for itself.

Two depths. The *full* trace watches every operation (10 to 20 microseconds each). In the *light* trace the break
wrappers alone take notes, which is enough for further sizes of a forward pass that was traced in full once.

The trace predicts, the capture decides: code may ask whether it is being captured and take another way there, so a host
read in the trace is a warning, in the capture an error. Bodies of breaks run outside every mode, unwatched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from segue._compat import data_address, keeping_mode_stacks, num_modes, storage_handle, storage_weakref, without_modes
from segue.device import Device, ShapeMemo
from segue.device.cpu_tape import fresh_results
from segue.device.operations import (
    LIFT,
    RESIZED,
    Operation,
    geometry,
    is_strided,
    operation,
    plain_arguments,
    signature,
    tensors,
    touched,
)
from segue.device.watch import GRAD, HostReads, Location, OperationMode, describe_line, user_line
from segue.errors import CaptureError, TraceMismatchError
from segue.graph.breaks import Mark, around_bodies, handling, running_body
from segue.graph.bridge import Fresh, OutputNote, note_output
from segue.graph.modes import SETTINGS, current_modes, kernel_modes, kernel_settings
from segue.graph.refusals import break_refusal, caught, holds_itself, set_inside, strange, unwatchable, without_one_memory
from segue.graph.state import Draws, default_generator
from segue.graph.streams import join, noting_streams
from segue.graph.tree import Spec, flatten, same_value, unflatten


class HostRead(NamedTuple):
    operation: str
    location: Location | None

    def __str__(self) -> str:
        return f"{self.operation} at {describe_line(self.location) or 'an unknown line'}"


@dataclass(frozen=True, slots=True)
class BreakNote:
    """One break as the trace met it. `scalars` holds plain leaves of the arguments by their index."""

    mark: Mark
    arguments: Spec
    scalars: dict[int, Any]
    output: OutputNote
    location: Location | None
    streams: tuple[Any, ...]
    """side streams with work since the break before"""
    joins: tuple[Any, ...]
    """streams that the body worked on"""
    changed: int | None
    """which argument's list, dictionary or other container the body changed"""


@dataclass(slots=True)
class Trace:
    """What one watched run showed. A light trace has breaks and seconds alone."""

    is_full: bool
    breaks: list[BreakNote] = field(default_factory=list)
    operations: list[tuple[Operation, Location | None]] = field(default_factory=list)
    plain_arguments: list[str] = field(default_factory=list)
    """of each operation"""
    externals: dict[int, torch.Tensor] = field(default_factory=dict)
    written: dict[int, torch.Tensor] = field(default_factory=dict)
    host_reads: list[HostRead] = field(default_factory=list)
    reads_grad: bool = False
    """whether a tensor's `grad` was asked for; seen where host reads of Python's are"""
    draws_random: bool = False
    draws: Draws = field(default_factory=Draws)
    draws_elsewhere: bool = False
    """whether numbers were drawn on another device, where a recording does not draw again"""
    devices: set[torch.device] = field(default_factory=set)
    """where the tensors lie that operations read from outside, or made; of these, `read_devices` of the former"""
    read_devices: set[torch.device] = field(default_factory=set)
    has_backward: bool = False
    """whether a result, of the pass or of a break, belongs to an autograd graph, which no recording has"""
    refusal: CaptureError | None = None
    """what no recording can hold"""
    shapes: ShapeMemo = field(default_factory=dict)
    streams: tuple[Any, ...] = ()
    seconds: float = 0.0

    def has_same_breaks(self, other: Trace) -> bool:
        return [n.mark for n in self.breaks] == [n.mark for n in other.breaks]

    def share(self, other: Trace) -> None:
        """Takes over what `other`, a full trace of the same function at another size, found and this one did not."""
        self.externals = other.externals
        self.written = other.written
        self.host_reads = other.host_reads
        self.draws_random = other.draws_random
        self.has_backward = self.has_backward or other.has_backward
        self.refusal = self.refusal or other.refusal
        self.streams = other.streams
        self.breaks = [
            replace(n, streams=o.streams, joins=o.joins) if o.streams or o.joins else n
            for n, o in zip(self.breaks, other.breaks, strict=True)
        ]

    def check_scalars(self, later: Trace) -> None:
        """An undeclared plain argument of a break that changed between two traces of one key would be stale at replay.

        Raises:
            CaptureError: names the break and the argument.
        """
        for before, after in zip(self.breaks, later.breaks, strict=False):
            for index, value in before.scalars.items():
                if index in after.scalars and not same_value(value, after.scalars[index]):
                    name = _argument_name(before, index)
                    if name in before.mark.static:
                        continue
                    raise CaptureError(
                        f"break {before.mark.name}: its argument {name} was {value!r} and then "
                        f"{after.scalars[index]!r} for the same shape, so a replay would see a stale value. Read the live "
                        "value from segue.current() inside the break, pass it as a tensor, or put it in the key.",
                        operation=before.mark.name,
                        location=describe_line(before.location),
                    )


Collect = Callable[[int, list[torch.Tensor]], None]
"""Told, after each operation of a full trace, its place and the tensors that it left behind."""


def traced(
    forward: Callable[[], Any], device: Device, *, is_full: bool, segmented: bool, collect: Collect | None = None
) -> tuple[Any, Trace]:
    """Runs `forward` once and returns its result and the trace. With `segmented`, marked functions are breaks;
    otherwise their bodies are part of what is watched. The caller's own exception passes through unchanged."""
    trace = Trace(is_full)
    watch = _TraceMode(trace, device, collect) if is_full else None
    handler = _TraceHandler(trace, watch, device) if segmented else None
    start = time.perf_counter()
    with keeping_mode_stacks(), without_autocast_cache(), handling(handler), _watching(watch, device, trace):
        if handler is not None:
            handler.begin()
        output = forward()
    trace.seconds = time.perf_counter() - start
    leaves = flatten(output)[0]
    trace.has_backward = trace.has_backward or _has_backward(leaves)
    if watch is not None:  # an outside tensor may be returned without any operation
        watch.note_read([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], is_passed_on=True)
        trace.streams = watch.take_streams()
        watch.forget()
    return output, trace


@contextmanager
def _watching(watch: _TraceMode | None, device: Device, trace: Trace) -> Iterator[None]:
    if watch is None:
        yield
        return

    def note(what: str) -> None:
        if what == GRAD:
            trace.reads_grad = True
        else:
            trace.host_reads.append(HostRead(what, user_line()))

    reads = nullcontext() if device.kind != "cpu" else HostReads(note)
    with reads, watch:
        yield


class without_autocast_cache:
    """Autocast's weight cache would freeze a cast copy of a weight, or lend one capture's casts to the next."""

    def __enter__(self) -> None:
        self._was_enabled = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._was_enabled)


class _TraceMode(OperationMode):
    """Notes every primitive operation. Storages are told apart by handle, and a weak reference to each storage made
    inside keeps its handle from being given to another."""

    def __init__(self, trace: Trace, device: Device, collect: Collect | None) -> None:
        super().__init__(device.kind)
        self._collect = collect
        self._trace = trace
        self._device = device
        self._inside: dict[int, Any] = {}
        self._main = device.current_stream()
        self._side: dict[Any, None] = {}
        self._settings = kernel_settings()

    def handle(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = self._trace
        location = user_line()
        try:
            key, outs = self._before(op, args, kwargs, location)
        except Exception as error:  # of torch's, about what it cannot say of such tensors: none of the caller's
            trace.refusal = trace.refusal or unwatchable(op, error, location)
            return op.overload(*args, **kwargs)
        try:
            result = self._drawing(op, args, kwargs) if op.is_random else op.overload(*args, **kwargs)
        except Exception as error:
            if self._device.traces_shapes:  # where nothing runs in a capture, it would not be raised there
                trace.refusal = trace.refusal or caught(op, error, location)
            raise
        try:
            self._after(op, args, kwargs, location, key, outs, result)
        except Exception as error:
            trace.refusal = trace.refusal or unwatchable(op, error, location)
        return result

    def handle_strange(self, func: OpOverload, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._trace.refusal = self._trace.refusal or strange(operation(func), kind, user_line())
        return func(*args, **kwargs)

    def _before(self, op: Operation, args: Any, kwargs: dict[str, Any], location: Location | None) -> tuple[Any, Any]:
        """Notes what an operation is told. Answers with its signature and how its `out=` lies, where results are noted."""
        trace = self._trace
        trace.operations.append((op, location))
        trace.plain_arguments.append(plain_arguments(args, kwargs))
        if op.reads_host(args):
            trace.host_reads.append(HostRead(op.name, location))
        if op.name == LIFT:  # a constant of the program, made here
            self.note_made(args)
        self.note_read(args)
        if kwargs:
            self.note_read(tuple(kwargs.values()))
        for tensor in op.written(args, kwargs) if op.may_write else ():
            handle = storage_handle(tensor)
            if handle not in self._inside:
                trace.written[handle] = tensor
        if self._main is not None:
            self._note_stream()
        outs = [geometry(t) for t in op.declared(args, kwargs)] if op.has_out else None
        key = signature(op, args, kwargs) if self._device.traces_shapes and (op.returns_fresh or outs) else None
        if self._device.traces_shapes and kernel_settings() != self._settings:  # elsewhere the recorded kernel stays
            trace.refusal = trace.refusal or set_inside(op, location, self._settings)
        return key, outs

    def _after(
        self, op: Operation, args: Any, kwargs: dict[str, Any], location: Location | None, key: Any, outs: Any, result: Any
    ) -> None:
        trace = self._trace
        if self._device.traces_shapes and any(t.is_quantized or t.is_nested for t in tensors(result)):
            trace.refusal = trace.refusal or without_one_memory(op, tensors(result), location)
        if op.is_random and any(t.device != self._device.device for t in tensors(result)):
            trace.draws_elsewhere = True
        if op.returns_fresh and is_strided(result):
            self._note_results(op, key, result)
        elif outs is not None and key is not None:
            trace.shapes[key] = None if outs == [geometry(t) for t in op.declared(args, kwargs)] else RESIZED
        if self._collect is not None:
            self._collect(len(trace.operations) - 1, touched(op, args, kwargs, result))

    def note_read(self, value: Any, *, is_passed_on: bool = False) -> None:
        for tensor in tensors(value):
            if tensor.layout is not torch.strided:
                continue
            handle = storage_handle(tensor)
            if handle not in self._inside and handle not in self._trace.externals:
                self._trace.externals[handle] = tensor.detach()
            if handle not in self._inside and not is_passed_on:
                self._trace.read_devices.add(tensor.device)
                self._trace.devices.add(tensor.device)

    def note_made(self, value: Any) -> None:
        for tensor in tensors(value):
            if tensor.layout is not torch.strided:
                continue
            handle = storage_handle(tensor)
            if handle not in self._inside:
                self._inside[handle] = storage_weakref(tensor)
                self._trace.devices.add(tensor.device)

    def take_streams(self) -> tuple[Any, ...]:
        streams, self._side = tuple(self._side), {}
        return streams

    def forget(self) -> None:
        self._inside.clear()

    def _note_results(self, op: Operation, key: Any, result: Any) -> None:
        fresh = fresh_results(op, result)
        self.note_made(fresh)
        if key is not None:
            self._trace.shapes[key] = [geometry(r) for r in fresh]

    def _note_stream(self) -> None:
        stream = self._device.current_stream()
        if stream != self._main:
            self._side[stream] = None

    def _drawing(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tag covers operations that may draw; whether this call drew shows in the generator."""
        generator = kwargs.get("generator") or default_generator(self._device.device)
        before = generator.get_state()
        result = op.overload(*args, **kwargs)
        after = generator.get_state()
        if not torch.equal(before, after):
            self._trace.draws_random = True
            self._trace.draws.note(generator, before, after)
        return result


class _TraceHandler:
    def __init__(self, trace: Trace, watch: _TraceMode | None, device: Device) -> None:
        self._trace = trace
        self._device = device
        self._watch = watch

    def begin(self) -> None:
        """The pass begins: its breaks must be met in modes that a replay has too."""
        self._modes = self._entered()

    def _entered(self) -> dict[str, Any]:
        """Modes that a replay does not carry to bodies, as it does grad mode, inference mode and autocast."""
        settings = zip(SETTINGS, kernel_settings(), strict=True)
        return dict(zip(("a function mode", "a dispatch mode"), num_modes(), strict=True)) | dict(settings)

    def on_break(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self._watch
        location = user_line() if watch is not None else None
        streams = watch.take_streams() if watch is not None else ()
        leaves, spec = flatten((args, kwargs))
        if spec.is_leaf:
            self._trace.refusal = holds_itself(mark, location)
            with handling(None), running_body():
                return mark.function(*args, **kwargs)
        noting: AbstractContextManager[list[Any]] = nullcontext([])
        if watch is not None:
            noting = noting_streams(self._device)
        entered = [name for name, value in self._entered().items() if value != self._modes[name]]
        around = around_bodies.get()
        watched = nullcontext() if around is None else around(mark, leaves)
        lying = _lying(leaves)
        outside = nullcontext() if entered else without_modes(HostReads)  # not the pass's own, which the body is met in
        with handling(None), outside, running_body():
            standing = _standing(self._device.kind)
            with watched, noting as joins:
                results, result_spec = flatten(mark.function(*args, **kwargs))
            join(self._device, joins)
            sets = _standing(self._device.kind) != standing
            refusal = break_refusal(
                mark, location, leaves, results, is_moved=_lying(leaves) != lying, entered=entered, sets_modes=sets
            )
            if refusal is not None:
                self._trace.refusal = refusal
                return unflatten(result_spec, iter(results))
            output = note_output(result_spec, results, leaves)
            if watch is not None:
                watch.note_read(leaves, is_passed_on=True)
                watch.note_made([r for r, note in zip(results, output.leaves, strict=True) if isinstance(note, Fresh)])
        self._trace.draws.pause()
        self._trace.has_backward = self._trace.has_backward or _has_backward(results)
        scalars = {i: v for i, v in enumerate(leaves) if not isinstance(v, torch.Tensor)}
        changed = _changed_argument(spec, leaves, args, kwargs)
        self._trace.breaks.append(BreakNote(mark, spec, scalars, output, location, streams, tuple(joins), changed))
        return unflatten(result_spec, iter(results))


def _standing(kind: str) -> Any:
    """Modes that a body may set and leave."""
    return kernel_modes(kind), current_modes(kind), torch.get_num_threads(), torch.is_anomaly_enabled()


def _lying(leaves: list[Any]) -> list[Any]:
    """Where tensors lie, and how."""
    strided = [t for t in leaves if isinstance(t, torch.Tensor) and t.layout is torch.strided]
    return [(data_address(t), t.shape, t.stride()) for t in strided]


def _changed_argument(spec: Spec, before: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Which argument's containers the body put something else in, or None."""
    if has_flat_arguments(spec):
        return None
    at = 0
    for index, (child, value) in enumerate(zip(_argument_specs(spec), (*args, *kwargs.values()), strict=True)):
        old, at = before[at : at + _size(child)], at + _size(child)
        new, spec_after = flatten(value)
        if spec_after != child or not all(_is_unchanged(a, b) for a, b in zip(old, new, strict=True)):
            return index
    return None


def has_flat_arguments(spec: Spec) -> bool:
    """Whether no argument is a container; `spec` is that of ``(args, kwargs)``."""
    return all([child.is_leaf for child in _argument_specs(spec)])


def expect_break(trace: Trace, index: int, mark: Mark, arguments: Spec) -> BreakNote:
    """The trace's note of the break that a capture meets as its `index`-th.

    Raises:
        TraceMismatchError: the trace met another break, or none, or called it with another structure.
    """
    note = trace.breaks[index] if index < len(trace.breaks) else None
    if note is not None and note.mark is mark and note.arguments == arguments:
        if note.changed is not None:
            name = _argument_names(note)[note.changed]
            raise CaptureError(
                f"break {mark.name} changed the container that it was given as {name}: a recording cannot repeat "
                "that for the code that follows. Return the new value, or change a copy.",
                operation=mark.name,
                location=describe_line(note.location),
            )
        return note
    expected = "no further break" if note is None else f"{note.mark.name} with {note.arguments!r}"
    is_redefined = note is not None and note.mark is not mark and note.mark.name == mark.name
    advice = "a function marked inside the forward pass is a new break at every call: mark it outside"
    if not is_redefined:
        advice = "the order of eager breaks must not depend on anything but the captured shape"
    raise TraceMismatchError(
        f"break {index} of this capture is {mark.name} with {arguments!r}, where the warm-up met {expected}: {advice}",
        operation=mark.name,
        location=describe_line(user_line()),
    )


def _has_backward(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves)


def _is_unchanged(before: Any, after: Any) -> bool:
    return before is after or (not isinstance(before, torch.Tensor) and same_value(before, after))


def _argument_specs(arguments: Spec) -> tuple[Spec, ...]:
    positional, named = arguments.children
    return (*positional.children, *named.children)


def _argument_names(note: BreakNote) -> list[str]:
    """The parameter of each argument, positional ones first."""
    import inspect

    positional, named = note.arguments.children
    try:
        parameters = list(inspect.signature(note.mark.function).parameters)
    except (TypeError, ValueError):
        parameters = []
    names = [parameters[i] if i < len(parameters) else f"#{i}" for i in range(len(positional.children))]
    return [*names, *named.context]


def _argument_name(note: BreakNote, index: int) -> str:
    """The parameter that a leaf of the arguments belongs to."""
    owners = [
        name
        for name, spec in zip(_argument_names(note), _argument_specs(note.arguments), strict=True)
        for _ in range(_size(spec))
    ]
    return owners[index]


def _size(spec: Spec) -> int:
    return 1 if spec.is_leaf else sum(_size(child) for child in spec.children)
