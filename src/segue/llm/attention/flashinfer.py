"""Attention by FlashInfer's paged wrappers: tensor-core decode and prefill, planned on the host outside the graph.

FlashInfer divides the work of a batch on the host (`plan`), and its kernels read the division from a workspace. A static
plan therefore plans again before every replay, from the padded batch that the host knows, into buffers at fixed
addresses. A plan holds for one scale, window and cap, which only the layers know: its wrapper is made at the first run of
such a layer, in a warm-up. Slots without tokens see one row of the null page, since FlashInfer wants a length of one.

All plans share one workspace for partial results, and plans of a kind of layer one for the division: replays of a lane
never overlap. Kernels are compiled (nvcc) at the first plan. In graph mode FlashInfer divides for the worst case, so a
live plan and a static one may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch

from segue.config import GraphSupport
from segue.errors import CaptureError
from segue.graph.guard import is_capturing
from segue.llm.attention.base import Attention, LayerSpec, Needs, Plan, StaticPlan
from segue.llm.batch import ForwardBatch, HostBatch
from segue.llm.kv_cache import PagedKVCache
from segue.shapes.key import ShapeKey

_DTYPES = (torch.bfloat16, torch.float16)
_DIMS = (64, 128, 256)
_PARTIAL_BYTES = 128 << 20  # as FlashInfer recommends
_DIVISION_BYTES = 8 << 20  # what its wrappers allocate


class FlashInferAttention(Attention):
    """Owns the workspaces that its plans share."""

    name: ClassVar[str] = "flashinfer"
    support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    bounds_context: ClassVar[bool] = False

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        device = cache.keys[0].device
        with torch.inference_mode(False):
            self.partials = torch.zeros(_PARTIAL_BYTES, dtype=torch.uint8, device=device)
        self._divisions: dict[_Kind, torch.Tensor] = {}

    def division(self, kind: _Kind) -> torch.Tensor:
        """The workspace for the division of the work of one kind of layer."""
        if kind not in self._divisions:
            with torch.inference_mode(False):
                self._divisions[kind] = torch.zeros(_DIVISION_BYTES, dtype=torch.uint8, device=self.partials.device)
        return self._divisions[kind]

    @classmethod
    def refusal(cls, needs: Needs, device: torch.device) -> str | None:
        if find_spec("flashinfer") is None:
            return "FlashInfer is not installed (pip install 'segue[flashinfer]')"
        if device.type != "cuda":
            return "it needs a CUDA device"
        if needs.dtype not in _DTYPES:
            return f"it takes bfloat16 and float16, not {str(needs.dtype).removeprefix('torch.')}"
        if needs.head_dim not in _DIMS or needs.value_head_dim != needs.head_dim:
            return f"it takes heads of 64, 128 or 256 elements, not {needs.head_dim} with {needs.value_head_dim} of V"
        return "its paged wrappers know no attention sinks" if needs.has_sinks else None

    def plan_live(self, batch: ForwardBatch, key: ShapeKey | None = None) -> Plan:
        host = batch.host
        is_decode = host.width == 1 and host.padded_tokens == host.padded_requests if key is None else key.phase == "decode"
        plan = _Plan(self, is_decode=is_decode, is_static=False)
        plan.update(batch)
        return plan

    def static_plan(self, key: ShapeKey) -> StaticPlan:
        return _Plan(self, is_decode=key.uniform and key.width == 1, is_static=True)


class _Kind(NamedTuple):
    """What a wrapper's plan holds for."""

    num_heads: int
    scaling: float
    window: int | None
    softcap: float | None


