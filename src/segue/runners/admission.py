"""Admitting a call: it is traced, answers its caller with the trace's result, and is captured at once.

Device work runs once. Where the static inputs lie as the live ones do, the trace runs on the caller's own tensors, so
aliasing, in-place writes and results that are arguments are eager's by construction; the capture then runs the body once
more on static inputs and executes nothing. Whatever goes wrong after the trace, the caller has an answer: the refusal is
returned with its reason, and what the second run of the body changed in Python is put back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from segue._compat import data_address, storage_handle
from segue.backends import Backend
from segue.errors import CaptureError, HostReadError, SegueError
from segue.graph import Call, Recording, Trace, calling
from segue.graph.audit import Audit
from segue.graph.breaks import around_bodies
from segue.graph.bridge import Argument, External
from segue.graph.context import setting
from segue.graph.effects import BodyEffects, HostState, hooks
from segue.graph.guard import interruption
from segue.graph.lease import Outputs, as_returned
from segue.graph.modes import kernel_modes
from segue.graph.reach import Reach, is_marked
from segue.graph.state import default_generator, keeping_modes, parts_of
from segue.graph.tree import Spec, flatten
from segue.memory.lane import Lane
from segue.observe.decision import Reason
from segue.runners.call_graph import CallGraph, StaticCall
from segue.runners.call_held import Asking, Held
from segue.runners.call_key import Scan, facts, inconstant
from segue.runners.call_padding import Padded, cut
from segue.runners.call_store import Entry
from segue.shapes.key import ShapeKey


@dataclass(slots=True)
class Admission:
    """What came of it: the caller's answer, and a recording or the reason why there is none."""

    output: Any
    graph: CallGraph | None = None
    reason: Reason | None = None
    detail: str = ""
    error: Exception | None = None
    effects: list[str] = field(default_factory=list)
    operations: int = 0
    difference: str = ""
    """where the run that was to be recorded went another way than the traced one"""


CHANGED_ARGUMENT = (
    "the call changes an argument beyond its data: what a container holds, or a tensor's shape, flags or attributes"
)


_LEAVE_PATH = "torch.backends.mha.set_fastpath_enabled(False) makes eager leave it too"


