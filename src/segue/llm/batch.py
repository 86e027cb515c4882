"""The batch that flows through every phase: what a forward pass needs to know, on the host and on the device.

All requests' tokens lie behind one another on one axis (no padding between them); `query_start` says where each begins.
The host knows everything first (`HostBatch`): an attention plans from it without reading the device, and a runner
chooses the graph from it. `ForwardBatch` is the same as device tensors, which is what recorded kernels read.

Padding is the hard part, because a recording runs over every padded row. `pad_into` makes those rows harmless: padded
tokens feed id 0 at position 0 and write their K and V into the scrap page; padded requests have length 0, their offsets
are parked after the real tokens, and their table names the null page. What a padded row computes is never read.

Integers are int32 except `last_index`, which is int64 because transformers indexes hidden states with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from segue._compat import read_while_compiling
from segue.graph import current, is_calling, is_splitting
from segue.llm.pages import NULL_PAGE, PAGE_SIZE, SCRAP_PAGE, pages_for
from segue.llm.parts import Parts
from segue.llm.step_sampling import StepSampling

__all__ = [
    "NULL_PAGE",
    "PAGE_SIZE",
    "SCRAP_PAGE",
    "BatchArrays",
    "BatchTensors",
    "ForwardBatch",
    "HostBatch",
    "RequestRows",
    "build_batch",
    "dummy_batch",
    "fill_ids",
    "in_engine",
    "pad_host",
    "pad_into",
    "to_device",
]


class RequestRows(NamedTuple):
    """What one request brings to a step: the tokens to run, how many are cached before them, and its pages."""

    token_ids: Sequence[int]
    num_cached: int
    pages: Sequence[int]


class BatchArrays(NamedTuple):
    """The integers of a batch on the host; `BatchTensors` says what they are."""

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    num_tokens: np.ndarray
    last_index: np.ndarray


class BatchTensors(NamedTuple):
    """The tensors of a batch of T tokens and R requests."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T], place in the request's own sequence
    slot_mapping: torch.Tensor  # [T], where the token's K and V go
    query_start: torch.Tensor  # [R + 1], first token of each request
    seq_lens: torch.Tensor  # [R], cached + new tokens
    block_table: torch.Tensor  # [R, pages]
    num_tokens: torch.Tensor  # [1], the count without padding
    last_index: torch.Tensor  # [R], int64, each request's last token


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """A batch as the host knows it. The tuples have one entry a request slot, padded slots included (length 0).

    `num_tokens` and `num_requests` count what is real; `padded_tokens` and `padded_requests` what the arrays hold.
    `width` is the number of tokens that each real request brings where that is the same for all, else 0. Arrays are
    not written once they are a batch's, until their step is given to the device (then those of `pad_into` may be).
    `device_ids` has the real tokens where the host does not know them yet (the step before chose them); then those in
    `arrays` stand for nothing.
    `sampling` is what the real requests draw by; without, each gets its likeliest token.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_tokens: int
    num_requests: int
    max_query_len: int
    max_seq_len: int
    width: int
    page_size: int
    arrays: BatchArrays
    device_ids: torch.Tensor | None = None
    sampling: StepSampling | None = None

    @property
    def uniform(self) -> bool:
        """Whether every real request brings the same number of tokens."""
        return self.width > 0

    @property
    def padded_tokens(self) -> int:
        return len(self.arrays.input_ids)

    @property
    def padded_requests(self) -> int:
        return len(self.arrays.seq_lens)

    @property
    def num_pages(self) -> int:
        """Columns of the block table."""
        return int(self.arrays.block_table.shape[1])

    @property
    def tensors(self) -> BatchTensors:
        """Over the memory of `arrays`."""
        return BatchTensors(*map(torch.from_numpy, self.arrays))


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """A batch on the device. Its tensors may be a runner's static buffers: then they change at the runner's next load.

    `tree_mask` holds packed bits for speculative trees, None for a causal batch. `plan` is what the attention planned
    for the batch, `parts` what the model consists of that runs it. `sampling` is None where the pass does not draw. See
    `BatchTensors` for the shapes.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_tokens: torch.Tensor
    last_index: torch.Tensor
    host: HostBatch
    tree_mask: torch.Tensor | None = None
    plan: Any = None
    sampling: StepSampling | None = None
    parts: Parts | None = None

    def planned(self, plan: Any, parts: Parts) -> ForwardBatch:
        """What the model of `parts` is run on."""
        return replace(self, plan=plan, parts=parts)


