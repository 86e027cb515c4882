"""Triton kernels over the paged cache: decode, extend (prefill), and the write of new K and V.

Everything that changes from step to step (lengths, offsets, page tables, the number of real tokens) is read from device
tensors, so one recording serves every batch of its shape. Grids are sized for the worst case of a shape; programs that
find nothing to do return at once.

*Decode.* One program a request, KV head and split. The splits share the blocks of keys of the request as it is now: a
short context occupies few of them, a long one all. The new token's K and V, where they are given, do not take the way
through memory: the last split starts from them and stores them into the cache. Where several splits had work, each
leaves its unnormalised sum, and the last to arrive merges all in the order of the splits, so the bits do not depend on
who was last. It sets the counter back to zero for the next launch.

*Extend.* One program a KV head and tile of queries; a tile never spans two requests. Request `r` owns the tile numbers
from ``query_start[r] // BLOCK_Q + r``, which leaves each enough of them without any table made on the host. Padding is
what a request after the last would own; its rows become zeros.

*Dependent* (programmatic dependent launch): write and extend may be launched before what came before them is over, and
wait for it themselves. A launch that is not made so waits for nothing there.

Scores are kept in base 2. A key that is masked is never loaded: stale pages may hold NaN, and 0 x NaN is NaN.
"""

import triton
import triton.language as tl

from segue.llm.kernels.launch import Launcher

LOG2_E = tl.constexpr(1.4426950408889634)


@Launcher
@triton.jit
def write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    num_tokens_ptr,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program a token: K and V into their slot. Padding is not written."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(num_tokens_ptr):
        return
    slot = tl.load(slots_ptr + token).to(tl.int64)
    places = tl.arange(0, BLOCK_K)
    source = k_ptr + token * k_stride + places // DIM * k_head_stride + places % DIM
    tl.store(k_cache_ptr + slot * K_WIDTH + places, tl.load(source, mask=places < K_WIDTH), mask=places < K_WIDTH)
    places = tl.arange(0, BLOCK_V)
    source = v_ptr + token * v_stride + places // VALUE_DIM * v_head_stride + places % VALUE_DIM
    tl.store(v_cache_ptr + slot * V_WIDTH + places, tl.load(source, mask=places < V_WIDTH), mask=places < V_WIDTH)


