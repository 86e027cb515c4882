"""What lies around the experts' products, as Triton kernels: a router's choice, pairs by expert, and the weighted sum.

The sort counts: each block of pairs counts its experts, and then every pair's place is what comes before its expert, before
its block and before itself. Pairs keep their order within an expert, so the same routing always gives the same sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from segue.llm.kernels.launch import Launcher

_PAIRS = 64  # a block
_BLOCKS = 16  # of counts, read at once
_COLUMNS = 1024


@Launcher
@triton.jit
def _route_kernel(
    logits, bias, weights, index, stride, scale, num_experts,
    TOP_K: tl.constexpr, IS_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALIZES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row. Of equal scores the first is taken; where a logit is NaN, so are all weights."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_E)
    exists = at < num_experts
    x = tl.load(logits + row * stride + at, mask=exists, other=float("-inf")).to(tl.float32)
    if IS_SOFTMAX:
        scores = tl.exp(x - tl.max(x, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    else:
        scores = tl.sigmoid(x)
    left = scores
    if HAS_BIAS:
        left += tl.load(bias + at, mask=exists, other=0.0).to(tl.float32)
    left = tl.where(exists, left, float("-inf"))
    choices = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], dtype=tl.float32)
    experts = tl.zeros([BLOCK_K], dtype=tl.int64)
    for choice in tl.range(0, TOP_K):
        best = tl.min(tl.where(left == tl.max(left, axis=0), at, num_experts - 1), axis=0)
        score = tl.sum(tl.where(at == best, scores, 0.0), axis=0)
        chosen = tl.where(choices == choice, score, chosen)
        experts = tl.where(choices == choice, best.to(tl.int64), experts)
        left = tl.where(at == best, float("-inf"), left)
    if NORMALIZES:
        chosen = chosen / (tl.sum(chosen, axis=0) + 1e-20)
    has_nan = tl.max((exists & (x != x)).to(tl.int32), axis=0) > 0
    chosen = tl.where(has_nan, float("nan"), chosen * scale)
    places = row * TOP_K + choices
    tl.store(weights + places, chosen.to(weights.dtype.element_ty), mask=choices < TOP_K)
    tl.store(index + places, experts, mask=choices < TOP_K)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    is_softmax: bool,
    normalizes: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights = torch.empty(rows, top_k, dtype=dtype, device=logits.device)
    index = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    _route_kernel(
        (rows,), logits, logits if bias is None else bias, weights, index, logits.stride(0), scale, num_experts,
        TOP_K=top_k, IS_SOFTMAX=is_softmax, HAS_BIAS=bias is not None, NORMALIZES=normalizes,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(top_k), num_warps=1,
    )  # fmt: skip
    return weights, index


@triton.jit
def _experts_of(index, num_tokens, pairs, pair, num_experts, TOP_K: tl.constexpr, HAS_COUNT: tl.constexpr):
    """The experts of some pairs; `num_experts` for those that have none."""
    exists = pair < pairs
    if HAS_COUNT:
        exists = exists & (pair // TOP_K < tl.load(num_tokens))
    expert = tl.load(index + pair, mask=exists, other=num_experts).to(tl.int32)
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    index, num_tokens, counts, pairs, num_experts,
    TOP_K: tl.constexpr, HAS_COUNT: tl.constexpr, PAIRS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """How many of a block's pairs each expert has."""
    block = tl.program_id(0)
    expert = _experts_of(index, num_tokens, pairs, block * PAIRS + tl.arange(0, PAIRS), num_experts, TOP_K, HAS_COUNT)
    experts = tl.arange(0, BLOCK_E)
    tl.store(counts + block * BLOCK_E + experts, tl.sum((expert[:, None] == experts[None]).to(tl.int32), axis=0))


