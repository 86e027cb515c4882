"""The dispatch table: which captured shape answers a live batch.

Every batch takes the same three steps down, and the first that fits wins:

1. *exact*: a graph that recorded everything, attention included, so its whole shape must fit. A uniform graph holds up
   to `requests` requests of exactly `width` tokens each. A slotted graph (the full prefill) holds up to `tokens` tokens
   spread in any way over up to `requests` request slots.
2. *relaxed*: a segmented graph, whose attention runs eagerly between segments. It depends on the token count alone
   (`requests` is None), so any batch of at most `tokens` tokens fits, uniform or not.
3. *eager*, with the typed reason why the first step failed.

So 13 decode requests run the full graph of 16 rows; if one of them brings two tokens, the step runs the segmented graph
of 16 tokens; and without one, it runs eagerly because it is not uniform. A variant (a LoRA) must match at every step:
its kernels are in the recording.

The idea that keeps a look-up short: the keys of one kind (phase, variant, kind and width) are sorted by size, and an
array made once maps each live size to the first key that is large enough. A look-up indexes it and walks, past the
context rungs (or slot counts) that are too small, to the first key that fits; it never searches. An order is replaced
whole when a key comes or goes, so a look-up in another thread sees the old order or the new one, never half of one;
callers of `add` and `remove` take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from segue.observe.decision import Reason
from segue.shapes.key import Phase, ShapeKey

ANY_WIDTH = 0
UNBOUNDED = float("inf")


class DispatchTable:
    """Captured shapes of every phase of one engine, or of one runner's phase. Look-ups need no lock."""

    def __init__(self, keys: Iterable[ShapeKey] = ()) -> None:
        self._orders: dict[_Kind, _Order] = {}
        # (phase, variant) -> the widths of its uniform graphs: tells WIDTH from NOT_UNIFORM and NOT_CAPTURED.
        self._widths: dict[tuple[Phase, str], tuple[int, ...]] = {}
        grouped: dict[_Kind, list[ShapeKey]] = {}
        for key in dict.fromkeys(keys):
            grouped.setdefault(_kind_of(key), []).append(key)
        for kind, members in grouped.items():
            self._replace(kind, members)

    def lookup(
        self,
        phases: tuple[Phase, ...],
        tokens: int,
        requests: int,
        uniform: bool,
        width: int = 1,
        context: int | None = None,
        variant: str = "",
        max_padding: float = UNBOUNDED,
    ) -> tuple[ShapeKey | None, Reason | None]:
        """The captured shape for a live batch, or the reason why there is none; exactly one of the two is None.

        `phases` lists whose graphs may answer, in order of preference: a runner passes its own, an engine's decode step
        ``("decode", "prefill")``. `tokens` and `requests` are the real counts. `uniform` says that each request brings
        exactly `width` tokens. `context` is the longest context any request needs; None accepts only graphs that do
        not bound theirs. A shape of more than `max_padding` times the real tokens is refused.

        Raises `ValueError` for an empty batch, and where a uniform batch's counts contradict each other.
        """
        if tokens < 1 or requests < 1 or (uniform and tokens != requests * width):
            raise ValueError(
                f"no batch has {tokens} tokens in {requests} requests with uniform={uniform} and width={width}; "
                "counts must be at least 1, and a uniform batch has requests x width tokens"
            )
        need = _Need(tokens, requests, UNBOUNDED if context is None else context, max_padding * tokens)
        why: Reason | None = None
        for phase in phases:
            key, reason = self._exact(phase, variant, need, uniform, width)
            if key is not None:
                return key, None
            why = why or reason
        for phase in phases:
            key, reason = self._fit(_Kind(phase, variant, "tokens", ANY_WIDTH), tokens, need)
            if key is not None:
                return key, None
            why = why or reason
        return None, why or Reason.NOT_CAPTURED

    def add(self, key: ShapeKey) -> None:
        """Make a shape available (a lazy capture). Adding it twice changes nothing."""
        kind = _kind_of(key)
        members = self._members(kind)
        if key not in members:
            self._replace(kind, [*members, key])

    def remove(self, key: ShapeKey) -> None:
        """Withdraw a shape (an eviction). Raises `KeyError` where it was never added."""
        kind = _kind_of(key)
        members = self._members(kind)
        if key not in members:
            raise KeyError(f"{key} is not in the dispatch table")
        self._replace(kind, [member for member in members if member != key])

    def __contains__(self, key: ShapeKey) -> bool:
        return key in self._members(_kind_of(key))

    def __iter__(self) -> Iterator[ShapeKey]:
        return (key for order in list(self._orders.values()) for key in order.keys)

    def __len__(self) -> int:
        return sum(len(order.keys) for order in self._orders.values())

    def _exact(
        self, phase: Phase, variant: str, need: _Need, uniform: bool, width: int
    ) -> tuple[ShapeKey | None, Reason | None]:
        widths = self._widths.get((phase, variant), ())
        why: Reason | None = None
        if uniform and width in widths:
            key, why = self._fit(_Kind(phase, variant, "uniform", width), need.requests, need)
            if key is not None:
                return key, None
        elif widths:
            why = Reason.WIDTH if uniform else Reason.NOT_UNIFORM
        key, reason = self._fit(_Kind(phase, variant, "slots", ANY_WIDTH), need.tokens, need)
        return key, why or reason

    def _fit(self, kind: _Kind, size: int, need: _Need) -> tuple[ShapeKey | None, Reason | None]:
        order = self._orders.get(kind)
        return (None, None) if order is None else order.fit(size, need)

    def _members(self, kind: _Kind) -> tuple[ShapeKey, ...]:
        order = self._orders.get(kind)
        return () if order is None else order.keys

    def _replace(self, kind: _Kind, members: list[ShapeKey]) -> None:
        if members:
            self._orders[kind] = _Order(kind, members)
        else:
            self._orders.pop(kind, None)
        self._widths[kind.phase, kind.variant] = tuple(
            other.width
            for other in self._orders
            if other.how == "uniform" and (other.phase, other.variant) == (kind.phase, kind.variant)
        )


