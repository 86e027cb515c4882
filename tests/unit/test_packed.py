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


def load(packed: PackedInputs, given: dict[str, torch.Tensor], tokens: int, requests: int) -> None:
    with packed.loading(tokens, requests) as arrays:
        for name, array in arrays.items():
            array[:] = given[name].numpy()


@pytest.mark.parametrize("device", DEVICES)
def test_every_load_arrives_whole_at_a_fixed_place(device: str) -> None:
    packed = PackedInputs(SLOTS, device, 33, 7)
    rng = random.Random(5)
    places: dict[tuple[int, int], dict[str, int]] = {}
    for step in range(60):
        tokens, requests = rng.randint(1, 33), rng.randint(1, 7)
        given = sources(tokens, requests, step)
        expected = {name: value.clone() for name, value in given.items()}
        load(packed, given, tokens, requests)
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


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_that_raises_copies_nothing_and_the_next_load_is_right(device: str) -> None:
    packed = PackedInputs(SLOTS, device, 8, 4)
    load(packed, sources(4, 2, 1), 4, 2)
    for _ in range(3):
        with pytest.raises(KeyError), packed.loading(4, 2) as arrays:
            if device == "cuda":
                arrays["ids"][:] = -1
            raise KeyError
        assert packed.view(4, 2)["ids"].tolist() == sources(4, 2, 1)["ids"].tolist()
    load(packed, sources(4, 2, 2), 4, 2)
    assert packed.view(4, 2)["ids"].tolist() == sources(4, 2, 2)["ids"].tolist()


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
        load(packed, sources(64, 4, step), 64, 4)
        seen.append(packed.view(64, 4)["ids"].clone())
    assert [s.tolist() for s in seen] == [sources(64, 4, step)["ids"].tolist() for step in range(12)]
