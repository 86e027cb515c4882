"""Breaks that answer otherwise than their trace, or cannot be taken apart, and breaks in compiled code; names of code."""

from __future__ import annotations

import abc
from typing import Any

import pytest
import torch

import segue
from call_support import same
from segue.errors import BreakOutputError

GLOBAL = 0
mean = 0
"""also the name of a method"""


ANSWER = 1
"""named by the body of a break alone"""


@segue.eager_on_graph
def numbered(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, ANSWER


def test_a_break_whose_result_changes_raises_once_and_the_next_calls_are_eager() -> None:
    global ANSWER
    step, raised = segue.graph(lambda x: numbered(x.sin())[0] + 1), 0
    with torch.inference_mode():
        for turn in range(30):
            ANSWER = max(1, turn - 9)
            x = torch.randn(3)
            try:
                same(step(x), x.sin() * 2 + 1)
            except BreakOutputError as error:
                raised += 1
                assert "numbered" in str(error)
    assert raised == 1 and step.report().replays > 0 and "capture_failed" in step.report().eager


def cyclic_list() -> Any:
    found: list[Any] = [1]
    found.append(found)
    return found


def cyclic_dict() -> Any:
    found: dict[str, Any] = {"a": 1}
    found["self"] = found
    return found


@segue.eager_on_graph
def with_container(x: torch.Tensor, container: Any) -> torch.Tensor:
    return x * x.max().item()


@segue.eager_on_graph
def answering(x: torch.Tensor, container: Any) -> Any:
    return x * 2, container


@pytest.mark.parametrize("make", [cyclic_list, cyclic_dict])
def test_a_container_that_holds_itself_makes_a_break_eager(make: Any) -> None:
    container = make()
    taking = segue.graph(lambda x: with_container(x + 1, container) * 2)
    giving = segue.graph(lambda x: answering(x + 1, container)[0] * 2)
    for _ in range(4):
        x = torch.randn(3)
        same(taking(x), (x + 1) * (x + 1).max().item() * 2)
        same(giving(x), (x + 1) * 2 * 2)
    assert taking.report().replays == giving.report().replays == 0
    assert "holds itself" in str(taking.report().refused) and "holds itself" in str(giving.report().refused)


class Compiled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    @segue.eager_on_graph
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.linear(x)) + 1


def test_a_break_splits_code_that_is_compiled_around_it() -> None:
    model = Compiled()
    step = segue.graph(torch.compile(model, backend="eager"))
    with torch.inference_mode():
        for _ in range(6):
            x = torch.randn(2, 4)
            same(step(x), model(x))
    assert step.report().replays == 4


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.GLOBAL = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.GLOBAL(x).mean()


def test_names_of_attributes_and_methods_are_no_globals() -> None:
    global GLOBAL, mean
    model = Named()
    step = segue.graph(model)
    with torch.inference_mode():
        for turn in range(8):
            GLOBAL = mean = turn
            x = torch.randn(2, 4)
            same(step(x), model(x))
    assert step.report().replays == 6


def test_an_abstract_method_stays_one() -> None:
    class Base(abc.ABC):
        @segue.graph
        @abc.abstractmethod
        def run(self, x: torch.Tensor) -> torch.Tensor: ...

    with pytest.raises(TypeError, match="abstract"):
        Base()  # type: ignore[abstract]
