"""Packed inputs: every field arrives whole at its captured size's place, by one copy."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from segue.errors import InputError
from segue.inputs import PackedInputs, Padding, Slot

SLOTS = [
    Slot("ids", "tokens", torch.int32, Padding.FOREACH_COPY),
    Slot("starts", "requests", torch.int32, Padding.FOREACH_COPY, extra=1),
    Slot("table", "requests", torch.int32, Padding.FOREACH_COPY, shape=(3,)),
    Slot("count", None, torch.int32, Padding.FOREACH_COPY, shape=(1,)),
    Slot("last", "requests", torch.int64, Padding.FOREACH_COPY),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sources(tokens: int, requests: int, seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    shapes: dict[str, Any] = {slot.name: slot.full_shape(tokens, requests) for slot in SLOTS}
    return {s.name: torch.randint(0, 1 << 30, shapes[s.name], dtype=s.dtype, generator=make) for s in SLOTS}


@pytest.mark.parametrize("device", DEVICES)
def test_every_load_arrives_whole_at_a_fixed_place(device: str) -> None:
    packed = PackedInputs(SLOTS, device, 33, 7)
    rng = random.Random(5)
    places: dict[tuple[int, int], dict[str, int]] = {}
    for step in range(60):
        tokens, requests = rng.randint(1, 33), rng.randint(1, 7)
        given = sources(tokens, requests, step)
        expected = {name: value.clone() for name, value in given.items()}
        packed.load(given, tokens, requests)
        for value in given.values():
            value.fill_(-1)  # the source may be overwritten at once
        views = packed.view(tokens, requests)
        assert {n: v.tolist() for n, v in views.items()} == {n: v.tolist() for n, v in expected.items()}
        found = places.setdefault((tokens, requests), {n: v.data_ptr() for n, v in views.items()})
        assert found == {n: v.data_ptr() for n, v in views.items()}
        assert all(v.data_ptr() % 16 == 0 for v in views.values())


def test_fields_of_one_size_do_not_overlap() -> None:
    views = PackedInputs(SLOTS, "cpu", 9, 5).view(9, 5)
    spans = sorted((v.data_ptr(), v.data_ptr() + v.nbytes) for v in views.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ids", None, "slot ids: its source is missing"),
        (
            "ids",
            torch.zeros(3, dtype=torch.int32),
            r"slot ids: its source is torch.int32 of shape \(3,\); expected .*\(4,\)",
        ),
        ("last", torch.zeros(2, dtype=torch.int32), "slot last: its source is torch.int32"),
        ("count", torch.zeros(1, 1, dtype=torch.int32), "slot count"),
    ],
)
def test_a_source_that_does_not_fit_is_named_and_nothing_is_written(name: str, value: Any, message: str) -> None:
    packed = PackedInputs(SLOTS, "cpu", 8, 4)
    packed.load(sources(4, 2, 1), 4, 2)
    before = {n: v.tolist() for n, v in packed.view(4, 2).items()}
    bad = sources(4, 2, 2) | {name: value}
    with pytest.raises(InputError, match=message):
        packed.load({n: v for n, v in bad.items() if v is not None}, 4, 2)
    assert {n: v.tolist() for n, v in packed.view(4, 2).items()} == before


def test_a_size_beyond_the_largest_is_refused() -> None:
    packed = PackedInputs(SLOTS, "cpu", 8, 4)
    with pytest.raises(InputError, match="tokens is 9; the static inputs hold 1 to 8"):
        packed.view(9, 1)


@pytest.mark.gpu
def test_loads_behind_a_busy_device_keep_their_order() -> None:
    packed = PackedInputs(SLOTS, "cuda", 64, 4)
    work = torch.rand(4096, 4096, device="cuda")
    seen = []
    for step in range(12):
        work = (work @ work).sigmoid()
        packed.load(sources(64, 4, step), 64, 4)
        seen.append(packed.view(64, 4)["ids"].clone())
    assert [s.tolist() for s in seen] == [sources(64, 4, step)["ids"].tolist() for step in range(12)]