def in_engine(part: object) -> bool:
    """Whether a pass of an engine's is under way whose model has `part`, a module or a configuration: what that one is given
    then is of the batch under way, and no caller's tensors."""
    if not is_calling():
        return False
    if is_splitting():
        return id(part) in _asking()
    parts = _parts()
    return parts is not None and parts.has(part)


def _parts() -> Parts | None:
    batch = current().batch
    return batch.parts if isinstance(batch, ForwardBatch) else None


@read_while_compiling
def _asking() -> tuple[int, ...]:
    parts = _parts()
    return () if parts is None else parts.asking()


def build_batch(rows: Sequence[RequestRows], page_size: int = PAGE_SIZE) -> HostBatch:
    """The unpadded batch of `rows`, in their order.

    Raises ValueError where a row brings no token, or its pages do not reach its last position.
    """
    if not rows:
        raise ValueError("a batch needs at least one request; the step is empty")
    input_ids, positions, slots = array("i"), array("i"), array("i")
    query_lens: list[int] = []
    seq_lens: list[int] = []
    for index, row in enumerate(rows):
        count, end = len(row.token_ids), row.num_cached + len(row.token_ids)
        _check_row(index, row, end, page_size)
        input_ids.extend(row.token_ids)
        positions.extend(range(row.num_cached, end))
        for place in range(row.num_cached // page_size, pages_for(end, page_size)):
            offset = (row.pages[place] - place) * page_size  # from a position to its slot, within this page
            first, last = max(row.num_cached, place * page_size), min(end, (place + 1) * page_size)
            slots.extend(range(first + offset, last + offset))
        query_lens.append(count)
        seq_lens.append(end)
    tables = [row.pages[: pages_for(length, page_size)] for row, length in zip(rows, seq_lens, strict=True)]
    return _assemble(input_ids, positions, slots, query_lens, seq_lens, tables, page_size)


def pad_host(host: HostBatch, tokens: int, requests: int, pages: int | None = None) -> HostBatch:
    """`host` padded to `tokens` tokens, `requests` request slots and `pages` table columns (None: as many as now).

    Raises ValueError where the batch is larger than that in any of the three.
    """
    columns = host.num_pages if pages is None else pages
    shapes = ((tokens,), (tokens,), (tokens,), (requests + 1,), (requests,), (requests, columns), (1,), (requests,))
    empty = (np.empty(shape, held.dtype) for shape, held in zip(shapes, host.arrays, strict=True))
    return pad_into(BatchArrays(*empty), host)


def pad_into(arrays: BatchArrays, host: HostBatch) -> HostBatch:
    """`host` padded to the shapes of `arrays`, which are written whole, and are then the result's.

    Raises ValueError where the batch is larger than that; then nothing is written.
    """
    tokens, (requests, pages) = len(arrays.input_ids), arrays.block_table.shape
    real, rows, columns = host.padded_tokens, host.padded_requests, host.num_pages
    for name, have, want in (("tokens", real, tokens), ("requests", rows, requests), ("pages", columns, pages)):
        if have > want:
            raise ValueError(f"cannot pad a batch of {have} {name} to {want} {name}; choose a rung of at least {have}")
    scrap = np.arange(tokens - real) % host.page_size + SCRAP_PAGE * host.page_size
    tails = (0, 0, scrap, host.num_tokens, 0, NULL_PAGE, 0, 0)
    for padded, held, tail in zip(arrays, host.arrays, tails, strict=True):
        count = len(held)
        padded[count:] = tail
        if held.ndim == 1:
            padded[:count] = held
        else:
            padded[:count, :columns] = held
            padded[:count, columns:] = tail
    return HostBatch(
        query_lens=host.query_lens + (0,) * (requests - rows),
        seq_lens=host.seq_lens + (0,) * (requests - rows),
        num_tokens=host.num_tokens,
        num_requests=host.num_requests,
        max_query_len=host.max_query_len,
        max_seq_len=host.max_seq_len,
        width=host.width,
        page_size=host.page_size,
        arrays=arrays,
        device_ids=host.device_ids,
        sampling=host.sampling,
    )


def dummy_batch(
    tokens: int, requests: int, *, context: int = 0, longest: int | None = None, page_size: int = PAGE_SIZE
) -> HostBatch:
    """A batch for warm-ups: `tokens` tokens spread evenly over `requests`, each with `context` tokens before them.

    No request is longer than `longest` with its context (None: no bound); tokens beyond that are padding.

    It reads and writes the scrap page alone, so running it changes no request's cache. With more requests than tokens
    the requests beyond have length 0.
    """
    if tokens < 1 or requests < 1 or context < 0:
        raise ValueError(f"a dummy batch needs tokens >= 1, requests >= 1, context >= 0; got {tokens, requests, context}")
    if longest is not None and longest <= context:
        raise ValueError(f"a dummy batch with a context of {context} needs requests longer than {longest}")
    spread = tokens if longest is None else min(tokens, requests * (longest - context))
    real = min(spread, requests)
    share, rest = divmod(spread, real)
    rows = []
    for index in range(real):
        count = share + (index < rest)
        rows.append(RequestRows((0,) * count, context, (SCRAP_PAGE,) * pages_for(context + count, page_size)))
    return pad_host(build_batch(rows, page_size), tokens, requests)


def to_device(host: HostBatch, device: torch.device | str, tree_mask: torch.Tensor | None = None) -> ForwardBatch:
    """Copies of `host`'s arrays on `device`: what an eager pass uses, where no static buffers exist."""
    moved = {name: tensor.to(device, copy=True) for name, tensor in host.tensors._asdict().items()}
    fill_ids(moved["input_ids"], host)
    sampling = host.sampling
    if sampling is not None:
        sampling = StepSampling(sampling.variant, sampling.numbers.to(device), sampling.integers.to(device))
    return ForwardBatch(**moved, host=host, tree_mask=tree_mask, sampling=sampling)


def fill_ids(input_ids: torch.Tensor, host: HostBatch) -> None:
    """Puts tokens that only the device knows where a pass reads them."""
    if host.device_ids is not None:
        input_ids[: host.num_tokens].copy_(host.device_ids)


def _check_row(index: int, row: RequestRows, end: int, page_size: int) -> None:
    if row.num_cached < 0:
        raise ValueError(f"row {index} has num_cached={row.num_cached}; it must be >= 0")
    if end == row.num_cached:
        raise ValueError(f"row {index} brings no token to run; leave it out of the batch")
    if pages_for(end, page_size) > len(row.pages):
        raise ValueError(
            f"row {index} reaches position {end - 1} but its {len(row.pages)} pages of {page_size} end at "
            f"{len(row.pages) * page_size}; allocate {pages_for(end, page_size)} pages first"
        )


def _assemble(
    input_ids: array[int],
    positions: array[int],
    slots: array[int],
    query_lens: list[int],
    seq_lens: list[int],
    tables: list[Sequence[int]],
    page_size: int,
) -> HostBatch:
    query_start, last_index = array("i", [0]), array("q")
    for count in query_lens:
        query_start.append(query_start[-1] + count)
        last_index.append(query_start[-1] - 1)
    columns = max(len(table) for table in tables)
    flat = array("i")
    for table in tables:
        flat.extend(table)
        flat.extend(array("i", [NULL_PAGE]) * (columns - len(table)))
    arrays = BatchArrays(
        input_ids=_array(input_ids),
        positions=_array(positions),
        slot_mapping=_array(slots),
        query_start=_array(query_start),
        seq_lens=_array(array("i", seq_lens)),
        block_table=_array(flat).reshape(len(tables), columns),
        num_tokens=_array(array("i", [len(input_ids)])),
        last_index=_array(last_index),
    )
    return HostBatch(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_tokens=len(input_ids),
        num_requests=len(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        width=query_lens[0] if min(query_lens) == max(query_lens) else 0,
        page_size=page_size,
        arrays=arrays,
    )


def _array(values: array[int]) -> np.ndarray:
    """`values` as an array over the same memory: 100 times faster than a list's."""
    return np.frombuffer(values, dtype=np.int64 if values.typecode == "q" else np.int32)
