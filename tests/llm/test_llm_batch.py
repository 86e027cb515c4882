"""Batches: what a loop over the definition gives, and padding that touches nothing real."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.llm.batch import (
    NULL_PAGE,
    PAGE_SIZE,
    SCRAP_PAGE,
    RequestRows,
    build_batch,
    dummy_batch,
    pad_host,
    to_device,
)  # fmt: skip


@st.composite
def request_rows(draw: st.DrawFn) -> list[RequestRows]:
    rows, next_page = [], 2
    for _ in range(draw(st.integers(1, 6))):
        count, cached = draw(st.integers(1, 40)), draw(st.integers(0, 70))
        pages = -(-(count + cached) // PAGE_SIZE) + draw(st.integers(0, 2))
        ids = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        rows.append(RequestRows(ids, cached, list(range(next_page, next_page + pages))))
        next_page += pages
    return rows


@given(request_rows())
@settings(max_examples=60, deadline=None)
def test_a_batch_is_what_its_definition_says(rows: list[RequestRows]) -> None:
    host = build_batch(rows)
    tensors = host.tensors
    token, starts = 0, [0]
    for index, row in enumerate(rows):
        for offset, token_id in enumerate(row.token_ids):
            position = row.num_cached + offset
            assert tensors.input_ids[token] == token_id and tensors.positions[token] == position
            assert tensors.slot_mapping[token] == row.pages[position // 16] * 16 + position % 16
            token += 1
        starts.append(token)
        assert tensors.last_index[index] == token - 1
        used = -(-(row.num_cached + len(row.token_ids)) // 16)
        table = tensors.block_table[index].tolist()
        assert table == row.pages[:used] + [NULL_PAGE] * (len(table) - used)
    lengths = [len(row.token_ids) for row in rows]
    assert tensors.query_start.tolist() == starts and host.query_lens == tuple(lengths)
    assert tensors.seq_lens.tolist() == list(host.seq_lens)
    assert host.seq_lens == tuple(row.num_cached + len(row.token_ids) for row in rows)
    assert (host.num_tokens, host.num_requests) == (token, len(rows)) and tensors.num_tokens.tolist() == [token]
    assert host.max_query_len == max(lengths) and host.max_seq_len == max(host.seq_lens)
    assert host.width == (lengths[0] if len(set(lengths)) == 1 else 0) and host.uniform == (host.width > 0)
    for name, tensor in tensors._asdict().items():
        assert tensor.dtype == (torch.int64 if name == "last_index" else torch.int32)


@given(request_rows(), st.integers(0, 50), st.integers(0, 5), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_padding_keeps_what_is_real_and_parks_the_rest(
    rows: list[RequestRows], tokens: int, requests: int, pages: int
) -> None:
    host = build_batch(rows)
    size = (host.num_tokens + tokens, host.num_requests + requests, host.num_pages + pages)
    padded = pad_host(host, *size)
    assert (padded.padded_tokens, padded.padded_requests, padded.num_pages) == size
    assert (padded.num_tokens, padded.num_requests, padded.width) == (host.num_tokens, host.num_requests, host.width)
    n, r, old, new = host.num_tokens, host.num_requests, host.tensors, padded.tensors
    assert torch.equal(new.block_table[:r, : host.num_pages], old.block_table)
    assert new.block_table[:r, host.num_pages :].eq(NULL_PAGE).all() and new.block_table[r:].eq(NULL_PAGE).all()
    assert new.query_start.tolist() == old.query_start.tolist() + [n] * requests
    for name, real in (("input_ids", n), ("positions", n), ("seq_lens", r), ("last_index", r)):
        got = getattr(new, name)
        assert torch.equal(got[:real], getattr(old, name)) and got[real:].eq(0).all()
        assert got.dtype == getattr(old, name).dtype
    assert torch.equal(new.slot_mapping[:n], old.slot_mapping)
    assert (new.slot_mapping[n:] // PAGE_SIZE).eq(SCRAP_PAGE).all() and new.num_tokens.tolist() == [n]
    assert padded.query_lens == host.query_lens + (0,) * requests and padded.seq_lens == host.seq_lens + (0,) * requests


def test_padding_twice_is_padding_once() -> None:
    host = build_batch([RequestRows([5, 6], 3, [2]), RequestRows([7], 0, [3])])
    twice, once = pad_host(pad_host(host, 8, 4), 16, 8, 3), pad_host(host, 16, 8, 3)
    assert torch.equal(twice.tensors.query_start, once.tensors.query_start)
    assert torch.equal(twice.tensors.block_table, once.tensors.block_table)
    assert twice.query_lens == once.query_lens


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one request"),
        ([RequestRows([], 0, [2])], "brings no token"),
        ([RequestRows([1], -1, [2])], "num_cached"),
        ([RequestRows([1], 16, [2])], "allocate 2 pages"),
    ],
)
def test_impossible_rows_are_named(rows: list[RequestRows], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(rows)


@pytest.mark.parametrize(("size", "name"), [((1, 2), "tokens"), ((3, 1), "requests"), ((3, 2, 0), "pages")])
def test_a_batch_is_never_cut(size: tuple[int, ...], name: str) -> None:
    host = build_batch([RequestRows([1, 2], 0, [2]), RequestRows([3], 0, [3])])
    with pytest.raises(ValueError, match=f"cannot pad a batch of . {name}"):
        pad_host(host, *size)


@pytest.mark.parametrize(("tokens", "requests"), [(8, 8), (16, 3), (2, 5), (70, 2)])
def test_a_dummy_batch_touches_the_scrap_page_alone(tokens: int, requests: int) -> None:
    host = dummy_batch(tokens, requests, context=20)
    assert (host.padded_tokens, host.padded_requests) == (tokens, requests)
    assert (host.tensors.slot_mapping // PAGE_SIZE).eq(SCRAP_PAGE).all()
    assert set(host.tensors.block_table.unique().tolist()) <= {NULL_PAGE, SCRAP_PAGE}
    assert sum(host.query_lens) == tokens and host.max_seq_len == 20 + host.max_query_len
    with pytest.raises(ValueError, match="tokens >= 1"):
        dummy_batch(0, 1)


def test_on_a_device_the_tensors_are_copies() -> None:
    host = build_batch([RequestRows([5, 6], 3, [2])])
    batch = to_device(host, "cpu")
    assert batch.host is host and batch.tree_mask is None
    for name, tensor in host.tensors._asdict().items():
        assert torch.equal(getattr(batch, name), tensor) and getattr(batch, name).data_ptr() != tensor.data_ptr()
