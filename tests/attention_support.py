"""A paged cache with a known history of each request, and what softmax attention over that history is.

Everything in the cache that no request has written is NaN (but the null page): whoever reads it shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from segue.llm.attention import LayerSpec, Needs, Plan
from segue.llm.batch import ForwardBatch, RequestRows, build_batch, pad_host, to_device
from segue.llm.kv_cache import PagedKVCache
from segue.llm.pages import PAGE_SIZE, pages_for

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Form(NamedTuple):
    """The attention of a model."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def needs(self) -> Needs:
        return Needs(
            self.heads, self.kv_heads, self.dim, self.value_dim, self.dtype,
            self.window is not None, self.softcap is not None, self.has_sinks,
        )  # fmt: skip


class Request(NamedTuple):
    new: int
    cached: int


class Step(NamedTuple):
    """A padded batch, its inputs, and the right answer for its real rows."""

    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    expected: torch.Tensor
    written: tuple[torch.Tensor, torch.Tensor]
    """the cache afterwards, pages 0 and 1 left out"""


class Scene:
    """One cache, and steps over it. Each step begins with a cache of its own: other pages, other histories."""

    def __init__(self, form: Form, device: str, num_pages: int = 96) -> None:
        self.form = form
        self.device = device
        self.cache = PagedKVCache(1, num_pages, form.kv_heads, form.dim, form.dtype, device, value_head_dim=form.value_dim)
        self.sinks = self._random(form.heads) if form.has_sinks else None
        self.spec = LayerSpec(0, form.dim**-0.5, form.window, form.softcap)
        self._generator = torch.Generator().manual_seed(0)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=getattr(self, "_generator", None)).to(self.device, self.form.dtype)

    def step(self, requests: Sequence[Request], tokens: int | None = None, slots: int | None = None) -> Step:
        """`requests` over pages in random order, padded to `tokens` and `slots`."""
        form, cache = self.form, self.cache
        keys, values = cache.keys[0], cache.values[0]
        keys[PAGE_SIZE:] = float("nan")
        values[PAGE_SIZE:] = float("nan")
        free = (torch.randperm(cache.num_pages - 2, generator=self._generator) + 2).tolist()
        rows, histories = [], []
        for new, cached in requests:
            pages = [free.pop() for _ in range(pages_for(new + cached))]
            rows.append(RequestRows([0] * new, cached, pages))
            history = (
                self._random(new + cached, form.kv_heads, form.dim),
                self._random(new + cached, form.kv_heads, form.value_dim),
            )
            places = torch.tensor([pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(new + cached)])
            keys[places[:cached].to(self.device)] = history[0][:cached]
            values[places[:cached].to(self.device)] = history[1][:cached]
            histories.append((places.to(self.device), *history))
        written = (keys.clone(), values.clone())
        for places, k, v in histories:
            written[0][places], written[1][places] = k, v
        host = build_batch(rows)
        host = pad_host(
            host, tokens or host.padded_tokens, slots or host.padded_requests, pages_for(cache.num_pages * PAGE_SIZE)
        )
        q = self._random(host.padded_tokens, form.heads, form.dim)
        padding = host.padded_tokens - host.num_tokens
        new_k = [k[cached:] for (_, cached), (_, k, _) in zip(requests, histories, strict=True)]
        new_v = [v[cached:] for (_, cached), (_, _, v) in zip(requests, histories, strict=True)]
        k = torch.cat([*new_k, self._random(padding, form.kv_heads, form.dim)])
        v = torch.cat([*new_v, self._random(padding, form.kv_heads, form.value_dim)])
        expected, begin = [], 0
        for (new, cached), (_, all_k, all_v) in zip(requests, histories, strict=True):
            expected.append(self._softmax_attention(q[begin : begin + new], all_k, all_v, cached))
            begin += new
        reserved = 2 * PAGE_SIZE
        batch = to_device(host, self.device)
        return Step(batch, q, k, v, torch.cat(expected), (written[0][reserved:], written[1][reserved:]))

    def run(self, plan: Plan, step: Step) -> torch.Tensor:
        """As a recording's break runs it: with memory for the result, which holds anything."""
        out = torch.full((*step.q.shape[:2], self.form.value_dim), torch.nan, dtype=step.q.dtype, device=step.q.device)
        return plan.run(step.q, step.k, step.v, self.spec, self.sinks, out)

    def check(self, out: torch.Tensor, step: Step) -> None:
        """The answer is right, padding is finite, and the cache holds the new rows and is otherwise as it was."""
        real = step.expected.shape[0]
        tolerance = TOLERANCE[self.form.dtype]
        torch.testing.assert_close(out[:real].float(), step.expected, rtol=tolerance, atol=tolerance)
        assert torch.isfinite(out).all()
        for tensor, after in zip((self.cache.keys[0], self.cache.values[0]), step.written, strict=True):
            assert torch.equal(tensor[2 * PAGE_SIZE :].nan_to_num(123.0), after.nan_to_num(123.0))
            assert not tensor[:PAGE_SIZE].any(), "the null page was written"

    def _softmax_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cached: int) -> torch.Tensor:
        """Row by row, from the definition, in float64."""
        form, group = self.form, self.form.heads // self.form.kv_heads
        out = torch.zeros(q.shape[0], form.heads, form.value_dim, device=q.device)
        for i in range(q.shape[0]):
            position = cached + i
            first = 0 if form.window is None else max(0, position - form.window + 1)
            seen_k = k[first : position + 1].double().repeat_interleave(group, dim=1)
            seen_v = v[first : position + 1].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[i].double(), seen_k) * self.spec.scaling
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : position + 1 - first]
            out[i] = torch.einsum("hn,nhd->hd", weights, seen_v)
        return out
