"""Attention by Triton kernels: reads the pages where they lie, in one launch for a decode and two for an extend.

The kernels read lengths and tables at replay, so one recording serves every length, and what is not there costs nothing.
A plan is the batch's tensors and little else; all plans run the same kernels with the same block sizes, so they agree bit
for bit on the same padded batch. A recorded extend has programs for all request slots; one in a break, whose launches are
made anew, for the live requests alone. K and V of padded tokens are not written, and their rows come out zero.
"""

from __future__ import annotations

import shutil
from ctypes import c_int32
from importlib.util import find_spec
from os import environ
from typing import Any, ClassVar

import torch

from segue.config import GraphSupport
from segue.llm.attention.base import Attention, LayerSpec, Needs, Plan, StaticPlan
from segue.llm.attention.bound import BoundBatch
from segue.llm.batch import ForwardBatch
from segue.llm.kernels.launch import Prepared
from segue.llm.kv_cache import PagedKVCache
from segue.shapes.key import ShapeKey

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_DIM = 256
_LEAST_CAPABILITY = (8, 0)


class TritonAttention(Attention):
    """Holds no state of its own; the cache belongs to the engine."""

    name: ClassVar[str] = "triton"
    support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    bounds_context: ClassVar[bool] = False

    @classmethod
    def refusal(cls, needs: Needs, device: torch.device) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        if needs.dtype not in _DTYPES:
            return f"its kernels take bfloat16, float16 and float32, not {str(needs.dtype).removeprefix('torch.')}"
        if max(needs.head_dim, needs.value_head_dim) > _MAX_DIM:
            return f"its kernels take heads of at most {_MAX_DIM} elements, not {max(needs.head_dim, needs.value_head_dim)}"
        if device.type != "cuda":
            return None if environ.get("TRITON_INTERPRET") == "1" else "it needs a CUDA device"
        if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
            return "it needs a GPU of compute capability 8.0 or newer"
        if "CC" not in environ and not any(map(shutil.which, ("gcc", "clang", "cc"))):
            return "triton needs a C compiler, and there is none (install gcc)"
        return None

    def plan_live(self, batch: ForwardBatch, key: ShapeKey | None = None) -> Plan:
        host = batch.host
        is_decode = host.width == 1 and host.padded_tokens == host.padded_requests if key is None else key.phase == "decode"
        plan = _TritonPlan(self.cache, is_decode=is_decode)
        plan.update(batch)
        return plan

    def static_plan(self, key: ShapeKey) -> StaticPlan:
        return _TritonPlan(self.cache, is_decode=key.uniform and key.width == 1)

    def break_plan(self, key: ShapeKey) -> StaticPlan:
        return _TritonPlan(self.cache, is_decode=key.uniform and key.width == 1, is_for_breaks=True)


class _TritonPlan(StaticPlan):
    """Keeps the tensors of its first batch; those of a later one are copied into them where they are others."""

    def __init__(self, cache: PagedKVCache, *, is_decode: bool, is_for_breaks: bool = False) -> None:
        from segue.llm.attention import triton_ops

        self._ops = triton_ops
        self.cache = cache
        self._is_decode = is_decode
        self.prepares = not is_decode  # whose splits leave their sums in memory that is made at each call
        self._live = c_int32() if is_for_breaks and not is_decode else None
        self._bound: BoundBatch | None = None

    def update(self, batch: ForwardBatch) -> None:
        if self._bound is None:
            self._bound = BoundBatch.of(batch)
            self._prepare(batch.seq_lens.shape[0], batch.seq_lens.device)
        else:
            self._bound.load(batch)
        if self._live is not None:
            self._live.value = batch.host.num_requests

    def _prepare(self, requests: int, device: torch.device) -> None:
        kv_heads = self.cache.keys[0].shape[1]
        self._splits = self._ops.num_splits(requests, kv_heads, device) if self._is_decode else 1
        if self._is_decode:
            with torch.inference_mode(False):
                self._arrived = torch.zeros(requests * kv_heads, dtype=torch.int32, device=device)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], self.cache.values[spec.layer].shape[2]) if out is None else out
        if self._is_decode:
            tensors, (table, lengths, slots, *_), numbers = self._arguments(q, k, v, spec, sinks, out)
            self._ops.decode(*tensors, table, lengths, slots, self._arrived, self._splits, *numbers)
        else:
            tensors, bound, numbers = self._arguments(q, k, v, spec, sinks, out)
            if self._live is not None:
                bound = bound._replace(lengths=bound.lengths[: self._live.value])
            self._ops.extend(*tensors, *bound, *numbers)
        return out

    def prepared(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> list[Prepared] | None:
        if not self.prepares:
            return None
        tensors, bound, numbers = self._arguments(q, k, v, spec, sinks, out)
        return self._ops.prepared_extend(*tensors, *bound, *numbers, self._live)

    def _arguments(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> tuple[tuple[Any, ...], BoundBatch, tuple[Any, ...]]:
        """What the operations take, before, of and behind the batch."""
        assert self._bound is not None
        window = self._ops.NO_WINDOW if spec.window is None else spec.window
        return (
            (q, k, v, self.cache.keys[spec.layer], self.cache.values[spec.layer], out),
            self._bound,
            (sinks, spec.scaling, spec.softcap or 0.0, window, self.cache.page_size),
        )