class _Pages(NamedTuple):
    """A batch as FlashInfer wants it, on the host."""

    query_start: torch.Tensor  # [R + 1]
    page_start: torch.Tensor  # [R + 1]
    pages: torch.Tensor  # [page_start[R]]
    last_page_len: torch.Tensor  # [R]

    @classmethod
    def of(cls, host: HostBatch) -> _Pages:
        size, table = host.page_size, host.tensors.block_table
        lengths = host.tensors.seq_lens.clamp(min=1)
        counts = (lengths + size - 1) // size
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = torch.cumsum(counts, dim=0)
        is_used = torch.arange(table.shape[1]) < counts[:, None]
        return cls(host.tensors.query_start.clone(), starts, table[is_used], ((lengths - 1) % size + 1).to(torch.int32))

    @classmethod
    def largest(cls, tokens: int, requests: int, size: int) -> _Pages:
        """The first slot has all the tokens: what a wrapper in graph mode must be planned for first."""
        lengths = torch.tensor([tokens] + [1] * (requests - 1), dtype=torch.int32)
        starts = torch.zeros(requests + 1, dtype=torch.int32)
        starts[1:] = torch.cumsum((lengths + size - 1) // size, dim=0)
        query_start = torch.tensor([0] + [tokens] * requests, dtype=torch.int32)
        return cls(query_start, starts, torch.zeros(int(starts[-1]), dtype=torch.int32), (lengths - 1) % size + 1)


class _Plan(StaticPlan):
    """A wrapper for each kind of layer met so far, all planned for the last batch."""

    def __init__(self, attention: FlashInferAttention, *, is_decode: bool, is_static: bool) -> None:
        from segue.llm.attention.flashinfer_op import register_wrapper, run_wrapper

        self.cache = attention.cache
        self._attention = attention
        self._is_decode = is_decode
        self._is_static = is_static
        self._register: Callable[[Any], int] = register_wrapper
        self._run = run_wrapper
        self._wrappers: dict[_Kind, Any] = {}
        self._handles: dict[_Kind, int] = {}
        self._batch: ForwardBatch | None = None
        self._pages: _Pages | None = None
        self._slots: torch.Tensor | None = None

    def update(self, batch: ForwardBatch) -> None:
        self._batch, self._pages = batch, _Pages.of(batch.host)
        if self._slots is None:
            with torch.inference_mode(False):
                self._slots = torch.empty_like(batch.slot_mapping, dtype=torch.int64)
        self._slots.copy_(batch.slot_mapping)
        for kind, wrapper in self._wrappers.items():
            self._plan(wrapper, kind, self._pages)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._slots is not None and sinks is None
        if k is not None and v is not None:
            self.cache.write(spec.layer, self._slots, k, v)
        kind = _Kind(q.shape[1], spec.scaling, spec.window, spec.softcap)
        if kind not in self._wrappers:
            self._make(kind)
        keys, values = self.cache.keys[spec.layer], self.cache.values[spec.layer]
        out = q.new_empty(*q.shape[:2], values.shape[2]) if out is None else out
        self._run(q, keys, values, out, self.cache.page_size, self._handles[kind])
        return out

    def _make(self, kind: _Kind) -> None:
        if is_capturing():
            raise CaptureError(
                "FlashInfer plans on the host, and this layer was not met before the capture: set num_warmups to at least 1"
            )
        assert self._batch is not None and self._pages is not None
        host = self._batch.host
        tokens, requests = host.padded_tokens, host.padded_requests
        with torch.inference_mode(False):
            wrapper = self._wrapper(requests, host.num_pages)
        if self._is_static:
            wrapper.reset_workspace_buffer(self._attention.partials, self._attention.division(kind))
            self._plan(wrapper, kind, _Pages.largest(tokens, requests, self.cache.page_size))
        self._plan(wrapper, kind, self._pages)
        self._wrappers[kind] = wrapper
        self._handles[kind] = self._register(wrapper)

    def _wrapper(self, requests: int, pages: int) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        partials = self._attention.partials
        if not self._is_static:
            if self._is_decode:
                return BatchDecodeWithPagedKVCacheWrapper(partials, "NHD", use_tensor_cores=True)
            return BatchPrefillWithPagedKVCacheWrapper(partials, "NHD")

        def integers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=partials.device)

        most_pages = min(requests * pages, self.cache.num_pages + requests)  # no two requests share a page but the null page
        starts, numbers, last = integers(requests + 1), integers(most_pages), integers(requests)
        if self._is_decode:
            return BatchDecodeWithPagedKVCacheWrapper(
                partials, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=starts,
                paged_kv_indices_buffer=numbers, paged_kv_last_page_len_buffer=last,
            )  # fmt: skip
        return BatchPrefillWithPagedKVCacheWrapper(
            partials, "NHD", use_cuda_graph=True, qo_indptr_buf=integers(requests + 1), paged_kv_indptr_buf=starts,
            paged_kv_indices_buf=numbers, paged_kv_last_page_len_buf=last,
        )  # fmt: skip

    def _plan(self, wrapper: Any, kind: _Kind, pages: _Pages) -> None:
        keys = self.cache.keys[0]
        kv_heads, dim = keys.shape[1:]
        common = {
            "sm_scale": kind.scaling,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "q_data_type": keys.dtype,
        }
        size = self.cache.page_size
        if self._is_decode:
            wrapper.plan(*pages[1:], kind.num_heads, kv_heads, dim, size, **common)
        else:
            wrapper.plan(*pages, kind.num_heads, kv_heads, dim, size, causal=True, **common)
