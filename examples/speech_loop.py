"""An autoregressive loop as in text-to-speech: one small transformer step for each frame, sampling inside the graph.

The key-value cache lives in the module and is written in place at a position that is a tensor; random draws inside a
recording are those that eager would make with the same seed.

    python examples/speech_loop.py [--device cuda]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import compare, run
from torch import nn

import segue

FRAMES = 24


class Speaker(nn.Module):
    """A decoder over audio codes with its own cache of fixed length."""

    def __init__(self, codes: int = 256, width: int = 128, heads: int = 4, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.embed, self.head = nn.Embedding(codes, width), nn.Linear(width, codes)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.register_buffer("cache", torch.zeros(layers, 2, heads, length, self.size))
        self.register_buffer("places", torch.arange(length))

    def forward(self, code: torch.Tensor, position: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        x = self.embed(code)
        visible = self.places <= position
        for layer, (project, mlp) in enumerate(zip(self.qkv, self.mlp, strict=True)):
            q, k, v = project(x).view(3, self.heads, 1, self.size)
            keys, values = self.cache[layer]
            keys.index_copy_(1, position, k)
            values.index_copy_(1, position, v)
            x = x + F.scaled_dot_product_attention(q, keys, values, attn_mask=visible[None]).reshape(1, -1)
            x = x + mlp(x)
        weights = torch.softmax(self.head(x) / temperature, dim=-1)
        return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)  # one draw by the exponential race


def speak(step: nn.Module, cache: torch.Tensor, device: str, seed: int) -> list[int]:
    """A sequence of codes; the same seed gives the same sequence."""
    torch.manual_seed(seed)
    cache.zero_()
    code = torch.zeros(1, dtype=torch.int64, device=device)
    temperature = torch.tensor(0.8, device=device)
    codes = []
    for frame in range(FRAMES):
        code = step(code, torch.full((1,), frame, device=device), temperature)
        codes.append(code)
    return torch.cat(codes).tolist()


def main(device: str = "cpu") -> float:
    """Speaks with and without graphs; returns how many times faster graphs were."""
    torch.manual_seed(0)
    model = Speaker().to(device).eval()
    step = segue.graph(model, inference=True)
    with torch.inference_mode():
        for seed in range(3):
            assert speak(step, model.cache, device, seed) == speak(model, model.cache, device, seed)
        factor = compare(
            "speech loop",
            lambda: speak(model, model.cache, device, 1),
            lambda: speak(step, model.cache, device, 1),
            device,
        )
    print(step.report())
    return factor


if __name__ == "__main__":
    run(main)
