"""State that does not lie in attributes, lists and dicts of the callable's own: in slots, in classes, in attributes of
functions, in objects in lists, and in what a break is given. Whatever happens to it, calls answer as eager ones do."""

from __future__ import annotations

import array
import asyncio
import collections
import contextvars
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import itertools
import logging
import operator
import random
import re
import threading
import types
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import segue
from call_support import eager_reasons, same
from segue.errors import BreakOutputError


def two(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


class Slotted:
    __slots__ = ("k", "n", "total")

    def __init__(self) -> None:
        self.n, self.k, self.total = 0, 0.0, torch.zeros(2)


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = Slotted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.n += 1
        self.state.total = self.state.total + x
        return self.state.total * self.state.n


def test_what_a_capture_leaves_in_slots_is_put_back() -> None:
    plain, step = Counting(), segue.graph(Counting())
    for value in range(6):
        same(step(two(value)), plain(two(value)))
    assert step.state.n == 6 and "unsafe_effects" in eager_reasons(step)


def test_a_position_in_a_dataclass_with_slots_moves_once_a_call() -> None:
    @dataclasses.dataclass(slots=True)
    class Position:
        at: int = 0

    rows, position = torch.zeros(8, 2), Position()

    def f(x: torch.Tensor) -> torch.Tensor:
        rows[position.at] = x
        position.at += 1
        return rows.sum(0)

    step = segue.graph(f)
    with torch.no_grad():
        for value in range(1, 6):
            same(step(two(value)), two(sum(range(value + 1))))
    assert position.at == 5 and rows[:, 0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


def test_a_break_that_sets_a_slot_which_recorded_code_reads() -> None:
    state = Slotted()

    @segue.eager_on_graph
    def note(x: torch.Tensor) -> torch.Tensor:
        state.k = float(x.sum())
        return x

    step = segue.graph(lambda x: note(x + 1) * state.k)
    for value in range(5):
        same(step(two(value)), (two(value) + 1) * 2 * (value + 1))


def pool_of(module: type, name: str) -> Callable[[], None]:
    return lambda: getattr(module, name).__setitem__("w", two(9))


def make_class_dict() -> tuple[Any, Callable[[], None]]:
    class Model(torch.nn.Module):
        table: ClassVar = {"w": two(2)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table["w"]

    return Model(), pool_of(Model, "table")


def make_class_module() -> tuple[Any, Callable[[], None]]:
    class Model:
        net = torch.nn.Linear(2, 2, bias=False)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    return Model(), lambda: setattr(Model.net, "weight", torch.nn.Parameter(torch.eye(2) * 9))


def make_descriptor() -> tuple[Any, Callable[[], None]]:
    class Held:
        value = two(2)

        def __init__(self) -> None:
            self.value = two(3)

        def __get__(self, owner: Any, kind: Any = None) -> Any:
            return self if owner is None else self.value

    class Model(torch.nn.Module):
        w = Held()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

    return Model(), lambda: setattr(Model.w, "value", two(9))


def make_inner_class() -> tuple[Any, Callable[[], None]]:
    class Settings:
        scale = two(2)

    class Model(torch.nn.Module):
        settings = Settings

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.settings.scale

    return Model(), lambda: setattr(Settings, "scale", two(9))


def make_partial_method() -> tuple[Any, Callable[[], None]]:
    held = {"w": two(2)}

    def scaled(self: Any, by: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return x * by["w"]

    class Model(torch.nn.Module):
        run = functools.partialmethod(scaled, held)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    return Model(), lambda: held.__setitem__("w", two(9))


class Double:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Negate:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return -x


class Stages(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = [Double()]
        self.table: dict[str, Any] = {"act": Double()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stages[0](x) + 3 * self.table["act"](x)


def make_list_of_objects() -> tuple[Any, Callable[[], None]]:
    model = Stages()
    return model, lambda: model.stages.__setitem__(0, Negate())  # type: ignore[call-overload]


def make_dict_of_objects() -> tuple[Any, Callable[[], None]]:
    model = Stages()
    return model, lambda: model.table.update(act=Negate())


def make_view_of_a_dict() -> tuple[Any, Callable[[], None]]:
    held = {1: two(2)}
    values = held.values()
    return lambda x: x * sum(values), lambda: held.__setitem__(1, two(9))


def make_order_of_children() -> tuple[Any, Callable[[], None]]:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Hardtanh(-3.0, 3.0), torch.nn.Linear(2, 2))
    torch.nn.init.eye_(model[2].weight)
    torch.nn.init.constant_(model[2].bias, 5)
    model._modules = OrderedDict(model._modules)
    return model, lambda: model._modules.move_to_end("1")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        make_class_dict, make_class_module, make_descriptor, make_inner_class, make_partial_method, make_list_of_objects,
        make_dict_of_objects, make_view_of_a_dict, make_order_of_children,
    ],
)  # fmt: skip
def test_a_change_there_is_seen(make: Callable[[], tuple[Any, Callable[[], None]]]) -> None:
    f, change = make()
    step = segue.graph(f)
    with torch.no_grad():
        for _ in range(3):
            same(step(two(4)), f(two(4)))
        assert step.report().replays == 1
        before = f(two(4))
        change()
        assert not torch.equal(f(two(4)), before)
        for _ in range(4):
            same(step(two(4)), f(two(4)))
        assert step.report().replays > 1, "it is recorded again"


def test_values_of_pythons_own_kinds_do_not_count() -> None:
    """As numbers and texts there do not (docs/safety.md): a log that others keep makes no recording another one."""
    model = Stages()
    model.table["when"] = datetime.datetime(2026, 1, 1)
    step = segue.graph(model)
    for day in range(1, 8):
        model.table["when"] = datetime.datetime(2026, 1, day)
        same(step(two(4)), model(two(4)))
    assert step.report().replays == 5


@pytest.mark.parametrize(
    "held",
    [
        datetime.datetime(2026, 1, 1), re.compile("a+"), slice(1, 2), array.array("f", [1.0]), threading.Lock(),
        operator.itemgetter(1), io.StringIO("a"), np.arange(3), np.random.default_rng(0), Path("a"), property(abs), complex,
        types.SimpleNamespace(a=1), functools.lru_cache(abs), memoryview(b"ab"), collections.Counter("ab"), zip([1], [2]),
        random.Random(1), decimal.Decimal(1), uuid.UUID(int=3), weakref.ref(Double), types.MappingProxyType({"a": 1}),
        logging.getLogger("a"), contextvars.ContextVar("a"), itertools.count(), enum.Enum("E", "a"), asyncio.Queue,
    ],
    ids=lambda held: type(held).__name__,
)  # fmt: skip
def test_what_is_held_beside_makes_no_recording_fail(held: Any) -> None:
    """Attributes of objects of C's are often read-only, and made anew when they are asked for."""
    model = Stages()
    model.held, model.table["held"] = held, held  # type: ignore[assignment]
    step = segue.graph(model)
    for value in range(5):
        same(step(two(value)), model(two(value)))
    assert step.report().replays == 3


def test_a_tensor_that_a_class_holds_is_told_from_another() -> None:
    class Model(torch.nn.Module):
        pool = (two(5), [two(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if any(x is p for p in (self.pool[0], *self.pool[1])) else x * 3

    model = Model()
    step = segue.graph(model)
    for x in (two(5), model.pool[0], model.pool[1][0], two(6)) * 3:
        same(step(x), model(x))


def test_a_tensor_that_escapes_into_a_class_or_a_function_holds_its_data() -> None:
    class Model(torch.nn.Module):
        last: ClassVar[dict[str, torch.Tensor]] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last["y"] = x * 2
            return x * 3

    step = segue.graph(Model())
    for value in range(4):
        step(two(value))
        same(Model.last["y"], two(2 * value))

    class Summing(torch.nn.Module):
        sum: ClassVar[torch.Tensor] = torch.zeros(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Summing.sum = Summing.sum + x
            return Summing.sum * 2

    step = segue.graph(Summing())
    for value in range(1, 6):
        same(step(two(1)), two(2 * value))

    def total(x: torch.Tensor) -> torch.Tensor:
        total.sum = total.sum + x  # type: ignore[attr-defined]
        return total.sum * 2  # type: ignore[attr-defined]

    total.sum = torch.zeros(2)  # type: ignore[attr-defined]
    step = segue.graph(total)
    for value in range(1, 6):
        same(step(two(1)), two(2 * value))


def grown(x: torch.Tensor, s: Any) -> torch.Tensor:
    s.add(len(s))
    return x * len(s)


def counted(x: torch.Tensor, s: Any) -> torch.Tensor:
    s.n += 1
    return x * s.n


def raised(x: torch.Tensor, s: Any) -> torch.Tensor:
    s[0] += 1
    return x * float(s[0])


def written(x: torch.Tensor, s: Any) -> torch.Tensor:
    s.write(b"1")
    return x * s.tell()


def counter() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


USED_UP: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "a set": (set, grown),
    "an object with slots": (Slotted, counted),
    "an iterator": (lambda: iter([1, 2, 3, 4, 5]), lambda x, s: x * next(s)),
    "a generator": (lambda: (i for i in range(4)), lambda x, s: x * sum(s)),
    "a torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda x, s: x * torch.randint(0, 100, (1,), generator=s),
    ),
    "an array": (lambda: np.zeros(1), raised),
    "a bytearray": (lambda: bytearray(1), raised),
    "a file": (io.BytesIO, written),
    "a closure": (counter, lambda x, s: x * s()),
}


@pytest.mark.parametrize("kind", USED_UP)
def test_what_a_break_changes_in_an_object_that_the_pass_made_is_new_at_each_call(kind: str) -> None:
    make, use = USED_UP[kind]
    marked = segue.eager_on_graph(use)
    step = segue.graph(lambda x: marked(x + 1, make()) * 2)
    for value in range(5):
        same(step(two(value)), use(two(value) + 1, make()) * 2)


def test_an_object_that_the_callable_holds_may_be_used_up_by_a_break() -> None:
    held = iter(range(100))

    @segue.eager_on_graph
    def take(x: torch.Tensor, items: Any) -> torch.Tensor:
        return x + next(items)

    step = segue.graph(lambda x: take(x * 2, held) * 3)
    for value in range(6):
        same(step(two(1)), two(3 * (2 + value)))
    assert step.report().replays == 4


SCALARS: dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], Any, Any]] = {
    "units": (lambda x, t: x * float(t / np.timedelta64(1, "s")), np.timedelta64(1, "s"), np.timedelta64(1, "m")),
    "dates": (lambda x, t: x * t.astype("datetime64[s]").astype(int), np.datetime64(5, "s"), np.datetime64(5, "D")),
    "fields": (
        lambda x, t: x * int(t["p"]),
        np.array([(1, 2)], dtype=[("p", "i4"), ("q", "i4")])[0],
        np.array([(1, 2)], dtype=[("q", "i4"), ("p", "i4")])[0],
    ),
}


@pytest.mark.parametrize("kind", SCALARS)
def test_numbers_of_numpy_are_told_by_their_dtype_too(kind: str) -> None:
    f, one, other = SCALARS[kind]
    step = segue.graph(f)
    for given in (one, one, one, other, other, other, one):
        same(step(two(1), given), f(two(1), given))
    assert step.report().replays == 3


def test_arrays_of_numpy_have_no_value(tmp_path: Path) -> None:
    """Those of other kinds neither: what is written into them must stay written."""

    def f(x: torch.Tensor, m: Any) -> torch.Tensor:
        m[0] += 1
        return x * float(m[0])

    step = segue.graph(f)
    for _ in range(4):
        held = np.memmap(tmp_path / "a", dtype="f4", mode="w+", shape=(2,))
        same(step(two(1), held), two(1))
        assert held.tolist() == [1, 0]
    assert eager_reasons(step) == {"unhashable_argument": 4}


def test_a_weight_of_a_break_that_requires_grad_by_now_is_no_silent_loss() -> None:
    lin = torch.nn.Linear(2, 2).requires_grad_(False)

    @segue.eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        return lin(x)

    for wrapped in (segue.graph(lambda x: body(x) * 2), segue.graph(lin, debug="forward")):
        lin.requires_grad_(False)
        for _ in range(3):
            wrapped(two(1))
        lin.requires_grad_(True)
        with pytest.raises(BreakOutputError, match="requires grad, and none in its warm-up"):
            wrapped(two(1))
        for _ in range(2):
            assert wrapped(two(1)).requires_grad
        with torch.no_grad():
            assert not wrapped(two(1)).requires_grad


SETTERS: dict[str, tuple[Callable[[], object], Callable[[], object], Callable[[], object]]] = {
    "grad mode": (
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_grad_enabled(True),
        torch.is_grad_enabled,
    ),
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
        torch.get_default_dtype,
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_enabled("cpu", False),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "what autocast casts to": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
}


@pytest.mark.parametrize("mode", SETTERS)
def test_a_mode_that_a_break_sets_and_the_pass_puts_back_is_as_before(mode: str) -> None:
    begin, end, read = SETTERS[mode]

    @segue.eager_on_graph
    def enter(x: torch.Tensor) -> torch.Tensor:
        begin()
        return x * 2

    def f(x: torch.Tensor) -> torch.Tensor:
        y = enter(x)
        end()
        return y

    step, before = segue.graph(f), read()
    try:
        for _ in range(4):
            step(two(1))
            assert read() == before
    finally:
        end()
    assert "capture_failed" in eager_reasons(step)
