"""Static inputs: addresses stay, heads are copied, and each policy leaves in the tail what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.errors import ConfigError, InputError
from segue.inputs import Padding, Slot, StaticInputs, grouped_copy

POISON = -77
SENTINEL = 9
MAX_TOKENS, MAX_REQUESTS = 16, 4


def slot(name: str, padding: Padding, **options: Any) -> Slot:
    why = "masked by the length" if padding is Padding.KEEP_PAD else ""
    return Slot(name, options.pop("axis", "tokens"), options.pop("dtype", torch.int32), padding, why=why, **options)


ALL_POLICIES = [slot(padding.value, padding, sentinel=SENTINEL) for padding in Padding]


def inputs(*slots: Slot) -> StaticInputs:
    return StaticInputs(slots, "cpu", MAX_TOKENS, MAX_REQUESTS)


def batch(real: int, start: int = 1) -> dict[str, torch.Tensor]:
    """Distinct positive numbers for every policy's slot."""
    return {padding.value: torch.arange(start, start + real, dtype=torch.int32) for padding in Padding}


def poison(static: StaticInputs) -> None:
    for buffer in static.view(MAX_TOKENS, MAX_REQUESTS).values():
        buffer.fill_(POISON)


def rung_of(real: int) -> int:
    return next(rung for rung in (4, 8, 16) if rung >= real)


def test_each_policy_leaves_the_tail_it_promises_in_a_poisoned_buffer() -> None:
    static = inputs(*ALL_POLICIES)
    poison(static)
    views = static.load(batch(3), 8, 1)
    tails = {name: view[3:].tolist() for name, view in views.items()}
    assert tails == {
        "keep_pad": [POISON] * 5,
        "fill_sentinel": [SENTINEL] * 5,
        "zero": [0] * 5,
        "foreach_copy": [POISON] * 5,
        "fill_once": [POISON] * 5,
    }
    assert all(view[:3].tolist() == [1, 2, 3] for view in views.values())


def test_rows_beyond_the_rung_are_never_touched() -> None:
    static = inputs(*ALL_POLICIES)
    poison(static)
    static.load(batch(3), 8, 1)
    assert all(view[8:].tolist() == [POISON] * 8 for view in static.view(16, 1).values())


def test_fill_once_fills_the_whole_buffer_at_allocation_and_its_tail_never_again() -> None:
    static = inputs(slot("x", Padding.FILL_ONCE, sentinel=SENTINEL))
    for values, expected in (
        ([1, 2], [1, 2, SENTINEL, SENTINEL]),
        ([3, 4, 5], [3, 4, 5, SENTINEL]),
        ([6], [6, 4, 5, SENTINEL]),
    ):
        assert static.load({"x": torch.tensor(values, dtype=torch.int32)}, 4, 1)["x"].tolist() == expected


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=8))
def test_growing_and_shrinking_batches_agree_with_plain_lists(sizes: list[int]) -> None:
    static = inputs(*ALL_POLICIES)
    poison(static)
    expected = {padding: [POISON] * MAX_TOKENS for padding in Padding}
    for call, real in enumerate(sizes):
        rung = rung_of(real)
        views = static.load(batch(real, start=100 * call), rung, 1)
        for padding, rows in expected.items():
            fill = {Padding.FILL_SENTINEL: SENTINEL, Padding.ZERO: 0}.get(padding)
            if fill is not None:
                rows[real:rung] = [fill] * (rung - real)
            rows[:real] = range(100 * call, 100 * call + real)
            assert views[padding.value].tolist() == rows[:rung]


def test_views_are_the_same_tensors_every_time_and_addresses_never_move() -> None:
    static = inputs(*ALL_POLICIES)
    before = static.addresses()
    first = static.view(8, 2)
    for real in (8, 3, 5):
        assert static.load(batch(real), 8, 2) is first
    assert all(static.view(8, 2)[name] is tensor for name, tensor in first.items())
    assert static.addresses() == before == {name: tensor.data_ptr() for name, tensor in static.view(16, 4).items()}


