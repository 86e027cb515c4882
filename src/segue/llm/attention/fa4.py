"""Attention by FlashAttention-4 (CuTe DSL): one varlen kernel over the pages for every batch.

It reads lengths, offsets and tables at replay, as the Triton kernels do, so plans bind the batch and no more. A pass
compiles for some ten seconds at its first launch. It never splits a context (it cannot on Hopper), which makes long
decodes of few requests slow: choose it for prefill.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

import torch

from segue.config import GraphSupport
from segue.llm.attention.base import Attention, LayerSpec, Needs, Plan, StaticPlan
from segue.llm.attention.bound import BoundBatch
from segue.llm.batch import ForwardBatch
from segue.llm.kv_cache import PagedKVCache
from segue.shapes.key import ShapeKey

_DTYPES = (torch.bfloat16, torch.float16)
_MAJORS = (9, 10, 11)  # paged caches: not on compute capability 8 and 12
_MAX_DIM = {9: 256, 10: 128, 11: 128}
_DIM_MULTIPLE = 8


class Fa4Attention(Attention):
    """Holds no state of its own; the cache belongs to the engine."""

    name: ClassVar[str] = "fa4"
    support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    bounds_context: ClassVar[bool] = False

    @classmethod
    def refusal(cls, needs: Needs, device: torch.device) -> str | None:
        try:
            version("flash-attn-4")
        except PackageNotFoundError:
            return "FlashAttention-4 is not installed (pip install 'segue[fa4]')"
        if device.type != "cuda":
            return "it needs a CUDA device"
        major = torch.cuda.get_device_capability(device)[0]
        if major not in _MAJORS:
            return f"it reads pages on GPUs of compute capability 9 to 11, and this one has {major}"
        if needs.dtype not in _DTYPES:
            return f"it takes bfloat16 and float16, not {str(needs.dtype).removeprefix('torch.')}"
        for dim in (needs.head_dim, needs.value_head_dim):
            if dim % _DIM_MULTIPLE or dim > _MAX_DIM[major]:
                return f"it takes heads of up to {_MAX_DIM[major]} elements, a multiple of {_DIM_MULTIPLE}, not {dim}"
        return None

    def plan_live(self, batch: ForwardBatch, key: ShapeKey | None = None) -> Plan:
        plan = _Fa4Plan(self.cache)
        plan.update(batch)
        return plan

    def static_plan(self, key: ShapeKey) -> StaticPlan:
        return _Fa4Plan(self.cache)


class _Fa4Plan(StaticPlan):
    """The same kernel for live and recorded batches, so both agree bit for bit on the same padded batch."""

    def __init__(self, cache: PagedKVCache) -> None:
        from segue.llm.attention.fa4_op import attend

        self._attend = attend
        self.cache = cache
        self._bound: BoundBatch | None = None
        self._slots: torch.Tensor | None = None

    def update(self, batch: ForwardBatch) -> None:
        if self._bound is None or self._slots is None:
            self._bound = BoundBatch.of(batch)
            with torch.inference_mode(False):
                self._slots = torch.empty_like(batch.slot_mapping, dtype=torch.int64)
        else:
            self._bound.load(batch)
        self._slots.copy_(batch.slot_mapping)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._bound is not None and self._slots is not None
        if k is not None and v is not None:
            self.cache.write(spec.layer, self._slots, k, v)
        bound, keys, values = self._bound, self.cache.keys[spec.layer], self.cache.values[spec.layer]
        return self._attend(
            q, keys, values, bound.table, bound.lengths, bound.query_start, bound.num_tokens, sinks,
            spec.scaling, spec.softcap or 0.0, spec.window or 0, self.cache.page_size,
        )  # fmt: skip
