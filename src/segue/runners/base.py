"""The runner: per phase, what flows. Batch -> decision -> static inputs -> replay -> output, one direction.

A runner owns the shapes of one phase: which are captured, the static memory they read, how a live batch is padded into
it and how the live part of the output is cut out again. How a shape is recorded is its backend's business; it never asks
which backend it has.

`capture` is a method with a report, never a side effect of construction: rung by rung, the largest first, it warms and
records, so that the device works off a warm-up while the host records. After start-up the engine closes the guard, and
a later capture raises.

Subclasses say what is particular to their phase (the abstract methods); the order of things stands here, once.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from segue.backends import Backend, Forward, Replayable
from segue.errors import CaptureError, CaptureOutOfMemory, StrictModeError
from segue.graph import Call, CaptureGuard, Trace, calling
from segue.memory.budget import Budget
from segue.memory.shortage import shortage_text
from segue.observe.decision import Decision, Decisions, GraphRecord, Reason
from segue.runners.fitting import record_fitted
from segue.runners.store import GraphStore
from segue.shapes.key import Phase, ShapeKey

B = TypeVar("B")
Progress = Callable[[ShapeKey, str], None]
"""Told before each step of a capture: the key, and ``"warm-up"`` or ``"capture"``."""


class Settings(Protocol):
    """What a runner reads of a phase's resolved configuration."""

    @property
    def phase(self) -> Phase: ...
    @property
    def backend(self) -> str: ...
    @property
    def max_padding(self) -> float: ...
    @property
    def num_warmups(self) -> int: ...
    @property
    def on_failure(self) -> str: ...


class Live(NamedTuple):
    """A live batch as the dispatch table sees it. See `DispatchTable.lookup`."""

    tokens: int
    requests: int
    uniform: bool
    width: int = 1
    context: int | None = None
    variant: str = ""


