"""The Triton kernels as registered operations, so that traces, recordings and compilers see what they read and write.

Block sizes and the number of splits follow from shapes alone, never from lengths: that is what makes eager and replay
agree bit for bit. Importing this module registers the operations with torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int32
from typing import Any

import torch
import triton

from segue._compat import is_observed
from segue.llm.attention.triton_kernels import decode_kernel, extend_kernel, write_kernel
from segue.llm.kernels.launch import Launch, Prepared, can_depend, prepared_launches

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
    requests, num_heads, _ = q.shape
    kv_heads, value_dim = v_cache.shape[1:]
    sums = states = q.new_empty(0, dtype=torch.float32)
    if splits > 1:
        sums = q.new_empty(requests * num_heads * splits * value_dim, dtype=torch.float32)
        states = q.new_empty(requests * num_heads * splits * 2, dtype=torch.float32)
    constants = decode_constants(
        num_heads, k_cache.shape[1:], v_cache.shape[1:], k_cache.element_size(), page_size, has_new, softcap > 0,
        sinks is not None,
    )  # fmt: skip
    with _on(q.device):
        decode_kernel(
            (kv_heads, splits, requests),
            q, k, v, out, k_cache, v_cache, table, lengths, slots, out if sinks is None else sinks, sums, states, arrived,
            *_scaled(scale, softcap), window, splits, table.stride(0),
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            **constants,
        )  # fmt: skip


@functools.lru_cache
def decode_constants(
    num_heads: int, k_shape: torch.Size, v_shape: torch.Size, element_size: int, page_size: int,
    has_new: bool, has_softcap: bool, has_sinks: bool,
) -> dict[str, Any]:  # fmt: skip
    (kv_heads, dim), value_dim = k_shape, v_shape[1]
    group, block_v = num_heads // kv_heads, _block(value_dim)
    merge_g = triton.next_power_of_2(group)
    return {
        "NUM_KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "VALUE_DIM": value_dim, "PAGE_SIZE": page_size,
        "BLOCK_G": max(_MIN_DOT, merge_g), "BLOCK_D": _block(dim), "BLOCK_V": block_v,
        "BLOCK_N": _keys(DECODE_KEYS_BYTES, dim, element_size), "MERGE_G": merge_g,
        "MERGE_S": max(1, min(MAX_SPLITS, _MERGED_ELEMENTS // (merge_g * block_v))),
        "HAS_NEW": has_new, "HAS_SOFTCAP": has_softcap, "HAS_SINKS": has_sinks, "STAGES": DECODE_STAGES, "num_warps": 2,
    }  # fmt: skip


def _extend(q: torch.Tensor, *others: Any) -> None:
    with _on(q.device):
        for launch in _extend_launches(q, *others):
            launch.run()


def prepared_extend(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, *others: Any) -> list[Prepared] | None:
    """The launches of an extend that has run, to be made again; None where that cannot be prepared."""
    if not all(x is None or x.stride(-1) == 1 for x in (q, k, v)):
        return None  # what is not dense is copied first, to another place each time
    return prepared_launches(_extend_launches(q, k, v, *others))


def _extend_launches(
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
    live: c_int32 | None = None,
) -> list[Launch]:
    """`live` has the number of requests where that differs from launch to launch: of the first ones in `table`."""
    q = _with_dense_rows(q)
    requests: Any = lengths.shape[0] if live is None else live
    kv_heads = v_cache.shape[1]
    block_q, constants = extend_constants(
        q.shape, table.shape[0], k_cache.shape[1:], v_cache.shape[1:], q.element_size(), page_size, q.device,
        window < NO_WINDOW, softcap > 0, sinks is not None,
    )  # fmt: skip
    rows = q.shape[0] // block_q + 1  # and one for each request
    attend = Launch(
        extend_kernel,
        (kv_heads, rows + requests if live is None else rows),
        (
            q, out, k_cache, v_cache, table, lengths, query_start, out if sinks is None else sinks,
            *_scaled(scale, softcap), window, requests, q.shape[0], table.stride(0), q.stride(0), q.stride(1),
        ),
        constants,
        live,
    )  # fmt: skip
    if k is None or v is None:
        return [attend]
    return [_write(_with_dense_rows(k), _with_dense_rows(v), k_cache, v_cache, slots, num_tokens), attend]


@functools.lru_cache
def extend_constants(
    q_shape: torch.Size, requests: int, k_shape: torch.Size, v_shape: torch.Size, element_size: int, page_size: int,
    device: torch.device, has_window: bool, has_softcap: bool, has_sinks: bool,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Tokens of a tile, and the kernel's constants."""
    (tokens, num_heads, dim), kv_heads, value_dim = q_shape, k_shape[0], v_shape[1]
    group = num_heads // kv_heads
    block_g = triton.next_power_of_2(group)
    rows = _extend_rows(device, dim, element_size, tokens * block_g, kv_heads)
    block_q = max(1, rows // block_g)
    return block_q, {
        "NUM_KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "VALUE_DIM": value_dim, "PAGE_SIZE": page_size,
        "BLOCK_G": block_g, "BLOCK_Q": block_q, "BLOCK_D": _block(dim), "BLOCK_V": _block(value_dim),
        "BLOCK_N": _keys(EXTEND_KEYS_BYTES, dim, element_size),
        "BLOCK_R": max(_REQUESTS, triton.next_power_of_2(requests + 1)),
        "HAS_WINDOW": has_window, "HAS_SOFTCAP": has_softcap, "HAS_SINKS": has_sinks,
        "STAGES": EXTEND_STAGES, "IS_DEPENDENT": can_depend(device), "num_warps": 8 if block_q * block_g > 64 else 4,
    }  # fmt: skip


def _write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, count: torch.Tensor
) -> Launch:
    (kv_heads, dim), value_dim = k_cache.shape[1:], v_cache.shape[2]
    constants = {
        "K_WIDTH": kv_heads * dim, "V_WIDTH": kv_heads * value_dim, "DIM": dim, "VALUE_DIM": value_dim,
        "BLOCK_K": triton.next_power_of_2(kv_heads * dim), "BLOCK_V": triton.next_power_of_2(kv_heads * value_dim),
        "IS_DEPENDENT": can_depend(k.device), "num_warps": 4,
    }  # fmt: skip
    strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    return Launch(write_kernel, (k.shape[0],), (k, v, k_cache, v_cache, slots, count, *strides), constants)


