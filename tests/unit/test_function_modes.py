"""Function modes of `torch.overrides`: those around a call, and functions of users' that ask them. Eager is the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import segue
from call_support import eager_reasons, same


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Scale(TorchFunctionMode):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.relu else result


MODES: dict[str, Callable[[float], Any]] = {
    "alone": Scale,
    "around a device": lambda factor: _both(Scale(factor), torch.device("cpu")),
    "inside a device": lambda factor: _both(torch.device("cpu"), Scale(factor)),
}


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


@pytest.mark.parametrize("mode", MODES)
def test_a_function_mode_around_a_call_sees_what_it_runs(mode: str) -> None:
    function = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4))
    step, plain = segue.graph(function), segue.graph(lambda x: torch.relu(x))
    x = torch.randn(2, 4)
    for factor in (2.0, 2.0, 2.0, 2.0, 3.0, None, None, None, None, 3.0, None):
        with contextlib.nullcontext() if factor is None else MODES[mode](factor):
            same(step(x), function(x))
            same(plain(x), torch.relu(x))
    for made in (step, plain):
        assert eager_reasons(made) == {"debug": 6, "first_seen": 2} and made.report().replays == 3


def test_devices_around_a_call_are_no_modes_that_a_replay_passes_by() -> None:
    step = segue.graph(lambda x: x + torch.ones(4))
    x = torch.randn(4)
    for _ in range(5):
        with torch.device("cpu"), torch.device("cpu"):
            same(step(x), x + 1)
    assert step.report().replays == 3


def test_a_mode_that_the_callable_enters_is_recorded_with_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with Scale(3.0):
            return torch.relu(x)

    step = segue.graph(function)
    for n in range(5):
        x = torch.randn(4) + n
        same(step(x), function(x))
    assert step.report().replays == 3
