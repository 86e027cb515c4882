"""FlashAttention-4 as a registered operation, so that traces and recordings see what it reads. Importing this module
imports FlashAttention-4 and registers the operation with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flash_attn.cute import flash_attn_varlen_func

_LIBRARY = torch.library.Library("segue_fa4", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor table, Tensor lengths, Tensor query_start, Tensor num_tokens, "
    "Tensor? sinks, float scale, float softcap, int window, int page_size) -> Tensor"
)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    num_tokens: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    page_size: int,
) -> torch.Tensor:
    """A window of 0 means none. Rows of padding come out as zeros: no request owns them, so the kernel leaves them."""
    tokens = q.shape[0]
    result: Any = flash_attn_varlen_func(
        q,
        k_cache.unflatten(0, (-1, page_size)),
        v_cache.unflatten(0, (-1, page_size)),
        cu_seqlens_q=query_start,
        seqused_k=lengths,
        page_table=table,
        max_seqlen_q=tokens,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (None, None),
        learnable_sink=sinks,
        softcap=softcap,
    )
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    is_padding = torch.arange(tokens, device=q.device) >= num_tokens
    return out.masked_fill_(is_padding[:, None, None], 0.0)


def _shape_only(q: torch.Tensor, k_cache: Any, v_cache: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[2])


_LIBRARY.impl("attend", _attend, "CUDA")
_LIBRARY.impl("attend", _shape_only, "Meta")

attend: Callable[..., torch.Tensor] = torch.ops.segue_fa4.attend.default
