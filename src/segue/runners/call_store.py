"""What is known of each key of a `segue.graph`: seen so far, recorded, refused for which reason, and for how long.

Recordings are bounded in number and bytes. When one too many is wanted, the least valuable goes: recent calls times the
work that a replay saves (counted in operations, each a launch). Counts age, so a shape that was busy long ago gives way;
a newcomer must have been twice as busy as what it replaces, so that many rare shapes cannot drive each other out.

Evicting one recording frees its executable graph and its static inputs. The pool's memory is shared by the lane's
recordings and stays; it goes when the last recording does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from segue.memory.lane import Lane
from segue.observe.decision import Decision, Reason
from segue.runners.call_graph import CallGraph
from segue.runners.call_held import Held, Mark
from segue.shapes.key import ShapeKey

FIRST_RETRY = 64
"""calls of a key until a failed capture is tried again; twice as many after each further failure"""
LAST_RETRY = 1 << 20
MIN_KEYS = 1024
_MANY_REBOUNDS = 4
_ELSEWHERE = "a parameter, buffer or tensor that it reads lies elsewhere now, or a function that it names is another one"
_HYSTERESIS = 2
_AGE_AFTER = 256
_MOST_RECENT = 1024
_MOST_OF_A_POOL = 4


@dataclass(slots=True, eq=False)
class Entry:
    """One key. `wait` counts the calls that still run eagerly before the next attempt."""

    shape: ShapeKey
    graph: CallGraph | None = None
    decision: Decision | None = None
    seen: int = 0
    recent: int = 0
    operations: int = 0
    reason: Reason = Reason.FIRST_SEEN
    detail: str = ""
    wait: int = 0
    failures: int = 0
    difference: str = ""
    """where the last run that was to be recorded went another way than the traced one"""
    rebounds: int = 0
    replays: int = 0
    since_capture: int = 0
    effects: tuple[str, ...] = ()
    verified: int = 0
    unverified: str = ""
    pending: Any = None
    """the admission that another thread is to complete"""
    is_urgent: bool = False
    """the next recording is made by the call itself"""
    key: Any = None
    base: Entry | None = None
    """the entry of calls that look the same, where of this one's an argument is a tensor that the callable holds"""
    held: Held | None = None
    """those tensors, once a recording was to be made; the base knows them"""
    pools: dict[Any, set[Any]] = field(default_factory=dict)
    """of the base: by argument and container that the callable holds, the items that have entries of their own"""
    asks: bool = False
    """of the base: whether an entry of a held tensor was refused, since a copy would be treated otherwise"""

    def refuse(self, reason: Reason, detail: str) -> None:
        """Remembers why there is no recording, and for how many calls."""
        self.reason, self.detail = reason, detail
        self.wait = min(FIRST_RETRY << self.failures, LAST_RETRY)
        self.failures += 1
        if reason is Reason.ALIASED_INPUTS and self.base is not None:
            self.base.asks = True

    def hurry(self, min_hits: int) -> None:
        """The next call is recorded, whatever was refused before."""
        self.seen, self.wait, self.reason = max(self.seen, min_hits), 0, Reason.FIRST_SEEN
        self.recent += _MOST_RECENT
        self.pending, self.is_urgent = None, True

    def note_rebound(self, detail: str = _ELSEWHERE) -> None:
        """This call runs eagerly and the next one is recorded; where it happens again and again, a later one."""
        self.rebounds += 1
        self.reason, self.detail = Reason.REBOUND, detail
        self.wait = 1 if self.rebounds < _MANY_REBOUNDS else min(8 << (self.rebounds - _MANY_REBOUNDS), LAST_RETRY)

    @property
    def without_capture(self) -> str:
        """Why there is no recording once `step.freeze()` was called."""
        held = "; an argument is a tensor that the callable holds, so such calls need a recording of their own"
        return f"step.freeze() was called{'' if self.base is None else held}"

    @property
    def is_idle(self) -> bool:
        return self.graph is None and self.pending is None

    @property
    def value(self) -> int:
        return self.recent * max(self.operations, 1)


