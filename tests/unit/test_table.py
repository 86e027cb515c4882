"""The dispatch table: exact shape, then segmented graph, then eager with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.observe.decision import Reason
from segue.shapes import ShapeKey, vllm_decode
from segue.shapes.table import DispatchTable

DECODE = [ShapeKey("decode", rung, rung, uniform=True) for rung in vllm_decode(512)]
SEGMENTED = [ShapeKey("prefill", rung) for rung in vllm_decode(512)]
STEP: Any = ("decode", "prefill")


def slotted(tokens: int, slots: int) -> ShapeKey:
    return ShapeKey("prefill", tokens, slots)


def test_the_worked_example_on_the_ladder_of_vllm() -> None:
    table = DispatchTable(DECODE + SEGMENTED)
    # 13 decode requests go to the full graph of 16 rows.
    key, reason = table.lookup(STEP, tokens=13, requests=13, uniform=True)
    assert (key, reason) == (ShapeKey("decode", 16, 16, uniform=True), None)
    # Give one request a two-token query and the step runs the segmented graph of the same rung.
    key, reason = table.lookup(STEP, tokens=14, requests=13, uniform=False)
    assert (key, reason) == (ShapeKey("prefill", 16), None)
    # Without one, eagerly, with that reason.
    only_full = DispatchTable(DECODE)
    assert only_full.lookup(STEP, tokens=14, requests=13, uniform=False) == (None, Reason.NOT_UNIFORM)


def test_a_single_runner_looks_up_its_own_phase() -> None:
    table = DispatchTable(DECODE)
    assert table.lookup(("decode",), 512, 512, True) == (DECODE[-1], None)
    assert table.lookup(("decode",), 513, 513, True) == (None, Reason.NO_RUNG)
    assert table.lookup(("target_verify",), 1, 1, True) == (None, Reason.NOT_CAPTURED)


def test_a_uniform_batch_too_large_for_full_finds_the_segmented_graph() -> None:
    table = DispatchTable([ShapeKey("decode", 8, 8, uniform=True), ShapeKey("prefill", 64)])
    assert table.lookup(STEP, 9, 9, True) == (ShapeKey("prefill", 64), None)


def test_tokens_per_request_must_match_a_uniform_graph() -> None:
    verify = [ShapeKey("target_verify", n * 4, n, uniform=True, width=4) for n in (1, 2, 4, 8)]
    table = DispatchTable(verify)
    assert table.lookup(("target_verify",), 12, 3, True, width=4) == (verify[2], None)
    assert table.lookup(("target_verify",), 9, 3, True, width=3) == (None, Reason.WIDTH)
    assert table.lookup(("target_verify",), 9, 3, False) == (None, Reason.NOT_UNIFORM)


def test_the_smallest_sufficient_context_is_used() -> None:
    keys = [ShapeKey("decode", n, n, uniform=True, context=c) for n in (1, 4) for c in (128, 512, 2048)]
    table = DispatchTable(keys)
    for context, rung in ((1, 128), (128, 128), (129, 512), (2048, 2048)):
        key, _ = table.lookup(("decode",), 3, 3, True, context=context)
        assert key == ShapeKey("decode", 4, 4, uniform=True, context=rung)
    assert table.lookup(("decode",), 3, 3, True, context=2049) == (None, Reason.NO_RUNG)
    # Who cannot say how much context is needed may not use a graph that bounds it.
    assert table.lookup(("decode",), 3, 3, True) == (None, Reason.NO_RUNG)


def test_a_graph_without_a_bound_takes_any_context() -> None:
    table = DispatchTable([ShapeKey("decode", 4, 4, uniform=True)])
    assert table.lookup(("decode",), 3, 3, True, context=10**6)[1] is None


def test_a_missing_context_rung_falls_to_the_next_larger_size() -> None:
    small = ShapeKey("decode", 2, 2, uniform=True, context=128)
    large = ShapeKey("decode", 4, 4, uniform=True, context=512)
    table = DispatchTable([small, large])
    assert table.lookup(("decode",), 2, 2, True, context=200) == (large, None)


def test_a_full_prefill_graph_takes_up_to_its_request_slots() -> None:
    table = DispatchTable([slotted(64, 1), slotted(64, 4), slotted(256, 8)])
    assert table.lookup(("prefill",), 50, 1, False) == (slotted(64, 1), None)
    assert table.lookup(("prefill",), 50, 3, False) == (slotted(64, 4), None)
    assert table.lookup(("prefill",), 50, 6, False) == (slotted(256, 8), None)
    assert table.lookup(("prefill",), 50, 9, False) == (None, Reason.TOO_MANY_REQUESTS)
    assert table.lookup(("prefill",), 257, 1, False) == (None, Reason.NO_RUNG)
    assert table.lookup(("prefill",), 40, 4, True, width=10) == (slotted(64, 4), None)


def test_more_requests_than_slots_on_the_largest_rung_is_named_so() -> None:
    table = DispatchTable([slotted(64, 8), slotted(256, 2)])
    assert table.lookup(("prefill",), 200, 4, False) == (None, Reason.TOO_MANY_REQUESTS)


def test_a_shape_that_pads_too_much_is_refused_and_a_tighter_segmented_one_used() -> None:
    full = ShapeKey("decode", 64, 64, uniform=True)
    table = DispatchTable([full])
    assert table.lookup(STEP, 32, 32, True, max_padding=2.0) == (full, None)
    assert table.lookup(STEP, 31, 31, True, max_padding=2.0) == (None, Reason.OVER_PADDED)
    assert table.lookup(STEP, 31, 31, True) == (full, None)
    table.add(ShapeKey("prefill", 32))
    assert table.lookup(STEP, 31, 31, True, max_padding=2.0) == (ShapeKey("prefill", 32), None)


def test_a_variant_never_answers_for_another() -> None:
    lora = ShapeKey("decode", 8, 8, uniform=True, variant="lora-a")
    table = DispatchTable([lora, ShapeKey("prefill", 8)])
    assert table.lookup(STEP, 5, 5, True, variant="lora-a") == (lora, None)
    assert table.lookup(STEP, 5, 5, True, variant="lora-b") == (None, Reason.NOT_CAPTURED)
    assert table.lookup(STEP, 5, 5, True) == (ShapeKey("prefill", 8), None)


def test_keys_come_and_go_after_construction() -> None:
    table = DispatchTable()
    small, large = (ShapeKey("decode", n, n, uniform=True) for n in (2, 8))
    assert table.lookup(("decode",), 1, 1, True) == (None, Reason.NOT_CAPTURED)
    table.add(large)
    table.add(large)
    assert (len(table), list(table), large in table, small in table) == (1, [large], True, False)
    assert table.lookup(("decode",), 1, 1, True) == (large, None)
    table.add(small)
    assert table.lookup(("decode",), 1, 1, True) == (small, None)
    table.remove(large)
    assert table.lookup(("decode",), 3, 3, True) == (None, Reason.NO_RUNG)
    table.remove(small)
    assert table.lookup(("decode",), 1, 1, True) == (None, Reason.NOT_CAPTURED)
    assert table.lookup(("decode",), 2, 1, False) == (None, Reason.NOT_CAPTURED)
    with pytest.raises(KeyError, match="decode"):
        table.remove(small)


@pytest.mark.parametrize("key", [ShapeKey("decode", 8, None, uniform=True), ShapeKey("decode", 8, 3, uniform=True, width=2)])
def test_a_uniform_key_must_add_up(key: ShapeKey) -> None:
    with pytest.raises(ValueError, match="requests x width"):
        DispatchTable([key])


@pytest.mark.parametrize(("tokens", "requests", "uniform"), [(0, 0, False), (3, 0, False), (5, 2, True)])
def test_a_contradictory_batch_is_a_misuse(tokens: int, requests: int, uniform: bool) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens"):
        DispatchTable(DECODE).lookup(("decode",), tokens, requests, uniform)


def _key(kind: str, size: int, slots: int, width: int, context: int | None) -> ShapeKey:
    if kind == "uniform":
        return ShapeKey("decode", size * width, size, uniform=True, width=width, context=context)
    return ShapeKey("decode", size, slots if kind == "slots" else None, context=context)


KEYS = st.builds(
    _key,
    st.sampled_from(["uniform", "slots", "tokens"]),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 2),
    st.sampled_from([None, 8, 64]),
)


@given(
    keys=st.lists(KEYS, max_size=12),
    later=st.lists(KEYS, max_size=4),
    requests=st.integers(1, 8),
    width=st.integers(1, 2),
    spare=st.integers(0, 4),
    uniform=st.booleans(),
    context=st.sampled_from([None, 5, 8, 9, 70]),
)
def test_the_table_agrees_with_a_search_through_all_keys(
    keys: list[ShapeKey],
    later: list[ShapeKey],
    requests: int,
    width: int,
    spare: int,
    uniform: bool,
    context: int | None,
) -> None:
    tokens = requests * width if uniform else requests + spare
    table = DispatchTable(keys)
    for key in later:
        table.add(key)
    for key in keys[::3]:
        if key in table:
            table.remove(key)
    alive = (set(keys) | set(later)) - set(keys[::3])

    def cost(key: ShapeKey) -> tuple[float, ...]:
        kind = 2 if key.requests is None else (0 if key.uniform else 1)
        slots = key.requests if key.requests is not None else 0
        return (kind, key.tokens, slots, float("inf") if key.context is None else key.context)

    def fits(key: ShapeKey) -> bool:
        holds = key.tokens >= tokens and (key.requests is None or key.requests >= requests)
        shape = not key.uniform or (uniform and key.width == width)
        return holds and shape and (key.context is None or (context is not None and key.context >= context))

    expected = min(filter(fits, alive), key=cost, default=None)
    found, reason = table.lookup(("decode",), tokens, requests, uniform, width, context)
    assert found == expected
    assert (reason is None) == (found is not None)
