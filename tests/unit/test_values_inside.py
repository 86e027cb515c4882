"""What decides a call without being a leaf of it (keys of dicts, contexts of registered nodes, keywords of partials), and
kinds of tensors and memory that a recording cannot stand for. All beside the plain function."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import segue
from call_support import eager_reasons, same
from segue.device import Device


class Settings:
    def __init__(self) -> None:
        self.scale = 2.0
        self.shift = torch.ones(2)


class Box:
    def __init__(self, held: Any, about: Any) -> None:
        self.held, self.about = held, about


pytree.register_pytree_node(Box, lambda b: ([b.held], b.about), lambda leaves, about: Box(leaves[0], about))


@dataclasses.dataclass(frozen=True)
class Name:
    text: str


def by_keys(x: torch.Tensor, table: dict[Any, float]) -> torch.Tensor:
    return sum((key(x) * value for key, value in table.items()), torch.zeros_like(x))


def rebound() -> tuple[Any, Callable[[], None]]:
    linear = torch.nn.Linear(2, 2)
    return {linear: 2.0}, lambda: setattr(linear, "weight", torch.nn.Parameter(torch.full((2, 2), 9.0)))


def closed_over() -> tuple[Any, Callable[[], None]]:
    scale = 2.0

    def key(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change() -> None:
        nonlocal scale
        scale = 7.0

    return {key: 1.0}, change


@pytest.mark.parametrize("make", [rebound, closed_over])
def test_a_key_that_holds_something_is_no_constant(make: Callable[[], Any]) -> None:
    table, change = make()
    step = segue.graph(by_keys)
    with torch.no_grad():
        for turn in range(5):
            x = torch.randn(3, 2)
            if turn == 3:
                change()
            same(step(x, table), by_keys(x, table))
    assert set(eager_reasons(step)) == {"unhashable_argument"}


@pytest.mark.parametrize("about", ["settings", "tensor", "list of settings"])
def test_what_a_registered_node_says_of_itself_counts(about: str) -> None:
    settings, calls = Settings(), []
    context = {"settings": settings, "tensor": torch.ones(3), "list of settings": [1, settings]}[about]

    def body(box: Box) -> torch.Tensor:
        calls.append(1)
        return box.held * settings.scale

    step = segue.graph(body)
    with torch.no_grad():
        for turn in range(5):
            settings.scale = 2.0 if turn < 3 else 7.0
            x = torch.randn(2)
            same(step(Box(x, context)), x * settings.scale)
    assert len(calls) == 5


ORDINARY_KEYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "texts": lambda x: {"a": x, "b": x * 2},
    "numbers": lambda x: {1: x, 2.5: x, (1, "a"): x},
    "dtypes": lambda x: {torch.float32: x, None: x, True: x},
    "classes": lambda x: {torch.nn.Linear: x, int: x},
    "frozen dataclasses": lambda x: {Name("a"): x},
    "ordered": lambda x: OrderedDict(b=x, a=x),
    "default": lambda x: defaultdict(list, a=x),
    "nested": lambda x: [{"a": {3: (x, {"b": x})}}],
}


@pytest.mark.parametrize("name", ORDINARY_KEYS)
def test_keys_that_are_values_are_recorded(name: str, device: Device) -> None:
    make = ORDINARY_KEYS[name]

    def body(held: Any) -> Any:
        return pytree.tree_map(lambda t: t * 2, held)

    step = segue.graph(body)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, device=device.device)
            got, expected = step(make(x)), body(make(x))
            same(got, expected)
            assert type(got) is type(expected)
    assert step.report().replays == 2, step.report()


def test_keywords_that_a_partial_gets_later_count() -> None:
    plain = functools.partial(lambda x, scale=2.0, **more: x * scale + sum(more.values()), scale=2.0)
    step, x = segue.graph(plain), torch.ones(2)

    def check() -> None:
        for _ in range(3):
            same(step(x), plain(x))

    with torch.no_grad():
        check()
        plain.keywords["more"] = torch.full((2,), 5.0)
        check()
        plain.keywords["scale"] = 3.0
        check()
        del plain.keywords["more"]
        check()
    assert step.report().replays > 0


class Loud(torch.Tensor):
    """Adds 100 to each product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.mul:
            return result.as_subclass(torch.Tensor).add(100).as_subclass(Loud)
        return result


