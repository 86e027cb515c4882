"""Ladders: the presets' exact numbers, and what every ladder guarantees."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import ConfigError
from segue.shapes import (
    custom,
    decode_ladder,
    geometric,
    powers_of_two,
    prefill_ladder,
    round_up,
    sglang_decode,
    sglang_prefill,
    vllm_decode,
)

PRESETS = (
    sglang_decode,
    vllm_decode,
    sglang_prefill,
    powers_of_two,
    lambda maximum: decode_ladder("cpu", maximum),
    lambda maximum: prefill_ladder("cpu", maximum),
    lambda maximum: prefill_ladder("cuda", maximum),
)


def test_sglang_has_36_decode_rungs_at_256() -> None:
    ladder = sglang_decode(256)
    assert len(ladder) == 36
    assert ladder[:8] == (1, 2, 4, 8, 12, 16, 24, 32)
    assert ladder[-2:] == (248, 256)


def test_sglang_decode_goes_on_by_16_and_then_by_32() -> None:
    ladder = sglang_decode(600)
    assert ladder[35:39] == (256, 272, 288, 304)
    assert ladder[-5:] == (496, 512, 544, 576, 600)


def test_vllm_has_51_rungs_at_512() -> None:
    ladder = vllm_decode(512)
    assert len(ladder) == 51
    assert ladder[:6] == (1, 2, 4, 8, 16, 24)
    assert ladder[33:36] == (248, 256, 272)
    assert ladder[-2:] == (496, 512)


def test_sglang_has_42_prefill_rungs_at_2048() -> None:
    ladder = sglang_prefill(2048)
    assert len(ladder) == 42
    steps = {high - low for low, high in pairwise(ladder)}
    assert steps == {4, 16, 32, 64, 256}
    assert ladder[0] == 4 and ladder[-4:] == (1280, 1536, 1792, 2048)


def test_sglang_prefill_goes_on_by_512_above_4096() -> None:
    assert sglang_prefill(6000)[-5:] == (4096, 4608, 5120, 5632, 6000)


def test_automatic_ladders_on_cpu_are_short() -> None:
    assert decode_ladder("cpu", 8) == (1, 2, 4, 8)
    assert decode_ladder("cpu", 6) == (1, 2, 4, 6)
    assert prefill_ladder("cpu", 256) == (16, 64, 256)
    assert prefill_ladder("cpu", 300) == (16, 64, 256, 300)
    assert prefill_ladder("cpu", 5) == (5,)


def test_automatic_ladders_on_cuda_are_the_presets() -> None:
    assert decode_ladder("cuda", 256) == sglang_decode(256)
    assert decode_ladder("cuda", 512, "vllm") == vllm_decode(512)
    assert prefill_ladder("cuda", 2048) == sglang_prefill(2048)


def test_geometric_and_powers_of_two() -> None:
    assert powers_of_two(20) == (1, 2, 4, 8, 16, 20)
    assert powers_of_two(64, start=16) == (16, 32, 64)
    assert geometric(1, 10, 1.5) == (1, 2, 3, 5, 8, 10)
    assert geometric(16, 4, 2) == (4,)


@pytest.mark.parametrize("preset", PRESETS)
@given(maximum=st.integers(1, 9000))
def test_a_preset_ascends_and_ends_at_the_true_maximum(preset: Callable[[int], tuple[int, ...]], maximum: int) -> None:
    ladder = preset(maximum)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[0] >= 1 and ladder[-1] == maximum


@given(sizes=st.lists(st.integers(1, 500), min_size=1), n=st.integers(1, 600))
def test_round_up_gives_the_smallest_rung_that_holds_n(sizes: list[int], n: int) -> None:
    holding = [size for size in sizes if size >= n]
    assert round_up(custom(sizes), n) == (min(holding) if holding else None)


def test_custom_sorts_removes_repeats_and_adds_the_maximum() -> None:
    assert custom([8, 1, 8, 2]) == (1, 2, 8)
    assert custom([8, 1], maximum=10) == (1, 8, 10)
    assert custom((), maximum=10) == (10,)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: custom([4, 0]), "0"),
        (lambda: custom([4, -3]), "-3"),
        (lambda: custom([4, 2.5]), "2.5"),  # type: ignore[list-item]
        (lambda: custom([True]), "True"),
        (lambda: custom([4, 12], maximum=10), "12"),
        (lambda: custom([]), "empty"),
        (lambda: sglang_decode(0), "0"),
        (lambda: geometric(1, 8, 1.0), "1.0"),
        (lambda: geometric(0, 8, 2), "start is 0"),
        (lambda: decode_ladder("cuda", 8, "trt"), "trt"),
    ],
)
def test_an_invalid_ladder_is_an_error_that_names_the_value(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()
