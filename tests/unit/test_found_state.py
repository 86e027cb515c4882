"""State that a callable reaches by ways beyond attributes of modules: once it is another one, the answer is eager's."""

from __future__ import annotations

import collections
import enum
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import segue
from call_support import eager_reasons, same
from segue.graph.versions import dict_tag

needs_versions = pytest.mark.skipif(dict_tag() is None, reason="seen where dicts have versions (docs/safety.md)")
Color = enum.Enum("Color", "RED BLUE")

ONES = torch.ones(4)
WEIGHT: Any = ONES
SHAPED: Any = torch.zeros(3)
SCALE = 2.0
ACTIVATION: Any = torch.sin


@pytest.fixture(autouse=True)
def _globals() -> Iterator[None]:
    before = WEIGHT, SHAPED, SCALE, ACTIVATION
    with torch.no_grad():
        yield
    globals().update(zip(("WEIGHT", "SHAPED", "SCALE", "ACTIVATION"), before, strict=True))


def _set(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


def _other() -> torch.Tensor:
    return torch.full((4,), 9.0)


def _check(function: Callable[..., Any], change: Callable[[], Any], *args: Any) -> None:
    """Replays before the change, and not the same recording after it."""
    step = segue.graph(function)
    x = torch.arange(1.0, 5.0)
    for _ in range(4):
        same(step(*args, x), function(*args, x))
    assert step.report().replays == 2
    change()
    for offset in range(4):
        same(step(*args, x + offset), function(*args, x + offset))
    assert eager_reasons(step)["rebound"] == 1 and step.report().captures == 2


def _check_eager(function: Callable[..., Any], change: Callable[[], Any], *args: Any) -> None:
    """The argument has no value to compare: eager before the change and after it."""
    step = segue.graph(function)
    for turn in range(6):
        x = torch.arange(1.0, 5.0) + turn
        same(step(*args, x), function(*args, x))
        if turn == 3:
            change()
    assert set(eager_reasons(step)) == {"unhashable_argument"} and step.report().replays == 0


class Plain:
    pass


class Items(tuple[Any, ...]):
    pass


class Holder(torch.nn.Module):
    """Applies a function to what it holds."""

    def __init__(self, held: Any, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.held, self.function = held, function
        self.register_buffer("shaped", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.held, x)


def _first(held: Any, x: torch.Tensor) -> torch.Tensor:
    return x * held[0]


@pytest.mark.parametrize(
    "held",
    [
        collections.deque([ONES]),
        collections.UserDict({0: ONES}),
        collections.UserList([ONES]),
        collections.ChainMap({0: ONES}),
        collections.defaultdict(list, {0: ONES}),
    ],
    ids=lambda held: type(held).__name__,
)
def test_a_tensor_in_a_container_of_any_kind(held: Any) -> None:
    _check(Holder(held, _first), lambda: held.__setitem__(0, _other()))


def test_a_tensor_behind_a_read_only_view_of_a_dict() -> None:
    table = {0: ONES}
    _check(Holder(types.MappingProxyType(table), _first), lambda: table.__setitem__(0, _other()))


def test_a_distribution() -> None:
    held = torch.distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=False)
    _check(Holder(held, lambda held, x: held.log_prob(x)), lambda: setattr(held, "loc", _other()))


class Named(torch.nn.Module):
    @property
    def weight(self) -> torch.Tensor:
        return WEIGHT

    @staticmethod
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * WEIGHT

    @classmethod
    def shifted(cls, x: torch.Tensor) -> torch.Tensor:
        return x + WEIGHT

    def forward(self, way: int, x: torch.Tensor) -> torch.Tensor:
        return (lambda: x * self.weight, lambda: self.scaled(x), lambda: self.shifted(x))[way]()


@pytest.mark.parametrize("way", [0, 1, 2], ids=["property", "staticmethod", "classmethod"])
def test_a_global_that_a_method_of_another_kind_names(way: int) -> None:
    _check(Named(), _set("WEIGHT", _other()), way)


@functools.lru_cache
def _table() -> torch.Tensor:
    return WEIGHT * 1


def test_a_global_behind_a_cached_function() -> None:
    _table.cache_clear()

    def change() -> None:
        globals()["WEIGHT"] = _other()
        _table.cache_clear()

    _check(lambda x: x * _table(), change)


class Called:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE


def test_a_number_that_call_names() -> None:
    _check(Called(), _set("SCALE", 5.0))


def _helped(x: torch.Tensor) -> torch.Tensor:
    return _helper(x)


def _helper(x: torch.Tensor) -> torch.Tensor:
    return ACTIVATION(x)


@needs_versions
def test_a_function_that_a_called_function_names() -> None:
    _check(_helped, _set("ACTIVATION", torch.cos))


@needs_versions
def test_an_unrelated_global_that_changes_costs_no_recording() -> None:
    step = segue.graph(_helped)
    for number in range(6):
        globals()["UNRELATED"] = number
        same(step(ONES * number), _helped(ONES * number))
    assert step.report().replays == 4


@needs_versions
@pytest.mark.parametrize(
    ("before", "after", "function"),
    [
        (torch.sin, torch.cos, lambda v, x: v(x)),
        (torch.float64, torch.float16, lambda v, x: x.to(v)),
        (Color.RED, Color.BLUE, lambda v, x: x * 2 if v is Color.RED else x),
        (None, ONES * 3, lambda v, x: x if v is None else x * v),
        (int, float, lambda v, x: x * v(2.5)),
    ],
    ids=["function", "dtype", "enum", "None", "type"],
)
def test_what_says_which_way_code_takes(before: Any, after: Any, function: Any) -> None:
    item = Plain()
    item.value = before  # type: ignore[attr-defined]
    _check(Holder(item, lambda item, x: function(item.value, x)), lambda: setattr(item, "value", after))
    table = {"value": before}
    _check(lambda x: function(table["value"], x), lambda: table.__setitem__("value", after))


@needs_versions
def test_a_generator_that_is_another_one() -> None:
    item = Plain()
    item.generator = torch.Generator()  # type: ignore[attr-defined]
    step = segue.graph(lambda x: x + torch.rand(4, generator=item.generator))  # type: ignore[attr-defined]
    for _ in range(3):
        step(ONES)
    item.generator = torch.Generator().manual_seed(5)  # type: ignore[attr-defined]
    same(step(ONES), ONES + torch.rand(4, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("value", [torch.cos, torch.nn.Tanh()], ids=["function", "module"])
def test_a_list_of_functions(value: Any) -> None:
    items: list[Any] = [torch.sin]

    def chain(x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda y, item: item(y), items, x)

    _check(chain, lambda: items.append(value))
    _check(chain, lambda: items.__setitem__(0, value))


def test_functions_in_containers_without_versions() -> None:
    held = Items(([torch.sin],))
    _check(lambda x: held[0][0](x), lambda: held[0].__setitem__(0, torch.cos))
    table = collections.defaultdict(list, {"f": torch.sin})  # type: ignore[dict-item]
    _check(lambda x: table["f"](x), lambda: table.__setitem__("f", torch.cos))  # type: ignore[operator,call-overload]


def test_a_tensor_of_the_class_of_a_classmethod() -> None:
    class Kind:
        weight = ONES

        @classmethod
        def run(cls, x: torch.Tensor) -> torch.Tensor:
            return x * cls.weight

    _check(Kind.run, lambda: setattr(Kind, "weight", _other()))


def test_a_dict_that_grows_and_a_set_with_another_member() -> None:
    table = {"a": ONES}
    _check(lambda x: x + sum(table.values()), lambda: table.__setitem__("b", ONES))
    names = {"a"}
    _check(lambda x: x * 2 if "b" in names else x, lambda: names.add("b"))
    _check(lambda x: x * 2 if "a" in names else x, lambda: (names.remove("a"), names.add("c")))


class One:
    weight = ONES

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x)


class Two(One):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1


def test_an_object_of_another_class() -> None:
    first, inner = One(), One()
    _check(first.run, lambda: setattr(first, "__class__", Two))
    _check(Holder(inner, lambda held, x: held.run(x)), lambda: setattr(inner, "__class__", Two))


@needs_versions
def test_an_attribute_that_hides_one_of_the_class() -> None:
    item = One()
    _check(Holder(item, lambda held, x: x * held.weight), lambda: setattr(item, "weight", _other()))


@pytest.mark.parametrize("name", ["torch_helpers", "logging_utils", "segue_models", "collections_of_mine"])
def test_a_users_module_named_like_a_library(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{name}.py").write_text(
        "import torch\nW = torch.ones(4)\ndef f(x): return x * W\nclass C: pass\nc = C()\nc.w = torch.ones(4)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    _check(module.f, lambda: setattr(module, "W", _other()))
    globals()["named"] = module
    _check(lambda x: x * named.W, lambda: setattr(module, "W", _other() * 2))  # type: ignore[name-defined] # noqa: F821
    item = module.c
    _check(lambda x: x * item.w, lambda: setattr(item, "w", _other()))


def test_a_tensor_that_is_used_for_its_shape_or_dtype_alone() -> None:
    _check(lambda x: x * SHAPED.shape[0], _set("SHAPED", torch.zeros(5)))
    local = [torch.zeros(1, dtype=torch.float64)]
    _check(lambda x: x.to(local[0].dtype), lambda: local.__setitem__(0, torch.zeros(1, dtype=torch.float16)))


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: buffer.resize_(5),
        lambda buffer: setattr(buffer, "data", torch.zeros(7)),
        lambda buffer: buffer.unsqueeze_(0),
    ],
    ids=["resized", "data", "dimensions"],
)
def test_a_buffer_that_is_used_for_its_shape_alone(change: Callable[[torch.Tensor], Any]) -> None:
    model = Holder(None, lambda held, x: x * len(model.shaped))  # type: ignore[arg-type]
    _check(model, lambda: change(model.shaped))  # type: ignore[arg-type]


@pytest.mark.parametrize("turn", [lambda b: b.t_(), lambda b: b.unsqueeze_(0), lambda b: b.resize_(b.numel() + 2).fill_(1)])
def test_a_body_that_turns_a_buffer_in_place_runs_eagerly_and_once_a_call(turn: Callable[[torch.Tensor], Any]) -> None:
    class Turning(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.arange(6.0).reshape(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turn(self.b)  # type: ignore[arg-type]
            return self.b * x  # type: ignore[return-value,operator]

    model, beside = Turning(), Turning()
    step = segue.graph(model)
    for _ in range(5):
        same(step(torch.tensor(2.0)), beside(torch.tensor(2.0)))
        assert model.b.stride() == beside.b.stride()  # type: ignore[operator]
    assert step.report().replays == 0 and step.report().eager.keys() & {"unsafe_effects", "capture_failed"}


def test_a_deque_that_each_call_changes_is_seen() -> None:
    last, beside = collections.deque([1.0], maxlen=3), collections.deque([1.0], maxlen=3)

    def body(held: Any, x: torch.Tensor) -> torch.Tensor:
        held.append(held[-1] + 1)
        return x * held[-1]

    step = segue.graph(lambda x: body(last, x))
    for _ in range(5):
        same(step(ONES), body(beside, ONES))
    assert last == beside and eager_reasons(step)["unsafe_effects"] == 4


def _weighted(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT * SCALE


def _call(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return function(x)


def test_what_a_function_among_the_arguments_names() -> None:
    _check(_call, _set("WEIGHT", _other()), _weighted)
    _check(_call, _set("SCALE", 5.0), _weighted)


def test_the_object_of_a_method_among_the_arguments() -> None:
    model, weight = torch.nn.Linear(4, 4), ONES.clone()
    _check_eager(_call, lambda: setattr(model, "weight", torch.nn.Parameter(torch.ones(4, 4))), model.forward)
    _check_eager(_call, lambda: setattr(weight, "data", _other()), weight.mul)
    _check_eager(_call, lambda: setattr(weight, "data", _other() * 2), weight.__add__)
    table = {"a": 2.0}
    _check_eager(lambda get, x: x * get("a"), lambda: table.__setitem__("a", 5.0), table.get)


def test_a_method_that_changes_its_object_is_seen() -> None:
    items, beside = [5, 4, 3, 2, 1], [5, 4, 3, 2, 1]
    step = segue.graph(lambda take, x: x * take())
    for _ in range(4):
        same(step(items.pop, ONES), ONES * beside.pop())
    assert items == beside and step.report().replays == 0


def test_what_containers_that_count_by_value_hold() -> None:
    model, items = torch.nn.Linear(4, 4), Items((ONES.clone(),))
    _check_eager(
        lambda held, x: next(iter(held))(x),
        lambda: setattr(model, "weight", torch.nn.Parameter(torch.ones(4, 4))),
        frozenset([model]),
    )
    _check_eager(lambda held, x: held[0] * x, lambda: setattr(items[0], "data", _other()), items)


class ByName:
    def __init__(self, name: str, weight: torch.Tensor) -> None:
        self.name, self.weight = name, weight

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByName) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def test_objects_that_are_equal_and_hold_other_tensors_run_eagerly() -> None:
    step = segue.graph(lambda held, x: x * held.weight)
    for number in range(4):
        held = ByName("a", ONES * number)
        same(step(held, ONES), ONES * held.weight)
    assert "unhashable_argument" in step.report().eager
