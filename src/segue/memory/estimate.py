"""What graphs will cost, before they are all made: two estimates from a few recordings that were made to be measured.

*The usual formula* takes one or two captures a family: the largest one, and (N - 1) times what a further one took, at
least 1 MiB each; over families that share a pool, the highest of the largest ones and the sum of the others. It reads
one number, the fall of free memory, so it multiplies what happened to fall together in one capture.

*Ours* keeps apart what behaves differently. The pool is as large as its largest recordings make it, whatever their
number: what the sampled recordings of all families, largest first, made of one pool. Executable graphs do add up: the
mean of the sampled ones, times their number, less what the driver kept of the samples when they were closed: it gives
that to the next graphs. Static plans and inputs are not estimated, but made, all of them, and read.

Both stand beside the actual cost in the report. Nothing here captures; who samples is `llm.sizing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from segue.device import MemoryReading
from segue.memory.ledger import Ledger
from segue.observe.decision import GraphRecord
from segue.observe.report import format_bytes

LEAST_MARGINAL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FamilySample:
    """Some recordings of a family, in the order of their capture, and how many the family will have."""

    family: str
    num_graphs: int
    first_bytes: int
    """what the largest takes of the pool and of the driver, as if it were the first one there"""
    marginal_bytes: int
    """what the second one takes; 0 where only one was sampled"""
    driver_bytes: float
    """the mean of all samples"""
    pool_bytes: int = 0
    """what the samples made a pool grow by that families sampled before had already grown"""
    num_sampled: int = 0
    kept_bytes: int = 0
    """what the driver still holds of the samples' executable graphs, for others"""

    @property
    def driver_growth(self) -> int:
        """What the driver will take for the family's executable graphs beyond what it holds."""
        return max(round(self.driver_bytes * self.num_graphs) - self.kept_bytes, 0)

    @property
    def graph_bytes(self) -> int:
        """What the family's graphs will add to the pool, and take of the driver."""
        return self.pool_bytes + self.driver_growth


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes. `total_bytes` is what must stay free when the cache is sized, `graph_bytes` the part that is graphs."""

    families: tuple[FamilySample, ...]
    pool_bytes: int
    static_bytes: int
    """static inputs and plans of all shapes, as measured"""
    eager_peak_bytes: int
    """the most that an eager pass held at once, outside of every pool"""
    lent_bytes: int = 0
    """how much of that the pool will hold, where it is lent to eager passes"""

    @property
    def driver_bytes(self) -> int:
        return sum(family.driver_growth for family in self.families)

    @property
    def graph_bytes(self) -> int:
        """Pool and executable graphs."""
        return self.pool_bytes + self.driver_bytes

    @property
    def formula_bytes(self) -> int:
        """The same by the usual formula."""
        return formula([(f.first_bytes, f.marginal_bytes, f.num_graphs) for f in self.families])

    @property
    def total_bytes(self) -> int:
        return self.within(None)

    def within(self, budget: int | None) -> int:
        """What must stay free where graphs are bounded by a budget."""
        graphs = self.graph_bytes if budget is None else min(self.graph_bytes, budget)
        lent = self.lent_bytes if budget is None else min(self.lent_bytes, budget)
        return graphs + self.static_bytes + self.eager_peak_bytes - lent

    def once_closed(self, before: MemoryReading, after: MemoryReading) -> Estimate:
        """The estimate after its samples and their pool are gone; readings from before and after that."""
        given_back = (before.driver_used - after.driver_used) - (before.reserved - after.reserved)
        sampled = sum(family.driver_bytes * family.num_sampled for family in self.families)
        share = min(max(1 - given_back / sampled, 0.0), 1.0) if sampled else 0.0
        families = [replace(f, kept_bytes=int(share * f.driver_bytes * f.num_sampled)) for f in self.families]
        return replace(self, families=tuple(families))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self) | {
            "driver_bytes": self.driver_bytes,
            "graph_bytes": self.graph_bytes,
            "formula_bytes": self.formula_bytes,
            "total_bytes": self.total_bytes,
        }

    def compared(self, actual: Ledger) -> tuple[str, ...]:
        """Both estimates beside what the graphs took: a line for all, and one a family where there are several."""
        took = actual.budget_bytes
        ours, usual = (f"{format_bytes(n)} ({error_text(n, took)})" for n in (self.graph_bytes, self.formula_bytes))
        lines = [f"graphs took {format_bytes(took)}; estimated {ours}, by the usual formula {usual}"]
        for row in actual.families if len(actual.families) > 1 else ():
            estimated = next((f.graph_bytes for f in self.families if f.family == row.family), 0)
            took = row.own_bytes + row.driver_bytes
            error = error_text(estimated, took)
            lines.append(f"  {row.family}: took {format_bytes(took)}, estimated {format_bytes(estimated)} ({error})")
        return tuple(lines)


def formula(families: Sequence[tuple[int, int, int]]) -> int:
    """The usual formula over (largest, marginal, number of graphs) of each family."""
    present = [family for family in families if family[2]]
    marginals = sum((number - 1) * max(marginal, LEAST_MARGINAL_BYTES) for _, marginal, number in present)
    return max((largest for largest, _, _ in present), default=0) + marginals


def family_sample(family: str, records: Sequence[GraphRecord], num_graphs: int) -> FamilySample:
    """From recordings in the order of their capture, the largest first."""
    if not records:
        return FamilySample(family, 0, 0, 0, 0.0)
    first = max(records[0].pool_bytes, records[0].peak_bytes) + records[0].driver_bytes
    marginal = records[1].pool_bytes + records[1].driver_bytes if len(records) > 1 else 0
    driver_bytes = sum(r.driver_bytes for r in records) / len(records)
    pool_bytes = sum(r.pool_bytes for r in records)
    return FamilySample(family, num_graphs, first, marginal, driver_bytes, pool_bytes, len(records))


def sampled(count: int) -> list[int]:
    """Which of `count` recordings, ordered by size, to make for an estimate: the two largest, one between, the smallest."""
    return sorted({place for place in (0, 1, count // 2, count - 1) if 0 <= place < count})


def error_text(estimated: int, actual: int) -> str:
    """The estimate's error in per cent of the actual."""
    return "no graphs" if not actual else f"{100 * (estimated - actual) / actual:+.1f}%"
