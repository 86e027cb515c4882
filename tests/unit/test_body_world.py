"""What a body does beside operations on its arguments: random state, gradients, other threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import segue
from call_support import eager_reasons, same
from segue.device import Device

OWN = torch.Generator()


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    state = OWN.get_state()
    yield OWN
    OWN.set_state(state)


def _check_draws(body: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Numbers of each call, and those that the caller draws next, are eager's."""
    step, x = segue.graph(body), torch.arange(4.0)
    with torch.no_grad():
        for seed in range(5):
            found = []
            for call in (step, body):
                torch.manual_seed(seed)
                OWN.manual_seed(seed)
                found.append((call(x), torch.rand(2), torch.rand(2, generator=OWN)))
            same(found[0], found[1])
    return step


def _forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return x + torch.randn(4)


def _half_forked(x: torch.Tensor) -> torch.Tensor:
    x = x + torch.randn(4)
    with torch.random.fork_rng():
        x = x + torch.randn(4)
    return x + torch.randn(4)


def _seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x + torch.randn(4)


def _seeded_after(x: torch.Tensor) -> torch.Tensor:
    y = x + torch.randn(4)
    torch.manual_seed(3)
    return y


def _seeded_own(x: torch.Tensor) -> torch.Tensor:
    OWN.manual_seed(3)
    return x + torch.rand(4, generator=OWN)


def _made_inside(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("body", [_forked, _half_forked, _seeded, _seeded_after, _seeded_own, _made_inside])
def test_a_body_that_sets_random_state_runs_eagerly(body: Any, generator: torch.Generator) -> None:
    step = _check_draws(body)
    assert step.report().replays == 0 and eager_reasons(step)["unsafe_effects"] == 4


@segue.eager_on_graph
def _drawing_break(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(4)


def _breaks_between(x: torch.Tensor) -> torch.Tensor:
    return _drawing_break(x + torch.randn(4)) + torch.randn(4) + torch.rand(4, generator=OWN)


def _forked_without_draws(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return x * 2


@pytest.mark.parametrize("body", [_breaks_between, _forked_without_draws, lambda x: torch.dropout(x, 0.5, True) + x])
def test_bodies_that_only_draw_are_recorded(body: Any, generator: torch.Generator) -> None:
    assert _check_draws(body).report().replays == 3


def test_a_step_of_an_optimizer_runs_eagerly() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizers = [torch.optim.SGD([p], 0.1, momentum=0.9) for p in (ours, theirs)]
    step = segue.graph(lambda: optimizers[0].step(), inference=True)
    for number in range(5):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            ((parameter * number) ** 2).sum().backward()
        step()
        optimizers[1].step()
        same(ours.data, theirs.data)
    assert step.report().replays == 0


def test_a_grad_of_an_argument_or_a_parameter_is_read_eagerly() -> None:
    weight = torch.nn.Parameter(torch.ones(4))

    def of_argument(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.grad is None else x * x.grad

    def of_parameter(x: torch.Tensor) -> torch.Tensor:
        return x * weight if weight.grad is None else x * weight.grad

    for body in (of_argument, of_parameter):
        step, x = segue.graph(body, inference=True), torch.arange(4.0).requires_grad_()
        for number in range(6):
            if number >= 3:
                x.grad, weight.grad = torch.full((4,), float(number)), torch.full((4,), number + 1.0)
            same(step(x), body(x).detach())
        assert step.report().replays == 0 and eager_reasons(step)["unsafe_effects"] == 5


def test_work_that_the_body_gives_to_another_thread_is_not_recorded(device: Device) -> None:
    if device.kind == "cuda":
        pytest.skip("a capture refuses other threads' work by itself")
    with ThreadPoolExecutor(1) as pool, torch.no_grad():

        def body(x: torch.Tensor) -> torch.Tensor:
            return pool.submit(torch.sin, x * 2).result() + 1

        step = segue.graph(body)
        for number in range(5):
            same(step(torch.arange(4.0) + number), body(torch.arange(4.0) + number))
    assert step.report().replays == 0  # a thread that still holds what it was given makes another reason


def test_a_number_made_inside_is_no_strange_tensor() -> None:
    step = segue.graph(lambda x: torch.where(x > 0, x, 0.5) * torch.tensor(2.0) + torch.full_like(x, 3))
    for number in range(5):
        x = torch.arange(4.0) - number
        same(step(x), torch.where(x > 0, x, 0.5) * 2 + 3)
    assert step.report().replays == 3
