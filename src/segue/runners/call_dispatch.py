"""Where a call of `segue.graph` belongs: its device's recordings and the entry of its key, or why it must run eagerly.

Whatever a recording cannot know of is ruled out here, before anything runs: a call inside another wrapped call (it runs
inline, as part of that one), graphs switched off, modes and transforms of others, gradients, arguments without a
value, pads that do not fit.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from segue._compat import is_observed, is_stream_capturing
from segue.backends import Backend, make_backend
from segue.backends.base import RecordingBackend
from segue.device import get_device
from segue.errors import ReplayError
from segue.forks import at_fork
from segue.graph.breaks import lane_holder
from segue.graph.context import setting
from segue.memory.lane import Lane
from segue.observe.decision import Reason
from segue.runners.admission import held_by
from segue.runners.call_key import MOST_SPREAD, Scan, is_spread, overlaps_itself, scan
from segue.runners.call_options import Options
from segue.runners.call_padding import Padded, Padding, padded_key, shape_key
from segue.runners.call_shortcut import Known, Shortcuts
from segue.runners.call_store import CallStore, Entry


class Inside:
    """Why wrapped calls run eagerly for a while. Tasks and threads that are begun meanwhile take it along in their context,
    and may outlive it: then it is over there too, where it is a call's."""

    __slots__ = ("is_over", "reason")

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        self.is_over = False


plainly_because: ContextVar[Inside | None] = ContextVar("segue_calls_run_plainly_because", default=None)
"""set while this thread is inside a wrapped call, or graphs are switched off"""
_AUTOGRAD = "grad mode is on and a tensor requires grad: use torch.no_grad(), or inference=True"
_OBSERVED = (
    "a dispatch mode, a function mode, a transform of torch.func, a level of forward_ad or parametrize.cached() is active"
)
_WIDE_GAPS = f"the memory from an argument's first to its last element is over {MOST_SPREAD} times its own: pass a copy"


@contextmanager
def disabled() -> Iterator[None]:
    """Every `segue.graph` called inside, in this thread or task, runs eagerly: for hunting a bug. Nests."""
    with setting(plainly_because, Inside(Reason.DISABLED)):
        yield


class Inlined(Inside):
    """A block in which wrapped calls are part of one that is recorded or replayed, by the holder of `lane` where given."""

    __slots__ = ("_before", "_lane")

    def __init__(self, lane: Lane | None = None) -> None:
        super().__init__(Reason.CAPTURING)
        self._lane = lane
        self._before = plainly_because.get(), lane_holder.get()

    def __enter__(self) -> None:
        plainly_because.set(self)
        if self._lane is not None:
            lane_holder.set(self._lane)

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        inside, holder = self._before
        plainly_because.set(inside)
        if self._lane is not None:
            self._lane.settle()
            lane_holder.set(holder)


def why_plain() -> Reason | None:
    """Why a wrapped call runs eagerly here and now, whatever it is."""
    inside = plainly_because.get()
    return None if inside is None or inside.is_over else inside.reason


class Site:
    """One device's lane, backend and recordings."""

    def __init__(self, device: torch.device, options: Options) -> None:
        self.lane = Lane(get_device(device))
        self.backend: Backend = make_backend(options.recorder, self.lane)
        if isinstance(self.backend, RecordingBackend):
            self.backend.notes_unseen = True
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


