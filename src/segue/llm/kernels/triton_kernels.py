"""The operations as Triton kernels. Every size that varies from batch to batch is an argument that Triton does not
specialise on, so a kernel is compiled once a model, in its first warm-up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from segue.llm.kernels import reference
from segue.llm.kernels.activation_triton import ACTIVATION_CODES, activated
from segue.llm.kernels.experts_triton import experts_down, experts_up, pairs_down, pairs_up
from segue.llm.kernels.launch import Launch, Launcher
from segue.llm.kernels.routing_triton import combine, pairs_by_expert, route

__all__ = [
    "combine", "experts_down", "experts_up", "gated", "greedy", "linear_add", "norm_linear", "norm_linear_gated",
    "pairs_by_expert", "pairs_down", "pairs_up", "rms_norm", "rotate_into", "route",
]  # fmt: skip

_HEADS_PER_PROGRAM = 8
_GATED_BLOCK = 1024
_LOGITS_BLOCK = 2048
_ROWS, _COLUMNS = 4, 256  # of a weight, a program; of 19 settings the fastest over the four products of a layer (H200)


@Launcher
@triton.jit
def _norm_kernel(x, weight, out, stride, size, eps, ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(x + row * stride + at, mask=inside, other=0.0)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wide = values.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    if ADDS_ONE:
        result = wide * (1.0 + scale)
    else:
        result = wide.to(values.dtype).to(tl.float32) * scale
    tl.store(out + row * size + at, result.to(values.dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool) -> torch.Tensor:
    size = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, size).contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _norm_kernel(
        (rows.shape[0],), rows, weight, out, rows.stride(0), size, eps,
        ADDS_ONE=adds_one, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out.view(x.shape)


@Launcher
@triton.jit
def _gated_kernel(x, out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * size + size + at, mask=inside, other=0.0)
    result = activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * size + at, result.to(gate.dtype), mask=inside)


def gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    x = x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(size, _GATED_BLOCK), rows)
    _gated_kernel(grid, x, out, size, ACTIVATION=ACTIVATION_CODES[activation], BLOCK=_GATED_BLOCK, num_warps=4)
    return out


@triton.jit
def _normed(x, weight, scale, DTYPE: tl.constexpr, ADDS_ONE: tl.constexpr):
    """Part of some heads; `weight` is that part's, a row a head."""
    if ADDS_ONE:
        result = x * scale * (1.0 + weight)
    else:
        result = (x * scale).to(DTYPE).to(tl.float32) * weight
    return result.to(DTYPE).to(tl.float32)


@triton.jit
def _head_weight(q_weight, k_weight, is_q, at, inside):
    of_q = tl.load(q_weight + at, mask=inside, other=0.0).to(tl.float32)[None]
    of_k = tl.load(k_weight + at, mask=inside, other=0.0).to(tl.float32)[None]
    return tl.where(is_q[:, None], of_q, of_k)


