"""The Triton kernels as registered operations, so that traces, recordings and compilers see what they read and write.

Block sizes and the number of splits follow from shapes alone, never from lengths: that is what makes eager and replay
agree bit for bit. Importing this module registers the operations with torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

from segue.llm.attention.triton_kernels import decode_kernel, extend_kernel, write_kernel

NO_WINDOW = 1 << 30
MAX_SPLITS = 64
_LOG2_E = 1.4426950408889634
PROGRAMS_PER_PROCESSOR = 2
_PROCESSORS_OF_A_CPU = 4  # the interpreter's: few splits, but more than one
_REQUESTS = 256  # that an extend looks through: few values, so that few kernels are compiled
_ROWS_OF_A_CPU = 64
_MIN_DOT = 16  # rows and columns of the smallest matrix product
_MERGED_ELEMENTS = 8192
DECODE_STAGES = 3
EXTEND_STAGES = 3
DECODE_KEYS_BYTES = 16 << 10  # of K in one block; with two warps the fastest of 37 settings at batch 1 to 256 (H200)
EXTEND_KEYS_BYTES = 16 << 10
EXTEND_ROWS_BYTES = 32 << 10  # of Q in one tile: with the keys, below the 99 KiB of shared memory of the smaller GPUs

_LIBRARY = torch.library.Library("segue_triton", "DEF")
_NEW = "Tensor q, Tensor? k, Tensor? v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) out"
_BATCH = "Tensor table, Tensor lengths, Tensor slots"
_SPEC = "Tensor? sinks, float scale, float softcap, int window, int page_size"
_LIBRARY.define(f"decode({_NEW}, {_BATCH}, Tensor(d!) arrived, int splits, {_SPEC}) -> ()")
_LIBRARY.define(f"extend({_NEW}, {_BATCH}, Tensor query_start, Tensor num_tokens, {_SPEC}) -> ()")


def num_splits(requests: int, kv_heads: int, device: torch.device) -> int:
    """Splits of each request and KV head: enough programs for all processors, of which short contexts use fewer."""
    return max(1, min(MAX_SPLITS, _num_processors(device) * PROGRAMS_PER_PROCESSOR // (requests * kv_heads)))


def _decode(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    arrived: torch.Tensor,
    splits: int,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    page_size: int,
) -> None:
    q, has_new = _with_dense_rows(q), k is not None
    k, v = (q, q) if k is None or v is None else (_with_dense_rows(k), _with_dense_rows(v))
    requests, num_heads, dim = q.shape
    kv_heads, value_dim = v_cache.shape[1:]
    group = num_heads // kv_heads
    sums = states = q.new_empty(0, dtype=torch.float32)
    if splits > 1:
        sums = q.new_empty(requests * kv_heads * splits * group * value_dim, dtype=torch.float32)
        states = q.new_empty(requests * kv_heads * splits * group * 2, dtype=torch.float32)
    block_v, merge_g = _block(value_dim), triton.next_power_of_2(group)
    with _on(q.device):
        decode_kernel(
            (kv_heads, splits, requests),
            q, k, v, out, k_cache, v_cache, table, lengths, slots, out if sinks is None else sinks, sums, states, arrived,
            *_scaled(scale, softcap), window, splits, table.stride(0),
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            NUM_KV_HEADS=kv_heads, GROUP=group, DIM=dim, VALUE_DIM=value_dim, PAGE_SIZE=page_size,
            BLOCK_G=max(_MIN_DOT, merge_g), BLOCK_D=_block(dim), BLOCK_V=block_v, BLOCK_N=_keys(DECODE_KEYS_BYTES, k_cache),
            MERGE_G=merge_g, MERGE_S=max(1, min(MAX_SPLITS, _MERGED_ELEMENTS // (merge_g * block_v))),
            HAS_NEW=has_new, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None, STAGES=DECODE_STAGES, num_warps=2,
        )  # fmt: skip


def _extend(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_tokens: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    page_size: int,
) -> None:
    q = _with_dense_rows(q)
    tokens, num_heads, dim = q.shape
    kv_heads, value_dim = v_cache.shape[1:]
    group, requests = num_heads // kv_heads, lengths.shape[0]
    block_g = triton.next_power_of_2(group)
    rows = _extend_rows(q, tokens * block_g, kv_heads)
    block_q = max(1, rows // block_g)
    with _on(q.device):
        if k is not None and v is not None:
            k, v = _with_dense_rows(k), _with_dense_rows(v)
            write_kernel(
                (tokens,),
                k, v, k_cache, v_cache, slots, num_tokens, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                K_WIDTH=kv_heads * dim, V_WIDTH=kv_heads * value_dim, DIM=dim, VALUE_DIM=value_dim,
                BLOCK_K=triton.next_power_of_2(kv_heads * dim), BLOCK_V=triton.next_power_of_2(kv_heads * value_dim),
                num_warps=4,
            )  # fmt: skip
        extend_kernel(
            (kv_heads, tokens // block_q + requests + 1),
            q, out, k_cache, v_cache, table, lengths, query_start, out if sinks is None else sinks,
            *_scaled(scale, softcap), window, requests, tokens, table.stride(0), q.stride(0), q.stride(1),
            NUM_KV_HEADS=kv_heads, GROUP=group, DIM=dim, VALUE_DIM=value_dim, PAGE_SIZE=page_size,
            BLOCK_G=block_g, BLOCK_Q=block_q, BLOCK_D=_block(dim), BLOCK_V=_block(value_dim),
            BLOCK_N=_keys(EXTEND_KEYS_BYTES, k_cache), BLOCK_R=max(_REQUESTS, triton.next_power_of_2(requests + 1)),
            HAS_WINDOW=window < NO_WINDOW, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None,
            STAGES=EXTEND_STAGES, num_warps=8 if block_q * block_g > 64 else 4,
        )  # fmt: skip


def _nothing(*_: Any) -> None:
    """What the operations return: their results are written."""


_LIBRARY.impl("decode", _decode, "CompositeExplicitAutograd")
_LIBRARY.impl("extend", _extend, "CompositeExplicitAutograd")
_LIBRARY.impl("decode", _nothing, "Meta")
_LIBRARY.impl("extend", _nothing, "Meta")

decode: Callable[..., None] = torch.ops.segue_triton.decode.default
extend: Callable[..., None] = torch.ops.segue_triton.extend.default


def _scaled(scale: float, softcap: float) -> tuple[float, float]:
    """The two factors of the kernels' scores, which are in base 2; see `_capped` there."""
    if softcap > 0:
        return 2.0 * scale / softcap * _LOG2_E, softcap * _LOG2_E
    return scale * _LOG2_E, 0.0


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block(dim: int) -> int:
    return int(max(_MIN_DOT, triton.next_power_of_2(dim)))


def _keys(num_bytes: int, cache: torch.Tensor) -> int:
    """Keys of one block of so many bytes."""
    fitting = num_bytes // (_block(cache.shape[-1]) * cache.element_size())
    return max(_MIN_DOT, min(64, fitting))


def _extend_rows(q: torch.Tensor, rows: int, kv_heads: int) -> int:
    """Rows of one tile (tokens times heads of a group): the most that still gives every processor a program."""
    if q.device.type == "cpu":
        return _ROWS_OF_A_CPU
    processors = _num_processors(q.device)
    fitting = EXTEND_ROWS_BYTES // (_block(q.shape[-1]) * q.element_size())
    return next((size for size in (128, 64) if size <= fitting and rows // size * kv_heads >= processors), 32)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return _PROCESSORS_OF_A_CPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
