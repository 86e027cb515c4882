"""The cache writes what it is told and nothing else; the pool never hands a page to two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.llm.kv_cache import PagedKVCache, PagePool


def make_cache(**changes: int) -> PagedKVCache:
    sizes = {"num_layers": 2, "num_pages": 5, "num_kv_heads": 3, "head_dim": 4} | changes
    return PagedKVCache(**sizes, dtype=torch.float32, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_a_write_lands_in_its_slots_alone(slot_dtype: torch.dtype) -> None:
    cache = make_cache(value_head_dim=6)
    slots = torch.tensor([33, 70, 35], dtype=slot_dtype)
    k, v = torch.randn(3, 3, 4), torch.randn(3, 6, 3).transpose(1, 2)
    before = cache.checksum([33, 70, 35])
    cache.write(1, slots, k, v)
    assert torch.equal(cache.keys[1][slots.long()], k) and torch.equal(cache.values[1][slots.long()], v)
    assert cache.checksum([33, 70, 35]) == before
    assert cache.checksum()[0] == before[0] and cache.checksum()[1] != before[1]


def test_the_checksum_sees_one_bit_and_nan() -> None:
    cache = make_cache()
    zero = cache.checksum()
    cache.values[0][40, 1, 2] = -0.0
    assert cache.checksum() != zero and cache.checksum([40]) == zero
    cache.values[0][40, 1, 2] = float("nan")
    assert cache.checksum() == cache.checksum()


def test_the_cache_is_written_in_and_outside_inference_mode() -> None:
    with torch.inference_mode():
        cache = make_cache()
        cache.write(0, torch.tensor([32]), torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    k = torch.full((1, 3, 4), 2.0, requires_grad=True)
    cache.write(0, torch.tensor([33]), k, k)
    assert not cache.keys[0].is_inference() and not cache.keys[0].requires_grad
    assert cache.keys[0].sum() == 12 + 24


def test_sizes_are_counted() -> None:
    cache = make_cache(value_head_dim=6)
    assert cache.nbytes == 2 * 5 * 16 * 3 * (4 + 6) * 4
    assert PagedKVCache.bytes_per_page(2, 3, 4, torch.float32, value_head_dim=6) * 5 == cache.nbytes
    assert cache.keys[0].shape == (80, 3, 4) and cache.values[1].shape == (80, 3, 6)
    cache.close()
    assert cache.nbytes == 0
    with pytest.raises(ValueError, match="must be >= 3"):
        make_cache(num_pages=2)


@given(st.integers(3, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_page_has_one_owner_and_none_is_lost(num_pages: int, actions: list[tuple[bool, int]]) -> None:
    pool, owned = PagePool(num_pages), []
    for is_allocation, count in actions:
        if is_allocation:
            free = pool.num_free
            pages = pool.allocate(count)
            assert (pages is None) == (count > free)
            owned += [pages] if pages else []
        elif owned:
            pool.free(owned.pop(count % len(owned)))
        held = [page for pages in owned for page in pages]
        assert len(set(held)) == len(held) and not {0, 1} & set(held) and all(page < num_pages for page in held)
        assert pool.num_free + len(held) == pool.capacity == num_pages - 2


@pytest.mark.parametrize(
    ("pages", "message"),
    [([0], "reserved"), ([1], "reserved"), ([9], "free already"), ([99], "not of this pool"), ([2, 2], "twice in one")],
)
def test_a_wrong_free_is_an_error_and_changes_nothing(pages: list[int], message: str) -> None:
    pool = PagePool(10)
    assert pool.allocate(3) == [2, 3, 4]
    with pytest.raises(ValueError, match=message):
        pool.free([3, *pages])
    assert pool.num_free == 5
    pool.free([2, 3, 4])
    assert pool.num_free == 8 and pool.allocate(9) is None
    with pytest.raises(ValueError, match="must be >= 0"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="at least 3"):
        PagePool(2)