@dataclass(slots=True)
class CaptureReport:
    """What a capture did: a row for each recording, and each failure with its error."""

    records: list[GraphRecord] = field(default_factory=list)
    failures: list[tuple[ShapeKey, Exception]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def pool_bytes(self) -> int:
        return sum(record.pool_bytes for record in self.records)


class Runner(ABC, Generic[B]):
    """Runs one phase. Owns its recordings and static inputs until `close`; its lane may be shared with other runners.
    One thread at a time calls `execute`; the lane serialises runners that share it."""

    def __init__(self, settings: Settings, backend: Backend, *, strict: bool = False) -> None:
        self.phase = settings.phase
        self.settings = settings
        self.backend = backend
        self.lane = backend.lane
        self.strict = strict
        self.store = GraphStore()
        self.guard = CaptureGuard()
        self.decisions = Decisions()
        self.budget: Budget | None = None
        """bounds what a capture keeps, where one is set; it must count this runner's records"""

    # -- what is particular to a phase ---------------------------------------------------------------------------------

    @abstractmethod
    def keys(self) -> Sequence[ShapeKey]:
        """The shapes that start-up captures."""

    @abstractmethod
    def describe(self, batch: B) -> Live:
        """The live batch's counts, from the host alone."""

    @abstractmethod
    def prepare(self, key: ShapeKey) -> Call:
        """Puts harmless inputs of the shape into static memory, and says what `current()` is for them."""

    @abstractmethod
    def forward(self, key: ShapeKey) -> Forward:
        """The function that a recording of `key` holds."""

    @abstractmethod
    def load(self, batch: B, decision: Decision) -> Call:
        """Puts the live batch into static memory, padded; what `current()` is for it."""

    @abstractmethod
    def live_output(self, output: Any, batch: B, key: ShapeKey) -> Any:
        """The live part of the output of a replay of `key`: a view, valid until the lane's next replay."""

    @abstractmethod
    def run_eagerly(self, batch: B) -> Any:
        """The live batch without padding or static memory."""

    # -- the way of a call ---------------------------------------------------------------------------------------------

    def decide(self, batch: B) -> Decision:
        """Which recording answers `batch`, or why none does. Counts nothing."""
        return self.decide_live(self.describe(batch))

    def decide_live(self, live: Live) -> Decision:
        """The same for a batch of such counts."""
        if self.settings.backend == "disabled":
            return Decision(None, "disabled", Reason.DISABLED, live.tokens, live.tokens)
        most = self.max_padding(live)
        key, reason = self.store.table.lookup((self.phase,), *live, max_padding=most)
        if key is None:
            if self.store.why:
                absent, why_not = self.store.absent.lookup((self.phase,), *live, max_padding=most)
                if absent is not None:
                    reason = self.store.why[absent]
                elif not len(self.store):
                    reason = why_not  # of shapes that are not there either none would do
            return Decision(None, "disabled", reason, live.tokens, live.tokens)
        if self.lane.borrowed_bytes:
            return Decision(None, "disabled", Reason.BORROWED, live.tokens, live.tokens)
        return Decision(key, self.backend.name, None, live.tokens, key.tokens)

    def max_padding(self, live: Live) -> float:
        """How many times the live tokens a shape may have."""
        return self.settings.max_padding

    def execute(self, batch: B) -> Any:
        """Runs `batch`, by replay where a recording fits. The output is valid until the lane's next replay.

        Raises:
            StrictModeError: strict mode is on and the call would run eagerly for another reason than `disabled`.
        """
        decision = self.decide(batch)
        self.decisions.note(decision)
        if decision.key is None:
            if self.strict and decision.reason is not Reason.DISABLED:
                raise StrictModeError(f"strict mode: a {self.phase} batch would run eagerly: {decision.reason}")
            return self.run_eagerly(batch)
        graph = self.store.get(decision.key)
        with self.lane.exclusive():
            with calling(self.load(batch, decision)):
                output = graph.replay()
        record = graph.record
        record.hits += 1
        record.real += decision.real
        record.padded += decision.padded
        return self.live_output(output, batch, decision.key)

    # -- capture -------------------------------------------------------------------------------------------------------

    def capture(self, keys: Sequence[ShapeKey] | None = None, progress: Progress | None = None) -> CaptureReport:
        """Records `keys` (None: all of `keys()`), largest first. What is recorded already stays as it is.

        Raises:
            CaptureNotAllowed: the guard is closed.
            CaptureError: a shape failed, and the phase is configured to raise.
            Exception: what the forward pass itself raised, unchanged. After either, shapes recorded before are in use.
        """
        asked = dict.fromkeys(self.keys() if keys is None else keys)
        wanted = sorted((key for key in asked if key not in self.store), key=_size, reverse=True)
        self.guard.check(", ".join(str(key) for key in list(asked)[:3]) or f"the phase {self.phase}")
        report = CaptureReport()
        start = time.perf_counter()
        if self.settings.backend != "disabled" and wanted:
            tell = progress or (lambda key, what: None)
            with self.lane.exclusive(), self.lane.capture_pass():
                largest: Trace | None = None
                for key in wanted:
                    if self._is_budget_spent(key):
                        continue
                    before = self.lane.device.memory()
                    warmed = None if self._is_ruled_out(key, report) else self._warm(key, largest, tell, report)
                    if warmed is not None:
                        trace, call = warmed
                        largest = largest or trace
                        tell(key, "capture")
                        loaded_bytes = self.lane.device.memory().unreserved - before.unreserved
                        self._record(key, trace, call, loaded_bytes, report)
        report.seconds = time.perf_counter() - start
        return report

    def _warm(
        self, key: ShapeKey, largest: Trace | None, tell: Progress, report: CaptureReport
    ) -> tuple[Trace, Call] | None:
        """The trace of one rung, and its call; None where it failed. The device runs it while the host records."""
        tell(key, "warm-up")
        try:
            call = self.prepare(key)
            with calling(call):
                trace = self.backend.trace(self.forward(key), like=largest)[1]
                for _ in range(self.settings.num_warmups - 1):
                    before, trace = trace, self.backend.trace(self.forward(key), like=largest)[1]
                    before.check_scalars(trace)
                return trace, call
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the pass's tensors as long as the error lives
            self._failed(key, CaptureOutOfMemory(f"out of memory in the warm-up: {error}"), report)
        except CaptureError as error:
            self._failed(key, error, report)
        return None

    def _record(self, key: ShapeKey, trace: Trace, call: Call, loaded_bytes: int, report: CaptureReport) -> None:
        device = self.lane.device

        def record() -> Replayable:
            device.make_room()
            with calling(call), device.measure_peak(self.lane.pool) as peak:
                graph = self.backend.record(key, self.forward(key), trace)
            graph.record.peak_bytes = peak.nbytes
            return graph

        try:
            graph = record_fitted(self.lane, record)
        except CaptureError as error:
            self._failed(key, error, report)
            return
        graph.record.loaded_bytes = max(loaded_bytes, 0)
        self.store.add(graph)
        if self.budget is not None and self.budget.is_exceeded:
            self.drop(key, Reason.OVER_BUDGET)
            self.budget.refuse(graph.record)
            return
        report.records.append(graph.record)

    def _is_budget_spent(self, key: ShapeKey) -> bool:
        """Whether nothing fits now. Where the lane may be made anew a shape is recorded all the same, for its size."""
        budget = self.budget
        if budget is None or budget.may_rebuild or not budget.is_exceeded:
            return False
        self.store.note_absent(key, Reason.OVER_BUDGET)
        return True

    def _failed(self, key: ShapeKey, error: CaptureError, report: CaptureReport) -> None:
        """A failed shape falls back as configured: raise; skip it; run the phase eagerly; or keep to smaller shapes."""
        policy = self.settings.on_failure
        if isinstance(error, CaptureOutOfMemory):
            told = shortage_text(key, self.backend.name, self.lane.device.memory(), self.lane.reserved_bytes)
            error = CaptureOutOfMemory(f"{error}; {told}", operation=error.operation, location=error.location)
        if policy == "raise":
            raise type(error)(f"{key}: {error}", operation=error.operation, location=error.location) from error
        report.failures.append((key, error))
        self.store.note_absent(key, Reason.CAPTURE_FAILED)
        for other in self.store:
            if self._rules_out(key, other):
                self.drop(other, Reason.CAPTURE_FAILED)

    def _is_ruled_out(self, key: ShapeKey, report: CaptureReport) -> bool:
        """Whether an earlier failure of this capture ends `key` as well; then its calls say so."""
        if not any(self._rules_out(failed, key) for failed, _ in report.failures):
            return False
        self.store.note_absent(key, Reason.CAPTURE_FAILED)
        return True

    def _rules_out(self, failed: ShapeKey, key: ShapeKey) -> bool:
        policy = self.settings.on_failure
        return policy == "eager" or (policy == "shrink" and _size(key) > _size(failed))

    def drop(self, key: ShapeKey, reason: Reason) -> None:
        """Closes one recording; calls that no other one answers now run eagerly for `reason`."""
        if key in self.store:
            self.store.remove(key)
            self.store.note_absent(key, reason)

    def evict(self, key: ShapeKey) -> int:
        """Closes one recording, whose calls then run eagerly, and returns the bytes that this gives back. Pool memory is
        shared, and stays."""
        with self.lane.exclusive(is_upkeep=True):
            if key not in self.store:
                return 0
            freed = self.store.get(key).record.freed_if_evicted
            self.drop(key, Reason.EVICTED)
            return freed

    def close_recordings(self) -> None:
        """Closes every recording, so that all can be captured anew. Absent shapes are forgotten with them."""
        with self.lane.exclusive(is_upkeep=True):
            self.store.close()
            self.store.forget_absent()

    def close(self) -> None:
        """Closes every recording. The lane stays open."""
        with self.lane.exclusive(is_upkeep=True):
            self.store.close()


def _size(key: ShapeKey) -> tuple[int, int]:
    return key.tokens, key.context or 0
