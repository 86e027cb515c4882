"""The matrix products of a mixture of experts as Triton kernels, with no look at the routing on the host.

Pairs of a token and an expert come sorted by expert; `ends` says where each expert's pairs end. A product is cut into tiles
of rows of one expert. How many tiles there are depends on the routing, so as many programs are launched as there can be;
each finds its expert from `ends`, and those beyond the last tile end at once. Pairs of padded tokens lie behind the last
expert: no tile has them, so they cost nothing.

Where there are few tokens hardly two meet in an expert. Then each pair reads its expert's weights by itself, as a matrix
times a vector, nothing is sorted, and the second product ends in the weighted sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from segue.llm.kernels.activation_triton import ACTIVATION_CODES, activated
from segue.llm.kernels.launch import Launcher

# Of some seventy settings each the fastest at 1 to 4 tokens, or 8 to 64 (H200, Qwen3-30B-A3B's shape).
_PAIR_UP = {"BLOCK_N": 4, "BLOCK_K": 128, "STAGES": 3, "num_warps": 1}
_PAIR_DOWN = {"BLOCK_N": 8, "BLOCK_K": 256, "STAGES": 5, "num_warps": 2}


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
    few = (16, 64 if activation is None else 32, 2, 256)
    rows, columns, warps, depth = few if share <= 8 else (32, 64, 4, 128) if share <= 32 else (64, 128, 8, 128)
    most_tiles = min(pairs, num_experts + pairs // rows)
    _experts_kernel(
        (triton.cdiv(size, columns), most_tiles),
        x.contiguous(), ends if tokens is None else tokens, ends, weight, out, size, num_experts,
        K=x.shape[1], IS_UP=activation is not None,
        ACTIVATION=0 if activation is None else ACTIVATION_CODES[activation],
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=depth // x.element_size(), STAGES=3, num_warps=warps,
    )  # fmt: skip
    return out


@Launcher
@triton.jit
def _pair_up_kernel(
    x, index, num_tokens, weight, out, size, num_experts,
    K: tl.constexpr, TOP_K: tl.constexpr, HAS_COUNT: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One pair of a token and an expert: ``activation(gate) * up``, some columns of it."""
    pair = tl.program_id(1)
    token = pair // TOP_K
    expert = tl.load(index + pair)
    is_one = (expert >= 0) & (expert < num_experts)
    if HAS_COUNT:
        is_one = is_one & (token < tl.load(num_tokens))
    if is_one:
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = columns < size
        at = tl.arange(0, BLOCK_K)
        gates = weight + (expert.to(tl.int64) * 2 * size + columns)[:, None] * K + at[None]
        ups = gates + size.to(tl.int64) * K
        gate_sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        up_sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            inside = start + at < K
            mask = exists[:, None] & inside[None]
            values = tl.load(x + token * K + start + at, mask=inside, other=0.0).to(tl.float32)[None]
            gate_sums += tl.load(gates + start, mask=mask, other=0.0).to(tl.float32) * values
            up_sums += tl.load(ups + start, mask=mask, other=0.0).to(tl.float32) * values
        dtype = out.dtype.element_ty
        gate = activated(tl.sum(gate_sums, axis=1).to(dtype).to(tl.float32), ACTIVATION)
        up = tl.sum(up_sums, axis=1).to(dtype).to(tl.float32)
        result = gate.to(dtype).to(tl.float32) * up
        tl.store(out + pair * size + columns, result.to(dtype), mask=exists)


@Launcher
@triton.jit
def _pair_down_kernel(
    x, index, num_tokens, weight, weights, out, size, num_experts,
    K: tl.constexpr, TOP_K: tl.constexpr, HAS_COUNT: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token: the weighted sum of its experts' results, some columns of it."""
    token = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = columns < size
    at = tl.arange(0, BLOCK_K)
    dtype = out.dtype.element_ty
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for choice in range(TOP_K):
        expert = tl.load(index + token * TOP_K + choice)
        is_one = (expert >= 0) & (expert < num_experts)
        if HAS_COUNT:
            is_one = is_one & (token < tl.load(num_tokens))
        if is_one:
            rows = weight + (expert.to(tl.int64) * size + columns)[:, None] * K + at[None]
            source = x + (token * TOP_K + choice) * K + at
            sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
            for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                inside = start + at < K
                values = tl.load(source + start, mask=inside, other=0.0).to(tl.float32)[None]
                part = tl.load(rows + start, mask=exists[:, None] & inside[None], other=0.0)
                sums += part.to(tl.float32) * values
            scale = tl.load(weights + token * TOP_K + choice).to(tl.float32)
            product = tl.sum(sums, axis=1).to(dtype).to(tl.float32) * scale
            if ROUNDS:
                product = product.to(dtype).to(tl.float32)
            total += product
    tl.store(out + token * size + columns, total.to(dtype), mask=exists)


def pairs_up(
    x: torch.Tensor, index: torch.Tensor, num_tokens: torch.Tensor | None, weight: torch.Tensor, activation: str
) -> torch.Tensor:
    pairs, size = index.numel(), weight.shape[1] // 2
    x, index = x.contiguous(), index.contiguous()
    out = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    _pair_up_kernel(
        (triton.cdiv(size, _PAIR_UP["BLOCK_N"]), pairs),
        x, index, index if num_tokens is None else num_tokens, weight, out, size, weight.shape[0],
        K=x.shape[1], TOP_K=index.shape[1], HAS_COUNT=num_tokens is not None, ACTIVATION=ACTIVATION_CODES[activation],
        **_PAIR_UP,
    )  # fmt: skip
    return out


def pairs_down(
    x: torch.Tensor, index: torch.Tensor, num_tokens: torch.Tensor | None, weight: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    tokens, size = index.shape[0], weight.shape[1]
    index = index.contiguous()
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    _pair_down_kernel(
        (triton.cdiv(size, _PAIR_DOWN["BLOCK_N"]), tokens),
        x, index, index if num_tokens is None else num_tokens, weight, weights.contiguous(), out, size, weight.shape[0],
        K=x.shape[1], TOP_K=index.shape[1], HAS_COUNT=num_tokens is not None, ROUNDS=weights.dtype is x.dtype,
        **_PAIR_DOWN,
    )  # fmt: skip
    return out