class _Refused(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def admit(
    function: Callable[..., Any],
    origin: Callable[..., Any],
    backend: Backend,
    entry: Entry,
    scan: Scan,
    padded: Padded | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Admission, Callable[[], None] | None]:
    """Traces a call of `function`, which wraps `origin` (where the search for what it reads starts). Answers with the
    admission so far, and what completes it: that captures, and fills in the recording or the reason why there is none.
    It may be run again where it was interrupted. None where there is nothing to complete.

    Hold the backend's lane for both, and have nested wrapped calls run inline.

    Raises:
        Exception: what the function itself raised in its ordinary run, unchanged.
    """
    static = StaticCall(scan, padded)
    is_live = static.is_like(scan.tensors)
    search = functools.partial(_searching(function, origin, scan), follows_breaks=not backend.is_segmented)
    try:
        reach = search()
        before = HostState(reach)
    except Exception as error:  # a container of the user's that cannot be read: no error of the call's
        with calling(Call(args, kwargs)):
            output = function(*args, **kwargs)
        detail = f"what it reaches cannot be read: {type(error).__name__}: {error}"
        return Admission(output, reason=Reason.CAPTURE_FAILED, detail=detail, error=error), None
    fast = _fast_path(reach) if static.device.type == "cpu" else None
    if fast is not None:
        with calling(Call(args, kwargs)):
            output = function(*args, **kwargs)
        detail = f"a {fast} takes a path on the cpu device that torch leaves while it is watched"
        return Admission(output, reason=Reason.CAPTURE_FAILED, detail=f"{detail}: {_LEAVE_PATH}"), None
    if not is_live and (static.overlaps or _are_held(search, scan.tensors)):
        with calling(Call(args, kwargs)):
            output = function(*args, **kwargs)
        detail = "arguments share memory in a way that copies cannot keep"
        return Admission(output, reason=Reason.ALIASED_INPUTS, detail=detail), None
    if not is_live:
        with torch.no_grad():
            static.load(scan.tensors)
    called, named = (args, kwargs) if is_live else (static.args, static.kwargs)
    inputs = scan.tensors if is_live else static.buffers
    versions = [_version(t) for t in inputs]
    known = facts(inputs)
    bodies = BodyEffects(reach, before)
    starts = [(g, g.get_state()) for g in (default_generator(static.device), *reach.generators())]
    with calling(Call(args, kwargs)), setting(around_bodies, bodies.around):
        output, trace = backend.trace(lambda: function(*called, **named))
    written = {i for i, t in enumerate(inputs) if _is_written(t, versions[i], trace)}
    static.uncounted = {i for i in written if versions[i] is not None and _version(inputs[i]) == versions[i]}
    returned = [TensorWeakRef(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in flatten(output)[0]]
    opaque = inconstant(output)
    _hand_over(backend.lane, output)
    is_kept = facts(inputs) == known
    if not is_live:
        written |= {i for i in static.distinct if _differ(static.live_part(i, scan.tensors[i]), scan.tensors[i])}
        output = _from_static(output, static, scan, padded, trace, written)
    admission = Admission(output, operations=len(trace.operations))
    touched: set[str] = set()
    with _refusing(admission):
        touched.update(before.changed())
        if not is_kept or not keeps_arguments(scan, args, kwargs):
            raise _Refused(Reason.UNSAFE_EFFECTS, CHANGED_ARGUMENT)
        if opaque is not None:
            detail = (
                f"the result holds a {type(opaque).__name__}, which is no plain tensor, nor a value that can be compared"
            )
            raise _Refused(Reason.UNSAFE_EFFECTS, detail)
        _check(trace, static, scan, backend.lane, written)
        returns_argument = any(isinstance(leaf, Argument) for note in trace.breaks for leaf in note.output.leaves)
        if returns_argument and _are_held(search, scan.tensors):
            detail = "a break returns state, and this call's argument is part of it: a later call is recorded"
            raise _Refused(Reason.REBOUND, detail)
        _check_carriers(_carriers(scan))
        _check_world(trace, reach, scan, starts)
        for name, changed in bodies.changed.items():
            detail = f"break {name} changes {_names(changed)}, which what follows it may read: return the new value instead"
            raise _Refused(Reason.UNSAFE_EFFECTS, detail)
        for name, held in bodies.held().items():
            detail = f"break {name} is called while {_names(held)} is changed for the moment, which a replay does not repeat"
            raise _Refused(Reason.UNSAFE_EFFECTS, f"{detail}: change it inside the break, or pass the value to it")
    if admission.reason is not None:
        return admission, None
    handles = list(map(storage_handle, inputs))
    read = {handle for handle in handles if trace.externals.pop(handle, None) is not None}
    asking = None if entry.base is None else Asking(handles, read, output)

    def complete() -> None:
        with _refusing(admission):
            live = Call(args, kwargs)
            lasting = [None if leaf is None else leaf() for leaf in returned]
            parts = function, search, backend, entry.shape, static, trace, written, touched, admission, live
            admission.graph = _capture(*parts, lasting, asking)

    return admission, complete


def held_by(function: Callable[..., Any], origin: Callable[..., Any], scan: Scan) -> Held | None:
    """The tensors that the callable, bodies of breaks and plain arguments reach; None where they cannot be read."""
    try:
        return Held(_searching(function, origin, scan)(follows_breaks=True))
    except Exception:  # a container of the user's
        return None


def _searching(function: Callable[..., Any], origin: Callable[..., Any], scan: Scan) -> Callable[..., Reach]:
    return functools.partial(Reach, function if is_marked(function) else origin, _carriers(scan))


def _carriers(scan: Scan) -> list[Any]:
    """What of a call is no tensor and may lead to some."""
    leaves = [leaf for leaf in scan.leaves if not isinstance(leaf, torch.Tensor)]
    return [*leaves, *(scan.structure.objects if isinstance(scan.structure, Spec) else ())]


@contextmanager
def _refusing(admission: Admission) -> Iterator[None]:
    """What is raised inside is a reason: the caller has the trace's answer, so it is no error of the call's."""
    try:
        yield
    except _Refused as refusal:
        admission.reason, admission.detail = refusal.reason, str(refusal)
    except HostReadError as error:
        admission.reason, admission.detail, admission.error = Reason.DATA_DEPENDENT, str(error), error
    except Exception as error:
        detail = str(error) if isinstance(error, SegueError) else f"{type(error).__name__}: {error}"
        admission.reason, admission.detail, admission.error = Reason.CAPTURE_FAILED, detail, error


def _capture(
    function: Callable[..., Any],
    search: Callable[..., Reach],
    backend: Backend,
    key: ShapeKey,
    static: StaticCall,
    trace: Trace,
    written: set[int],
    touched: set[str],
    admission: Admission,
    live: Call,
    lasting: list[Any],
    asking: Asking | None,
) -> CallGraph:
    """`search` says what the callable reaches now; `touched` names what the trace changed in Python, `lasting` are its
    results. `asking` is given where an argument is a tensor that the callable holds."""
    reach = search()
    if reach.opaque:
        raise _Refused(Reason.UNSAFE_EFFECTS, reach.opaque[0])
    state, before = HostState(reach), Audit(reach, {storage_handle(t): t for t in reach.tensors() if _is_strided(t)})

    def is_own(label: str, value: Any) -> bool:
        return label in touched or _holds_memory_of(backend.lane, value)

    changed: list[str] = []
    sets = None if interruption.get() is None else reach.stores  # in the background others run beside
    graph: Any = None
    modes = keeping_modes(static.device)
    try:
        with calling(live), modes, backend.lane.capture_pass():
            graph = backend.record(key, lambda: function(*static.args, **static.kwargs), trace)
    except CaptureError as error:
        changed = state.restore(is_own, sets)
        if changed and not isinstance(error, HostReadError):
            raise _Refused(Reason.UNSAFE_EFFECTS, f"{_effects_text(changed)}; {error}") from error
        raise
    finally:
        changed = changed or state.restore(is_own, sets)
    try:
        if changed:
            raise _Refused(Reason.UNSAFE_EFFECTS, _effects_text(changed))
        if modes.changed:
            detail = "leaves a mode of torch changed, which a replay would not"
            raise _Refused(Reason.UNSAFE_EFFECTS, f"the run that is recorded {detail}")
        if asking is not None and asking.shows_in(graph.recording, trace, static.buffers, reach):
            detail = "an argument is a tensor that the callable holds, or part of one, and a copy of it is treated otherwise"
            raise _Refused(Reason.ALIASED_INPUTS, f"{detail}: pass a copy (clone()) where that is not meant")
        if graph.recording.difference is not None:
            found = graph.recording.difference
            if interruption.get() is None:
                modes.undo_seeds()
            admission.difference = f"{found.traced}; then {found.captured}"
            detail = f"goes another way than the call before it ({admission.difference}): a later call is recorded"
            raise _Refused(Reason.REBOUND, f"the run that is recorded {detail}")
        if not static.is_intact():
            raise _Refused(Reason.UNSAFE_EFFECTS, CHANGED_ARGUMENT)
        handles = {storage_handle(b) for b in static.buffers}
        if any(h in static.with_gaps or (at and h in handles) for h, at in graph.recording.restrided.items()):
            raise _Refused(
                Reason.ALIASED_INPUTS, "as_strided looks around an argument: pass all that it reads, without an offset"
            )
        reach = search()
        admission.effects = hooks(reach)
        if graph.recording.unseen:
            admission.effects.append(_take_all_as_touched(graph.recording, reach, static))
            written = set(static.distinct)
        strange = _strange(graph.recording, trace, static, reach)
        if strange is not None and not state.others and before.holds():  # what was exchanged meanwhile may look so
            detail = "it reads a tensor that each call makes where no operation is seen, in a thread of its own for instance"
            raise _Refused(Reason.UNSAFE_EFFECTS, f"{detail} (shape {list(strange.shape)})")
        held = [*static.buffers, *(t for b in graph.recording.breaks for t in b.tensors)] if graph.recording.breaks else []
        audit = Audit(reach, graph.recording.externals, held)
        if state.others or not before.holds():  # asked last: the recording may have seen what was there before or after
            raise _Refused(Reason.REBOUND, f"{', '.join(state.others) or 'what it reads'} was changed while it was recorded")
        beyond = search(follows_breaks=True).tensors() if graph.recording.breaks else []  # what bodies alone reach
        return CallGraph(graph, static, written, audit, lasting, beyond)
    except BaseException:
        graph.close()
        raise


def _strange(recording: Recording, trace: Trace, static: StaticCall, reach: Reach) -> torch.Tensor | None:
    """A tensor that the recording reads, and that neither the traced call read nor the callable reaches."""
    returned = [leaf.tensor for note in trace.breaks for leaf in note.output.leaves if isinstance(leaf, External)]
    known = [*trace.externals.values(), *returned, *static.buffers, *filter(_is_strided, reach.tensors())]
    handles, addresses = set(map(storage_handle, known)), {t.untyped_storage().data_ptr() for t in known}
    for handle, tensor in recording.externals.items():
        if handle in handles or tensor.untyped_storage().data_ptr() in addresses:
            continue
        if tensor.numel() and tensor.dim():  # others are constants of the program
            return tensor
    return None


def _holds_memory_of(lane: Lane, value: Any) -> bool:
    """Whether `value`, or an item of it, is a tensor in the lane's pool: made by the pass that was captured."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else (value,)
    tensors = [t for t in items if isinstance(t, torch.Tensor) and _is_strided(t) and t.numel()]
    segments = lane.pool.state().segments if tensors else []
    return any(start <= data_address(t) < start + nbytes for t in tensors for start, nbytes in segments)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _take_all_as_touched(recording: Recording, reach: Reach, static: StaticCall) -> str:
    """Work that no torch operation launched (a kernel of Triton's, say) may read and write whatever the callable reaches:
    all of that is watched as if it were read and written."""
    buffers = {storage_handle(b) for b in static.buffers}
    for tensor in reach.tensors():
        if tensor.layout is torch.strided and tensor.device == static.device and storage_handle(tensor) not in buffers:
            recording.externals.setdefault(storage_handle(tensor), tensor.detach())
            recording.written.setdefault(storage_handle(tensor), tensor.detach())
    return (
        f"it launches work that is no torch operation (before {recording.unseen[0]}), so all arguments count as written "
        "and all tensors that it reaches as read; register such a kernel as a torch operation to be exact"
    )


def _names(labels: list[str]) -> str:
    return ", ".join(dict.fromkeys(labels))


def _effects_text(changed: list[str]) -> str:
    return f"each call changes {_names(changed)}, which a replay would not: pass it as a tensor, or change it outside"


def _check(
    trace: Trace,
    static: StaticCall,
    scan: Scan,
    lane: Lane,
    written: set[int],
) -> None:
    if trace.has_backward:
        raise _Refused(Reason.AUTOGRAD, "the result requires grad: call it under torch.no_grad(), or with inference=True")
    if static.overlaps and written:
        raise _Refused(Reason.ALIASED_INPUTS, "arguments overlap without being one tensor, and one is written")
    device = lane.device.device
    if kernel_modes(device.type) != scan.key[4]:
        raise _Refused(Reason.UNSAFE_EFFECTS, "it leaves a mode of torch changed (grad mode, autocast, default dtype, ..)")
    foreign = {d for d in trace.devices if d != device and d.type != "meta"}
    if device.type == "cuda":  # small host tensors are made and consumed on the way; outside ones would be frozen
        foreign = {d for d in foreign if d.type == "cuda" or d in trace.read_devices}
    if foreign:
        raise _Refused(Reason.OTHER_DEVICE, f"the pass uses tensors on {', '.join(map(str, foreign))} and on {device}")
    if trace.draws_elsewhere:
        raise _Refused(Reason.OTHER_DEVICE, f"random numbers are drawn on another device than {device}")


def _check_world(trace: Trace, reach: Reach, scan: Scan, starts: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    """What is neither memory that stays nor state of Python's; `starts` are generators before the trace."""
    if trace.draws.are_set(starts):
        raise _Refused(Reason.UNSAFE_EFFECTS, "it sets the state of a random generator, which a replay would not")
    if not trace.draws.are_from([generator for generator, _ in starts]):
        raise _Refused(Reason.UNSAFE_EFFECTS, "it draws from a generator that it makes inside, or that is not found")
    grads = [t.grad for t in (*scan.tensors, *reach.tensors()) if t.is_leaf and t.grad is not None]
    if trace.reads_grad or any(_is_strided(g) and storage_handle(g) in trace.externals for g in grads):
        raise _Refused(Reason.UNSAFE_EFFECTS, "it reads the grad of a tensor, which is another one after each backward")


def _check_carriers(carriers: list[Any]) -> None:
    """Arguments that are equal by an equality of their own, and not by what they hold."""
    for value in carriers:
        if isinstance(type(value).__eq__, FunctionType) and not isinstance(value, Enum):
            found = Reach(value)
            if found.modules or found.tensors():
                detail = (
                    f"a {type(value).__name__}, equal by its own __eq__, holds tensors: make it a dataclass, or pass them"
                )
                raise _Refused(Reason.UNHASHABLE_ARGUMENT, detail)


def keeps_arguments(scan: Scan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the containers among the arguments of a call that has run hold what they did before."""
    if isinstance(scan.structure, int):
        return True
    leaves, structure = flatten((args, kwargs))
    return structure == scan.structure and all(a is b for a, b in zip(leaves, scan.leaves, strict=True))


def _fast_path(reach: Reach) -> str | None:
    """A layer with a fast path (nested tensors, fused layers) that it takes in eval mode, and not under a function mode."""
    kinds = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
    found = (type(m).__name__ for m in reach.modules if isinstance(m, kinds) and not m.training)
    return next(found, None) if torch.backends.mha.get_fastpath_enabled() else None


def _are_held(search: Callable[..., Reach], tensors: list[torch.Tensor]) -> bool:
    """Whether an argument is part of a tensor that the callable, or a body of its breaks, reaches by itself."""
    try:
        reached = search(follows_breaks=True).tensors()
    except Exception:  # a container that cannot be read
        return True
    handles = {storage_handle(t) for t in reached if t.layout is torch.strided}
    return any(storage_handle(t) in handles for t in tensors)


def _from_static(output: Any, static: StaticCall, scan: Scan, padded: Padded | None, trace: Trace, written: set[int]) -> Any:
    with torch.no_grad():
        for i in written:
            static.write_back(i, scan.tensors[i])
    outside = {h: t for h, t in trace.externals.items() if h not in {storage_handle(b) for b in static.buffers}}
    leaves = flatten(output)[0]
    returned = as_returned(leaves, lambda leaf: _is_strided(leaf) and storage_handle(leaf) in trace.externals)
    outputs = Outputs(output, returned, leaves, static.buffers, outside, is_inference=static.is_inference)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not any([t.requires_grad for t in scan.tensors])):
        return outputs.copied(scan.tensors, None if padded is None else functools.partial(cut, axes=padded.axes))


def _is_written(tensor: torch.Tensor, version: int | None, trace: Trace) -> bool:
    return storage_handle(tensor) in trace.written or _version(tensor) != version


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape differ; NaN equals NaN."""
    return not bool(((a == b) | ((a != a) & (b != b))).all())


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _hand_over(lane: Lane, output: Any) -> None:
    """The trace ran on the lane's stream; its results are used on the caller's."""
    stream = lane.device.current_stream()
    if stream is None or stream == lane.stream:
        return
    for leaf in flatten(output)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            # Of plain memory: torch does it for no other layout, and frees what it makes of lazy bits here twice.
            for part in parts_of(leaf):
                part.record_stream(stream)
