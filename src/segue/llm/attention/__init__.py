"""Attention over the paged cache: the contract in `base`, one file a backend, and the function transformers calls."""

from __future__ import annotations

from typing import Any

import torch

from segue.graph import current, eager_on_graph
from segue.llm.attention.base import Attention, LayerSpec, Needs, Plan, StaticPlan
from segue.llm.attention.selection import ATTENTIONS, AttentionChoice, choose_attention, make_attention, needs_of
from segue.llm.attention_switch import ATTENTION
from segue.llm.checkpoints import require_extra
from segue.llm.kernels import prepared_rotation
from segue.llm.kernels.launch import Launches, Prepared

__all__ = [
    "ATTENTIONS",
    "Attention",
    "AttentionChoice",
    "LayerSpec",
    "Needs",
    "Plan",
    "StaticPlan",
    "choose_attention",
    "make_attention",
    "needs_of",
    "paged_attention",
    "register",
    "rotated_attention",
]


def _launches(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, *others: Any) -> list[Prepared] | None:
    plan: Plan = current().batch.plan
    *spec, sinks, out = others
    return plan.prepared(q, k, v, LayerSpec(*spec), sinks, out)


def _prepared(q: torch.Tensor, *others: Any, out: torch.Tensor) -> Launches | None:
    attend = _launches(q, *others, out)
    return None if attend is None else Launches(attend, q.device.index)


@eager_on_graph(static=("layer", "scaling", "window", "softcap"), prepare=_prepared)
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one layer for the batch under way; its plan knows lengths and pages. Shapes and `out` as in `Plan.run`:
    a recording gives the memory that its next segment reads."""
    plan: Plan = current().batch.plan
    return plan.run(q, k, v, LayerSpec(layer, scaling, window, softcap), sinks, out)


def _prepared_with_rotation(*given: Any, out: torch.Tensor) -> Launches | None:
    *rotation, layer, scaling, window, softcap, sinks = given
    *_, q, _keys, _values = rotation
    rotate, attend = prepared_rotation(*rotation), _launches(q, None, None, layer, scaling, window, softcap, sinks, out)
    return None if rotate is None or attend is None else Launches([*rotate, *attend], q.device.index)


@eager_on_graph(static=("eps", "adds_one", "layer", "scaling", "window", "softcap"), prepare=_prepared_with_rotation)
def rotated_attention(
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
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same behind `rotate_into`, which leaves the rotated queries in `q`: two kernels of one break, of which the second
    primes the graph that follows."""
    torch.ops.segue.rotate_into(qkv, cos, sin, q_weight, k_weight, eps, adds_one, slots, q, keys, values)
    plan: Plan = current().batch.plan
    return plan.run(q, None, None, LayerSpec(layer, scaling, window, softcap), sinks, out)


def register() -> None:
    """Makes `paged_attention` known to transformers under a name that has no mask function, so no mask is built."""
    require_extra()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _from_transformers)


def _from_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' convention: ``[1, heads, T, dim]`` in, ``[1, T, heads, dim]`` out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return paged_attention(q, k, v, layer, scale, sliding_window, softcap, s_aux)[None], None
