"""The audit of many tensors and of hooks, and the shortcut past the key: cheap, and never stale."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import segue
from call_support import check_calls, eager_reasons, same
from segue._compat import storage_weakref
from segue.device import Device
from segue.graph.words import Watch


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Deep(torch.nn.Module):
    """More tensors than are asked one by one."""

    def __init__(self, depth: int = 50) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(depth)])
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x + self.get_buffer("shift")


def _weight(model: torch.nn.Module) -> torch.nn.Parameter:
    return model.layers[37].weight  # type: ignore[index,union-attr,return-value]


def _data(model: torch.nn.Module) -> None:
    _weight(model).data = torch.randn_like(_weight(model))


def _set(model: torch.nn.Module) -> None:
    _weight(model).set_(torch.randn_like(_weight(model)))  # type: ignore[call-overload]


def _swap(model: torch.nn.Module) -> None:
    torch.utils.swap_tensors(_weight(model), torch.nn.Parameter(torch.randn_like(_weight(model))))


def _moved_storage(model: torch.nn.Module) -> None:
    storage = _weight(model).untyped_storage()
    held = storage.clone()
    storage.resize_(0)
    torch.empty(1 << 12, device=held.device)
    storage.resize_(1 << 20)
    storage[: held.nbytes()].copy_(held) if storage.device.type == "cpu" else _weight(model).normal_()


def _other_buffer(model: torch.nn.Module) -> None:
    model.shift = model.get_buffer("shift") * 2


@pytest.mark.parametrize("rebind", [_data, _set, _swap, _moved_storage, _other_buffer])
def test_one_tensor_of_many_that_lies_elsewhere_is_noticed(rebind: Callable[[Any], None], device: Device, new: Any) -> None:
    model = Deep().to(device.device)
    step = segue.graph(model)
    check_calls(step, model, [((new(2, 4),), {}) for _ in range(4)])
    rebind(model)
    check_calls(step, model, [((new(2, 4),), {}) for _ in range(4)])
    assert eager_reasons(step)["rebound"] == 1 and step.report().captures == 2


def test_a_tensor_moved_within_its_storage_is_noticed(device: Device, new: Any) -> None:
    model = Deep().to(device.device)
    whole = new(64)
    _weight(model).data = whole[:16].view(4, 4)
    step = segue.graph(model)
    check_calls(step, model, [((new(2, 4),), {}) for _ in range(4)])
    _weight(model).data = whole[32:48].view(4, 4)
    check_calls(step, model, [((new(2, 4),), {}) for _ in range(3)])
    assert eager_reasons(step)["rebound"] == 1


def _nothing_else() -> bool:
    return True


def test_many_addresses_are_read_by_two_gathers_and_agree_with_data_ptr(device: Device) -> None:
    tensors = [torch.empty(n % 5 + 1, device=device.device)[n % 3 :] for n in range(200)]
    watch = Watch(tensors, [])
    assert watch.sees_tensors, "this build of torch lays tensors out otherwise: addresses are asked one by one"
    assert watch.hold(_nothing_else)
    for index in (0, 100, 199):
        before = tensors[index].data
        tensors[index].data = torch.empty_like(before)
        assert not watch.hold(_nothing_else)
        tensors[index].data = before
        assert watch.hold(_nothing_else)


def test_addresses_keep_no_memory_alive_and_notice_that_it_went(device: Device) -> None:
    tensors = [torch.nn.Parameter(torch.empty(1 << 10, device=device.device)) for _ in range(100)]
    watch = Watch(tensors, [])
    seen = storage_weakref(tensors[50])
    with torch.no_grad():
        tensors[50].data = torch.empty(1, device=device.device)
    assert seen.expired() and not watch.hold(_nothing_else)
    assert not watch.hold(_nothing_else)


# -- hooks ------------------------------------------------------------------------------------------------------------


def _double(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _halve(module: torch.nn.Module, args: Any) -> Any:
    return tuple(a / 2 for a in args)


HOOKS: list[Any] = [
    lambda m: m[1].register_forward_hook(_double),
    lambda m: m[1].register_forward_pre_hook(_halve),
    lambda m: m.register_forward_hook(_double),
    lambda m: torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1),
    lambda m: torch.nn.modules.module.register_module_forward_pre_hook(_halve),
]


@pytest.mark.parametrize("add", HOOKS)
def test_hooks_that_come_and_go_are_noticed(add: Any, device: Device, new: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)).to(device.device)
    step = segue.graph(model)
    made = [((new(2, 4),), {}) for _ in range(4)]
    check_calls(step, model, made)
    handle = add(model)
    try:
        check_calls(step, model, made)
    finally:
        handle.remove()
    check_calls(step, model, made)
    assert eager_reasons(step)["rebound"] == 2 and step.report().captures == 3


# -- the shortcut -----------------------------------------------------------------------------------------------------


def test_calls_that_look_alike_and_differ_elsewhere_are_told_apart(new: Any) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y.sum() + y

    step = segue.graph(f)

    def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole, square = new(8), new(2, 2)
        same_one = new(4)
        return [
            (new(4), new(4)),
            (same_one, same_one),
            (whole[:4], whole[2:6]),
            (whole[:4], whole[4:]),
            (new(8)[::2], new(4)),
            (square, square.t()),
            (new(2, 2), new(2, 2).t()),
            (new(4).double(), new(4).double()),
            (new(4), torch.nn.Parameter(new(4), requires_grad=False)),
        ]

    for _, made in itertools.product(range(3), [pairs(), pairs()]):
        for x, y in made * 2:
            check_calls(step, f, [((x, y), {})])
    assert step.report().replays > 40


def test_a_shortcut_holds_for_its_modes_alone(new: Any) -> None:
    seen = []

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_inference_mode_enabled())
        return x @ y

    step = segue.graph(f)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode):
        for _ in range(4):
            with mode():
                x, y = new(3, 3), new(3, 3)
                got = step(x, y)
                assert got.is_inference() == (mode is torch.inference_mode)
                same(got, x @ y)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        for _ in range(4):
            assert step(new(3, 3), new(3, 3)).dtype == torch.bfloat16
    with torch.enable_grad():
        x = new(3, 3).requires_grad_()
        assert step(x, new(3, 3)).requires_grad
    step.close()
    same(step(x, y), x @ y)
    assert eager_reasons(step)["disabled"] == 1 and step.report().replays == 0


# -- what was not there at the recording --------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "scale", 1)


class Holder:
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def go(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) * getattr(self, "scale", 1)

    __call__ = go


def times_five(x: torch.Tensor) -> torch.Tensor:
    return x * 5


@pytest.mark.parametrize(("name", "value"), [("scale", 4), ("forward", times_five)])
@pytest.mark.parametrize("inner", [False, True])
def test_an_attribute_that_a_module_gets_later_is_noticed(name: str, value: Any, inner: bool, new: Any) -> None:
    module = Scaled()
    whole = torch.nn.Sequential(module) if inner else module
    step = segue.graph(whole)
    x = new(3)
    for _ in range(4):
        same(step(x), x)
    setattr(module, name, value)
    for _ in range(4):
        same(step(x), whole(x))
    delattr(module, name)
    for _ in range(4):
        same(step(x), x)


@pytest.mark.parametrize("is_method", [False, True])
@pytest.mark.parametrize(("name", "value"), [("scale", 4), ("act", times_five)])
def test_an_attribute_that_an_object_gets_later_is_noticed(name: str, value: Any, is_method: bool, new: Any) -> None:
    holder = Holder()
    step = segue.graph(holder.go if is_method else holder)
    x = new(3)
    for _ in range(4):
        same(step(x), holder.go(x))
    setattr(holder, name, value)
    for _ in range(4):
        same(step(x), holder.go(x))


def test_a_dict_that_a_hook_fills_holds_what_eager_put_there(new: Any) -> None:
    model, seen = torch.nn.Sequential(torch.nn.Linear(2, 2)).to(new(1).device), {}
    model[0].register_forward_hook(lambda module, args, out: seen.__setitem__("out", out))
    step = segue.graph(model)
    for _ in range(5):
        x = new(1, 2)
        y = step(x)
        same(seen["out"], y)
        same(y, torch.nn.functional.linear(x, *model[0].parameters()))


def test_a_nested_tensor_runs_eagerly_whatever_was_called_before(new: Any) -> None:
    nested = torch.nested.nested_tensor([new(2), new(3)])
    for first in (True, False):
        step = segue.graph(lambda x: x + x)
        for _ in range(3 * first):
            step(new(3))
        for mine, theirs in zip(step(nested).unbind(), nested.unbind(), strict=True):
            same(mine, theirs + theirs)
        assert step.explain(nested).reason is segue.Reason.UNHASHABLE_ARGUMENT


class Shifted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._buffers.get("shift", 0)


def test_the_first_buffer_of_a_module_is_noticed(new: Any) -> None:
    module = Shifted()
    step = segue.graph(module)
    x = new(3)
    for _ in range(4):
        same(step(x), x)
    module.register_buffer("shift", torch.full((3,), 2.0, device=x.device))
    for _ in range(4):
        same(step(x), x + 2)