class _Kind(NamedTuple):
    """Keys that one order holds. `how` is ``"uniform"``, ``"slots"`` or ``"tokens"``: what a batch must fit in."""

    phase: Phase
    variant: str
    how: str
    width: int


class _Need(NamedTuple):
    """What a batch asks of a shape: at least so many tokens, requests and context; at most so many padded tokens."""

    tokens: int
    requests: int
    context: float
    most_tokens: float


class _Entry(NamedTuple):
    """A key with its bounds as plain numbers, in the order in which entries are tried: the least work first."""

    size: int
    requests: float
    context: float
    key: ShapeKey


class _Order:
    """The keys of one kind, ascending, and for each live size the index of the first that is large enough."""

    __slots__ = ("_entries", "_first", "_most_context", "_most_requests", "keys")

    def __init__(self, kind: _Kind, keys: Iterable[ShapeKey]) -> None:
        entries = [_entry(kind, key) for key in keys]
        self._entries = tuple(sorted(entries, key=lambda entry: entry[:3]))
        self.keys = tuple(entry.key for entry in self._entries)
        self._most_requests = max(entry.requests for entry in self._entries)
        self._most_context = max(entry.context for entry in self._entries)
        self._first: list[int] = []
        for index, entry in enumerate(self._entries):
            self._first += [index] * (entry.size + 1 - len(self._first))

    def fit(self, size: int, need: _Need) -> tuple[ShapeKey | None, Reason | None]:
        if size >= len(self._first) or need.context > self._most_context:
            return None, Reason.NO_RUNG
        if need.requests > self._most_requests:
            return None, Reason.TOO_MANY_REQUESTS
        why = Reason.NO_RUNG
        for index in range(self._first[size], len(self._entries)):
            entry = self._entries[index]
            if need.requests > entry.requests:
                why = Reason.TOO_MANY_REQUESTS
            elif need.context <= entry.context:
                if entry.key.tokens > need.most_tokens:
                    return None, Reason.OVER_PADDED
                return entry.key, None
        return None, why


def _kind_of(key: ShapeKey) -> _Kind:
    if key.uniform:
        if key.requests is None or key.tokens != key.requests * key.width:
            raise ValueError(f"{key} is uniform: it needs tokens == requests x width (width {key.width})")
        return _Kind(key.phase, key.variant, "uniform", key.width)
    return _Kind(key.phase, key.variant, "tokens" if key.requests is None else "slots", ANY_WIDTH)


def _entry(kind: _Kind, key: ShapeKey) -> _Entry:
    requests = UNBOUNDED if key.requests is None else key.requests
    context = UNBOUNDED if key.context is None else key.context
    size = key.requests if kind.how == "uniform" and key.requests is not None else key.tokens
    return _Entry(size, requests, context, key)
