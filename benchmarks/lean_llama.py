"""A hand-written model of Llama-3-8B's shape with random weights, as lean as plain torch operations allow.

It exists to load a recorder the way a real prefill does: one forward pass over T tokens is some 1,700 dispatcher
operations (about 25 kernels a layer), and each layer has one attention, which is where a segmented recording breaks.
RMS norm, split-half rotary embedding, grouped-query causal attention over the T tokens, gated MLP, residuals. There is
no LM head and no KV cache: neither changes what recording costs.

The forward reads `ids` and `positions`, static buffers of the largest size, and returns the last hidden state
[T, hidden]. Which attention it calls is an argument, because the peers differ in what a break may return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import segue

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads * d]"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    dtype: torch.dtype


LLAMA_8B = Shape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=128256, dtype=torch.bfloat16
)
TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocabulary=256, dtype=torch.float32)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over all tokens of the batch; allocates and returns its result."""
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).reshape(q.shape[0], -1)


attention_probe: list[tuple[torch.Tensor, ...]] | None = None
"""While this is a list, each call of the marked attention leaves its arguments in it."""


@segue.eager_on_graph
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same as an eager break that returns its tensor."""
    if attention_probe is not None:
        attention_probe.append((q, k, v))
    return plain_attention(q, k, v)


class Layer:
    """The weights of one layer; q, k and v are one matrix, gate and up another."""

    def __init__(self, shape: Shape, make: Callable[..., torch.Tensor]) -> None:
        self.attention_norm = make(shape.hidden).add_(1)
        self.qkv = make((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden)
        self.output = make(shape.hidden, shape.heads * shape.head_dim)
        self.mlp_norm = make(shape.hidden).add_(1)
        self.gate_up = make(2 * shape.intermediate, shape.hidden)
        self.down = make(shape.hidden, shape.intermediate)


class LeanLlama:
    """Weights drawn from `seed`, and static inputs for up to `max_tokens`. Owns them all. Call it under inference mode."""

    def __init__(self, shape: Shape, device: torch.device, max_tokens: int, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(seed)

        def make(*size: int) -> torch.Tensor:
            weight = torch.empty(size, dtype=shape.dtype, device=device)
            return weight.normal_(std=0.02, generator=generator)

        self.embedding = make(shape.vocabulary, shape.hidden)
        self.layers = [Layer(shape, make) for _ in range(shape.layers)]
        self.norm = make(shape.hidden).add_(1)
        self.ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.arange(max_tokens, device=device)
        frequencies = 500_000.0 ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
        angles = self.positions[:, None] * frequencies
        self.cos, self.sin = angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)

    @property
    def weight_bytes(self) -> int:
        tensors = [self.embedding, self.norm, *(w for layer in self.layers for w in vars(layer).values())]
        return sum(t.nbytes for t in tensors)

    def fill(self, tokens: int, real: int, generator: torch.Generator) -> None:
        """Writes a batch of `real` random tokens, padded with token 0 to `tokens`."""
        self.ids[:real].random_(0, self.shape.vocabulary, generator=generator)
        self.ids[real:tokens].zero_()

    def forward(self, tokens: int, attend: Attend) -> torch.Tensor:
        """The last hidden state of the first `tokens` tokens."""
        return self.run(self.ids[:tokens], self.positions[:tokens], attend)

    def run(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The last hidden state of the tokens `ids` at `positions`."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = F.embedding(ids, self.embedding)
        for layer in self.layers:
            x = x + self._attention(layer, x, cos, sin, attend)
            x = x + self._mlp(layer, x)
        return self._rms_norm(x, self.norm)

    def _attention(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        shape = self.shape
        qkv = F.linear(self._rms_norm(x, layer.attention_norm), layer.qkv).view(x.shape[0], -1, shape.head_dim)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        return F.linear(attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v), layer.output)

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.shape.hidden,), weight, 1e-5)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