def test_shapes_follow_axis_extra_rows_and_trailing_sizes() -> None:
    static = inputs(
        slot("ids", Padding.ZERO, dtype=torch.int64),
        slot("hidden", Padding.ZERO, dtype=torch.float32, shape=(3,)),
        slot("query_start", Padding.ZERO, axis="requests", extra=1),
        slot("table", Padding.ZERO, axis="requests", shape=(5,)),
        slot("num_tokens", Padding.ZERO, axis=None),
        slot("scale", Padding.ZERO, axis=None, dtype=torch.float32, shape=(2,)),
    )
    assert {name: tuple(view.shape) for name, view in static.view(8, 2).items()} == {
        "ids": (8,),
        "hidden": (8, 3),
        "query_start": (3,),
        "table": (2, 5),
        "num_tokens": (),
        "scale": (2,),
    }
    assert static.nbytes == 16 * 8 + 16 * 3 * 4 + 5 * 4 + 4 * 5 * 4 + 4 + 2 * 4


def test_both_axes_and_extra_rows_are_padded_together() -> None:
    static = inputs(
        slot("ids", Padding.FILL_SENTINEL, sentinel=SENTINEL),
        slot("lengths", Padding.ZERO, axis="requests"),
        slot("query_start", Padding.FILL_SENTINEL, axis="requests", extra=1, sentinel=5),
        slot("num_tokens", Padding.ZERO, axis=None),
    )
    poison(static)
    values = {"ids": [1, 2, 3, 4, 5], "lengths": [2, 3], "query_start": [0, 2, 5], "num_tokens": 5}
    views = static.load({name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}, 8, 4)
    assert {name: view.tolist() for name, view in views.items()} == {
        "ids": [1, 2, 3, 4, 5, SENTINEL, SENTINEL, SENTINEL],
        "lengths": [2, 3, 0, 0],
        "query_start": [0, 2, 5, 5, 5],
        "num_tokens": 5,
    }


def test_a_source_may_bring_the_whole_rung() -> None:
    static = inputs(
        slot("lengths", Padding.ZERO, axis="requests"), slot("start", Padding.FILL_SENTINEL, axis="requests", extra=1)
    )
    sources = {"lengths": torch.tensor([4]).int(), "start": torch.tensor([0, 4, 4, 4]).int()}
    views = static.load(sources, 4, 3)
    assert views["lengths"].tolist() == [4, 0, 0]
    assert views["start"].tolist() == [0, 4, 4, 4]


def test_a_source_may_be_overwritten_as_soon_as_load_returns() -> None:
    static = inputs(slot("x", Padding.ZERO))
    source = torch.tensor([1, 2, 3], dtype=torch.int32)
    views = static.load({"x": source}, 4, 1)
    source.fill_(POISON)
    assert views["x"].tolist() == [1, 2, 3, 0]


def test_buffers_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        static = inputs(slot("x", Padding.ZERO))
        static.load({"x": torch.tensor([1], dtype=torch.int32)}, 4, 1)
        inference_source = torch.tensor([7], dtype=torch.int32)
    views = static.load({"x": inference_source}, 4, 1)
    assert not views["x"].is_inference()
    views["x"].add_(1)
    assert views["x"].tolist() == [8, 1, 1, 1]


def test_a_source_that_requires_grad_leaves_no_graph_behind() -> None:
    static = inputs(slot("x", Padding.ZERO, dtype=torch.float32))
    view = static.load({"x": torch.ones(2, requires_grad=True)}, 4, 1)["x"]
    assert not view.requires_grad
    assert view.tolist() == [1, 1, 0, 0]


PAIR = (slot("ids", Padding.ZERO), slot("hidden", Padding.ZERO, dtype=torch.float32, shape=(2,)))


def good() -> dict[str, torch.Tensor]:
    return {"ids": torch.ones(3, dtype=torch.int32), "hidden": torch.ones(3, 2)}


def faults() -> Iterator[Any]:
    yield pytest.param({"hidden": None}, "slot hidden.*missing", id="missing")
    yield pytest.param({"idz": torch.ones(3)}, "slot idz.*not declared", id="unknown")
    yield pytest.param({"ids": torch.ones(3, dtype=torch.int64)}, "slot ids.*int64.*int32", id="dtype")
    yield pytest.param({"hidden": torch.ones(3, 1)}, r"slot hidden.*\(3, 1\)", id="trailing size that would broadcast")
    yield pytest.param({"hidden": torch.ones(3)}, r"slot hidden.*\(3,\)", id="too few dimensions")
    yield pytest.param({"ids": torch.ones((), dtype=torch.int32)}, "slot ids", id="scalar that would broadcast")
    yield pytest.param({"hidden": torch.ones(2, 2)}, "slot hidden.*2 rows.*slot ids", id="axes disagree")
    yield pytest.param({"ids": torch.ones(9, dtype=torch.int32)}, "slot ids.*9 rows.*8", id="more than the rung")
    yield pytest.param({"ids": torch.ones(3, dtype=torch.int32, device="meta")}, "slot ids.*meta.*cpu", id="another device")


