"""What users change about a callable between two calls, beside its weights: the answer is eager's, from the next call on."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import segue
from call_support import same
from segue.graph.guard import is_capturing
from segue.graph.versions import dict_tag

needs_versions = pytest.mark.skipif(dict_tag() is None, reason="seen where dicts have versions (docs/safety.md)")

ACTIVATION: Any = torch.relu
SCALE = 2.0


class Equal(torch.nn.Module):
    """Equal by its settings, whatever its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))

    def __eq__(self, other: object) -> bool:
        return type(other) is Equal

    __hash__ = torch.nn.Module.__hash__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Child(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.delta: Any = None
        self.note = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.delta is None else self.linear(x) + self.delta


class Twice(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child()
        self.equal = Equal()
        self.table = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Tanh()})
        self.extra: list[Any] = []
        self.act: Any = torch.relu
        self.combine: Any = operator.add
        self.dtype: Any = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.equal(self.child(x))
        for layer in self.table.values():
            y = layer(y)
        for layer in self.extra:
            y = layer(y) if callable(layer) else y + layer
        return (self.combine(self.act(y), ACTIVATION(y * SCALE))).to(self.dtype)


def _attribute(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model, name, value)


def _global(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: globals().__setitem__(name, value)


def _reordered(model: Model) -> None:
    model.table["a"] = model.table.pop("a")


def _hooked_and_trained(model: Model) -> None:
    model.child.linear.eval()


def _moved_attribute(model: Model) -> None:
    del model.child.note
    model.child.forward = lambda x: x * 3


ANYWHERE: dict[str, Callable[[Model], None]] = {
    "another builtin": _attribute("act", torch.tanh),
    "a function for a builtin": _attribute("act", F.gelu),
    "another operator": _attribute("combine", operator.mul),
    "another dtype": _attribute("dtype", torch.float64),
    "a global builtin": _global("ACTIVATION", torch.tanh),
    "a global number": _global("SCALE", 3.0),
    "an equal child": lambda model: setattr(model, "equal", Equal()),
    "another order": _reordered,
    "one more module": lambda model: model.extra.append(torch.nn.Linear(4, 4)),
    "one more tensor": lambda model: model.extra.append(torch.ones(4)),
    "another class": lambda model: setattr(model.child.linear, "__class__", Twice),
    "a hook that asks whether it trains": _hooked_and_trained,
}
WITH_VERSIONS: dict[str, Callable[[Model], None]] = {
    "a tensor for None": lambda model: setattr(model.child, "delta", torch.ones(4)),
    "made again": lambda model: model.child.linear.__init__(4, 4),  # type: ignore[misc]
    "another's state": lambda model: model.child.linear.__setstate__(vars(torch.nn.Linear(4, 4)).copy()),  # type: ignore[operator]
    "another table": lambda model: setattr(
        model.child.linear, "_parameters", dict(torch.nn.Linear(4, 4).named_parameters())
    ),
    "another table of modules": lambda model: setattr(
        model.table, "_modules", dict(reversed(list(model.table._modules.items())))
    ),
    "no hooks": lambda model: setattr(model.child.linear, "_forward_hooks", OrderedDict()),
    "a forward for an attribute": _moved_attribute,
}
CHANGES = [pytest.param(change, id=name) for name, change in ANYWHERE.items()]
CHANGES += [pytest.param(change, id=name, marks=needs_versions) for name, change in WITH_VERSIONS.items()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("more", [0, 30])
def test_a_change_shows_at_the_next_call(
    change: Callable[[Model], None], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a few modules, and with many, which are looked at in another way."""
    for name in ("ACTIVATION", "SCALE"):
        monkeypatch.setitem(globals(), name, globals()[name])
    torch.manual_seed(1)
    model, x = Model(), torch.randn(32, 4)
    model.child.linear.register_forward_hook(lambda module, args, output: output * (3 if module.training else 5))
    for n in range(more):
        model.add_module(f"unused{n}", torch.nn.Linear(4, 4))
    with segue.graph(model, inference=True) as step, torch.no_grad():
        for _ in range(3):
            same(step(x), model(x))
        assert step.report().replays
        before = model(x)
        change(model)
        after = model(x)
        assert after.dtype != before.dtype or not torch.equal(after, before), "the change is one"
        for _ in range(4):
            same(step(x), model(x))


class Holder(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


@pytest.mark.parametrize("is_child", [False, True])
@pytest.mark.parametrize("kind", ["compiled", "scripted", "traced"])
@pytest.mark.filterwarnings("ignore")
def test_modules_that_other_tools_wrapped_answer_as_eager(kind: str, is_child: bool) -> None:
    linear, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    made: Any = {
        "compiled": lambda: torch.compile(linear, backend="eager"),
        "scripted": lambda: torch.jit.script(linear),
        "traced": lambda: torch.jit.trace(linear, x),
    }[kind]()
    model = Holder(made) if is_child else made
    with segue.graph(model, inference=True) as step, torch.no_grad():
        for _ in range(4):
            same(step(x), model(x))
        assert step.report().replays == (2 if kind == "compiled" else 0)
        assert kind == "compiled" or "TorchScript" in str(step.report())
        linear.weight.mul_(2)
        same(step(x), model(x))
        linear.weight.data = torch.randn(4, 4)
        for _ in range(3):
            same(step(x), model(x))


class Waiting(torch.nn.Linear):
    """Lets another thread change it while it is captured."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.is_captured, self.is_changed = threading.Event(), threading.Event()
        self.early = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.early(x)
        if is_capturing() and not self.is_changed.is_set():
            self.is_captured.set()
            assert self.is_changed.wait(20)
        return super().forward(y)


def _new_data(model: Waiting) -> None:
    model.weight.data = torch.ones(4, 4)


MEANWHILE: dict[str, Callable[[Waiting], None]] = {
    "weight": lambda model: setattr(model, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "early": lambda model: setattr(model, "early", torch.nn.Linear(4, 4)),
    "data": _new_data,
    "hook": lambda model: model.early.register_forward_hook(lambda module, args, output: output * 2),
}


@pytest.mark.parametrize("name", list(MEANWHILE))
def test_what_another_thread_changes_during_a_capture_stays_and_shows(name: str) -> None:
    model, x = Waiting(), torch.randn(3, 4)

    def change() -> None:
        assert model.is_captured.wait(20)
        MEANWHILE[name](model)
        model.is_changed.set()

    before = model(x)
    thread = threading.Thread(target=change)
    thread.start()
    with segue.graph(model, inference=True) as step, torch.no_grad():
        step(x)
        same(step(x), before)
        thread.join()
        after = model(x)
        assert not torch.equal(after, before), "nobody put it back"
        for _ in range(4):
            same(step(x), after)
        assert step.report().replays


class Unreadable(list[int]):
    is_broken = True

    def __iter__(self) -> Any:
        if self.is_broken:
            raise RuntimeError("not now")
        return super().__iter__()


class Breaking(torch.nn.Module):
    """Holds a list that cannot be read, from the start or from a call on."""

    def __init__(self, breaks_at: int) -> None:
        super().__init__()
        self.calls, self.breaks_at, self.notes = 0, breaks_at, Unreadable([1])
        self.notes.is_broken = breaks_at == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.notes.is_broken = self.calls >= self.breaks_at
        return x + 1


@pytest.mark.parametrize("breaks_at", [0, 2])
def test_a_container_that_cannot_be_read_is_a_reason_and_no_error(breaks_at: int) -> None:
    model, x = Breaking(breaks_at), torch.randn(3, 4)
    with segue.graph(model, inference=True) as step:
        for n in range(1, 4):
            same(step(x), x + 1)
            assert model.calls == n, "the body ran once"
        assert step.report().eager["capture_failed"] and "not now" in str(step.report())


class Remembering(torch.nn.Module):
    """Notes the last shape when it is another."""

    last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is None or self.last != x.shape:
            self.last, self.count = x.shape, len(x)
        return x * 2


def test_sizes_that_a_child_remembers_do_not_undo_each_other_s_recordings() -> None:
    model = torch.nn.Sequential(Remembering(), torch.nn.Linear(4, 4))
    with segue.graph(model, inference=True) as step, torch.no_grad():
        for _ in range(6):
            for rows in (2, 3, 5):
                x = torch.randn(rows, 4)
                same(step(x), model(x))
        assert step.report().captures <= 4, "the first attribute of its own is one more recording"
        assert step.report().replays >= 10


def test_a_number_further_down_is_part_of_the_recording() -> None:
    """As docs/safety.md says: it may count calls, and each would be another recording."""
    model, x = torch.nn.Sequential(Child(), Child()), torch.randn(3, 4)
    with segue.graph(model, inference=True) as step:
        for n in range(5):
            model[0].note = n
            step(x)
        assert step.report().captures == 1 and step.report().replays == 3
