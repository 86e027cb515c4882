"""A recommender whose batch size changes with every request.

The rows of a batch are independent, so `Pad` may fill a batch up to a rung of a ladder and cut the answer back. Without
it every batch size would be a shape of its own.

    python examples/recommender.py [--device cuda]
"""

from __future__ import annotations

import torch
from common import compare, run
from torch import nn

import segue

RUNGS = [8, 16, 32, 64, 128]


class Recommender(nn.Module):
    """Embeddings of a user and some items, and a score for each row."""

    def __init__(self, users: int = 1000, items: int = 5000, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        blocks = [nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, 2 * width), nn.GELU()) for _ in range(layers)]
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(2 * width, 1)

    def forward(self, user: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        taste = self.items(history).mean(dim=1)
        return self.head(self.body(torch.cat([self.users(user), taste], dim=-1))).squeeze(-1).sigmoid()


def main(device: str = "cpu", calls: int = 60) -> float:
    """Scores batches of random sizes with and without graphs; returns how many times faster graphs were."""
    torch.manual_seed(0)
    model = Recommender().to(device).eval()
    rows = segue.Pad(dim=0, ladder=RUNGS, axis="rows", fill=0)
    step = segue.graph(model, pad={"user": rows, "history": rows}, inference=True)
    sizes = torch.randint(1, RUNGS[-1] + 1, (calls,)).tolist()
    batches = [(torch.randint(0, 1000, (n,), device=device), torch.randint(0, 5000, (n, 20), device=device)) for n in sizes]
    with torch.inference_mode():
        for user, history in batches:
            torch.testing.assert_close(step(user, history), model(user, history), rtol=1e-5, atol=1e-6)
        factor = compare("recommender", lambda: [model(*b) for b in batches], lambda: [step(*b) for b in batches], device)
    print(step.report())
    return factor


if __name__ == "__main__":
    run(main)
