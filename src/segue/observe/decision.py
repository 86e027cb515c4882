"""Which graph a call used, or the typed reason why it ran eagerly; and what each recording costs.

Every call yields one `Decision`. `Decisions` counts them, so that a report can show how much of the traffic replayed
and why the rest did not. Nothing here allocates per call beyond the decision itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from segue.shapes.key import ShapeKey


class Reason(Enum):
    """Why a call ran eagerly."""

    DISABLED = "disabled"
    FIRST_SEEN = "first_seen"
    NOT_CAPTURED = "not_captured"
    NO_RUNG = "no_rung"
    TOO_MANY_REQUESTS = "too_many_requests"
    OVER_PADDED = "over_padded"
    NOT_UNIFORM = "not_uniform"
    WIDTH = "width"
    SUPPORT = "support"
    AUTOGRAD = "autograd"
    UNHASHABLE_ARGUMENT = "unhashable_argument"
    ALIASED_INPUTS = "aliased_inputs"
    WIDE_GAPS = "wide_gaps"
    DATA_DEPENDENT = "data_dependent"
    CAPTURE_FAILED = "capture_failed"
    OVER_BUDGET = "over_budget"
    EVICTED = "evicted"
    BORROWED = "borrowed"
    REBOUND = "rebound"
    MISMATCH = "mismatch"
    CAPTURING = "capturing"
    LANE_BUSY = "lane_busy"
    IN_BACKGROUND = "in_background"
    DEBUG = "debug"
    OTHER_DEVICE = "other_device"
    UNSAFE_EFFECTS = "unsafe_effects"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Decision:
    """What one call does: replay the recording of `key`, or run eagerly for `reason`.

    `real` and `padded` count rows (tokens) before and after padding; they are equal where nothing is padded.
    `backend` is the name of the backend that answers, ``"disabled"`` for an eager call.
    """

    key: ShapeKey | None
    backend: str
    reason: Reason | None
    real: int
    padded: int

    @property
    def is_replay(self) -> bool:
        return self.key is not None and self.reason is None


@dataclass(slots=True)
class GraphRecord:
    """The ledger's row of one recording. Bytes and seconds as measured; `nodes` None where the device cannot tell.

    `pool_bytes` is what the lane's pool grew by for it, `peak_bytes` what it holds there at most while it runs (0 where
    that was not measured), `output_bytes` its outputs, which lie in the pool. `driver_bytes` are those of its executable
    graphs, `static_bytes` inputs of its own, `loaded_bytes` what its warm-up made the driver load (kernels, handles).
    `real` and `padded` add up the rows of all hits, so `real / padded` is the useful share of the work.
    """

    key: ShapeKey
    backend: str
    segments: int = 0
    breaks: int = 0
    nodes: int | None = None
    pool_bytes: int = 0
    driver_bytes: int = 0
    static_bytes: int = 0
    output_bytes: int = 0
    peak_bytes: int = 0
    loaded_bytes: int = 0
    warmup_s: float = 0.0
    capture_s: float = 0.0
    instantiate_s: float = 0.0
    hits: int = 0
    real: int = 0
    padded: int = 0

    @property
    def shared_bytes(self) -> int:
        """What it uses of pool memory that was there before it: other recordings' memory, in use at other times."""
        return max(self.peak_bytes - self.pool_bytes, 0)

    @property
    def freed_if_evicted(self) -> int:
        """What closing it alone gives back: pool memory is shared, and goes with the lane."""
        return self.driver_bytes + self.static_bytes


class Decisions:
    """Counts decisions by backend and reason. Not locked: a runner serialises its own calls."""

    def __init__(self) -> None:
        self.replays: Counter[str] = Counter()
        self.eager: Counter[Reason] = Counter()
        self.last: Decision | None = None

    def note(self, decision: Decision) -> None:
        self.last = decision
        if decision.reason is None:
            self.replays[decision.backend] += 1
        else:
            self.eager[decision.reason] += 1

    @property
    def num_replays(self) -> int:
        return sum(self.replays.values())

    @property
    def num_eager(self) -> int:
        return sum(self.eager.values())
