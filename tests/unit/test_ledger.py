"""The ledger: on the cpu device exact to the byte, on a GPU reconciled with the driver; its table stays narrow."""

from __future__ import annotations

import random

import pytest
import torch

from segue.backends.base import own_driver_bytes
from segue.device import Device, MemoryReading
from segue.memory.lane import Lane
from segue.memory.ledger import Balance, ledger_of
from segue.observe.decision import GraphRecord
from segue.shapes.key import ShapeKey
from tests_support import record

MIB = 1 << 20


def measured(lane: Lane, elements: int, tokens: int = 1) -> GraphRecord:
    """Records `y = (x + 1) * (x + 2)` of that many floats, its pool peak measured: three buffers are alive at once."""
    x = torch.zeros(elements, device=lane.device.device)
    with lane.device.measure_peak(lane.pool) as peak:
        made = record(lane, lambda: (x + 1) * (x + 2), tokens=tokens)
    made.record.peak_bytes = peak.nbytes
    return made.record


def test_the_first_recording_owns_the_pool_and_smaller_ones_share_it(lane: Lane) -> None:
    elements = 3 * MIB // 4  # buffers of 3 MiB
    large, small = measured(lane, elements), measured(lane, elements // 2)
    assert large.peak_bytes >= 9 * MIB and large.pool_bytes >= large.peak_bytes and large.shared_bytes == 0
    assert small.pool_bytes == 0 and small.shared_bytes == small.peak_bytes >= 3 * elements // 2 * 4
    assert large.output_bytes == 3 * MIB and small.output_bytes == 3 * MIB // 2
    ledger = ledger_of(lane, [large, small])
    assert ledger.pool_bytes == ledger.own_bytes + ledger.unowned_bytes == lane.reserved_bytes
    family = ledger.families[0]
    assert (family.graphs, family.peak_bytes, family.own_bytes) == (2, large.peak_bytes, large.pool_bytes)


def test_on_the_cpu_device_every_byte_is_explained() -> None:
    from segue.device.cpu import CpuDevice

    lane = Lane(CpuDevice())
    before = lane.device.memory()
    assert before[:1] + before[2:] == (0, 0, 0)
    rng = random.Random(1)
    sizes = [rng.choice([rng.randrange(1, 1 << 21), rng.randrange(1, 1 << 18)]) for _ in range(12)]
    records = [measured(lane, size, tokens) for tokens, size in enumerate(sizes, 1)]
    for size, row in zip(sizes, records, strict=True):
        blocks = 3 * (-(-size * 4 // 512) * 512)  # of which a large one keeps a remainder of up to 1 MiB
        assert row.peak_bytes == blocks if size * 4 <= MIB else blocks <= row.peak_bytes <= blocks + 3 * MIB
        assert row.output_bytes == size * 4
    ledger = ledger_of(lane, records, readings=(before, lane.device.memory()))
    assert ledger.balance is not None and ledger.balance.unexplained == 0 and ledger.balance.allocator == 0
    assert ledger.unowned_bytes == 0 and ledger.driver_bytes == 0
    assert ledger.balance.driver == sum(row.pool_bytes for row in records) == lane.reserved_bytes
    lane.close()
    assert lane.device.memory().driver_used == 0 and lane.device.memory().allocated == 0


@pytest.mark.gpu
def test_the_ledger_meets_the_driver_within_16_mib() -> None:
    from segue.device import get_device

    lane = Lane(get_device("cuda"))
    _ = lane.pool
    before = lane.device.memory()
    records = [measured(lane, (20 - i) * MIB, 20 - i) for i in range(20)]
    ledger = ledger_of(lane, records, readings=(before, lane.device.memory()))
    assert ledger.balance is not None
    assert abs(ledger.balance.unexplained) <= max(16 * MIB, ledger.balance.driver // 50), str(ledger)
    lane.close()


def test_an_eager_peak_counts_what_lived_at_once(device: Device) -> None:
    def work() -> torch.Tensor:
        a = torch.empty(4 * MIB, dtype=torch.uint8, device=device.device)
        b = torch.empty(8 * MIB, dtype=torch.uint8, device=device.device)
        del a
        return b[: torch.empty(2 * MIB, dtype=torch.uint8, device=device.device).shape[0]]

    kept = torch.empty(16 * MIB, dtype=torch.uint8, device=device.device)
    with device.measure_peak() as peak:
        work()
    assert kept.numel() and 12 * MIB <= peak.nbytes < 15 * MIB


def test_a_balance_names_what_nothing_explains() -> None:
    balance = Balance(driver=100 * MIB, pools=40 * MIB, allocator=30 * MIB, graphs=20 * MIB, loaded=4 * MIB)
    assert balance.unexplained == 6 * MIB and "unexplained 6.0 MiB" in str(balance)


def test_a_family_adds_up_what_is_its_own_and_takes_the_highest_of_what_is_shared(lane: Lane) -> None:
    rows = [
        GraphRecord(
            ShapeKey("prefill", 8), "breakable", nodes=10, pool_bytes=7, peak_bytes=6, output_bytes=4, driver_bytes=2
        ),
        GraphRecord(
            ShapeKey("prefill", 4), "breakable", nodes=11, pool_bytes=1, peak_bytes=5, output_bytes=2, driver_bytes=3
        ),
        GraphRecord(ShapeKey("decode", 4), "full", nodes=None, pool_bytes=0, peak_bytes=9),
    ]
    ledger = ledger_of(lane, rows, static={"prefill": 100})
    prefill, decode = ledger.families
    assert (prefill.graphs, prefill.nodes, prefill.own_bytes, prefill.peak_bytes) == (2, 21, 8, 6)
    assert (prefill.output_bytes, prefill.driver_bytes, prefill.static_bytes, prefill.shared_bytes) == (4, 5, 100, 4)
    assert (decode.nodes, decode.shared_bytes, decode.freed_if_evicted) == (None, 9, 0)
    assert [row["freed_if_evicted"] for row in ledger.to_dict()["graphs"]] == [2, 3, 0]


def test_the_table_is_at_most_120_columns_wide(lane: Lane) -> None:
    huge = int(1023.9 * MIB)
    names = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend", "denoise", "call")
    rows = [
        GraphRecord(
            ShapeKey(name, 8192), "full", nodes=123_456, pool_bytes=huge, peak_bytes=2 * huge, driver_bytes=huge,  # type: ignore[arg-type]
            output_bytes=huge, static_bytes=huge, warmup_s=1234.5, capture_s=1234.5,
        )
        for name in names
    ]  # fmt: skip
    readings = MemoryReading(0, 1 << 37, 0, 0), MemoryReading(1 << 36, 1 << 37, 1 << 35, 1 << 34)
    text = str(ledger_of(lane, rows * 40, readings=readings))
    assert max(map(len, text.splitlines())) <= 120, text


@pytest.mark.parametrize(("taken", "nodes", "own"), [(-4, 10, 0), (0, 10, 0), (20, 2, 20), (5, 200, 5), (8000, 16, 34)])
def test_what_another_process_took_meanwhile_is_not_the_recordings(taken: int, nodes: int, own: int) -> None:
    assert own_driver_bytes(taken * MIB, nodes) == own * MIB
