"""Arguments and options that a wrapped call cannot handle as usual: what works in eager works, with a reason."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import segue
from call_support import eager_reasons, same
from segue.errors import ConfigError


class Doubling(collections.namedtuple("Doubling", "a b")):
    def __new__(cls, a: Any) -> Any:
        return super().__new__(cls, a, a * 2)


class Marked(collections.namedtuple("Marked", "a")):
    mark: float


class Pieces(tuple[Any, ...]):
    pass


@dataclasses.dataclass
class Unset:
    a: Any
    b: Any = dataclasses.field(init=False)


@dataclasses.dataclass(slots=True)
class UnsetSlots(Unset):
    c: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Extra:
    a: Any
    more: dataclasses.InitVar[float] = 5.0

    def __post_init__(self, more: float) -> None:
        self.n = more


def marked(x: Any, mark: float) -> Marked:
    made = Marked(x)
    made.mark = mark
    return made


def ring(x: Any) -> list[Any]:
    made = [x]
    made.append(made)
    return made


class Odd:
    """Equal, hashed and shown as it is told; `itself` it equals always."""

    def __init__(self, equals: Any = None, hashed: Any = None, shown: Any = None) -> None:
        self.does = equals, hashed, shown

    def __eq__(self, other: object) -> Any:
        return True if self is other else self.does[0]()

    def __hash__(self) -> int:
        return 1 if self.does[1] is None else self.does[1]()

    def __repr__(self) -> str:
        return "odd" if self.does[2] is None else self.does[2]()


class OddKind(type):
    def __hash__(cls) -> int:
        raise AttributeError("unset")


class OfOddKind(metaclass=OddKind):
    pass


class Stubborn:
    """Registered with torch's pytree, and cannot be taken apart."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise self


def fail(*_: Any) -> Any:
    raise AttributeError("unset")


def fail_unspeakably(*_: Any) -> Any:
    raise Unspeakable


_pytree.register_pytree_node(Stubborn, fail, fail)


def dead() -> Any:
    return weakref.proxy(Stubborn())


def nested(depth: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(depth), 1)


IGNORED = {
    "eq raises": lambda: Odd(fail),
    "eq raises what cannot be shown": lambda: Odd(fail_unspeakably),
    "eq answers tensors": lambda: Odd(lambda: torch.ones(2)),
    "hash raises": lambda: Odd(lambda: True, fail),
    "repr raises": lambda: Odd(lambda: True, None, fail),
    "key": lambda: {Odd(fail): 1},
    "tensor as key": lambda: {torch.ones(2): 1},
    "metaclass": OfOddKind,
    "dead proxy": dead,
    "dead proxy in a list": lambda: [dead()],
    "pytree": Stubborn,
    "deep": lambda: nested(3000),
    "ring": lambda: ring(1),
    "tuple of tensors": lambda: Pieces((torch.ones(2),)),
    "method of a value": lambda: (1).__add__,
}


@pytest.mark.parametrize("odd", IGNORED.values(), ids=IGNORED)
@pytest.mark.parametrize("by_name", [False, True])
def test_an_argument_that_cannot_be_compared_makes_a_call_eager(odd: Callable[[], Any], by_name: bool) -> None:
    step = segue.graph(lambda x, o: x * 2)
    for _ in range(4):
        x = torch.randn(3)
        same(step(x, o=odd()) if by_name else step(x, odd()), x * 2)
        assert not step.explain(x, odd()).is_replay
    assert "unhashable_argument" in eager_reasons(step) and step.report().replays == 0


READ: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "namedtuple with its own __new__": (Doubling, lambda p: p.a + p.b),
    "namedtuple with an attribute": (lambda x: marked(x, 3.0), lambda p: p.a * p.mark),
    "dataclass with an unset field": (Unset, lambda d: d.a * 2),
    "slots with an unset field": (UnsetSlots, lambda d: d.a * 2),
    "dataclass with an attribute beside its fields": (Extra, lambda d: d.a * d.n),
    "list that holds itself": (ring, lambda r: r[1][1][0] * 2),
}


