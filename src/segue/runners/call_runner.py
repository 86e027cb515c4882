"""The way of a `segue.graph` call: arguments -> key -> recording -> static inputs -> replay -> output.

A key's first call is plain (lazy caches, autotuners and compilers do their work), the `min_hits`-th is traced, answers its
caller and is captured at once (`admission`), later ones replay. What cannot be recorded runs eagerly, with a typed reason;
device work never runs twice. Before each replay the tensors that the recording reads outside its arguments are compared
with where they were (`graph.audit`).

A call made while this thread is inside another wrapped call runs inline, as part of that one. Thread-safe: calls that
replay or record are serialised by the device's lane; eager calls are not.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from segue._compat import is_observed
from segue.backends import Backend, make_backend
from segue.device import get_device
from segue.errors import StrictModeError
from segue.graph import Call, calling
from segue.graph.lease import Cut, Lease
from segue.memory.lane import Lane
from segue.observe.decision import Reason
from segue.runners.admission import CHANGED_CONTAINER, Admission, admit, keeps_arguments
from segue.runners.call_key import Scan, scan
from segue.runners.call_options import Options
from segue.runners.call_padding import Padded, Padding, cut, padded_key, shape_key
from segue.runners.call_store import CallStore, Entry
from segue.runners.verification import unverifiable, verify

_state: ContextVar[Reason | None] = ContextVar("segue_calls_run_plainly_because", default=None)
_HARMLESS = (Reason.DISABLED, Reason.FIRST_SEEN, Reason.CAPTURING)
"""reasons that strict mode lets pass"""


@contextmanager
def disabled() -> Iterator[None]:
    """Every `segue.graph` called inside, in this thread or task, runs eagerly: for hunting a bug. Nests."""
    token = _state.set(Reason.DISABLED)
    try:
        yield
    finally:
        _state.reset(token)


class _Apart(NamedTuple):
    """A call that is not replayed although its key was recorded; with a reason, for this call alone."""

    reason: Reason | None


class Site:
    """One device's lane, backend and recordings."""

    def __init__(self, device: torch.device, options: Options) -> None:
        self.lane = Lane(get_device(device))
        self.backend: Backend = make_backend(options.backend, self.lane)
        self.store = CallStore(options.max_graphs, options.budget_bytes, self.lane, may_reset=options.outputs != "view")
        self.readers: list[Any] = []
        """streams that leases were named to be read on"""


class Found(NamedTuple):
    """Where a call belongs. Without an `entry` it runs eagerly, for `reason`."""

    scan: Scan | None
    padded: Padded | None
    site: Site | None
    entry: Entry | None
    reason: Reason | None = None
    detail: str = ""


