"""A toy phase for tests of runners: sums of squares, row by row, over a ladder of row counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from segue.backends import Forward, make_backend
from segue.graph import Call
from segue.memory.lane import Lane
from segue.observe.decision import Decision, Reason
from segue.runners import Live, Runner
from segue.shapes.key import ShapeKey

WIDTH = 8


@dataclass
class Settings:
    phase: Any = "call"
    backend: str = "full"
    max_padding: float = 2.0
    num_warmups: int = 1
    on_failure: str = "raise"


class Toy(NamedTuple):
    """A batch: rows, and how much context they claim to need."""

    rows: torch.Tensor
    context: int = 1


class ToyRunner(Runner[Toy]):
    """Sums of squares, row by row. `trouble` is called with the rung wherever the forward pass runs."""

    def __init__(self, lane: Lane, settings: Settings, ladder: Sequence[int], **options: Any) -> None:
        super().__init__(settings, make_backend(settings.backend, lane), **options)
        self.ladder = ladder
        self.trouble: Callable[[int, torch.Tensor], None] = lambda rung, x: None
        self.inputs = torch.full((max(ladder), WIDTH), float("nan"), device=lane.device.device)
        self.num_eager = 0

    def keys(self) -> list[ShapeKey]:
        return [ShapeKey("call", tokens=rung) for rung in self.ladder]

    def describe(self, batch: Toy) -> Live:
        return Live(batch.rows.shape[0], 1, False, 1, batch.context)

    def prepare(self, key: ShapeKey) -> Call:
        self.inputs[: key.tokens].zero_()
        return Call()

    def compute(self, x: torch.Tensor, rung: int) -> torch.Tensor:
        self.trouble(rung, x)
        return (x * x + 1).sum(dim=-1)

    def forward(self, key: ShapeKey) -> Forward:
        x = self.inputs[: key.tokens]
        return lambda: self.compute(x, key.tokens)

    def load(self, batch: Toy, decision: Decision) -> Call:
        self.inputs[: decision.padded].fill_(float("nan"))
        self.inputs[: decision.real].copy_(batch.rows)
        return Call()

    def live_output(self, output: Any, batch: Toy, key: ShapeKey) -> Any:
        return output[: batch.rows.shape[0]]

    def run_eagerly(self, batch: Toy) -> Any:
        self.num_eager += 1
        return (batch.rows * batch.rows + 1).sum(dim=-1)


def batch(runner: ToyRunner, size: int, context: int = 1) -> Toy:
    return Toy(torch.randn(size, WIDTH, device=runner.inputs.device), context)


def check(runner: ToyRunner, size: int, key: int | None, reason: Reason | None = None) -> None:
    """A batch of `size` is answered as said, rightly, and counted."""
    live = batch(runner, size)
    before = runner.decisions.num_replays, runner.decisions.eager[reason] if reason else 0
    got = runner.execute(live)
    expected = (live.rows * live.rows + 1).sum(dim=-1)
    torch.testing.assert_close(got, expected)
    decision = runner.decisions.last
    assert decision is not None and decision == runner.decide(live)
    assert (decision.key.tokens if decision.key else None, decision.reason) == (key, reason)
    assert decision.is_replay == (key is not None)
    if reason is None:
        assert runner.decisions.num_replays == before[0] + 1 and decision.padded == key
    else:
        assert runner.decisions.eager[reason] == before[1] + 1 and decision.padded == decision.real == size


def captured(runner: ToyRunner) -> list[int]:
    return sorted(key.tokens for key in runner.store)
