"""Estimates: the usual formula by its own definition, and what ours keeps apart."""

from __future__ import annotations

import pytest

from segue.device import MemoryReading
from segue.memory.estimate import Estimate, FamilySample, error_text, family_sample, formula, sampled
from segue.memory.shortage import checklist, shortage_text
from segue.observe.decision import GraphRecord
from segue.shapes.key import ShapeKey

MIB = 1 << 20


def test_the_formula_is_the_largest_and_a_marginal_for_each_further_one_of_at_least_1_mib() -> None:
    assert formula([(100 * MIB, 3 * MIB, 10)]) == 127 * MIB
    assert formula([(100 * MIB, 0, 10)]) == 109 * MIB
    assert formula([(100 * MIB, 3 * MIB, 10), (40 * MIB, 2 * MIB, 5)]) == (100 + 27 + 8) * MIB
    assert formula([(100 * MIB, 3 * MIB, 1)]) == 100 * MIB and formula([(100, 1, 0)]) == formula([]) == 0


def test_ours_takes_the_pool_once_and_executable_graphs_each() -> None:
    key = ShapeKey("prefill", 8)
    rows = [
        GraphRecord(key, "full", pool_bytes=90 * MIB, peak_bytes=80 * MIB, driver_bytes=4 * MIB),
        GraphRecord(key, "full", pool_bytes=2 * MIB, peak_bytes=50 * MIB, driver_bytes=2 * MIB),
        GraphRecord(key, "full", pool_bytes=0, peak_bytes=50 * MIB, driver_bytes=3 * MIB),
    ]
    sample = family_sample("prefill", rows, 42)
    assert (sample.first_bytes, sample.marginal_bytes, sample.driver_bytes) == (94 * MIB, 4 * MIB, 3 * MIB)
    estimate = Estimate((sample,), pool_bytes=92 * MIB, static_bytes=5 * MIB, eager_peak_bytes=7 * MIB)
    assert estimate.graph_bytes == (92 + 42 * 3) * MIB and estimate.formula_bytes == (94 + 41 * 4) * MIB
    assert estimate.total_bytes == estimate.graph_bytes + 12 * MIB == estimate.to_dict()["total_bytes"]
    assert sample.num_sampled == 3
    assert estimate.within(20 * MIB) == 32 * MIB and estimate.within(1 << 40) == estimate.total_bytes


def test_a_family_captured_into_a_grown_pool_still_has_its_own_size_in_the_formula() -> None:
    row = GraphRecord(ShapeKey("decode", 8), "full", pool_bytes=0, peak_bytes=30 * MIB, driver_bytes=MIB)
    assert family_sample("decode", [row], 3) == FamilySample("decode", 3, 31 * MIB, 0, float(MIB), 0, 1)
    assert family_sample("decode", [row], 3).graph_bytes == 3 * MIB
    assert family_sample("decode", [], 3).num_graphs == 0


@pytest.mark.parametrize(("back", "kept"), [(0, 12), (12, 0), (3, 9), (20, 0), (-5, 12)])
def test_what_the_driver_keeps_of_closed_samples_it_gives_to_the_graphs(back: int, kept: int) -> None:
    families = (FamilySample("prefill", 10, 0, 0, 3.0 * MIB, 50 * MIB, 3), FamilySample("decode", 4, 0, 0, 1.0 * MIB, 0, 3))
    before = Estimate(families, pool_bytes=50 * MIB, static_bytes=0, eager_peak_bytes=0)
    used = MemoryReading(900 * MIB, 1000 * MIB, 400 * MIB, 300 * MIB)
    closed = MemoryReading((900 - 70 - back) * MIB, 1000 * MIB, 330 * MIB, 250 * MIB)  # the pool was 70 MiB
    after = before.once_closed(used, closed)
    assert after.driver_bytes == before.driver_bytes - kept * MIB == (34 - kept) * MIB
    assert after.graph_bytes == sum(family.graph_bytes for family in after.families)


def test_samples_are_the_two_largest_one_between_and_the_smallest() -> None:
    assert [sampled(n) for n in (0, 1, 2, 3, 4, 42)] == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 21, 41]]


def test_errors_are_in_per_cent_of_the_actual() -> None:
    assert (error_text(110, 100), error_text(75, 100), error_text(0, 0)) == ("+10.0%", "-25.0%", "no graphs")


READINGS = {
    "the KV cache": (MemoryReading(990, 1000, 900, 900), 10, ["KV cache", "smaller shapes"]),
    "the pools": (MemoryReading(990, 1000, 900, 900), 800, ["smaller shapes"]),
    "another process": (MemoryReading(990, 1000, 100, 100), 20, ["what else runs", "smaller shapes"]),
    "cache and process": (MemoryReading(990, 1000, 600, 600), 0, ["KV cache", "smaller shapes", "what else runs"]),
    "nobody": (MemoryReading(100, 1000, 90, 90), 10, ["smaller shapes"]),
}


@pytest.mark.parametrize("who", list(READINGS))
def test_the_checklist_begins_with_who_holds_the_most(who: str) -> None:
    reading, pool, expected = READINGS[who]
    key = ShapeKey("prefill", 2048)
    found = checklist(key, "breakable", reading, pool)
    assert len(found) == len(expected) and all(word in text for word, text in zip(expected, found, strict=True)), found
    assert "'breakable' for prefill" in checklist(key, "full", reading, pool)[-1]
    assert "max_size below 2048" in shortage_text(key, "full", reading, pool)
