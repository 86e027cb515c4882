"""What recordings cost, to the byte: a row a recording, a row a family, and sums that must meet what the driver says.

Pool memory is shared, so a recording has three figures: what the pool grew by for it (*own*), what it holds there at
most while it runs (*peak*), and how much of that others use as well at other times (*shared*). Own bytes add up to the
pool, shared ones do not add up to anything. Outputs lie in the pool; static inputs and workspaces outside of it.

The balance compares two readings of the device, before a capture and after it. What the driver says was taken is what
the allocators reserved (the pools among it), the executable graphs, and what warm-ups made the driver load; the rest is
`unexplained` and printed, never spread over the others. On the cpu device it is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from segue.device import MemoryReading
from segue.memory.lane import Lane
from segue.observe.decision import GraphRecord
from segue.observe.report import format_bytes, format_table


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One recording, or all of a family. Bytes and seconds; `nodes` None where the device cannot tell."""

    family: str
    key: str
    graphs: int
    nodes: int | None
    own_bytes: int
    shared_bytes: int
    peak_bytes: int
    driver_bytes: int
    static_bytes: int
    output_bytes: int
    loaded_bytes: int
    warmup_s: float
    capture_s: float
    instantiate_s: float

    @property
    def freed_if_evicted(self) -> int:
        return self.driver_bytes + self.static_bytes


@dataclass(frozen=True, slots=True)
class Balance:
    """Two readings of the device compared, in bytes: `driver` is the growth that the driver reports."""

    driver: int
    pools: int
    allocator: int
    """reserved outside of the pools: static inputs, workspaces, and what eager work left cached"""
    graphs: int
    loaded: int

    @property
    def unexplained(self) -> int:
        return self.driver - self.pools - self.allocator - self.graphs - self.loaded

    def __str__(self) -> str:
        return (
            f"driver {format_bytes(self.driver)} more = pools {format_bytes(self.pools)} + other reserved "
            f"{format_bytes(self.allocator)} + graphs {format_bytes(self.graphs)} + loaded {format_bytes(self.loaded)} + "
            f"unexplained {format_bytes(self.unexplained)}"
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """Every recording of a lane. `str` is the table of families with the balance below, at most 120 columns wide."""

    graphs: tuple[LedgerRow, ...]
    families: tuple[LedgerRow, ...]
    pool_bytes: int
    """reserved by the lane's pools"""
    workspace_bytes: int
    """kept by what warm-ups allocated outside of the pools: library workspaces, plans, caches"""
    balance: Balance | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def own_bytes(self) -> int:
        return sum(row.own_bytes for row in self.families)

    @property
    def driver_bytes(self) -> int:
        return sum(row.driver_bytes for row in self.families)

    @property
    def unowned_bytes(self) -> int:
        """Pool memory that no recording grew it by: the anchor's chunk, and what closed recordings left behind."""
        return self.pool_bytes - self.own_bytes

    @property
    def budget_bytes(self) -> int:
        """What a budget counts: the pools' high water, and the driver's bytes of the executable graphs."""
        return self.pool_bytes + self.driver_bytes

    def with_notes(self, *notes: str) -> Ledger:
        """The same, with more lines below."""
        return replace(self, notes=(*self.notes, *notes))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        balance = self.balance
        return {
            "pool_bytes": self.pool_bytes,
            "unowned_bytes": self.unowned_bytes,
            "driver_bytes": self.driver_bytes,
            "workspace_bytes": self.workspace_bytes,
            "families": [asdict(row) for row in self.families],
            "graphs": [asdict(row) | {"freed_if_evicted": row.freed_if_evicted} for row in self.graphs],
            "balance": None if balance is None else asdict(balance) | {"unexplained": balance.unexplained},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        headers = ["family", "graphs", "nodes", "own", "shared", "peak", "driver", "static", "output", "warm s", "capture s"]
        lines = [format_table(headers, [_cells(row) for row in self.families])]
        lines.append(
            f"pools {format_bytes(self.pool_bytes)}, of which no graph's own {format_bytes(self.unowned_bytes)}; workspaces "
            f"and plans {format_bytes(self.workspace_bytes)}"
        )
        if self.balance is not None:
            lines.append(str(self.balance))
        return "\n".join((*lines, *self.notes))


def ledger_of(
    lane: Lane,
    records: Iterable[GraphRecord],
    *,
    static: Mapping[str, int] | None = None,
    readings: tuple[MemoryReading, MemoryReading] | None = None,
    notes: tuple[str, ...] = (),
) -> Ledger:
    """The ledger of a lane's `records`.

    `static` are bytes of static inputs that a family's recordings share. `readings` were taken before and after the
    capture of exactly these recordings; without them there is no balance.
    """
    rows = tuple(_row(record) for record in records)
    shared_inputs = static or {}
    names = dict.fromkeys(row.family for row in rows)
    families = tuple(
        _family(name, [row for row in rows if row.family == name], shared_inputs.get(name, 0)) for name in names
    )
    pool_bytes = lane.reserved_bytes
    balance, workspaces = None, 0
    if readings is not None:
        before, after = readings
        balance = Balance(
            driver=after.driver_used - before.driver_used,
            pools=pool_bytes,
            allocator=after.reserved - before.reserved - pool_bytes,
            graphs=sum(row.driver_bytes for row in rows),
            loaded=sum(row.loaded_bytes for row in rows),
        )
        workspaces = max(after.allocated - before.allocated, 0)
    return Ledger(rows, families, pool_bytes, workspaces, balance, notes)


def _row(record: GraphRecord) -> LedgerRow:
    return LedgerRow(
        family=record.key.phase,
        key=str(record.key),
        graphs=1,
        nodes=record.nodes,
        own_bytes=record.pool_bytes,
        shared_bytes=record.shared_bytes,
        peak_bytes=record.peak_bytes,
        driver_bytes=record.driver_bytes,
        static_bytes=record.static_bytes,
        output_bytes=record.output_bytes,
        loaded_bytes=record.loaded_bytes,
        warmup_s=record.warmup_s,
        capture_s=record.capture_s,
        instantiate_s=record.instantiate_s,
    )


_HIGHEST = ("shared_bytes", "peak_bytes", "output_bytes")
"""of these a family has what its largest recording has, since they lie in memory that all share"""


def _family(name: str, rows: list[LedgerRow], static_bytes: int) -> LedgerRow:
    values: dict[str, Any] = {"family": name, "key": "all"}
    for column in (f.name for f in fields(LedgerRow)[2:]):
        cells = [getattr(row, column) for row in rows]
        if column in _HIGHEST:
            values[column] = max(cells)
        else:
            values[column] = None if None in cells else sum(cells)
    values["static_bytes"] += static_bytes
    return LedgerRow(**values)


def _cells(row: LedgerRow) -> list[str]:
    sizes = (row.own_bytes, row.shared_bytes, row.peak_bytes, row.driver_bytes, row.static_bytes, row.output_bytes)
    return [
        row.family,
        str(row.graphs),
        "-" if row.nodes is None else str(row.nodes),
        *map(format_bytes, sizes),
        f"{row.warmup_s:.2f}",
        f"{row.capture_s:.2f}",
    ]
