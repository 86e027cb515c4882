"""What a callable can tell of a call, or somebody else changes around it, without a trace in the arguments' values."""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Subset, TensorDataset

import segue
from call_support import eager_reasons, same
from segue.graph.guard import is_capturing

NULL = torch.zeros(4)
POOL = [torch.full((4,), float(n)) for n in range(3)]
ONE, TWO = torch.ones(4), torch.full((4,), 2.0)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# -- arguments that are tensors which the callable holds ----------------------------------------------------------------


class Guided(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("null", torch.ones(4))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if c is self.null else self.linear(x) + c


def is_global(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x if c is NULL else x * 100 + c


def is_in_pool(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x - c if any(c is p for p in POOL) else x + c


def begins_alike(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x - c if c.data_ptr() == NULL.data_ptr() else x + c


def is_a_view(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x - c if c._base is NULL else x + c


def takes_another(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x + (ONE if c is NULL else TWO)  # the same operations


def says_so(x: torch.Tensor, c: torch.Tensor) -> Any:
    return x + c, c is NULL


HELD: list[tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = [
    (is_global, lambda: NULL),
    (is_in_pool, lambda: POOL[1]),
    (begins_alike, lambda: NULL.detach()),
    (is_a_view, lambda: NULL[:]),
    (takes_another, lambda: NULL),
    (says_so, lambda: NULL),
]


@pytest.mark.parametrize(("function", "held"), HELD, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("is_held_first", [False, True])
def test_a_callable_may_ask_whether_an_argument_is_a_tensor_that_it_holds(
    function: Callable[..., Any], held: Callable[[], torch.Tensor], is_held_first: bool
) -> None:
    step = segue.graph(function)
    x = torch.arange(4.0)
    for turn in range(6):
        for is_held in (is_held_first, not is_held_first):
            for _ in range(3 if turn < 2 else 1):
                c = held() if is_held else torch.full((4,), 5.0)
                same(step(x + turn, c), function(x + turn, c))
    assert step.report().replays >= 8  # with arguments that are not held
    assert eager_reasons(step)["aliased_inputs"]
    assert "treated otherwise" in str(step.report())


def test_a_call_that_looks_as_an_earlier_one_is_not_taken_for_it_where_an_argument_is_held() -> None:
    model = Guided()
    step = segue.graph(model)
    x = torch.ones(1, 4)
    for n in range(200):
        c = model.null if n % 50 == 49 else torch.full((4,), float(n))
        same(step(x, c), model(x, c))
    one = segue.graph(lambda c: c - 1 if c is NULL else c + 1)
    for _ in range(3):
        same(one(torch.ones(4)), torch.full((4,), 2.0))
    same(one(NULL), torch.full((4,), -1.0))


def test_a_held_argument_that_is_not_asked_after_is_replayed() -> None:
    model = Guided()
    other = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    model.extra = other
    step = segue.graph(model)
    x = torch.ones(2, 4)
    for n in range(5):
        same(step(x, other), model(x, other))
        other.add_(n)
    assert step.report().replays == 3
    model.extra = torch.nn.Parameter(torch.full((4,), 3.0), requires_grad=False)
    for _ in range(5):
        same(step(x, model.extra), model(x, model.extra))
    same(step(x, model.null), model(x, model.null))
    assert step.report().replays == 7


def test_capturing_a_call_with_a_held_argument_reports_its_own_recording() -> None:
    step = segue.graph(lambda x, c: x + c * NULL)
    report = step.capture(torch.ones(4), NULL)
    assert report.records and not report.failures
    report = segue.graph(is_global).capture(torch.ones(4), NULL)
    assert not report.records and "treated otherwise" in str(report.failures[0][1])


# -- functions of torch's that others take the place of -----------------------------------------------------------------


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def helper(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


PATCHED: list[tuple[Callable[..., Any], Any, str, Callable[..., Any]]] = [
    (Attention(), F, "scaled_dot_product_attention", lambda q, k, v: q * 100),
    (lambda x: F.scaled_dot_product_attention(x, x, x), F, "scaled_dot_product_attention", lambda q, k, v: q * 100),
    (lambda x: torch.sigmoid(x), torch, "sigmoid", lambda x: x * 3),
    (lambda x: helper(x) + 1, F, "gelu", lambda x: x * ONE.sum()),
    (lambda x: torch.cat([torch.nn.functional.pad(x, (1, 1)), F.pad(x, (1, 1))]), F, "pad", lambda x, size: x),
]


@pytest.mark.parametrize(("function", "module", "name", "other"), PATCHED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_function_of_torchs_that_user_code_names_may_be_replaced(
    function: Callable[..., Any], module: Any, name: str, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = segue.graph(function)
    x = torch.randn(2, 4, 4)
    for _ in range(4):
        same(step(x), function(x))
    assert step.report().replays == 2
    monkeypatch.setattr(module, name, other)
    for n in range(4):
        same(step(x + n), function(x + n))
    monkeypatch.undo()
    for n in range(4):
        same(step(x + n), function(x + n))
    assert eager_reasons(step)["rebound"] == 2 and step.report().captures == 3


def test_what_else_torchs_modules_come_to_hold_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    step = segue.graph(lambda x: torch.sigmoid(F.gelu(x)))
    for n in range(6):
        monkeypatch.setattr(F, "relu6", lambda x, n=n: x * n)
        monkeypatch.setattr(torch, f"of_a_test_{n}", n, raising=False)
        step(torch.ones(4))
    assert step.report().replays == 4


# -- tensors that objects of libraries hold -----------------------------------------------------------------------------


def _array() -> Any:
    array = np.empty((2, 2), dtype=object)
    array[:] = [[ONE, TWO], [TWO, 1.0]]
    return array


def _dispatched() -> Any:
    @functools.singledispatch
    def scaled(x: Any) -> Any:
        return x

    scaled.register(torch.Tensor, lambda x: x * ONE)
    return scaled


def _other() -> torch.Tensor:
    return torch.full((4,), 7.0)


def _dataset() -> Any:
    return TensorDataset(torch.ones(3, 4))


Holder = tuple[Callable[[], Any], Callable[[Any], torch.Tensor], Callable[[Any], Any]]
HOLDERS: dict[str, Holder] = {
    "array": (_array, lambda h: h[0, 1], lambda h: h.__setitem__((0, 1), _other())),
    "dataset": (_dataset, lambda h: h.tensors[0][0], lambda h: setattr(h, "tensors", (torch.full((3, 4), 7.0),))),
    "subset": (
        lambda: Subset(_dataset(), [1, 2]),
        lambda h: h[0][0],
        lambda h: setattr(h.dataset, "tensors", (torch.full((3, 4), 7.0),)),
    ),
    "adapter": (
        lambda: logging.LoggerAdapter(logging.getLogger(__name__), {"weights": [ONE]}),
        lambda h: h.extra["weights"][0],
        lambda h: h.extra["weights"].__setitem__(0, _other()),
    ),
    "timer": (
        lambda: threading.Timer(1, print, kwargs={"weight": ONE}),
        lambda h: h.kwargs["weight"],
        lambda h: setattr(h, "kwargs", {"weight": _other()}),
    ),
    "interpreter": (
        lambda: torch.fx.Interpreter(torch.fx.symbolic_trace(torch.nn.Linear(4, 4))),
        lambda h: h.module(ONE),
        lambda h: setattr(h.module, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    ),
    "dispatched": (_dispatched, lambda h: h(TWO), lambda h: h.register(torch.Tensor, lambda x: x * 7)),
}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_tensor_that_an_object_of_a_library_holds_may_be_another_one(name: str, is_inner: bool) -> None:
    make, read, change = HOLDERS[name]
    held = types.SimpleNamespace(item=make())
    direct = held.item
    function = (lambda x: x * read(held.item)) if is_inner else (lambda x: x * read(direct))
    step = segue.graph(function)
    x = torch.arange(4.0)
    for _ in range(4):
        same(step(x), function(x))
    assert step.report().replays == 2
    change(held.item)
    for n in range(4):
        same(step(x + n), function(x + n))
    assert step.report().replays == 4


def test_a_thread_that_ends_while_it_is_recorded_has_ended() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.weight = ONE  # type: ignore[attr-defined]

    def f(x: torch.Tensor) -> torch.Tensor:
        if is_capturing() and thread.ident is None:
            thread.start()
            thread.join()
        return x * thread.weight  # type: ignore[attr-defined]

    step = segue.graph(f)
    for _ in range(4):
        same(step(TWO), TWO)
    assert not thread.is_alive() and step.report().replays == 2
