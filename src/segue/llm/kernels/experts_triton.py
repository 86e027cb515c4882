"""The matrix products of a mixture of experts as Triton kernels, with no look at the routing on the host.

Pairs of a token and an expert come sorted by expert; `ends` says where each expert's pairs end. A product is cut into tiles
of rows of one expert. How many tiles there are depends on the routing, so as many programs are launched as there can be;
each finds its expert from `ends`, and those beyond the last tile end at once. Pairs of padded tokens lie behind the last
expert: no tile has them, so they cost nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from segue.llm.kernels.activation_triton import ACTIVATION_CODES, activated
from segue.llm.kernels.launch import Launcher


@Launcher
@triton.jit
def _experts_kernel(
    x, tokens, ends, weight, out, size, num_experts,
    K: tl.constexpr, IS_UP: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`size` columns of ``out``, its rows sorted by expert. Up: rows of tokens, gathered, to ``activation(gate) * up``.
    Down: rows in that order."""
    tile = tl.program_id(1)
    experts = tl.arange(0, BLOCK_E)
    exists = experts < num_experts
    until = tl.load(ends + experts, mask=exists, other=0)
    begin = tl.load(ends + experts - 1, mask=exists & (experts > 0), other=0)
    tiles = tl.where(exists, (until - begin + BLOCK_M - 1) // BLOCK_M, 0)
    if tile < tl.sum(tiles, axis=0):
        expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
        is_mine = experts == expert
        first = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
        start = tl.sum(tl.where(is_mine, begin, 0), axis=0) + (tile - first) * BLOCK_M
        end = tl.sum(tl.where(is_mine, until, 0), axis=0)
        rows = start + tl.arange(0, BLOCK_M)
        inside = rows < end
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < size
        at = tl.arange(0, BLOCK_K)
        sources = (tl.load(tokens + rows, mask=inside, other=0) if IS_UP else rows).to(tl.int64) * K
        matrix = weight + expert.to(tl.int64) * size * (2 * K if IS_UP else K) + columns.to(tl.int64)[None] * K
        sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        ups = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            places = k + at
            is_place = places < K
            values = tl.load(x + sources[:, None] + places[None], mask=inside[:, None] & is_place[None], other=0.0)
            mask = is_place[:, None] & is_column[None]
            part = tl.load(matrix + places[:, None], mask=mask, other=0.0)
            sums = tl.dot(values, part, sums, input_precision=PRECISION)
            if IS_UP:
                more = tl.load(matrix + size.to(tl.int64) * K + places[:, None], mask=mask, other=0.0)
                ups = tl.dot(values, more, ups, input_precision=PRECISION)
        dtype = out.dtype.element_ty
        result = sums.to(dtype).to(tl.float32)
        if IS_UP:
            result = activated(result, ACTIVATION).to(dtype).to(tl.float32) * ups.to(dtype).to(tl.float32)
        places_out = out + rows.to(tl.int64)[:, None] * size + columns[None]
        tl.store(places_out, result.to(dtype), mask=inside[:, None] & is_column[None])


def experts_up(
    x: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor, activation: str
) -> torch.Tensor:
    return _launch(x, tokens, ends, weight, activation)


def experts_down(x: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _launch(x, None, ends, weight, None)


def _launch(
    x: torch.Tensor, tokens: torch.Tensor | None, ends: torch.Tensor, weight: torch.Tensor, activation: str | None
) -> torch.Tensor:
    pairs = x.shape[0] if tokens is None else tokens.shape[0]
    size, num_experts = weight.shape[1] // (1 if activation is None else 2), ends.shape[0]
    out = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    share = pairs / num_experts  # rows an expert has on average
    rows, columns, warps = (16, 32, 4) if share <= 8 else (32, 64, 4) if share <= 32 else (64, 128, 8)
    most_tiles = min(pairs, num_experts + pairs // rows)
    _experts_kernel(
        (triton.cdiv(size, columns), most_tiles),
        x.contiguous(), ends if tokens is None else tokens, ends, weight, out, size, num_experts,
        K=x.shape[1], IS_UP=activation is not None,
        ACTIVATION=0 if activation is None else ACTIVATION_CODES[activation],
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=64, STAGES=3, num_warps=warps,
    )  # fmt: skip
    return out