@pytest.mark.parametrize(("make", "read"), READ.values(), ids=READ)
def test_odd_containers_go_in_and_come_out_as_in_eager(make: Callable[..., Any], read: Callable[..., Any]) -> None:
    inside = segue.graph(read)
    outside = segue.graph(make)
    for new in (lambda: torch.randn(3), lambda: torch.randn(1).expand(3)):
        for _ in range(4):
            x = new()
            same(inside(make(x)), read(make(x)))
            result = outside(x)
            assert type(result) is type(make(x))
            same(read(result), read(make(x)))


def test_an_attribute_beside_the_fields_is_part_of_the_call() -> None:
    step = segue.graph(lambda d: d.a * d.n)
    for more in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        x = torch.randn(3)
        same(step(Extra(x, more)), x * more)
    assert step.report().replays == 3


def test_calls_keep_no_object_alive_whose_method_they_were_given() -> None:
    class Big:
        scale = 2.0

        def times(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    step = segue.graph(lambda f, x: f(x))
    seen = []
    big = Big()
    for scale in (2.0, 3.0, 4.0, 5.0):
        big.scale = scale  # no key could tell
        x = torch.randn(3)
        same(step(big.times, x), x * scale)
        other = Big()
        seen.append(weakref.ref(other))
        step(other.times, x)
        del other
    gc.collect()
    assert not any(ref() for ref in seen) and eager_reasons(step) == {"unhashable_argument": 8}
    for _ in range(3):
        same(step(torch.relu, x), x.relu())
    assert step.report().replays == 1


FILLS = [
    (1e30, torch.float16, False), (math.nan, torch.int64, False), (0.5, torch.int32, False), (-1, torch.uint8, False),
    (1 << 70, torch.int64, False), (1j, torch.float32, False), (10**400, torch.float64, False), (2, torch.bool, False),
    (1e-3, torch.float16, True), (math.inf, torch.float16, True), (math.nan, torch.float32, True), (-1, torch.int8, True),
]  # fmt: skip


@pytest.mark.parametrize(("fill", "dtype", "fits"), FILLS, ids=str)
def test_a_filling_that_the_dtype_cannot_hold_makes_a_call_eager(fill: Any, dtype: torch.dtype, fits: bool) -> None:
    step = segue.graph(lambda x: x.clone(), pad={"x": segue.Pad(ladder=[8], fill=fill)})
    for rows in (3, 5, 8, 3):
        x = torch.randn(rows).to(dtype)
        same(step(x), x)
    assert step.report().replays == (2 if fits else 0) and eager_reasons(step) == (
        {"first_seen": 2} if fits else {"no_rung": 4}
    )


@pytest.mark.parametrize("fill", ["0", None, torch.zeros(()), [0]], ids=str)
def test_a_filling_that_is_no_number_is_refused(fill: Any) -> None:
    with pytest.raises(ConfigError, match="fill"):
        segue.Pad(ladder=[8], fill=fill)


UNCOMPARABLE: dict[str, Any] = {
    "a set, which has no value": {1, 2},
    "a Linear, which has no value": torch.nn.Linear(2, 2),
    "a bytearray, which has no value": bytearray(b"a"),
    "a Linear, as a key": {torch.nn.Linear(2, 2): 1},
    "a sparse_coo tensor": torch.eye(2).to_sparse(),
    "a lazily conjugated or negated tensor": torch.ones(2, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("detail", UNCOMPARABLE)
def test_what_hinders_a_key_is_named(detail: str) -> None:
    step = segue.graph(lambda x, other: x * 2)
    for _ in range(3):
        step(torch.ones(2), UNCOMPARABLE[detail])
    found = step.explain(torch.ones(2), UNCOMPARABLE[detail])
    assert str(found.reason) == "unhashable_argument" and detail in str(found)