@Launcher
@triton.jit(do_not_specialize=["heads"])
def _rotate_kernel(
    qkv, cos, sin, q_weight, k_weight, slots, keys, values, q_out,
    stride, cos_stride, heads, kv_heads, eps,
    HAS_NORM: tl.constexpr, ADDS_ONE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A head is two halves that are rotated, and dimensions after them that are not (`REST`, a power of 2; 0: none)."""
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    is_v = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    is_head = (head < heads + 2 * kv_heads)[:, None]
    exists = is_head & inside[None]
    source = qkv + row * stride + head[:, None] * DIM + at[None]
    first_in = tl.load(source, mask=exists, other=0.0)
    second_in = tl.load(source + HALF, mask=exists, other=0.0)
    dtype = first_in.dtype
    first, second = first_in.to(tl.float32), second_in.to(tl.float32)
    if REST > 0:
        more = 2 * HALF + tl.arange(0, REST)
        is_more = more < DIM
        rest_in = tl.load(qkv + row * stride + head[:, None] * DIM + more[None], mask=is_head & is_more[None], other=0.0)
        rest = rest_in.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first = _normed(first, _head_weight(q_weight, k_weight, is_q, at, inside), scale, dtype, ADDS_ONE)
        second = _normed(second, _head_weight(q_weight, k_weight, is_q, HALF + at, inside), scale, dtype, ADDS_ONE)
        if REST > 0:
            rest = _normed(rest, _head_weight(q_weight, k_weight, is_q, more, is_more), scale, dtype, ADDS_ONE)
    c1 = tl.load(cos + row * cos_stride + at, mask=inside, other=0.0).to(tl.float32)[None]
    c2 = tl.load(cos + row * cos_stride + HALF + at, mask=inside, other=0.0).to(tl.float32)[None]
    s1 = tl.load(sin + row * cos_stride + at, mask=inside, other=0.0).to(tl.float32)[None]
    s2 = tl.load(sin + row * cos_stride + HALF + at, mask=inside, other=0.0).to(tl.float32)[None]
    out1 = (first * c1).to(dtype).to(tl.float32) - (second * s1).to(dtype).to(tl.float32)
    out2 = (second * c2).to(dtype).to(tl.float32) + (first * s2).to(dtype).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    to_q = q_out + (row * heads + head[:, None]) * DIM
    to_k = keys + (slot * kv_heads + head[:, None] - heads) * DIM
    to_v = values + (slot * kv_heads + head[:, None] - heads - kv_heads) * DIM
    for_q, for_k, for_v = is_q[:, None] & inside[None], is_k[:, None] & inside[None], is_v[:, None] & inside[None]
    tl.store(to_q + at[None], out1.to(dtype), mask=for_q)
    tl.store(to_q + HALF + at[None], out2.to(dtype), mask=for_q)
    tl.store(to_k + at[None], out1.to(dtype), mask=for_k)
    tl.store(to_k + HALF + at[None], out2.to(dtype), mask=for_k)
    tl.store(to_v + at[None], first_in, mask=for_v)
    tl.store(to_v + HALF + at[None], second_in, mask=for_v)
    if REST > 0:
        tl.store(to_q + more[None], rest.to(dtype), mask=is_q[:, None] & is_more[None])
        tl.store(to_k + more[None], rest.to(dtype), mask=is_k[:, None] & is_more[None])
        tl.store(to_v + more[None], rest_in, mask=is_v[:, None] & is_more[None])


def rotate_into(qkv: torch.Tensor, *others: Any) -> None:
    rotation(qkv, *others).run()


def rotation(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    adds_one: bool,
    slots: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Launch:
    kv_heads, dim = keys.shape[1:]
    (rows, heads, _), half = q.shape, cos.shape[1] // 2
    arguments = (
        qkv, cos, sin, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight,
        slots, keys, values, q, qkv.stride(0), cos.stride(0), heads, kv_heads, eps,
    )  # fmt: skip
    constants = {
        "HAS_NORM": q_weight is not None, "ADDS_ONE": adds_one, "DIM": dim, "HALF": half,
        "BLOCK": triton.next_power_of_2(half),
        "REST": triton.next_power_of_2(dim - 2 * half) if dim > 2 * half else 0, "HEADS": _HEADS_PER_PROGRAM, "num_warps": 4,
    }  # fmt: skip
    return Launch(_rotate_kernel, (triton.cdiv(heads + 2 * kv_heads, _HEADS_PER_PROGRAM), rows), arguments, constants)


@Launcher
@triton.jit
def _row_product_kernel(
    x, norm_weight, weight, bias, out, size, eps,
    K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row: ``out[n] = sum_k weight[n, k] x[k]`` over the rows of the weight that a program owns.

    The norm costs no pass of its own: its root mean square is a factor of every result, summed up beside the products.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = rows < size
    wide_rows = rows.to(tl.int64) * K
    at = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        places = start + at
        inside = places < K
        mask = exists[:, None] & inside[None]
        part = tl.load(weight + wide_rows[:, None] + places[None], mask=mask, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        if NORM > 0:
            squares += values * values
            scale = tl.load(norm_weight + places, mask=inside, other=0.0).to(tl.float32)
            values = values * (1.0 + scale) if NORM == 2 else values * scale
        sums += part.to(tl.float32) * values[None]
        if GATED:
            more = tl.load(
                weight + size.to(tl.int64) * K + wide_rows[:, None] + places[None],
                mask=mask, other=0.0, eviction_policy="evict_first",
            )  # fmt: skip
            ups += more.to(tl.float32) * values[None]
    dtype = x.dtype.element_ty
    result = tl.sum(sums, axis=1)
    up = tl.sum(ups, axis=1)
    if NORM > 0:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        result, up = result * factor, up * factor
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=exists, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + size + rows, mask=exists, other=0.0).to(tl.float32)
    if GATED:
        gate = activated(result.to(dtype).to(tl.float32), ACTIVATION)
        result = gate.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    if ADDS:
        result += tl.load(out + rows, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(dtype), mask=exists)


def _row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float, bool] | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    size = weight.shape[0] // (1 if activation is None else 2)
    adds = out is not None
    if out is None:
        out = torch.empty(1, size, dtype=x.dtype, device=x.device)
    norm_weight, eps, adds_one = (weight, 0.0, False) if norm is None else norm
    _row_product_kernel(
        (triton.cdiv(size, _ROWS),), x, norm_weight, weight, weight if bias is None else bias, out, size, eps,
        K=weight.shape[1], NORM=0 if norm is None else 1 + adds_one, GATED=activation is not None, ADDS=adds,
        HAS_BIAS=bias is not None, ACTIVATION=0 if activation is None else ACTIVATION_CODES[activation],
        BLOCK_N=_ROWS, BLOCK_K=_COLUMNS, STAGES=5, num_warps=2,
    )  # fmt: skip
    return out


def _is_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is one row through a whole weight: then a matrix-vector kernel reads it faster than cuBLAS."""
    return x.shape[0] == 1 and x.stride(1) == 1 and weight.is_contiguous()


def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, adds_one: bool, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if _is_row(x, weight):
        return _row_product(x, weight, bias, norm=(norm_weight, eps, adds_one))
    return F.linear(rms_norm(x, norm_weight, eps, adds_one), weight, bias)


def norm_linear_gated(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    adds_one: bool,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    if _is_row(x, weight):
        return _row_product(x, weight, bias, norm=(norm_weight, eps, adds_one), activation=activation)
    return gated(F.linear(rms_norm(x, norm_weight, eps, adds_one), weight, bias), activation)


def linear_add(hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if _is_row(x, weight):
        _row_product(x, weight, bias, out=hidden)
    else:
        reference.linear_add(hidden, x, weight, bias)


@Launcher
@triton.jit
def _largest_kernel(logits, values, places, stride, size, parts, BLOCK: tl.constexpr):
    """The largest logit of each part of each row, and where it lies: the first of equals; NaN counts as largest."""
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf")).to(tl.float32)
    found = tl.where(found != found, float("inf"), found)
    largest = tl.max(found, axis=0)
    tl.store(values + row * parts + part, largest)
    tl.store(places + row * parts + part, tl.min(tl.where(found == largest, at, size), axis=0))


@Launcher
@triton.jit
def _likeliest_kernel(values, places, out, rows, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    found = tl.load(values + row * parts + at, mask=at < parts, other=float("-inf"))
    where = tl.load(places + row * parts + at, mask=at < parts, other=2147483647)
    largest = tl.max(found, axis=0)
    tl.store(out + row, tl.min(tl.where(found == largest, where, 2147483647), axis=0).to(tl.int64))
    tl.store(out + rows + row, ((largest < float("inf")) & (largest > float("-inf"))).to(tl.int64))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    rows, size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts = triton.cdiv(size, _LOGITS_BLOCK)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    _largest_kernel((parts, rows), logits, values, places, logits.stride(0), size, parts, BLOCK=_LOGITS_BLOCK, num_warps=4)
    _likeliest_kernel((rows,), values, places, out, rows, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return out
