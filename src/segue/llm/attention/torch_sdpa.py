"""The reference attention, on torch's `scaled_dot_product_attention`. Any device, any batch; gathers K and V.

Masked keys are the danger: masks are added to scores, and 0 x NaN is NaN, so a NaN in a stale page would reach a live
row through a key that is masked. The live plan reads exactly the rows that are visible. The static plan reads as many
rows as the key's context allows, and takes those beyond a request's length from the null page, which is zero.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from segue.config import GraphSupport
from segue.llm.attention.base import Attention, LayerSpec, Needs, Plan, StaticPlan
from segue.llm.batch import ForwardBatch
from segue.llm.kv_cache import PagedKVCache
from segue.shapes.key import ShapeKey

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TorchSdpaAttention(Attention):
    """Holds no state of its own; the cache belongs to the engine."""

    name: ClassVar[str] = "torch_sdpa"
    support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    bounds_context: ClassVar[bool] = True

    @classmethod
    def refusal(cls, needs: Needs, device: torch.device) -> str | None:
        return None

    def plan_live(self, batch: ForwardBatch, key: ShapeKey | None = None) -> Plan:
        return _LivePlan(self.cache, batch)

    def static_plan(self, key: ShapeKey) -> StaticPlan:
        assert key.requests is not None and key.context is not None
        return _StaticPlan(self.cache, key.tokens, key.requests, key.context, is_decode=key.uniform and key.width == 1)


class _LivePlan(Plan):
    """One call of the kernel a request, over exactly its visible rows. Rows of padding come out as zeros."""

    def __init__(self, cache: PagedKVCache, batch: ForwardBatch) -> None:
        self.cache = cache
        self._slots = batch.slot_mapping.long()
        host = batch.host
        self._query_lens = host.query_lens[: host.num_requests]
        self._seq_lens = host.seq_lens[: host.num_requests]
        self._rows = [_slots_of(batch.block_table[i], length, cache.page_size) for i, length in enumerate(self._seq_lens)]

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if k is not None and v is not None:
            self.cache.write(spec.layer, self._slots, k, v)
        keys, values = self.cache.keys[spec.layer], self.cache.values[spec.layer]
        out = q.new_zeros(q.shape[0], q.shape[1], values.shape[-1]) if out is None else out.zero_()
        start = 0
        for rows, num_new, length in zip(self._rows, self._query_lens, self._seq_lens, strict=True):
            first = length - num_new
            mask = (
                None if num_new == 1 and spec.window is None else causal_mask(first, num_new, length, spec.window, q.device)
            )
            heads = q[start : start + num_new].transpose(0, 1)[None]
            seen_k, seen_v = keys[rows].transpose(0, 1)[None], values[rows].transpose(0, 1)[None]
            out[start : start + num_new] = attend(heads, seen_k, seen_v, mask, spec, sinks)[0].transpose(0, 1)
            start += num_new
        return out


class _StaticPlan(StaticPlan):
    """Gathers `context` rows a request slot. A decode attends row by row; other batches see all slots' rows under one
    mask that tells the requests apart."""

    def __init__(self, cache: PagedKVCache, tokens: int, requests: int, context: int, *, is_decode: bool) -> None:
        self.cache = cache
        self._is_decode = is_decode
        device = cache.keys[0].device
        with torch.inference_mode(False):
            self._places = torch.arange(context, device=device)
            self._slots = torch.zeros(tokens, dtype=torch.int64, device=device)
            self._rows = torch.zeros(requests, context, dtype=torch.int64, device=device)
            self._is_visible = torch.zeros(requests, context, dtype=torch.bool, device=device)
            self._owner = torch.zeros(tokens, dtype=torch.int64, device=device)
            self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)

    def update(self, batch: ForwardBatch) -> None:
        size = self.cache.page_size
        places = self._places
        pages = batch.block_table[:, : -(-places.shape[0] // size)].long().repeat_interleave(size, dim=1)
        rows = pages[:, : places.shape[0]] * size + places % size
        self._slots.copy_(batch.slot_mapping)
        torch.lt(places[None], batch.seq_lens[:, None], out=self._is_visible)
        self._rows.copy_(torch.where(self._is_visible, rows, 0))
        self._positions.copy_(batch.positions)
        if not self._is_decode:
            tokens = torch.arange(self._owner.shape[0], device=places.device)
            owners = torch.searchsorted(batch.query_start[1:].long(), tokens, right=True)
            self._owner.copy_(owners)  # padded tokens belong to no slot: their index is past the last

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if k is not None and v is not None:
            self.cache.write(spec.layer, self._slots, k, v)
        keys, values = self.cache.keys[spec.layer][self._rows], self.cache.values[spec.layer][self._rows]
        if self._is_decode:  # [R, heads, 1, dim] against [R, kv_heads, context, dim]
            visible = self._is_visible
            if spec.window is not None:
                visible = visible & (self._places[None] > self._positions[:, None] - spec.window)
            return attend(q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), visible[:, None, None], spec, sinks)[
                :, :, 0
            ]
        requests, context = self._rows.shape
        owners = torch.arange(requests, device=q.device)
        visible = self._is_visible[None] & (self._owner[:, None] == owners)[:, :, None]
        visible = visible & (self._places <= self._positions[:, None])[:, None]
        if spec.window is not None:
            visible = visible & (self._places > self._positions[:, None] - spec.window)[:, None]
        flat_k, flat_v = keys.flatten(0, 1).transpose(0, 1)[None], values.flatten(0, 1).transpose(0, 1)[None]
        mask = visible.reshape(q.shape[0], requests * context)
        return attend(q.transpose(0, 1)[None], flat_k, flat_v, mask[None, None], spec, sinks)[0].transpose(0, 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``q[B, heads, M, dim]`` over ``k, v[B, kv_heads, N, dim]``; True in `mask` means visible.

    A row that sees nothing yields zeros or NaN and no other row is affected.
    """
    if k.shape[1] != q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    if spec.softcap is None and sinks is None:
        with _repeatable_kernels(q.device):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scaling)
    scores = (q @ k.transpose(-1, -2)).float() * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # a learnt score a head that takes weight and adds nothing
        sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights.to(v.dtype) @ v


def _repeatable_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """All of torch's kernels but cuDNN's, which gave other bits from call to call for masked decode batches (torch 2.11,
    H200: batch 8, 32 heads of 128)."""
    return sdpa_kernel(_KERNELS) if device.type == "cuda" else nullcontext()


def _slots_of(table: torch.Tensor, length: int, page_size: int) -> torch.Tensor:
    places = torch.arange(length, device=table.device)
    return table.long()[places // page_size] * page_size + places % page_size


def causal_mask(first: int, num_new: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """``[num_new, length]``: the row at position `first + i` sees its own position and those before, within `window`."""
    positions = torch.arange(first, first + num_new, device=device)[:, None]
    places = torch.arange(length, device=device)[None]
    visible = places <= positions
    return visible if window is None else visible & (places > positions - window)