@Launcher
@triton.jit(do_not_specialize=["window", "num_splits", "table_stride"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    lengths_ptr,
    slots_ptr,
    sinks_ptr,
    sums_ptr,
    states_ptr,
    arrived_ptr,
    scale,
    softcap,
    window,
    num_splits,
    table_stride,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE_G: tl.constexpr,
    MERGE_S: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``q[R, heads, DIM]``, new ``k, v[R, kv_heads, dim]`` -> ``out[R, heads, VALUE_DIM]``; row `r` is request `r`."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    length = tl.load(lengths_ptr + request)
    num_cached = length - 1 if HAS_NEW else length
    first = tl.maximum(length - window, 0)
    first_block = first // BLOCK_N
    num_blocks = tl.maximum((num_cached + BLOCK_N - 1) // BLOCK_N - first_block, 0)
    share = tl.maximum((num_blocks + num_splits - 1) // num_splits, 1)
    num_active = tl.maximum((num_blocks + share - 1) // share, 1)
    if split >= num_active:
        return

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    head_offsets = (kv_head * GROUP + heads) * q_head_stride
    q_mask = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    q = tl.load(q_ptr + request * q_stride + head_offsets[:, None] + dims[None, :], mask=q_mask, other=0.0)
    peak = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_V], dtype=tl.float32)

    if (split == num_active - 1) & (length > 0) & HAS_NEW:
        new_k = tl.load(k_ptr + request * k_stride + kv_head * k_head_stride + dims, mask=dims < DIM, other=0.0)
        new_v = tl.load(
            v_ptr + request * v_stride + kv_head * v_head_stride + value_dims, mask=value_dims < VALUE_DIM, other=0.0
        )
        row = tl.load(slots_ptr + request).to(tl.int64) * NUM_KV_HEADS + kv_head
        tl.store(k_cache_ptr + row * DIM + dims, new_k, mask=dims < DIM)
        tl.store(v_cache_ptr + row * VALUE_DIM + value_dims, new_v, mask=value_dims < VALUE_DIM)
        peak = _capped(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], axis=1) * scale, softcap, HAS_SOFTCAP)
        total += 1.0
        sums += new_v.to(tl.float32)[None, :]

    begin = (first_block + split * share) * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, num_cached)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        places = start + tl.arange(0, BLOCK_N)
        is_seen = (places >= first) & (places < num_cached)
        pages = tl.load(table_ptr + request * table_stride + places // PAGE_SIZE, mask=is_seen, other=0).to(tl.int64)
        rows = (pages * PAGE_SIZE + places % PAGE_SIZE) * NUM_KV_HEADS + kv_head
        k_mask = is_seen[None, :] & (dims < DIM)[:, None]
        k = tl.load(k_cache_ptr + rows[None, :] * DIM + dims[:, None], mask=k_mask, other=0.0)
        v_mask = is_seen[:, None] & (value_dims < VALUE_DIM)[None, :]
        v = tl.load(v_cache_ptr + rows[:, None] * VALUE_DIM + value_dims[None, :], mask=v_mask, other=0.0)
        scores = _capped(tl.dot(q, k, input_precision="tf32x3") * scale, softcap, HAS_SOFTCAP)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        peak = new_peak

    if num_active == 1:
        if HAS_SINKS:
            sinks = tl.load(sinks_ptr + kv_head * GROUP + heads, mask=heads < GROUP, other=0.0).to(tl.float32) * LOG2_E
            total, sums = _with_sinks(peak, total, sums, sinks)
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        out_rows = (request * NUM_KV_HEADS + kv_head) * GROUP + heads
        out_mask = (heads < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
        tl.store(out_ptr + out_rows[:, None] * VALUE_DIM + value_dims[None, :], result, mask=out_mask)
        return

    pair = request * NUM_KV_HEADS + kv_head
    places = (pair * num_splits + split) * GROUP + heads
    sums_mask = (heads < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(sums_ptr + places[:, None] * VALUE_DIM + value_dims[None, :], sums, mask=sums_mask)
    tl.store(states_ptr + places * 2, peak, mask=heads < GROUP)
    tl.store(states_ptr + places * 2 + 1, total, mask=heads < GROUP)
    tl.debug_barrier()  # every thread's part is written before one thread says so
    if tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel") != num_active - 1:
        return
    tl.store(arrived_ptr + pair, 0)
    _merge(
        out_ptr, sums_ptr, states_ptr, sinks_ptr, pair, kv_head, num_splits, num_active,
        GROUP, VALUE_DIM, BLOCK_V, MERGE_G, MERGE_S, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def _merge(
    out_ptr,
    sums_ptr,
    states_ptr,
    sinks_ptr,
    pair,
    kv_head,
    num_splits,
    num_active,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MERGE_G: tl.constexpr,
    MERGE_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Weighs the splits' sums and stores the result. Past the L1 cache, which other processors' stores do not reach."""
    heads = tl.arange(0, MERGE_G)
    value_dims = tl.arange(0, BLOCK_V)
    peak = tl.full([MERGE_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([MERGE_G], dtype=tl.float32)
    sums = tl.zeros([MERGE_G, BLOCK_V], dtype=tl.float32)
    for chunk in range(0, num_active, MERGE_S):
        splits = chunk + tl.arange(0, MERGE_S)
        places = (pair * num_splits + splits)[:, None] * GROUP + heads[None, :]
        is_there = (splits < num_active)[:, None] & (heads < GROUP)[None, :]
        peaks = tl.load(states_ptr + places * 2, mask=is_there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(states_ptr + places * 2 + 1, mask=is_there, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            sums_ptr + places[:, :, None] * VALUE_DIM + value_dims[None, None, :],
            mask=is_there[:, :, None] & (value_dims < VALUE_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        safe_peak = tl.where(heads < GROUP, new_peak, 0.0)
        shrink = tl.exp2(peak - safe_peak)
        weights = tl.exp2(peaks - safe_peak[None, :])
        total = total * shrink + tl.sum(totals * weights, axis=0)
        sums = sums * shrink[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        peak = new_peak
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + kv_head * GROUP + heads, mask=heads < GROUP, other=0.0).to(tl.float32) * LOG2_E
        total, sums = _with_sinks(peak, total, sums, sinks)
    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    out_mask = (heads < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(out_ptr + (pair * GROUP + heads)[:, None] * VALUE_DIM + value_dims[None, :], result, mask=out_mask)


@Launcher
@triton.jit(do_not_specialize=["window", "num_requests", "num_rows", "table_stride"])
def extend_kernel(
    q_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    lengths_ptr,
    query_start_ptr,
    sinks_ptr,
    scale,
    softcap,
    window,
    num_requests,
    num_rows,
    table_stride,
    q_stride,
    q_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """``q[T, heads, DIM]`` -> ``out[T, heads, VALUE_DIM]``, over a cache that holds the new tokens already."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the tiles with the most keys come last, and are begun first
    slots = tl.arange(0, BLOCK_R)
    starts = tl.load(query_start_ptr + slots, mask=slots <= num_requests, other=1 << 30)
    request = tl.sum((starts // BLOCK_Q + slots <= tile).to(tl.int32), axis=0) - 1
    is_padding = request == num_requests
    query_begin = tl.load(query_start_ptr + request)
    query_end = num_rows if is_padding else tl.load(query_start_ptr + request + 1)
    first_token = query_begin + (tile - query_begin // BLOCK_Q - request) * BLOCK_Q
    if first_token >= query_end:
        return

    rows = tl.arange(0, BLOCK_Q * BLOCK_G)
    tokens = first_token + rows // BLOCK_G
    groups = rows % BLOCK_G
    heads = kv_head * GROUP + groups
    is_live = (tokens < query_end) & (groups < GROUP)
    value_dims = tl.arange(0, BLOCK_V)
    out_offsets = (tokens.to(tl.int64) * NUM_KV_HEADS * GROUP + heads) * VALUE_DIM
    out_ptrs = out_ptr + out_offsets[:, None] + value_dims[None, :]
    out_mask = is_live[:, None] & (value_dims < VALUE_DIM)[None, :]
    if is_padding:
        tl.store(out_ptrs, tl.zeros([BLOCK_Q * BLOCK_G, BLOCK_V], dtype=out_ptr.dtype.element_ty), mask=out_mask)
        return

    offset = tl.load(lengths_ptr + request) - query_end  # from a token's index to its position
    positions = tokens + offset
    first_position = first_token + offset
    end = tl.minimum(first_token + BLOCK_Q, query_end) + offset  # positions of the tile, and keys, end before it
    dims = tl.arange(0, BLOCK_D)
    q_offsets = tokens.to(tl.int64) * q_stride + heads * q_head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=is_live[:, None] & (dims < DIM)[None, :], other=0.0)
    peak = tl.full([BLOCK_Q * BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_Q * BLOCK_G], dtype=tl.float32)
    sums = tl.zeros([BLOCK_Q * BLOCK_G, BLOCK_V], dtype=tl.float32)

    low = tl.maximum(first_position - window + 1, 0)
    table = table_ptr + request * table_stride
    begin = low // BLOCK_N * BLOCK_N
    middle = (first_position + 1) // BLOCK_N * BLOCK_N  # every row of the tile sees what lies before it
    inside = begin
    if HAS_WINDOW:  # and what lies from `inside` on
        inside = (tl.maximum(end - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        peak, total, sums = _attend(
            q, peak, total, sums, k_cache_ptr, v_cache_ptr, table, positions, kv_head, begin, tl.minimum(inside, end), low,
            end, window, scale, softcap, NUM_KV_HEADS, DIM, VALUE_DIM, PAGE_SIZE, BLOCK_D, BLOCK_V, BLOCK_N, True,
            HAS_SOFTCAP, STAGES,
        )  # fmt: skip
    peak, total, sums = _attend(
        q, peak, total, sums, k_cache_ptr, v_cache_ptr, table, positions, kv_head, inside, middle, low,
        end, window, scale, softcap, NUM_KV_HEADS, DIM, VALUE_DIM, PAGE_SIZE, BLOCK_D, BLOCK_V, BLOCK_N, False,
        HAS_SOFTCAP, STAGES,
    )  # fmt: skip
    peak, total, sums = _attend(
        q, peak, total, sums, k_cache_ptr, v_cache_ptr, table, positions, kv_head, tl.maximum(inside, middle), end, low,
        end, window, scale, softcap, NUM_KV_HEADS, DIM, VALUE_DIM, PAGE_SIZE, BLOCK_D, BLOCK_V, BLOCK_N, True,
        HAS_SOFTCAP, STAGES,
    )  # fmt: skip

    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=is_live, other=0.0).to(tl.float32) * LOG2_E
        total, sums = _with_sinks(peak, total, sums, sinks)
    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptrs, result, mask=out_mask)


@triton.jit
def _attend(
    q,
    peak,
    total,
    sums,
    k_cache_ptr,
    v_cache_ptr,
    table,
    positions,
    kv_head,
    begin,
    stop,
    low,
    end,
    window,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Blocks of keys from `begin` to `stop`. Rows read lie in ``[low, end)``, each visible to some row of the tile."""
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        places = start + tl.arange(0, BLOCK_N)
        is_read = (places >= low) & (places < end)
        k_mask = (dims < DIM)[:, None]
        v_mask = (value_dims < VALUE_DIM)[None, :]
        if IS_MASKED:
            pages = tl.load(table + places // PAGE_SIZE, mask=is_read, other=0).to(tl.int64)
            k_mask = is_read[None, :] & k_mask
            v_mask = is_read[:, None] & v_mask
        else:
            pages = tl.load(table + places // PAGE_SIZE).to(tl.int64)
        rows = (pages * PAGE_SIZE + places % PAGE_SIZE) * NUM_KV_HEADS + kv_head
        k = tl.load(k_cache_ptr + rows[None, :] * DIM + dims[:, None], mask=k_mask, other=0.0)
        v = tl.load(v_cache_ptr + rows[:, None] * VALUE_DIM + value_dims[None, :], mask=v_mask, other=0.0)
        scores = _capped(tl.dot(q, k, input_precision="tf32x3") * scale, softcap, HAS_SOFTCAP)
        if IS_MASKED:
            is_seen = (places[None, :] <= positions[:, None]) & (places[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen & is_read[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
        weights = tl.exp2(scores - safe_peak[:, None])
        shrink = tl.exp2(peak - safe_peak)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        peak = new_peak
    return peak, total, sums


@triton.jit
def _capped(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in base 2. With a cap they come in units of the cap: ``tanh(x) = 1 - 2 / (exp(2 x) + 1)``."""
    if HAS_SOFTCAP:
        return softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    else:
        return scores


@triton.jit
def _with_sinks(peak, total, sums, sinks):
    """A sink takes weight and adds nothing."""
    new_peak = tl.maximum(peak, sinks)
    shrink = tl.exp2(peak - new_peak)
    return total * shrink + tl.exp2(sinks - new_peak), sums * shrink[:, None]