@Launcher
@triton.jit(do_not_specialize=["pairs", "blocks"])
def _place_kernel(
    index, num_tokens, counts, tokens, places, ends, pairs, num_experts, blocks,
    TOP_K: tl.constexpr, HAS_COUNT: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_E: tl.constexpr,
    IS_ONE: tl.constexpr,
):  # fmt: skip
    """Where a block's pairs go. `IS_ONE`: there is no other block, and nothing was counted."""
    block = tl.program_id(0)
    within = tl.arange(0, PAIRS)
    pair = block * PAIRS + within
    expert = _experts_of(index, num_tokens, pairs, pair, num_experts, TOP_K, HAS_COUNT)
    experts = tl.arange(0, BLOCK_E)
    is_its = expert[:, None] == experts[None]
    before = tl.zeros([BLOCK_E], dtype=tl.int32)
    if IS_ONE:
        every = tl.sum(is_its.to(tl.int32), axis=0)
    else:
        every = tl.zeros([BLOCK_E], dtype=tl.int32)
        for first in tl.range(0, blocks, BLOCKS):
            some = first + tl.arange(0, BLOCKS)
            at = counts + some[:, None] * BLOCK_E + experts[None]
            found = tl.load(at, mask=(some < blocks)[:, None], other=0)
            every += tl.sum(found, axis=0)
            before += tl.sum(tl.where((some < block)[:, None], found, 0), axis=0)
    until = tl.cumsum(every, axis=0)
    if block == 0:
        tl.store(ends + experts, until, mask=experts < num_experts)
    begin = until - every + before
    earlier = (expert[:, None] == expert[None]) & (within[None] < within[:, None])
    place = tl.sum(tl.where(is_its, begin[None], 0), axis=1) + tl.sum(earlier.to(tl.int32), axis=1)
    exists = pair < pairs
    tl.store(tokens + place, pair // TOP_K, mask=exists)
    tl.store(places + pair, tl.where(expert < num_experts, place, -1), mask=exists)


def pairs_by_expert(
    index: torch.Tensor, num_experts: int, num_tokens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index, device = index.contiguous(), index.device
    pairs, top_k = index.numel(), index.shape[1]
    blocks, block_e = triton.cdiv(pairs, _PAIRS), triton.next_power_of_2(num_experts + 1)
    tokens = torch.empty(pairs, dtype=torch.int32, device=device)
    places = torch.empty(index.shape, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    counts = ends if blocks == 1 else torch.empty(blocks, block_e, dtype=torch.int32, device=device)
    common = {"TOP_K": top_k, "HAS_COUNT": num_tokens is not None, "PAIRS": _PAIRS, "BLOCK_E": block_e, "num_warps": 8}
    count = index if num_tokens is None else num_tokens
    if blocks > 1:
        _count_kernel((blocks,), index, count, counts, pairs, num_experts, **common)
    _place_kernel(
        (blocks,), index, count, counts, tokens, places, ends, pairs, num_experts, blocks,
        BLOCKS=_BLOCKS, IS_ONE=blocks == 1, **common,
    )  # fmt: skip
    return tokens, places, ends


@Launcher
@triton.jit
def _combine_kernel(rows, places, weights, out, size, TOP_K: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    dtype = out.dtype.element_ty
    for choice in tl.range(0, TOP_K):
        place = tl.load(places + token * TOP_K + choice)
        weight = tl.load(weights + token * TOP_K + choice).to(tl.float32)
        is_one = at < tl.where(place >= 0, size, 0)
        values = tl.load(rows + place.to(tl.int64) * size + at, mask=is_one, other=0.0).to(tl.float32)
        product = values * weight
        if ROUNDS:
            product = product.to(dtype).to(tl.float32)
        sums += tl.where(is_one, product, 0.0)
    tl.store(out + token * size + at, sums.to(dtype), mask=at < size)


def combine(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    (tokens, top_k), size = places.shape, rows.shape[1]
    out = torch.empty(tokens, size, dtype=rows.dtype, device=rows.device)
    _combine_kernel(
        (tokens, triton.cdiv(size, _COLUMNS)), rows, places, weights.contiguous(), out, size,
        TOP_K=top_k, ROUNDS=weights.dtype is rows.dtype, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