def _nothing(*_: Any) -> None:
    """What the operations return: their results are written."""


_LIBRARY.impl("decode", _decode, "CompositeExplicitAutograd")
_LIBRARY.impl("extend", _extend, "CompositeExplicitAutograd")
_LIBRARY.impl("decode", _nothing, "Meta")
_LIBRARY.impl("extend", _nothing, "Meta")


def _dispatched(operation: Callable[..., None], body: Callable[..., None]) -> Callable[..., None]:
    """The operation where somebody watches or compiles; its body at once where nobody does, as between two segments."""

    def call(q: torch.Tensor, *others: Any) -> None:
        is_seen = torch.compiler.is_compiling() or type(q) is not torch.Tensor or is_observed()
        (operation if is_seen else body)(q, *others)

    return call


decode = _dispatched(torch.ops.segue_triton.decode.default, _decode)
extend = _dispatched(torch.ops.segue_triton.extend.default, _extend)


def _scaled(scale: float, softcap: float) -> tuple[float, float]:
    """The two factors of the kernels' scores, which are in base 2; see `_capped` there."""
    if softcap > 0:
        return 2.0 * scale / softcap * _LOG2_E, softcap * _LOG2_E
    return scale * _LOG2_E, 0.0


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block(dim: int) -> int:
    return int(max(_MIN_DOT, triton.next_power_of_2(dim)))


def _keys(num_bytes: int, dim: int, element_size: int) -> int:
    """Keys of one block of so many bytes."""
    fitting = num_bytes // (_block(dim) * element_size)
    return max(_MIN_DOT, min(64, fitting))


def _extend_rows(device: torch.device, dim: int, element_size: int, rows: int, kv_heads: int) -> int:
    """Rows of one tile (tokens times heads of a group): the most that still gives every processor a program."""
    if device.type == "cpu":
        return _ROWS_OF_A_CPU
    processors = _num_processors(device)
    fitting = EXTEND_ROWS_BYTES // (_block(dim) * element_size)
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
