"""The operations in plain torch: what the kernels must compute, and what runs where there is no triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


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


def rotate_into(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    adds_one: bool,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    kv_heads, dim = keys.shape[1:]
    heads = qkv.view(qkv.shape[0], -1, dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps, adds_one), rms_norm(k, k_weight, eps, adds_one)
    index = slots.to(torch.int64)
    keys.index_copy_(0, index, _rotated(k, cos, sin))
    values.index_copy_(0, index, v)
    return _rotated(q, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