class CallDispatch:
    """One function's sites. Owns them until `close`. Thread-safe."""

    def __init__(self, function: Callable[..., Any], name: str, options: Options) -> None:
        self.function = function
        self.name = name
        self.options = options
        self.sites: dict[torch.device, Site] = {}
        self.past_replays = self.past_evictions = 0
        """of sites that were closed"""
        self.is_frozen = False
        self.is_closed = False
        self.why_disabled = ""
        self._padding = Padding(options.pad, function) if options.pad else None
        self._shortcuts = Shortcuts()
        self._has_shortcuts = self._padding is None and options.backend != "disabled"
        self._lock = threading.RLock()  # a signal's handler may call while this thread holds it
        at_fork(self, CallDispatch._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.RLock()

    def lanes_entered(self) -> list[Lane]:
        """Those that this thread holds."""
        return [site.lane for site in list(self.sites.values()) if site.lane.is_entered]

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """Where a call belongs that looks as an earlier one and has a recording, so that nothing needs taking apart: what
        `find` would say, sooner. None where that must be asked."""
        if kwargs or not args or not self._has_shortcuts or self.is_closed:
            return None
        inside = plainly_because.get()
        if inside is not None and not inside.is_over:
            return None
        known = self._shortcuts.find(args)
        return None if known is None or is_observed() or _is_being_captured(known.device_type) else known

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
        """Where a call belongs, or why it must run eagerly. Runs and counts nothing; a new key gets its entry."""
        why = why_plain()
        if why is not None:
            return Found(None, None, None, None, why)
        if self.is_closed or self.options.backend == "disabled":
            return _eagerly(Reason.DISABLED, "step.close() was called" if self.is_closed else self.why_disabled)
        try:
            call = scan(args, kwargs, self._home)
        except Exception as error:  # of code of the user's: __hash__, __eq__, a property, a container that holds itself
            return _eagerly(Reason.UNHASHABLE_ARGUMENT, _text(error))
        if call.reason is not None:
            return _eagerly(call.reason, call.detail)
        if is_observed():
            return _eagerly(Reason.DEBUG, _OBSERVED)
        key, padded = call.key, None
        device = key[3]
        if _is_being_captured(device.type):
            return _eagerly(Reason.CAPTURING, "the current stream is being captured")
        has_grad = torch.is_grad_enabled() and not self.options.inference
        if has_grad and any([t.requires_grad for t in call.tensors]):
            return _eagerly(Reason.AUTOGRAD, _AUTOGRAD)
        if self._padding is not None:
            fitted = self._padding.apply(args, kwargs, call.tensors)
            if isinstance(fitted, Reason):
                return _eagerly(fitted, "the arguments, or the fill for their dtype, do not fit the pads")
            if fitted.axes and key[2] is not None:
                return _eagerly(Reason.ALIASED_INPUTS, "padded arguments share memory")
            if any([s is not None and overlaps_itself(t) for s, t in zip(fitted.shapes, call.tensors, strict=True)]):
                return _eagerly(Reason.ALIASED_INPUTS, "a padded argument overlaps itself")
            key, padded = padded_key(call, fitted), fitted
        site = self.sites.get(device) or self._open(device)
        try:
            entry = site.store.entries.get(key)
            if entry is None:
                if any([is_spread(t) for i, t in enumerate(call.tensors) if padded is None or padded.shapes[i] is None]):
                    return _eagerly(Reason.WIDE_GAPS, _WIDE_GAPS)
                entry = site.store.add(key, Entry(shape_key(call, padded, len(site.store.entries)), key=key))
            marks = None if entry.held is None else entry.held.marks(call.tensors)
            if marks is not None:
                entry = site.store.variant(entry, marks)
        except Exception as error:  # an argument cannot be compared with that of another call
            return _eagerly(Reason.UNHASHABLE_ARGUMENT, _text(error))
        if has_grad and entry.graph is None and self._has_trained_parameters():
            return _eagerly(Reason.AUTOGRAD, _AUTOGRAD)
        if entry.graph is not None and padded is None and entry.base is None:
            self._shortcuts.learn(call, entry, site)
        return Found(call, padded, site, entry)

    def settle(self, site: Site, entry: Entry, call: Scan, recorded: Callable[..., Any]) -> Entry:
        """Before a recording of the call is made: the entry that it belongs to, now that it shows which tensors the callable
        holds. Code of `recorded` may ask whether an argument is one of them."""
        base = entry.base or entry
        held = held_by(recorded, self.function, call)
        if held is None:  # what it reaches cannot be read: nothing is recorded
            return entry
        base.held = held
        marks = held.marks(call.tensors)
        if marks is None:
            return base
        found = site.store.variant(base, marks)
        if found is not entry:
            found.seen, found.is_urgent = max(found.seen, entry.seen), found.is_urgent or entry.is_urgent
        return found

    def refusal(self, found: Found) -> tuple[Reason, str] | None:
        """Why the call found would run eagerly now, or None where it would replay."""
        entry = found.entry
        if entry is None:
            assert found.reason is not None
            return found.reason, found.detail
        graph = entry.graph
        if graph is None:
            is_frozen = self.is_frozen and not entry.wait
            return (Reason.NOT_CAPTURED, entry.without_capture) if is_frozen else (entry.reason, entry.detail)
        assert found.scan is not None
        if not graph.audit.holds():
            return Reason.REBOUND, ""
        if torch.is_grad_enabled() and not self.options.inference and graph.audit.requires_grad():
            return Reason.AUTOGRAD, _AUTOGRAD
        why = graph.cannot_answer(found.scan.tensors)
        return None if why is None else (why, "")

    def close(self) -> None:
        """Closes every recording and gives their memory back; later calls run eagerly."""
        if self.lanes_entered():
            raise ReplayError(
                f"{self.name}: step.close() was called in the middle of a call of the same step: close it afterwards"
            )
        self.is_closed = True
        for site in list(self.sites.values()):
            with site.lane.exclusive(is_upkeep=True):
                site.store.close()
            site.lane.close()
            self.past_replays += site.store.replays
            self.past_evictions += site.store.evictions
        self.sites.clear()
        self._shortcuts.forget()

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


def _eagerly(reason: Reason, detail: str = "") -> Found:
    return Found(None, None, None, None, reason, detail)


def _text(error: Exception) -> str:
    return (
        f"an argument cannot be compared: {traceback.format_exception_only(error)[-1].strip()}"  # whatever its __str__ does
    )


def _is_being_captured(device_type: str) -> bool:
    return device_type == "cuda" and is_stream_capturing()