@segue.eager_on_graph
def loud(x: torch.Tensor) -> torch.Tensor:
    return (x + 0).as_subclass(Loud)


@segue.eager_on_graph
def loud_view(x: torch.Tensor) -> Any:
    return {"of": x.as_subclass(Loud)}


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of the result": lambda x: (x + 1).as_subclass(Loud),
    "of a view": lambda x: x[:1].as_subclass(Loud),
    "of a break's result": lambda x: loud(x + 1) * 2,
    "of a break's view": lambda x: loud_view(x + 1)["of"] * 2,
    "between": lambda x: ((x + 1).as_subclass(Loud) * 2).as_subclass(torch.Tensor) - 1,
    "between a break and plain": lambda x: (loud(x + 1) * 2).as_subclass(torch.Tensor) - 1,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_tensor_stays_what_it_is(name: str, device: Device) -> None:
    step = segue.graph(KINDS[name])
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, device=device.device)
            got, expected = step(x), KINDS[name](x)
            assert type(got) is type(expected)
            same(got.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
    assert step.report().replays == (2 if name == "between" else 0)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantized_tensors_on_the_way_and_at_the_end() -> None:
    def on_the_way(x: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()

    def at_the_end(x: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)

    for body in (on_the_way, at_the_end):
        step = segue.graph(body)
        with torch.no_grad():
            for _ in range(4):
                x = torch.randn(4)
                got, expected = step(x), body(x)
                assert got.is_quantized == expected.is_quantized
                same(*(t.dequantize() if t.is_quantized else t for t in (got, expected)))
        assert step.report().replays == 0 and {"capture_failed", "unsafe_effects"} & set(eager_reasons(step))


@segue.eager_on_graph
def by_dlpack(x: torch.Tensor) -> torch.Tensor:
    return torch.from_dlpack(x)


@segue.eager_on_graph
def resized(x: torch.Tensor) -> torch.Tensor:
    return x.resize_(2, 2)


@segue.eager_on_graph
def put_elsewhere(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data * 2
    return x


def written_through(x: torch.Tensor) -> Any:
    y = x * 2
    z = by_dlpack(y)
    z.add_(1)
    return z, y


UNSEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "written through": written_through,
    "an argument written through": lambda x: by_dlpack(x).add_(1),
    "resized": lambda x: resized(x + 1) * 2,
    "put elsewhere": lambda x: put_elsewhere(x + 1) * 2,
}


@pytest.mark.parametrize("name", UNSEEN)
def test_breaks_that_torch_does_not_see_into_run_eagerly(name: str, device: Device) -> None:
    step = segue.graph(UNSEEN[name])
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(4, device=device.device)
            ours = x.clone()
            same(step(ours), UNSEEN[name](x))
            same(ours, x)
    assert "capture_failed" in eager_reasons(step) and step.report().replays == 0


@segue.eager_on_graph
def imaginary(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x).conj().imag


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "of a break": lambda x: imaginary(x + 1),
    "behind a break": lambda x: imaginary(x + 1) * 2,
}


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("name", LAZY)
def test_results_are_lazy_as_in_eager_even_without_items(name: str, size: int, device: Device) -> None:
    step = segue.graph(LAZY[name])
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(size, device=device.device)
            got, expected = step(x), LAZY[name](x)
            same(got, expected)
            assert (got.is_neg(), got.is_conj()) == (expected.is_neg(), expected.is_conj())
    assert step.report().replays == 2


def test_many_sizes_of_two_padded_dimensions_keep_little() -> None:
    step = segue.graph(lambda x, y: (x * 2, y + 1), pad={"x": segue.Pad(ladder=(1024,)), "y": segue.Pad(ladder=(2048,))})
    x, y = torch.randn(1024, 1), torch.randn(2048, 1)

    def call(count: int) -> None:
        for i in range(count):
            a, b = x[: 1 + i % 1023], y[: 1025 + i % 1021]
            same(step(a, b), (a * 2, b + 1))

    with torch.no_grad():
        call(10)
        before = num_tensors()
        call(4000)
    assert step.report().replays > 4000 and num_tensors() - before <= 4 * 1024 + 100


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
