"""Pieces made by a compiler, with eager breaks between them.

`torch.compile` reads the forward pass as one graph with symbolic sizes, the graph is split at the marked functions, and
each piece between them is compiled, once for all shapes. The hard idea is that nothing follows from this for recording: the
program that comes out makes the same calls of marked functions as the forward pass did, so it is traced and recorded as
any other forward pass is (`graph.recording`), as segments and breaks. What holds there holds here: bridges, ownership,
the transaction, and what a replay compares. A piece reads only memory of the pool, static inputs, and tensors that the
recording owns or whose address it compares, so none of its inputs can move unseen.

Dynamo's part ends with the recording. It is entered once for the trace and once for the record of a shape, outside every
mode; its guards find the program again or compile another one (sizes of one are compiled on their own), and its code around
the graph takes the inputs out of the forward pass and puts the outputs back into its result.

`compiler` is ``inductor``, or ``eager``: the pieces then run operation by operation, and are recorded so. The cpu device
records no code of a compiler's, so there an inductor piece is a break itself, and a recording has no segments.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, ClassVar

import torch

from segue._compat import inductor, storage_handle
from segue.backends.base import Forward, GraphReplay, RecordingBackend
from segue.backends.pieces import Program, refuse_shared_inputs, split
from segue.backends.split import OutdatedError, SplitPoints, reading, split_point
from segue.cache import cache_folder
from segue.compilers import COMPILERS, default_compiler
from segue.device.operations import tensors
from segue.device.watch import is_library
from segue.errors import CaptureError, ConfigError
from segue.graph import Trace, traced
from segue.graph.breaks import Mark, calls, current, is_calling, met, splitting
from segue.memory.lane import Lane
from segue.shapes.key import ShapeKey

Action = Callable[[Program, tuple[Any, ...]], Any]
"""Told the compiled program and its inputs; returns what the program returned, or what stands for that."""


@dataclass(slots=True)
class Build:
    """What compiling has cost: programs (one for all shapes, further ones where a guard failed), their pieces that hold
    work, seconds in Dynamo and in the compiler."""

    programs: int = 0
    pieces: int = 0
    trace_s: float = 0.0
    compile_s: float = 0.0


class PiecewiseBackend(RecordingBackend):
    """Compiles one forward pass, for all its shapes; use one object for one pass. Mark what depends on the shape
    (`segue.inputs.mark_varying`): other sizes are constants of the program, and a second program is compiled, which takes
    them for symbols too, where a later shape finds them changed."""

    name: ClassVar[str] = "tc_piecewise"
    is_segmented: ClassVar[bool] = True

    def __init__(self, lane: Lane, compiler: str = "auto") -> None:
        super().__init__(lane)
        if compiler not in COMPILERS:
            raise ConfigError(f"compiler is {compiler!r}; choose one of {', '.join(COMPILERS)}")
        self.compiler = default_compiler(lane.device.kind) if compiler == "auto" else compiler
        self.build = Build()
        self._points: list[SplitPoints] = []
        """of each program, and between a run and its program of the next one"""
        self._learnt: Trace | None = None
        self._make_program = self._compile  # one object: Dynamo finds its programs again by it
        self._action: Action | None = None
        self._entered_at: float | None = None
        """when the present action began, None before"""
        # Dynamo keeps programs with the code object, what it saw of earlier values under the code's name, and leaves names
        # in the globals: all three are this object's alone.
        self._code = _calling(lambda: None).__code__.replace(co_name=f"forward_{uuid.uuid4().hex}")
        self._globals: dict[str, Any] = {"__name__": __name__, "__builtins__": __builtins__}

    def trace(self, forward: Forward, like: Trace | None = None) -> tuple[Any, Trace]:
        """The first time, an eager run of the forward pass comes before, to learn the breaks from.

        Raises:
            CaptureError: the pass cannot be compiled as one graph; operator and line are named.
        """
        found: Trace | None = None

        def watch(program: Program, inputs: tuple[Any, ...]) -> Any:
            nonlocal found
            output, found = self._trace_program(program, inputs, like)
            return output

        with self.lane.device.on_stream(self.lane.stream):
            output = self._run_anew(forward, watch)
        if found is None:  # nothing to compile, so nothing to record either
            return super().trace(forward, like)
        return output, found

    def record(self, key: ShapeKey, forward: Forward, trace: Trace) -> GraphReplay:
        found: GraphReplay | None = None

        def capture(program: Program, inputs: tuple[Any, ...]) -> Any:
            nonlocal found
            found = super(PiecewiseBackend, self).record(key, lambda: program(*inputs), trace)
            found.keep = program
            return found.recording.output

        output = self._run(forward, capture)
        if found is None:
            return super().record(key, forward, trace)
        found.recording.output = output
        return found

    def run_unrecorded(self, forward: Forward) -> Any:
        """Compiled pieces with their breaks between, on the current stream: what the compiler gives without graphs."""
        return self._run_anew(forward, lambda program, inputs: program(*inputs))

    def _run_anew(self, forward: Forward, action: Action) -> Any:
        """As `_run`, for a pass that may be another shape's."""
        if self._points and self._points[-1].has_objects:
            self._renew(forward)
        return self._run(forward, action)

    def _trace_program(self, program: Program, inputs: tuple[Any, ...], like: Trace | None) -> tuple[Any, Trace]:
        """A compiler's code is no sequence of operations, and is not watched: what it reads from outside are its inputs."""
        if self.compiler == "eager" or self.lane.device.traces_shapes:
            return super().trace(lambda: program(*inputs), like)
        output, trace = traced(lambda: program(*inputs), self.lane.device, is_full=False, segmented=True)
        if self._learnt is not None and trace.has_same_breaks(self._learnt):
            trace.share(self._learnt)  # streams that bodies of breaks work on
        trace.externals = {storage_handle(tensor): tensor.detach() for tensor in tensors(inputs)}
        return output, trace

    def _run(self, forward: Forward, action: Action) -> Any:
        """The result of `forward`, with `action` in the place of its program. What `action` raises passes unchanged."""
        if not self._points:
            self._learn(forward)
        try:
            return self._enter(forward, action)
        except OutdatedError:
            self._learn(forward)
            return self._enter(forward, action)

    def _learn(self, forward: Forward) -> None:
        """Split points for the next program, from an eager run of the pass."""
        self._learnt = self._run_eagerly(forward)
        points = SplitPoints(
            self._learnt.breaks,
            self.lane.device.device,
            f"call_{id(self)}",
            is_aliasing_seen=self.compiler == "eager",
        )
        self._points.append(points)

    def _renew(self, forward: Forward) -> None:
        """Objects that breaks are called with may be others for another shape."""
        learnt = self._run_eagerly(forward)
        for points in self._points:
            points.renew(learnt.breaks)

    def _run_eagerly(self, forward: Forward) -> Trace:
        is_full = self._learnt is None and self.compiler != "eager"
        learnt = traced(forward, self.lane.device, is_full=is_full, segmented=True)[1]
        if self._learnt is not None and learnt.has_same_breaks(self._learnt):
            learnt.share(self._learnt)
        return learnt

    def _enter(self, forward: Forward, action: Action) -> Any:
        start, compile_s = time.perf_counter(), self.build.compile_s
        from torch._dynamo.exc import TorchDynamoException

        points = self._points[-1]
        run = FunctionType(self._code, self._globals, "forward", None, (CellType(forward),))
        self._action, self._entered_at = action, None
        try:
            with _reading(points):
                return torch.compile(run, backend=self._make_program, fullgraph=True)()
        except TorchDynamoException as error:
            if self._entered_at is not None:
                raise
            failure, points.failure = points.failure, None
            raise (failure or _failure(error)) from None
        finally:
            self._action = None
            if not points.is_used:
                self._points.remove(points)
            compile_s = self.build.compile_s - compile_s
            self.build.trace_s += (self._entered_at or time.perf_counter()) - start - compile_s

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Program:
        """Dynamo's backend: told the whole graph, returns what runs in its place."""
        points = self._points[-1]
        start = time.perf_counter()
        try:
            program, pieces = split(graph, points, self._compile_piece)
        except CaptureError as error:
            points.failure = error
            raise
        points.is_used = True
        self.build.programs += 1
        self.build.pieces += pieces
        self.build.compile_s += time.perf_counter() - start

        def run(*inputs: Any) -> Any:
            assert self._action is not None
            self._entered_at = time.perf_counter()
            with splitting(None):
                return self._action(program, inputs)

        return run

    def _compile_piece(self, piece: torch.fx.GraphModule, name: str) -> Program:
        if self.compiler == "eager":
            return piece
        refuse_shared_inputs(piece, name)
        placeholders = [node for node in piece.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            if "example_value" not in node.meta:
                raise CaptureError(
                    f"{name} of the pass takes {node.name}, which is no tensor: inductor cannot compile a mode that is "
                    "entered before a break and left after it. Enter it around the whole pass, or use compiler='eager' or "
                    "backend='breakable'",
                    operation=node.name,
                )
        inputs = [node.meta["example_value"] for node in placeholders]
        compiled = inductor(piece, inputs, cache_folder() / "inductor")
        if self.lane.device.kind == "cuda":
            return compiled
        mark = Mark(compiled, name, frozenset(), frozenset(), None, None)
        return lambda *inputs: met(mark, inputs, {})


def _calling(forward: Forward) -> Callable[[], Any]:
    return lambda: forward()


@contextmanager
def _reading(points: SplitPoints) -> Iterator[None]:
    """What is compiled inside meets `points`."""
    _allow_split_points()
    token = reading.set(points)
    setattr(calls, points.call, current() if is_calling() else None)
    try:
        with splitting(points):
            yield
    finally:
        reading.reset(token)
        delattr(calls, points.call)


def _allow_split_points() -> None:
    from torch.fx.node import has_side_effect

    torch.compiler.allow_in_graph(split_point)
    has_side_effect(split_point)


_USER_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<text>.*)')


def _failure(error: Exception) -> CaptureError:
    """Dynamo's error in one sentence: its first line says what it met, its last user frame where."""
    cause = getattr(error, "inner_exception", None)  # of the compiler behind Dynamo
    text = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    what = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    _, _, trail = text.partition("from user code:")
    frames = [frame for frame in _USER_FRAME.finditer(trail) if not is_library(frame["file"])]
    location = code = None
    if frames:
        last = frames[-1]
        location, code = f"{last['file']}:{last['line']} in {last['function']}", last["text"].strip()
    where = "" if location is None else f" at {location} ({code})"
    return CaptureError(
        f"torch.compile cannot make one graph of the pass: {what}{where}. Put that code into a function marked "
        "@segue.eager_on_graph, or record this phase with backend='breakable', which needs no compiler",
        operation=what,
        location=location,
    )
