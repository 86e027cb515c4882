"""The way of a `segue.graph` call: arguments -> key -> recording -> static inputs -> replay -> output.

A key's first call is plain (lazy caches, autotuners and compilers do their work), the `min_hits`-th is traced, answers its
caller and is captured at once (`admission`), later ones replay. What cannot be recorded runs eagerly, with a typed reason;
device work never runs twice. Before each replay the tensors that the recording reads outside its arguments are compared
with where they were (`graph.audit`).

Thread-safe: calls that replay or record are serialised by the device's lane; eager calls are not.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from segue._compat import end_grad_modes, has_function_modes, is_grad_enabled
from segue.errors import BreakOutputError, BreakStateError, StrictModeError
from segue.forks import at_fork
from segue.graph import Call, calling, eager_on_graph
from segue.graph.breaks import running_body
from segue.graph.context import put_back
from segue.graph.guard import CaptureInterrupted, interruption, is_lent
from segue.graph.lease import Cut, Lease
from segue.memory.lane import Lane
from segue.observe.decision import Reason
from segue.runners.admission import CHANGED_ARGUMENT, Admission, admit, keeps_arguments
from segue.runners.background import Background
from segue.runners.call_dispatch import CallDispatch, Inlined, Site, plainly_because
from segue.runners.call_graph import Tensors
from segue.runners.call_key import Scan, facts
from segue.runners.call_padding import Padded, cut
from segue.runners.call_store import Entry
from segue.runners.verification import unverifiable, verify

_HARMLESS = (Reason.DISABLED, Reason.FIRST_SEEN, Reason.CAPTURING, Reason.IN_BACKGROUND, Reason.LANE_BUSY)
"""reasons that strict mode lets pass"""


_DIFFERS = (
    "the run that is recorded goes another way than the call before it, each time and at the same place ({}), so that it "
    "depends on being recorded: put what differs there behind @segue.eager_on_graph"
)
_WAITS = "it waits for an idle moment in which to be recorded"


_STATE = (
    "{name}: while it was replayed, a break (or another thread) changed {what}, which was compared before, and which the "
    "recorded parts may have read too early. The recording is dropped and the next call runs eagerly. Return such a value "
    "from the break, or change it between calls."
)


class _Apart(NamedTuple):
    """A call that is not replayed although its key was recorded; with a reason, for this call alone."""

    reason: Reason | None


class CallRunner:
    """Runs the calls of one function; `dispatch` says where each belongs."""

    def __init__(self, dispatch: CallDispatch) -> None:
        self.dispatch = dispatch
        self.name = dispatch.name
        self.options = dispatch.options
        self.eager: Counter[Reason] = Counter()
        self.captures = 0
        self._verify_every = dispatch.options.verify_every
        self.run: Callable[..., Any] = dispatch.function
        if self.options.inference:
            self.run = _without_grad(dispatch.function)
        self._recorded = self.run if self.options.debug != "forward" else _as_one_break(self.run, self.name)
        """what is recorded: in debug mode the whole call as one break"""
        self._lock = threading.RLock()  # a signal's handler may call while this thread holds it
        at_fork(self, CallRunner._begin_anew)
        self._background = Background(self) if self.options.capture == "background" else None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer to one call."""
        before, has_grad = copy_context(), is_grad_enabled()
        outer = self.dispatch.lanes_entered()  # by a call that this one interrupts: of a handler, a finalizer, `outputs`
        try:
            return self._call(args, kwargs) if self._background is None else self.gated(self._call, args, kwargs)
        except BaseException as error:
            self._put_back(before, has_grad, outer, error)
            raise

    def _put_back(self, before: Context, has_grad: bool, entered: list[Lane], error: BaseException) -> None:
        """What a call held or set that an exception ended, were it by a signal's handler that raises at any place: where it
        did so between a value and the block that resets it, nothing else does. Lanes that were `entered` stay so."""
        inside, outer = plainly_because.get(), before.get(plainly_because)
        if inside is not None and inside is not outer:
            inside.is_over = True
        put_back(before)
        end_grad_modes(error, has_grad)
        if outer is None or outer.is_over:
            for lane in self.dispatch.lanes_entered():
                if lane not in entered:
                    lane.let_go()

    def _begin_anew(self) -> None:
        """In a forked child."""
        self._lock = threading.RLock()

    def run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain function."""
        with calling(Call(args, kwargs)):
            return self.gated(lambda args, kwargs: self.run(*args, **kwargs), args, kwargs)

    def gated(
        self, call: Callable[[tuple[Any, ...], dict[str, Any]], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """No call overlaps a capture in the background; a call inside such a capture is part of it."""
        if self._background is None or interruption.get() is not None:
            return call(args, kwargs)
        gate = self._background.gate
        depth = gate.depth()
        try:
            gate.enter()
            answer = call(args, kwargs)
            gate.leave(depth)
            return answer
        except BaseException:
            gate.leave(depth)
            raise

    def stop(self) -> None:
        """Ends captures in the background; returns when their thread has ended."""
        if self._background is not None:
            self._background.stop()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self.dispatch.known(args, kwargs)
        if known is not None:
            result = self._replay(known.site, known.entry, args, None, args, kwargs)
            if type(result) is not _Apart:
                return result
            if result.reason is not None:
                return self._plain(result.reason, "", args, kwargs)
        found = self.dispatch.find(args, kwargs)
        entry = found.entry
        if entry is None:
            assert found.reason is not None
            return self._plain(found.reason, found.detail, args, kwargs)
        assert found.site is not None and found.scan is not None
        if entry.graph is not None:
            result = self._replay(found.site, entry, found.scan.tensors, found.padded, args, kwargs)
            if type(result) is not _Apart:
                return result
            if result.reason is not None:
                return self._plain(result.reason, "", args, kwargs)
        return self._cold(found.site, entry, found.scan, found.padded, args, kwargs)

    def _replay(
        self,
        site: Site,
        entry: Entry,
        tensors: Tensors,
        padded: Padded | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The replayed answer, or an `_Apart` where there is no recording (any more), or none that fits this call."""
        lane = site.lane
        if not lane.enter(may_pass=True):
            return _Apart(Reason.LANE_BUSY)
        inlined: Inlined | None = None
        try:
            graph = entry.graph
            if graph is None:  # evicted while this thread waited
                return _Apart(None)
            if not graph.audit.holds():
                site.store.drop(entry, Reason.REBOUND)
                entry.note_rebound()
                return _Apart(None)
            if is_grad_enabled() and not self.options.inference and graph.audit.requires_grad():
                return _Apart(Reason.AUTOGRAD)
            aliased = None if graph.answers_all else graph.cannot_answer(tensors)
            if aliased is not None:
                return _Apart(aliased)
            entry.recent += 1
            entry.replays += 1
            entry.since_capture += 1
            record = graph.record
            record.hits += 1
            cut_rows: Cut | None = None
            if padded is not None:
                record.real += sum(a.real for a in padded.axes)
                record.padded += sum(a.rung for a in padded.axes)
                if any([a.real != a.rung for a in padded.axes]):
                    cut_rows = functools.partial(cut, axes=padded.axes)
            if site.readers:
                for stream in site.readers:
                    lane.device.order(stream, lane.device.current_stream())
                site.readers.clear()
            if self._verify_every and not entry.unverified and self._is_due(entry):
                with Inlined(lane):
                    return self._verified(site, entry, tensors, args, kwargs, cut_rows)
            if graph.has_breaks:
                inlined = Inlined(lane)
                inlined.__enter__()
            outputs = self.options.outputs
            if self.options.inference and is_grad_enabled():  # as the pass itself
                with torch.no_grad():
                    result = graph.answer(tensors, args, kwargs, cut_rows, is_view=outputs != "clone")
            else:
                result = graph.answer(tensors, args, kwargs, cut_rows, is_view=outputs != "clone")
            if graph.has_breaks and not graph.audit.holds():
                site.store.drop(entry, Reason.REBOUND)
                entry.note_rebound()
                raise BreakStateError(_STATE.format(name=self.name, what=graph.audit.change()))
            if outputs == "clone":
                return result
            if outputs == "view":
                generation = lane.generation
                return Lease(result, lambda: lane.generation == generation, site.readers.append)
            return outputs(result)
        except BreakOutputError as error:  # its body answers otherwise than in the trace, and may do so again
            site.store.drop(entry, Reason.CAPTURE_FAILED)
            entry.refuse(Reason.CAPTURE_FAILED, str(error))
            raise
        finally:
            if inlined is not None:
                inlined.__exit__()
            lane.leave()

    def _cold(
        self, site: Site, entry: Entry, call: Scan, padded: Padded | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call without a recording: plain, or the one that makes it."""
        with self._lock:
            site.store.note_cold(entry)
            if entry.pending is not None:
                is_due, reason, detail = False, Reason.IN_BACKGROUND, ""
            elif is_lent():  # what is traced or recorded now would lie in the lent pool
                is_due, reason, detail = False, Reason.FIRST_SEEN, "called inside Lane.lend()"
            elif sys.is_finalizing():  # the collector runs on its own then, and modules go
                is_due, reason, detail = False, Reason.FIRST_SEEN, "called while the interpreter ends"
            elif entry.wait:
                entry.wait -= 1
                is_due, reason, detail = False, entry.reason, entry.detail
            elif entry.seen + 1 < self.options.min_hits:
                is_due, reason, detail = False, entry.reason, entry.detail
            elif self.dispatch.is_frozen:
                is_due, reason, detail = False, Reason.NOT_CAPTURED, entry.without_capture
            else:
                is_due = site.store.has_room(entry)
                reason, detail = Reason.OVER_BUDGET, "busier shapes hold all of max_graphs"
                if not is_due:
                    entry.reason, entry.detail = reason, detail
        if is_due:
            settled = self.dispatch.settle(site, entry, call, self._recorded)
            if settled is not entry:
                again = settled.graph is not None
                return self.call(args, kwargs) if again else self._cold(site, settled, call, padded, args, kwargs)
            with site.store.filling_caches():
                admission = self._admit(site, entry, call, padded, args, kwargs)
            if admission is None:  # another thread recorded it
                return self.call(args, kwargs)
            if admission is Reason.LANE_BUSY:
                return self._plain(Reason.LANE_BUSY, "", args, kwargs)
            return self._answer(admission.output)
        is_first, known = not entry.seen, [] if entry.seen else facts(call.tensors)
        with site.store.filling_caches():
            result = self._plain(reason, detail, args, kwargs)
        if is_first and not (keeps_arguments(call, args, kwargs) and facts(call.tensors) == known):
            entry.refuse(Reason.UNSAFE_EFFECTS, CHANGED_ARGUMENT)
        entry.seen += 1
        return result

    def _admit(
        self, site: Site, entry: Entry, call: Scan, padded: Padded | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Admission | Literal[Reason.LANE_BUSY] | None:
        is_later = self._background is not None and not entry.is_urgent and self._can_wait(site)
        lane = site.lane
        if not lane.enter(may_pass=True):
            return Reason.LANE_BUSY
        try:
            if entry.graph is not None or entry.pending is not None or self.dispatch.is_closed:
                return None
            try:
                with Inlined(lane):
                    lane.is_recording, lane.num_passed = True, 0
                    admission, complete = admit(
                        self._recorded, self.dispatch.function, site.backend, entry, call, padded, args, kwargs
                    )
                    entry.operations = max(admission.operations, 1)
                    if complete is not None and not is_later and not lane.num_passed:
                        complete()
                    if lane.num_passed:
                        complete = None
                        _give_up(admission)
            except BaseException:  # the function's own: an eager call
                self._count(Reason.FIRST_SEEN)
                raise
            if complete is not None and is_later:
                assert self._background is not None
                answered, admission.output = replace(admission), None
                device = lane.device.device  # added first: what is not pending, since this was interrupted, is not done
                self._background.add(lambda: self._complete(site, entry, admission, complete), device)
                entry.pending, entry.reason, entry.detail = admission, Reason.IN_BACKGROUND, _WAITS
            else:
                self._settle(site, entry, admission)
        finally:
            lane.let_go()
        if complete is not None and is_later:
            self._count(Reason.FIRST_SEEN)
            return answered
        self._count(admission.reason or Reason.FIRST_SEEN)
        self._check_strictly(admission)
        return admission

    def _complete(self, site: Site, entry: Entry, admission: Admission, complete: Callable[[], None]) -> None:
        """In another thread: makes a recording that a call has prepared. What goes wrong is the entry's reason."""
        with site.lane.exclusive():
            if entry.pending is not admission or self.dispatch.is_closed:
                return
            if self.dispatch.is_frozen:
                entry.pending, entry.reason, entry.detail = None, Reason.NOT_CAPTURED, entry.without_capture
                return
            try:
                with Inlined():
                    complete()
            except CaptureInterrupted:
                raise
            except BaseException as error:  # nobody waits for this thread: it must not be lost
                admission.reason, admission.detail = Reason.CAPTURE_FAILED, f"{type(error).__name__}: {error}"
            if self.options.strict and admission.graph is not None and admission.effects:
                admission.graph.close()
                admission.graph, admission.reason, admission.detail = None, Reason.UNSAFE_EFFECTS, _effects(admission)
            entry.is_urgent = admission.graph is None  # what fails there may be well in the caller's own thread
            self._settle(site, entry, admission)

    def _can_wait(self, site: Site) -> bool:
        """Whether another thread can capture what this one has traced. Function modes are a thread's own."""
        return not site.lane.device.why_not_beside_others() and not has_function_modes()

    def _settle(self, site: Site, entry: Entry, admission: Admission) -> None:
        """Takes the recording, or remembers why there is none. Hold the lane."""
        entry.pending = None
        if admission.graph is None:
            assert admission.reason is not None
            if admission.difference and admission.difference == entry.difference:
                admission.reason, admission.detail = Reason.CAPTURE_FAILED, _DIFFERS.format(admission.difference)
            entry.difference = admission.difference
            if admission.reason is Reason.REBOUND:
                entry.note_rebound(admission.detail)
                entry.wait -= 1  # this call ran already
            else:
                entry.refuse(admission.reason, admission.detail)
            return
        self.captures += 1
        entry.is_urgent = False
        entry.unverified = unverifiable(admission.graph) if self.options.verify_every else ""
        entry.since_capture = 0
        entry.effects = tuple(admission.effects)
        site.store.put(entry, admission.graph)

    def _check_strictly(self, admission: Admission) -> None:
        if self.options.strict and (admission.reason is not None or _effects(admission)):
            reason = admission.reason or Reason.UNSAFE_EFFECTS
            raise StrictModeError(f"{self.name}: {reason}: {admission.detail or _effects(admission)}")

    def _verified(
        self,
        site: Site,
        entry: Entry,
        tensors: Tensors,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cut_rows: Cut | None,
    ) -> Any:
        assert entry.graph is not None

        def eager() -> Any:
            with running_body():
                return self.run(*args, **kwargs)

        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.options.inference):
            answer, difference = verify(entry.graph, tensors, args, kwargs, eager, cut_rows)
        entry.verified += 1
        if difference:
            entry.replays -= 1  # the answer is eager's
            site.store.drop(entry, Reason.MISMATCH)
            entry.refuse(Reason.MISMATCH, difference)
            entry.wait = 1 << 62
            self._count(Reason.MISMATCH)
            if self.options.strict:
                raise StrictModeError(f"{self.name}: {Reason.MISMATCH}: {difference}")
        return self._answer(answer)

    def _is_due(self, entry: Entry) -> bool:
        every = self._verify_every
        return entry.since_capture == 1 if every < 0 else entry.since_capture % every == 0

    def _plain(self, reason: Reason, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An eager call, counted."""
        self._count(reason)
        if self.options.strict and reason not in _HARMLESS:
            why = f"{reason}: {detail}" if detail else str(reason)
            raise StrictModeError(f"strict mode: {self.name} would run eagerly: {why}")
        if reason is Reason.CAPTURING:  # `current()` stays the outer call
            return self._answer(self.run(*args, **kwargs))
        with calling(Call(args, kwargs)):
            output = self.run(*args, **kwargs)
        return self._answer(output)

    def _answer(self, output: Any) -> Any:
        outputs = self.options.outputs
        if outputs == "clone":
            return output
        return Lease(output, lambda: True, lambda stream: None) if outputs == "view" else outputs(output)

    def _count(self, reason: Reason) -> None:
        with self._lock:
            self.eager[reason] += 1


CallRunner.call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what a caller compiles splits there


def _give_up(admission: Admission) -> None:
    if admission.graph is not None:
        admission.graph.close()
    admission.graph, admission.reason = None, Reason.UNSAFE_EFFECTS
    admission.detail = "another thread's call waited too long for this one, as if this one waited for its answer"


def _effects(admission: Admission) -> str:
    return "; ".join(admission.effects)


def _as_one_break(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    forward.__qualname__ = name
    marked = eager_on_graph(forward)
    forward.__wrapped__ = function  # type: ignore[attr-defined]  # now: the mark took the parameters as they are
    return marked


def _without_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run