class CallStore:
    """Owns every recording of one callable on one device. Changes happen with the device's lane held."""

    def __init__(self, max_graphs: int, budget: int | None, lane: Lane, *, may_reset: bool) -> None:
        self.entries: dict[Any, Entry] = {}
        self.recorded: dict[Entry, CallGraph] = {}
        self.evictions = 0
        self.forgotten_replays = 0
        self.max_graphs = max_graphs
        self.budget = budget
        self.lane = lane
        self._may_reset = may_reset
        self._max_keys = max(MIN_KEYS, 4 * max_graphs)
        self._cold_calls = 0

    @contextmanager
    def filling_caches(self) -> Iterator[None]:
        """Around an eager call: what it adds to dicts and sets of the callable's own makes no recording another one."""
        audits = [graph.audit for graph in list(self.recorded.values()) if graph.audit.grows()]
        yield
        for audit in audits:
            audit.take_growth()

    @property
    def replays(self) -> int:
        """By recordings that are here and by those that went."""
        return self.forgotten_replays + sum(entry.replays for entry in list(self.entries.values()))

    @property
    def used_bytes(self) -> int:
        """The lane's pools, driver memory and static inputs."""
        records = [graph.record for graph in list(self.recorded.values())]
        return self.lane.reserved_bytes + sum(r.driver_bytes + r.static_bytes for r in records)

    def add(self, key: Any, entry: Entry) -> Entry:
        """Takes a new key; rare unrecorded ones are forgotten where there are too many."""
        if len(self.entries) >= self._max_keys:
            idle = sorted((e.recent, i, k) for i, (k, e) in enumerate(list(self.entries.items())) if e.is_idle)
            for _, _, old in idle[: max(len(idle) // 2, 1)]:
                forgotten = self.entries.pop(old, None)
                self.forgotten_replays += 0 if forgotten is None else forgotten.replays
        return self.entries.setdefault(key, entry)

    def variant(self, base: Entry, marks: tuple[Mark | None, ...]) -> Entry:
        """The entry of calls that look as those of `base` do and have arguments that the callable holds: one for each, but
        of items of one container given as the same argument only the first few have their own. A callable that keeps many
        (a state for each of its users) does not ask which it is given; where it was seen to, these have too."""
        key = base.key, tuple([mark and self._shared(base, at, mark) for at, mark in enumerate(marks)])
        return self.entries.get(key) or self.add(key, Entry(base.shape, key=key, base=base))

    def _shared(self, base: Entry, argument: int, mark: Mark) -> Any:
        if mark.pool is None or base.asks:
            return mark
        own = base.pools.setdefault((argument, mark.pool), set())
        if len(own) < _MOST_OF_A_POOL:
            own.add(mark)
        return mark if mark in own else mark.pool

    def note_cold(self, entry: Entry) -> None:
        """Counts a call that was not replayed; all counts age with these."""
        entry.recent += 1
        self._cold_calls += 1
        if self._cold_calls % _AGE_AFTER == 0:
            for other in list(self.entries.values()):
                other.recent = min(other.recent, _MOST_RECENT) // 2

    def has_room(self, entry: Entry) -> bool:
        """Whether `entry` may be recorded, another one making room if need be."""
        return len(self.recorded) < self.max_graphs or self._victim(entry) is not None

    def put(self, entry: Entry, graph: CallGraph) -> None:
        """Takes a new recording; what is one too many, or over the budget, is closed, the new one too if it must be."""
        if entry in self.recorded:
            self.recorded[entry].close()
        entry.graph = self.recorded[entry] = graph  # first: with the last recording the pool goes, and this one lies in it
        entry.reason, entry.detail, entry.failures, entry.difference = Reason.EVICTED, "", 0, ""
        while len(self.recorded) > self.max_graphs:
            self.drop(min((e for e in self.recorded if e is not entry), key=lambda e: e.value), Reason.EVICTED)
        if self.budget is None:
            return
        if self.lane.reserved_bytes > self.budget:  # the pool stays until the last recording is gone
            for other in list(self.recorded):
                self.drop(other, Reason.OVER_BUDGET if other is entry else Reason.EVICTED)
            entry.refuse(Reason.OVER_BUDGET, f"its recording grew the pool over the memory budget of {self.budget} bytes")
        while self.recorded and self.used_bytes > self.budget:
            least = min(self.recorded, key=lambda e: (e is entry, e.value))
            self.drop(least, Reason.EVICTED)
            if least is entry:
                entry.refuse(Reason.OVER_BUDGET, f"its recording needs more than the memory budget of {self.budget} bytes")

    def drop(self, entry: Entry, reason: Reason) -> None:
        """Closes one recording; its calls run eagerly for `reason` until it is recorded again. Where this, or `put`, was
        interrupted, the recording may be known in one place alone."""
        graph = self.recorded.get(entry) or entry.graph
        entry.graph, entry.reason = None, reason
        entry.detail = "it made room for a busier kind of call" if reason is Reason.EVICTED else ""
        if reason in (Reason.EVICTED, Reason.OVER_BUDGET):
            self.evictions += 1
        if graph is not None:
            graph.close()
        self.recorded.pop(entry, None)
        if not self.recorded and self._may_reset:
            self.lane.release()

    def close(self) -> None:
        for entry in list(self.recorded):
            self.drop(entry, Reason.DISABLED)

    def _victim(self, entry: Entry) -> Entry | None:
        least = min(list(self.recorded), key=lambda e: e.value, default=None)
        if least is None:
            return None
        worth = entry.recent * (entry.operations or least.operations or 1)
        return least if least.value * _HYSTERESIS < worth else None
