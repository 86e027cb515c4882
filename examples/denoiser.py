"""A robot's action denoiser: the same small network ten times a decision, with a camera image that may be missing.

Whether an argument is there is part of the key, so calls with and without the image use different recordings, and
neither ever sees the other's. The loop's step number enters as a tensor: as a plain number each step would be a key.

    python examples/denoiser.py [--device cuda]
"""

from __future__ import annotations

import torch
from common import compare, run
from torch import nn

import segue

STEPS = 10


class Denoiser(nn.Module):
    """Predicts the noise in a chunk of actions, given the joints and, if there is one, an image."""

    def __init__(self, actions: int = 7, horizon: int = 16, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.horizon, self.actions = horizon, actions
        self.joints, self.step = nn.Linear(14, width), nn.Linear(1, width)
        self.eye = nn.Sequential(nn.Conv2d(3, 16, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.seen = nn.Linear(64, width)
        self.embed, self.out = nn.Linear(actions, width), nn.Linear(width, actions)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(
        self, noisy: torch.Tensor, joints: torch.Tensor, step: torch.Tensor, *, image: torch.Tensor | None = None
    ) -> torch.Tensor:
        context = self.joints(joints) + self.step(step)
        if image is not None:
            context = context + self.seen(self.eye(image))
        return self.out(self.body(self.embed(noisy) + context[:, None]))


def denoise(predict: nn.Module, noise: torch.Tensor, joints: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
    """The whole loop; `predict` is the module or its graphed form."""
    actions = noise
    for i in range(STEPS):
        step = torch.full((1, 1), i / STEPS, device=noise.device)
        actions = actions - predict(actions, joints, step, image=image) / STEPS
    return actions


def main(device: str = "cpu", decisions: int = 6) -> float:
    """Takes decisions with and without an image; returns how many times faster graphs were."""
    torch.manual_seed(0)
    model = Denoiser().to(device).eval()
    step = segue.graph(model, inference=True)
    cases = []
    for i in range(decisions):
        image = torch.rand(1, 3, 64, 64, device=device) if i % 2 else None
        noise = torch.randn(1, model.horizon, model.actions, device=device)
        cases.append((noise, torch.randn(1, 14, device=device), image))
    with torch.inference_mode():
        for case in cases:
            torch.testing.assert_close(denoise(step, *case), denoise(model, *case), rtol=1e-4, atol=1e-5)
        factor = compare(
            "denoiser", lambda: [denoise(model, *c) for c in cases], lambda: [denoise(step, *c) for c in cases], device
        )
    print(step.report())
    return factor


if __name__ == "__main__":
    run(main)
