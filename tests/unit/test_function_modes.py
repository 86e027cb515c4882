"""Function modes of `torch.overrides`: those around a call, and functions of users' that ask them. Eager is the oracle."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function, has_torch_function_unary

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


# -- functions that ask, behind decorators -------------------------------------------------------------------------------


def timed(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def new(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs)

    return new


def doubled(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: old(*args, **kwargs) * 2


class Counting:
    def __init__(self, old: Callable[..., Any]) -> None:
        self.old = old

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.old(*args, **kwargs) + 5


def asked(decorate: Callable[[Any], Any]) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Functions that ask modes, each behind the decorator and called with other values than its defaults."""

    @decorate
    def pops(x: torch.Tensor, **kwargs: Any) -> Any:
        factor = kwargs.pop("factor", 1.0)
        if has_torch_function_unary(x):
            return handle_torch_function(pops, (x,), x, factor=factor, **kwargs)
        return x * factor

    @decorate
    def deletes(x: torch.Tensor, factor: float = 1.0) -> Any:
        kept = factor
        del factor
        if has_torch_function_unary(x):
            return handle_torch_function(deletes, (x,), x, kept)
        return x * kept

    @decorate
    def settles(x: torch.Tensor, *, factor: float | None = None, shift: float | None = None) -> Any:
        factor = 7.0 if factor is None else factor
        if has_torch_function_unary(x):
            return handle_torch_function(settles, (x,), x, factor=factor, shift=shift)
        return x * factor + (shift or 0)

    @decorate
    def forgets(x: torch.Tensor, factor: float = 1.0, *more: float, shift: float = 0.0) -> Any:
        if has_torch_function_unary(x):
            return handle_torch_function(forgets, (x,), x)  # as l1_loss of torch's does with its weight
        return x * factor + sum(more) + shift

    @decorate
    def takes_many(*tensors: torch.Tensor, **kwargs: Any) -> Any:
        if has_torch_function(tensors):
            return handle_torch_function(takes_many, tensors, *tensors, **kwargs)
        return torch.stack(tensors).sum(0) * kwargs["factor"]

    @decorate
    def remembers(x: torch.Tensor, factor: float) -> Any:
        if has_torch_function_unary(x):
            return handle_torch_function(remembers, (x,), x, factor=factor)
        return x * (lambda: factor)() + OFFSETS["one"]

    class Holder:
        @decorate
        def method(self, x: torch.Tensor, factor: float = 1.0) -> Any:
            if has_torch_function_unary(x):
                return handle_torch_function(Holder.method, (x,), self, x, factor=factor)
            return x * factor

    return {
        "pops": lambda x: pops(x, factor=3.0),
        "deletes": lambda x: deletes(x, 3.0),
        "settles": lambda x: settles(x, shift=2.0),
        "forgets": lambda x: forgets(x, 3.0, 4.0, 5.0, shift=6.0),
        "takes_many": lambda x: takes_many(x, x + 1, factor=3.0),
        "remembers": lambda x: remembers(x, 3.0),
    } | ({} if decorate is Counting else {"method": lambda x: Holder().method(x, factor=3.0)})


@timed
def popping(x: torch.Tensor, **kwargs: Any) -> Any:
    factor = kwargs.pop("factor", 1.0)
    if has_torch_function_unary(x):
        return handle_torch_function(popping, (x,), x, factor=factor, **kwargs)
    return x * factor


@doubled
def deleting(x: torch.Tensor, factor: float = 1.0) -> Any:
    kept = factor
    del factor
    if has_torch_function_unary(x):
        return handle_torch_function(deleting, (x,), x, kept)
    return x * kept


OFFSETS = {"one": 1.0}
ASKED = {f"{decorate.__name__} {name}": f for decorate in (timed, doubled, Counting) for name, f in asked(decorate).items()}
ASKED |= {"global popping": lambda x: popping(x, factor=3.0), "global deleting": lambda x: deleting(x, 3.0)}


@pytest.mark.parametrize("name", ASKED)
def test_a_decorated_function_that_asks_runs_once_with_what_it_was_called_with(name: str) -> None:
    function = ASKED[name]
    step = segue.graph(function)
    for n in range(5):
        x = torch.randn(4) + n
        same(step(x), function(x))
    assert step.report().replays == 3


def test_a_loss_of_torchs_keeps_the_weight_that_it_does_not_tell() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(x, x * 3, weight=x * 7)

    step = segue.graph(function)
    for n in range(5):
        x = torch.rand(4) + n
        same(step(x), function(x))
    assert step.report().replays == 3
