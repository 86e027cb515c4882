"""What `segue.graph` returns, used as what it wraps: methods of all kinds, pickles and copies, modules."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import segue
from call_support import check_calls, eager_reasons, same


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def calls(new: Any, *sizes: tuple[int, ...], n: int = 4) -> list[Any]:
    return [(tuple(new(*size) for size in sizes), {}) for _ in range(n)]


# -- methods ----------------------------------------------------------------------------------------------------------


def family(wrap: Callable[..., Any], base: type = object) -> Any:
    """An object of the third generation; each `forward` calls the one that it overrides, the last one twice."""

    class A(base):  # type: ignore[misc]
        @wrap
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class B(A):
        @wrap
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 10

    class C(B):
        @wrap
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) - super().forward(-x)

    return C()


@pytest.mark.parametrize("base", [object, nn.Module])
def test_a_graphed_method_may_call_the_one_that_it_overrides(base: type, new: Any) -> None:
    ours, theirs = family(segue.graph, base), family(lambda f: f, base)
    check_calls(ours.forward, theirs.forward, calls(new, (3,)))
    assert ours.forward.report().replays == 2 and super(type(ours), ours).forward.report().replays == 0
    if base is nn.Module:
        x = new(3)
        same(ours(x), theirs(x))


def kinds(wrap: Callable[..., Any]) -> Any:
    """Methods of every kind, with the decorator inside and outside."""

    class Kinds:
        scale = 3.0
        relu = wrap(torch.relu)
        half = wrap(functools.partial(torch.mul, torch.tensor(0.5)))

        @classmethod
        @wrap
        def inner_class(cls, x: torch.Tensor) -> torch.Tensor:
            return x * cls.scale

        @wrap
        @classmethod
        def outer_class(cls, x: torch.Tensor) -> torch.Tensor:
            return x / cls.scale

        @staticmethod
        @wrap
        def inner_static(x: torch.Tensor) -> torch.Tensor:
            return x - 1

        @wrap
        @staticmethod
        def outer_static(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @wrap
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return -x

        @property
        @wrap
        def size(self) -> torch.Tensor:
            return torch.tensor(self.scale)

    class Child(Kinds):
        scale = 5.0

    return Kinds, Child


def test_methods_of_every_kind_are_eagers() -> None:
    for ours, theirs in zip(kinds(segue.graph), kinds(lambda f: f), strict=True):
        for holder in (ours, ours()), (theirs, theirs()):
            assert callable(holder[0].inner_class) and callable(holder[1].inner_static)
        for name in ("inner_class", "outer_class", "inner_static", "outer_static"):
            for _ in range(4):
                x = torch.randn(3)
                same(getattr(ours, name)(x), getattr(theirs, name)(x))
                same(getattr(ours(), name)(x), getattr(theirs(), name)(x))
        mine, plain = ours(), theirs()
        for _ in range(4):
            x = torch.randn(3)
            same((mine(x), mine.size, mine.relu(x), mine.half(x)), (plain(x), plain.size, plain.relu(x), plain.half(x)))


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the class is an argument: docs/safety.md")
def test_a_tensor_rebound_in_a_class_is_noticed_by_its_classmethods(new: Any) -> None:
    class Table:
        rows = new(3)

        @classmethod
        @segue.graph
        def read(cls, x: torch.Tensor) -> torch.Tensor:
            return x * cls.rows

    class Child(Table):
        rows = new(3)

    for _ in range(2):
        for holder in (Table, Child):
            check_calls(holder.read, functools.partial(torch.mul, holder.rows), calls(new, (3,)))
            assert holder.read.report().replays >= 2
            holder.rows = new(3)


def test_an_object_without_a_dict_runs_eagerly_and_says_so(new: Any) -> None:
    class Slots:
        __slots__ = ("by",)

        def __init__(self, by: torch.Tensor) -> None:
            self.by = by

        @segue.graph(strict=True)
        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    class Both(Slots):
        __slots__ = ("__dict__",)

    held = Slots(new(3))
    for _ in range(4):
        x = new(3)
        same(held.scale(x), x * held.by)
        held.by = new(3)
    assert "Slots has no __dict__" in str(held.scale.explain(new(3)))
    both = Both(new(3))
    check_calls(both.scale, lambda x: x * both.by, calls(new, (3,)))
    assert both.scale.report().replays == 2


class Scaler:
    def __init__(self, by: torch.Tensor) -> None:
        self.by = by
        self.itself = self

    @segue.graph
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaler) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def test_wrappers_of_methods_die_with_their_object_and_copies_have_their_own(new: Any) -> None:
    scaler = Scaler(new(3))
    check_calls(scaler.scale, functools.partial(torch.mul, scaler.by), calls(new, (3,)))
    for copied in (copy.copy(scaler), copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        for _ in range(4):
            copied.by = new(3)
            x = new(3)
            same((copied.scale(x), scaler.scale(x)), (x * copied.by, x * scaler.by))
    method = pickle.loads(pickle.dumps(scaler.scale))
    x = new(3)
    same(method(x), x * scaler.by)
    pair = copy.deepcopy((scaler, scaler.scale))
    assert pair[1] is pair[0].scale
    seen = weakref.ref(scaler)
    del scaler, copied, pair, method
    gc.collect()
    assert seen() is None


# -- pickles ----------------------------------------------------------------------------------------------------------


@segue.graph
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.steps = [doubled, segue.graph(tripled, min_hits=1), segue.graph(self.layer), segue.graph(self.plain)]

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_wrappers_are_pickled(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(doubled, protocol)) is doubled
    assert copy.copy(doubled) is copy.deepcopy(doubled) is doubled
    holder = Holder()
    again = pickle.loads(pickle.dumps(holder, protocol))
    x = torch.randn(2, 3)
    for _ in range(4):
        same(again(x), holder(x))
    assert again.steps[3]._function.__self__ is again and again.steps[2].module is again.layer
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(segue.graph(lambda x: x))


# -- a module ---------------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._scale = 2.0
        self._name = "gate"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._scale


class PlainGate:
    def __init__(self) -> None:
        self._scale = 2.0
        self._name = "gate"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._scale


@pytest.mark.parametrize("kind", [Gate, PlainGate])
def test_attributes_set_or_removed_through_a_wrapper_are_those_of_what_it_wraps(kind: Any, new: Any) -> None:
    gate = kind()
    step = segue.graph(gate)
    for scale in (2.0, 5.0, 7):
        step._scale = scale
        check_calls(step, lambda x: x * gate._scale, calls(new, (3,)))
        assert gate._scale == step._scale == scale
    step._name, step._buffer = "other", 1
    del step._buffer
    assert gate._name == step._name == "other" and not hasattr(gate, "_buffer")
    if kind is Gate:
        assert {"_scale", "report"} <= set(dir(step))
    with pytest.raises(AttributeError, match="attribute of the wrapper"):
        step._runner = None
    assert step(new(3)).shape == (3,)


def test_a_wrapped_container_is_one(new: Any) -> None:
    step = segue.graph(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh()))
    x = new(2, 4).cpu()
    for _ in range(3):
        same(step(x), step.module(x))
    assert (len(step), list(step), step[0]) == (3, list(step.module), step.module[0])
    step[0] = nn.Linear(4, 4)
    del step[2]
    step += nn.Sequential(nn.Sigmoid())
    assert len(step) == 3 and isinstance(step, nn.Sequential) and isinstance(step, type(segue.graph(nn.Linear(1, 1))))
    for again in (step, copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        for _ in range(3):
            same(again(x), step.module(x))
        assert len(again) == 3 and again.report().replays
    table = segue.graph(nn.ModuleDict({"a": nn.Linear(4, 4)}))
    assert "a" in table and list(table) == ["a"] and table["a"] is table.module["a"]  # type: ignore[index]
    with pytest.raises(TypeError, match="len"):
        len(segue.graph(nn.Linear(2, 2)))
    assert segue.graph(nn.Linear(2, 2))


def _weight_norm(m: Any) -> Any:
    return parametrizations.weight_norm(m)


def _prune(m: Any) -> Any:
    return prune.l1_unstructured(m, "weight", 0.5)


def _square(m: Any) -> Any:
    class Square(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w * w

    return parametrize.register_parametrization(m, "weight", Square())


@pytest.mark.parametrize("change", [_weight_norm, _prune, _square])
def test_torchs_utilities_change_a_module_through_its_wrapper(change: Callable[[Any], Any]) -> None:
    plain = nn.Linear(4, 4)
    step = segue.graph(copy.deepcopy(plain), inference=True)
    check_calls(step, plain, [((torch.randn(2, 4),), {}) for _ in range(3)])
    change(plain), change(step)
    check_calls(step, plain, [((torch.randn(2, 4),), {}) for _ in range(4)])
    assert parametrize.is_parametrized(step) == parametrize.is_parametrized(plain)


def test_a_wrapped_call_in_compiled_code_is_itself() -> None:
    layer = nn.Linear(4, 4)
    step = segue.graph(layer, inference=True)
    compiled = torch.compile(lambda x: step(x) + 1, backend="eager")
    for _ in range(4):
        x = torch.randn(2, 4)
        same(compiled(x), layer(x) + 1)
    assert step.report().replays == 2 and eager_reasons(step) == {"first_seen": 2}


class Outer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("read", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 4)), torch.fx.symbolic_trace])
def test_torchs_readers_of_programs_take_a_wrapped_child_as_the_module(read: Callable[..., Any]) -> None:
    layer = nn.Linear(4, 4)
    program = read(Outer(segue.graph(layer)))
    x = torch.randn(1, 4)
    same(program(x), layer(x) + 1)


# -- what is asked of it ---------------------------------------------------------------------------------------------------


class WithOptions(torch.nn.Module):
    def __call__(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale


def test_a_wrapper_has_the_signature_of_what_it_wraps() -> None:
    def f(x: torch.Tensor, /, *, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    for wrapped in (torch.nn.Linear(2, 2), WithOptions(), f):
        assert inspect.signature(segue.graph(wrapped)) == inspect.signature(wrapped)


def test_a_keyword_may_have_any_name(new: Any) -> None:
    step = segue.graph(lambda **named: named["self"] * 2)
    x = new(3)
    for _ in range(4):
        same(step(self=x), x * 2)
    assert step.report().replays == 2 and step.explain(self=x).is_replay
    same(step.eager(self=x), step.capture(self=x).output)


def test_an_unknown_option_is_told_with_those_there_are() -> None:
    with pytest.raises(TypeError, match=r"no option 'min_hit': there are backend, pad, outputs.*min_hits"):
        segue.graph(torch.nn.Linear(2, 2), min_hit=3)


def test_what_is_made_of_host_data_is_told_as_an_upload() -> None:
    array = np.ones(2, dtype=np.float32)
    for made in (lambda: torch.tensor([1.0, 2.0]), lambda: torch.as_tensor(array), lambda: torch.from_numpy(array)):
        step = segue.graph(lambda x, made=made: x + made())
        for _ in range(3):
            same(step(torch.ones(2)), torch.ones(2) + made())
        assert "host data is uploaded" in str(step.report()) and "reads tensor data" not in str(step.report())


# -- a wrapper inside another -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [None, "every:1"])
@pytest.mark.parametrize("in_break", [False, True])
def test_an_inner_wrapper_answers_as_it_says_in_every_call_of_the_outer(in_break: bool, verify: Any, new: Any) -> None:
    target = new(3)
    copied = segue.graph(lambda x: x * 2, outputs=segue.copy_to(target))
    leased = segue.graph(lambda x: x * 3, outputs="view")
    named = segue.graph(lambda x: x * 4, outputs=lambda y: {"y": y + 1})

    def forward(x: torch.Tensor) -> torch.Tensor:
        copied(x)
        return target + leased(x).value + named(x)["y"]

    inner = segue.eager_on_graph(forward) if in_break else forward
    outer = segue.graph(lambda x: inner(x) - 1, verify=verify)
    for _ in range(5):
        x = new(3)
        same(outer(x), x * 2 + x * 3 + (x * 4 + 1) - 1)
        same(target, x * 2)
    assert outer.report().replays == 3


def test_explain_says_what_a_call_does_when_a_weight_requires_grad_later(new: Any) -> None:
    weight = new(3)
    step = segue.graph(lambda x: x * weight)
    with torch.enable_grad():
        for is_trained in (False, False, False, True, False, True):
            weight.requires_grad_(is_trained)
            x, said, before = new(3), step.explain(new(3)), step.report().replays
            same(step(x).detach(), x * weight.detach())
            assert said.is_replay == step.report().replays - before and (said.reason is segue.Reason.AUTOGRAD) == is_trained