@pytest.mark.parametrize(("change", "message"), list(faults()))
def test_a_source_that_does_not_fit_names_its_slot_and_writes_nothing(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    static = inputs(*PAIR)
    poison(static)
    sources = {name: value for name, value in {**good(), **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        static.load(sources, 8, 1)
    assert all(bool((view == POISON).all()) for view in static.view(MAX_TOKENS, MAX_REQUESTS).values())
    static.load(good(), 8, 1)


@pytest.mark.parametrize(("tokens", "requests", "named"), [(17, 1, "tokens is 17"), (8, 5, "requests is 5"), (0, 1, "is 0")])
def test_a_size_that_the_buffers_do_not_hold_is_an_error(tokens: int, requests: int, named: str) -> None:
    with pytest.raises(InputError, match=named):
        inputs(*PAIR).view(tokens, requests)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"padding": Padding.KEEP_PAD}, "slot x.*why"),
        ({"padding": Padding.FILL_SENTINEL, "sentinel": 300, "dtype": torch.uint8}, "slot x.*300"),
        ({"padding": Padding.FILL_SENTINEL, "sentinel": -1, "dtype": torch.bool}, "slot x.*-1"),
        ({"padding": Padding.FILL_SENTINEL, "sentinel": 0.5}, "slot x.*0.5"),
        ({"padding": Padding.ZERO, "axis": "rows"}, "slot x.*rows"),
        ({"padding": Padding.ZERO, "axis": None, "extra": 1}, "slot x.*extra"),
        ({"padding": Padding.ZERO, "shape": (-1,)}, "slot x.*-1"),
    ],
)
def test_an_invalid_slot_is_refused_when_declared(options: dict[str, Any], named: str) -> None:
    arguments = {"name": "x", "axis": "tokens", "dtype": torch.int32, **options}
    with pytest.raises(ConfigError, match=named):
        Slot(**arguments)


def test_a_slot_declared_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="ids is declared twice"):
        inputs(PAIR[0], PAIR[0])


def test_a_float_slot_may_be_filled_with_minus_infinity() -> None:
    static = inputs(slot("mask", Padding.FILL_SENTINEL, dtype=torch.float32, sentinel=float("-inf")))
    assert static.load({"mask": torch.ones(1)}, 2, 1)["mask"].tolist() == [1.0, float("-inf")]


def test_grouped_copy_copies_mixed_dtypes_and_strides_and_skips_empty_ones() -> None:
    sources = [torch.arange(4), torch.rand(3, 2).T, torch.empty(0, 5), torch.arange(6).reshape(2, 3)]
    into = [torch.full_like(source, POISON) for source in sources]
    grouped_copy(into, sources)
    assert all(torch.equal(copied, source) for copied, source in zip(into, sources))


def test_grouped_copy_neither_broadcasts_nor_copies_some() -> None:
    first = torch.full((2,), POISON)
    with pytest.raises(ValueError, match=r"pair 1.*\(1,\).*\(2,\)"):
        grouped_copy([first, torch.zeros(2)], [torch.ones(2).long(), torch.ones(1)])
    assert first.tolist() == [POISON, POISON]
    with pytest.raises(ValueError, match="1 destinations, but 0 sources"):
        grouped_copy([first], [])


@pytest.mark.gpu
@pytest.mark.parametrize("is_pinned", [False, True])
def test_host_sources_reach_a_busy_gpu_before_they_are_overwritten(is_pinned: bool) -> None:
    static = StaticInputs(ALL_POLICIES, "cuda", 4096, 1)
    work = torch.rand(4096, 4096, device="cuda")
    for call in range(20):
        sources = {name: tensor.pin_memory() if is_pinned else tensor for name, tensor in batch(3000, call).items()}
        work = (work @ work).sigmoid()
        views = static.load(sources, 4096, 1)
        for source in sources.values():
            source.fill_(POISON)
        expected = torch.arange(call, call + 3000, dtype=torch.int32)
        assert all(torch.equal(view[:3000].cpu(), expected) for view in views.values())
    on_device = {name: tensor.cuda() for name, tensor in batch(10).items()}
    assert static.load(on_device, 16, 1)["fill_sentinel"].tolist() == [*range(1, 11), *[SENTINEL] * 6]