class CallRunner:
    """Runs the calls of one function. Owns its sites until `close`."""

    def __init__(self, function: Callable[..., Any], name: str, options: Options) -> None:
        self.function = function
        self.name = name
        self.options = options
        self.sites: dict[torch.device, Site] = {}
        self.eager: Counter[Reason] = Counter()
        self.captures = 0
        self.is_frozen = False
        self.is_closed = False
        self.run: Callable[..., Any] = _without_grad(function) if options.inference else function
        self._padding = Padding(options.pad, function) if options.pad else None
        self._lock = threading.Lock()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer to one call."""
        found = self.find(args, kwargs)
        entry = found.entry
        if entry is None:
            assert found.reason is not None
            return self._plain(found.reason, found.detail, args, kwargs)
        assert found.site is not None and found.scan is not None
        if entry.graph is not None:
            result = self._replay(found.site, entry, found.scan, found.padded, args, kwargs)
            if type(result) is not _Apart:
                return result
            if result.reason is not None:
                return self._plain(result.reason, "", args, kwargs)
        return self._cold(found.site, entry, found.scan, found.padded, args, kwargs)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
        """Where a call belongs, or why it must run eagerly. Runs and counts nothing; a new key gets its entry."""
        why = _state.get()
        if why is not None:
            return Found(None, None, None, None, why)
        if self.is_closed or self.options.backend == "disabled":
            return _eagerly(Reason.DISABLED, "step.close() was called" if self.is_closed else "")
        call = scan(args, kwargs, self._home)
        if call.reason is not None:
            return _eagerly(call.reason)
        if is_observed():
            return _eagerly(Reason.DEBUG, "a dispatch mode or a transform of torch.func is active")
        key, padded = call.key, None
        device = key[3]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _eagerly(Reason.CAPTURING, "the current stream is being captured")
        has_grad = torch.is_grad_enabled() and not self.options.inference
        if has_grad and any([t.requires_grad for t in call.tensors]):
            return _eagerly(Reason.AUTOGRAD, _AUTOGRAD)
        if self._padding is not None:
            fitted = self._padding.apply(args, kwargs, call.tensors)
            if isinstance(fitted, Reason):
                return _eagerly(fitted, "the arguments do not fit their pads")
            if fitted.axes and key[2] is not None:
                return _eagerly(Reason.ALIASED_INPUTS, "padded arguments share memory")
            key, padded = padded_key(call, fitted), fitted
        site = self.sites.get(device) or self._open(device)
        entry = site.store.entries.get(key)
        if entry is None:
            entry = site.store.add(key, Entry(shape_key(call, padded, len(site.store.entries))))
        if has_grad and entry.graph is None and self._has_trained_parameters():
            return _eagerly(Reason.AUTOGRAD, _AUTOGRAD)
        return Found(call, padded, site, entry)

    def refusal(self, found: Found) -> tuple[Reason, str] | None:
        """Why the call found would run eagerly now, or None where it would replay."""
        entry = found.entry
        if entry is None:
            assert found.reason is not None
            return found.reason, found.detail
        graph = entry.graph
        if graph is None:
            is_frozen = self.is_frozen and not entry.wait
            return (Reason.NOT_CAPTURED, "step.freeze() was called") if is_frozen else (entry.reason, entry.detail)
        assert found.scan is not None
        why = graph.cannot_answer(found.scan.tensors) if graph.audit.holds() else Reason.REBOUND
        return None if why is None else (why, "")

    def close(self) -> None:
        """Closes every recording and gives their memory back; later calls run eagerly."""
        self.is_closed = True
        for site in list(self.sites.values()):
            with site.lane.exclusive():
                site.store.close()
            site.lane.close()
        self.sites.clear()

    def _replay(
        self, site: Site, entry: Entry, call: Scan, padded: Padded | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The replayed answer, or an `_Apart` where there is no recording (any more), or none that fits this call."""
        tensors = call.tensors
        lane = site.lane
        lane.enter()
        token = None
        try:
            graph = entry.graph
            if graph is None:  # evicted while this thread waited
                return _Apart(None)
            if not graph.audit.holds():
                site.store.drop(entry, Reason.REBOUND)
                entry.note_rebound()
                return _Apart(None)
            if torch.is_grad_enabled() and not self.options.inference and graph.audit.requires_grad():
                return _Apart(Reason.AUTOGRAD)
            aliased = graph.cannot_answer(tensors)
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
            for stream in site.readers:
                lane.device.order(stream, lane.device.current_stream())
            site.readers.clear()
            if self.options.verify_every and not entry.unverified and self._is_due(entry):
                token = _state.set(Reason.CAPTURING)
                return self._verified(site, entry, call, args, kwargs, cut_rows)
            if graph.has_breaks:
                token = _state.set(Reason.CAPTURING)
            graph.run(tensors, args, kwargs)
            outputs = self.options.outputs
            if outputs == "clone":
                return graph.outputs.copied(tensors, cut_rows)
            view = graph.outputs.viewed(tensors, cut_rows)
            if outputs == "view":
                generation = lane.generation
                return Lease(view, lambda: lane.generation == generation, site.readers.append)
            return outputs(view)
        finally:
            if token is not None:
                _state.reset(token)
            lane.leave()

    def _cold(
        self, site: Site, entry: Entry, call: Scan, padded: Padded | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call without a recording: plain, or the one that makes it."""
        with self._lock:
            site.store.note_cold(entry)
            if entry.wait:
                entry.wait -= 1
                is_due, reason, detail = False, entry.reason, entry.detail
            elif entry.seen + 1 < self.options.min_hits:
                is_due, reason, detail = False, entry.reason, entry.detail
            elif self.is_frozen:
                is_due, reason, detail = False, Reason.NOT_CAPTURED, "step.freeze() was called"
            else:
                is_due = site.store.has_room(entry)
                reason, detail = Reason.OVER_BUDGET, "busier shapes hold all of max_graphs"
        if is_due:
            admission = self._admit(site, entry, call, padded, args, kwargs)
            if admission is None:  # another thread recorded it
                return self.call(args, kwargs)
            return self._answer(admission.output)
        result = self._plain(reason, detail, args, kwargs)
        if not entry.seen and not keeps_arguments(call, args, kwargs):
            entry.refuse(Reason.UNSAFE_EFFECTS, CHANGED_CONTAINER)
        entry.seen += 1
        return result

    def _admit(
        self, site: Site, entry: Entry, call: Scan, padded: Padded | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Admission | None:
        with site.lane.exclusive():
            if entry.graph is not None or self.is_closed:
                return None
            token = _state.set(Reason.CAPTURING)
            try:
                admission = admit(self.run, self.function, site.backend, entry.shape, call, padded, args, kwargs)
            finally:
                _state.reset(token)
            entry.operations = max(admission.operations, 1)
            if admission.graph is None:
                assert admission.reason is not None
                entry.refuse(admission.reason, admission.detail)
                self._count(admission.reason)
            else:
                self.captures += 1
                self._count(Reason.FIRST_SEEN)
                entry.unverified = unverifiable(admission.graph) if self.options.verify_every else ""
                entry.since_capture = 0
                entry.effects = tuple(admission.effects)
                site.store.put(entry, admission.graph)
        if self.options.strict and (admission.reason is not None or _effects(admission)):
            reason = admission.reason or Reason.UNSAFE_EFFECTS
            raise StrictModeError(f"{self.name}: {reason}: {admission.detail or _effects(admission)}")
        return admission

    def _verified(
        self, site: Site, entry: Entry, call: Scan, args: tuple[Any, ...], kwargs: dict[str, Any], cut_rows: Cut | None
    ) -> Any:
        assert entry.graph is not None
        answer, difference = verify(entry.graph, call.tensors, args, kwargs, lambda: self.run(*args, **kwargs), cut_rows)
        entry.verified += 1
        if difference:
            site.store.drop(entry, Reason.MISMATCH)
            entry.refuse(Reason.MISMATCH, difference)
            entry.wait = 1 << 62
            self._count(Reason.MISMATCH)
            if self.options.strict:
                raise StrictModeError(f"{self.name}: {Reason.MISMATCH}: {difference}")
        return self._answer(answer)

    def _is_due(self, entry: Entry) -> bool:
        every = self.options.verify_every
        return entry.since_capture == 1 if every < 0 else entry.since_capture % every == 0

    def _plain(self, reason: Reason, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An eager call, counted. Inside another wrapped call the outer one's output rules apply."""
        self._count(reason)
        if self.options.strict and reason not in _HARMLESS:
            why = f"{reason}: {detail}" if detail else str(reason)
            raise StrictModeError(f"strict mode: {self.name} would run eagerly: {why}")
        if reason is Reason.CAPTURING:
            return self.run(*args, **kwargs)
        with calling(Call(args, kwargs)):
            output = self.run(*args, **kwargs)
        return self._answer(output)

    def _answer(self, output: Any) -> Any:
        outputs = self.options.outputs
        if outputs == "clone":
            return output
        return Lease(output, lambda: True, lambda stream: None) if outputs == "view" else outputs(output)

    def _has_trained_parameters(self) -> bool:
        return isinstance(self.function, torch.nn.Module) and any(p.requires_grad for p in self.function.parameters())

    def _home(self) -> torch.device:
        """Where calls without tensors run."""
        if isinstance(self.function, torch.nn.Module):
            for parameter in self.function.parameters():
                return parameter.device
        return torch.get_default_device()

    def _open(self, device: torch.device) -> Site:
        with self._lock:
            return self.sites.get(device) or self.sites.setdefault(device, Site(device, self.options))

    def _count(self, reason: Reason) -> None:
        with self._lock:
            self.eager[reason] += 1


_AUTOGRAD = "grad mode is on and a tensor requires grad: use torch.no_grad(), or inference=True"


def _eagerly(reason: Reason, detail: str = "") -> Found:
    return Found(None, None, None, None, reason, detail)


def _effects(admission: Admission) -> str:
    return "; ".join(admission.effects)


def _without_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return run
