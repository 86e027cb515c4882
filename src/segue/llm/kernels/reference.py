"""The operations in plain torch: what the kernels must compute, and what runs where there is no triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activation_of(module: Any, device: torch.device) -> str | None:
    """The name of the activation that `act_fn` computes."""
    function = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if function is None:
        return None
    x = torch.linspace(-3, 3, 13, dtype=torch.float32, device=device)
    for name, candidate in ACTIVATIONS.items():
        if torch.allclose(function(x), candidate(x), atol=1e-5):
            return name
    return None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype) if adds_one else weight * wide.to(x.dtype)


def gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, adds_one: bool, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
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
    return gated(norm_linear(x, norm_weight, eps, adds_one, weight, bias), activation)


def linear_add(hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    hidden.addmm_(x, weight.t())
    if bias is not None:
        hidden += bias


def greedy(logits: torch.Tensor) -> torch.Tensor:
    largest, likeliest = logits.max(dim=-1)
    return torch.stack((likeliest, largest.isfinite().to(torch.int64)))


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    is_softmax: bool,
    normalizes: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.float()
    scores = wide.softmax(-1) if is_softmax else wide.sigmoid()
    index = (scores if bias is None else scores + bias).topk(top_k).indices
    weights = scores.gather(1, index)
    if normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights * scale).to(dtype), index


def pairs_by_expert(
    index: torch.Tensor, num_experts: int, num_tokens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, top_k = index.shape
    if num_tokens is not None:
        is_real = torch.arange(rows, device=index.device) < num_tokens
        index = torch.where(is_real[:, None], index, num_experts)
    expert = index.reshape(-1)
    by_expert, order = expert.sort(stable=True)
    every = torch.arange(num_experts, device=index.device, dtype=index.dtype)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=index.device)
    places = torch.where(expert < num_experts, places, -1)
    return (order // top_k).to(torch.int32), places.view(rows, top_k).to(torch.int32), ends


def experts_up(
    x: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor, activation: str
) -> torch.Tensor:
    out = x.new_empty(tokens.shape[0], weight.shape[1] // 2)
    for expert, start, end in _groups(ends):
        out[start:end] = gated(F.linear(x[tokens[start:end]], weight[expert]), activation)
    return out


def experts_down(x: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, start, end in _groups(ends):
        out[start:end] = F.linear(x[start:end], weight[expert])
    return out


def combine(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    has_expert = (places >= 0)[..., None]
    products = rows[places.clamp(min=0)] * weights[..., None]
    return torch.where(has_expert, products, 0).sum(dim=1).to(rows.dtype)


def pairs_up(
    x: torch.Tensor, index: torch.Tensor, num_tokens: torch.Tensor | None, weight: torch.Tensor, activation: str
) -> torch.Tensor:
    tokens, places, ends = pairs_by_expert(index, weight.shape[0], num_tokens)
    return experts_up(x, tokens, ends, weight, activation)[places.reshape(-1).clamp(min=0)]


def pairs_down(
    x: torch.Tensor, index: torch.Tensor, num_tokens: torch.Tensor | None, weight: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    _, places, ends = pairs_by_expert(index, weight.shape[0], num_tokens)
    last = x.shape[0]  # where rows of no expert go
    targets = torch.where(places < 0, last, places).reshape(-1).long()
    by_expert = x.new_empty(last + 1, x.shape[1]).index_copy_(0, targets, x)[:last]
    return combine(experts_down(by_expert, ends, weight), places, weights)


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Each expert that has pairs, with where they begin and end. Reads them on the host: nothing for a CUDA graph."""
    start = 0
    for expert, end in enumerate(() if ends.is_meta else ends.tolist()):
        if end > start:
            yield expert, start, end
        start = end


def rotate_into(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    adds_one: bool,
    slots: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    kv_heads, dim = keys.shape[1:]
    heads = qkv.view(qkv.shape[0], -1, dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps, adds_one), rms_norm(k, k_weight, eps, adds_one)
    index = slots.to(torch.int64)
    keys.index_copy_(0, index, _rotated(k, cos, sin))
    values.index_copy_(0, index, v)
    out.copy_(_rotated(q, cos, sin))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
