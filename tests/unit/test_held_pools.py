"""Callables that keep many tensors and are given some of them: one recording serves all, and none goes stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import segue


class Net(torch.nn.Module):
    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(count)])
        self.states = {i: torch.full((2, 8), float(i)) for i in range(60)}
        self.register_buffer("state", torch.zeros(2, 8))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + c


X = torch.ones(2, 8)


@pytest.mark.parametrize("options", [{}, {"max_graphs": 8}, {"strict": True}])
def test_a_pool_of_held_tensors_is_served_by_a_few_recordings(options: dict[str, Any]) -> None:
    model = Net()
    step = segue.graph(model, **options)
    with torch.inference_mode():
        for _ in range(8):
            for state in model.states.values():
                assert torch.equal(step(X, state), model(X, state))
                state.add_(1)
    report = step.report()
    assert report.captures <= 6 and report.replays >= 8 * 60 - 20


def test_a_held_tensor_that_each_step_binds_anew_makes_no_storm_of_captures() -> None:
    model = Net(4)
    step, plain = segue.graph(model), Net(4)
    plain.load_state_dict(model.state_dict())
    with torch.inference_mode():
        for _ in range(600):
            model.state = step(X, model.state) * 0.1
            plain.state = plain(X, plain.state) * 0.1
            assert torch.equal(model.state, plain.state)
    assert step.report().captures <= 24


def test_what_was_captured_and_frozen_serves_held_tensors_too() -> None:
    model = Net()
    step = segue.graph(model)
    with torch.inference_mode():
        step.capture(torch.zeros(2, 8), torch.zeros(2, 8))
        step.freeze()
        for _ in range(5):
            assert torch.equal(step(X, model.state), model(X, model.state))
    assert step.report().replays == 5


def test_a_result_that_is_no_value_does_not_count_as_another_answer() -> None:
    model = Net()

    def forward(x: torch.Tensor, c: torch.Tensor) -> Any:
        return model(x, c), lambda: 1

    step = segue.graph(forward)
    with torch.inference_mode():
        for _ in range(6):
            assert torch.equal(step(X, model.state)[0], model(X, model.state))
    assert step.report().replays >= 3


@pytest.mark.parametrize("before", [0, 3])
def test_a_tensor_that_code_asks_for_is_found_among_others(before: int) -> None:
    """What comes after the first few is not told from them: they must have come to be recorded by then."""
    model = Net()

    def forward(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return model(x, c) * 100 if c is model.state else model(x, c)

    step = segue.graph(forward)
    with torch.inference_mode():
        for _ in range(4):
            for i in range(before):
                assert torch.equal(step(X, model.states[i]), forward(X, model.states[i]))
        for _ in range(4):
            assert torch.equal(step(X, model.state), forward(X, model.state))
        for _ in range(4):
            for c in (*model.states.values(), model.state, torch.ones(2, 8)):
                assert torch.equal(step(X, c), forward(X, c))
