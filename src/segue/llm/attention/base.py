"""The contract of an attention backend.

Before every step the runner asks for a *plan*: host work, outside any graph, from what the host knows of the batch.
The plan runs the attention of each layer. There are two kinds, since a recording can hold only one of them:

- `plan_live` serves eager passes and eager breaks: it may use host lengths, and reads exactly the live rows.
- `static_plan` serves full graphs: tensors at fixed addresses, bounded by the key's context; `update` refreshes them
  from a live batch before a replay. Whether a backend can do this, and for which batches, is its `support`.
- `break_plan` serves the breaks of a recording, where a backend has one plan for all of its replays.

The attention that transformers calls is one marked function, so that the same model runs as one graph, with breaks, or
eagerly. What it reads of the live batch comes from `segue.current().batch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch

from segue.config import GraphSupport
from segue.llm.batch import ForwardBatch
from segue.llm.kernels.launch import Prepared
from segue.llm.kv_cache import PagedKVCache
from segue.shapes.key import ShapeKey


class LayerSpec(NamedTuple):
    """What one layer asks of its attention. `window` counts visible tokens, the newest included."""

    layer: int
    scaling: float
    window: int | None = None
    softcap: float | None = None


class Needs(NamedTuple):
    """What a model asks of an attention, over all its layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False


class Plan(Protocol):
    """Attention for one batch. Writes K and V of all real rows, then attends; rows of padding may hold anything finite."""

    cache: PagedKVCache
    prepares: bool = False
    """Whether `prepared` may answer: then a fused model's rotation is part of the break too."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``q[T, heads, dim]``, ``k[T, kv_heads, dim]``, ``v[T, kv_heads, value_dim]`` -> ``[T, heads, value_dim]``.

        `k` and `v` are None where a fused model wrote them to the cache itself. A plan may write its result to `out` and
        return that, which saves a copy, or leave it alone.
        """
        ...

    def prepared(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> list[Prepared] | None:
        """Launches that do as `run` has done with these tensors, for every later batch; None where there are none."""
        return None


class StaticPlan(Plan, Protocol):
    """A plan at fixed addresses."""

    def update(self, batch: ForwardBatch) -> None:
        """Refreshes the plan's tensors from a padded batch; queued on the current stream."""
        ...


class Attention(ABC):
    """One kind of attention over one cache."""

    name: ClassVar[str]
    support: ClassVar[GraphSupport]
    bounds_context: ClassVar[bool]
    """Whether a static plan reads up to the key's context, so that keys need one."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache

    @classmethod
    @abstractmethod
    def refusal(cls, needs: Needs, device: torch.device) -> str | None:
        """Why this attention cannot serve such a model here, in one clause; None where it can. Imports nothing optional."""

    @abstractmethod
    def plan_live(self, batch: ForwardBatch, key: ShapeKey | None = None) -> Plan:
        """`key` is that of the recording whose breaks the plan serves, None for an eager pass over `batch` as it is."""

    @abstractmethod
    def static_plan(self, key: ShapeKey) -> StaticPlan: ...

    def break_plan(self, key: ShapeKey) -> StaticPlan | None:
        """A plan for the breaks of the recording of `key`, refreshed before each replay; it may launch for the live batch
        alone. None: they get a live plan at each replay."""
        return None
