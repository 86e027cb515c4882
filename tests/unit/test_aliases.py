"""Results that share memory with arguments or lasting tensors, beside eager: the objects, their flags and their memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import segue
from call_support import eager_reasons, same
from segue.device import Device
from segue.device.operations import operation
from segue.graph.tree import flatten

Body = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def flags(result: Any, *known: torch.Tensor) -> list[Any]:
    """Of each tensor of a result all that can be asked of it, and which of the `known` tensors and the results it is."""
    leaves = flatten(result)[0]
    return [
        (
            [leaf is t for t in (*known, *leaves)],
            leaf.stride(),
            leaf.requires_grad,
            leaf.is_inference(),
            leaf.is_conj(),
            leaf.is_neg(),
            [leaf.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in known],
        )
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def check(body: Body, make: Callable[[], tuple[torch.Tensor, ...]], held: tuple[torch.Tensor, ...] = ()) -> Any:
    """Runs `body` replayed and eagerly, each on arguments of its own: results, flags and aliasing must agree, and what the
    arguments hold after each result was written."""
    step = segue.graph(body)
    for _ in range(4):
        ours, theirs = make(), make()
        for a, b in zip(ours, theirs, strict=True):
            b.copy_(a)
        got, expected = step(*ours), body(*theirs)
        same(got, expected)
        assert flags(got, *ours, *held) == flags(expected, *theirs, *held)
        for a, b in zip(flatten(got)[0], flatten(expected)[0], strict=True):
            can_write = isinstance(b, torch.Tensor) and not b.is_inference() and 0 not in b.stride()
            if can_write and not any(b.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in held):
                with torch.set_grad_enabled(torch.is_grad_enabled() and not b.requires_grad):
                    a.mul_(2), b.mul_(2)
        same(ours, theirs)
    assert step.report().replays >= 2, step.report()
    return step


COMPLEX_VIEWS: dict[str, Body] = {
    "conj": lambda x: x.conj(),
    "mH": lambda x: x.mH,
    "a negative": lambda x: x.conj().imag,
    "conj twice": lambda x: x.conj().conj(),
    "a row of conj": lambda x: x.conj()[1:],
    "real": lambda x: x.real,
    "imag of mT": lambda x: x.mT.imag,
    "as real": torch.view_as_real,
    "both": lambda x: (x, x.conj(), x.detach()),
    "fresh conj": lambda x: (x * 1j).conj(),
    "fresh both": lambda x: (lambda y: (y, y.conj(), y.conj().imag))(x * 1j),
}


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("name", COMPLEX_VIEWS)
def test_a_complex_view_of_an_argument_is_eagers(name: str, is_strided: bool, device: Device) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        x = torch.randn(3, 2, dtype=torch.complex64, device=device.device)
        return (x.t() if is_strided else x,)

    check(COMPLEX_VIEWS[name], make)


@pytest.mark.parametrize("name", ["to complex", "to bytes", "a row to bytes"])
def test_a_view_as_another_dtype_of_an_argument_is_eagers(name: str, device: Device) -> None:
    body: Body = {
        "to complex": torch.view_as_complex,
        "to bytes": lambda x: x.view(torch.int32),
        "a row to bytes": lambda x: x[1].view(torch.int16),
    }[name]
    check(body, lambda: (torch.randn(3, 2, device=device.device),))


VIEWS: dict[str, Body] = {
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "a slice of all": lambda x: x[:],
    "view_as": lambda x: x.view_as(x),
    "transposed": lambda x: x.t(),
    "detached and transposed": lambda x: x.detach().t(),
    "expanded": lambda x: x[:1].expand(5, 3),
    "requiring grad": lambda x: x.detach().requires_grad_(),
    "empty": lambda x: x[:0],
    "what needs no copy": lambda x: (x.contiguous(), x.to(x.dtype), x.real, x.reshape(x.shape), x.flatten(0)),
    "all": lambda x: [x, x.detach(), x.t(), x],
}


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_argument_is_a_new_object_with_eagers_flags(
    name: str, requires_grad: bool, mode: str, device: Device
) -> None:
    if not (requires_grad and mode == "grad"):
        with MODES[mode]():
            check(VIEWS[name], lambda: (torch.randn(2, 3, device=device.device).requires_grad_(requires_grad),))


@pytest.mark.parametrize("outputs", ["clone", "view"])
@pytest.mark.parametrize("name", VIEWS)
def test_without_grad_inside_alone_views_are_what_they_are_in_eager(name: str, outputs: Any, device: Device) -> None:
    step = segue.graph(VIEWS[name], inference=True, outputs=outputs)
    eager = torch.no_grad()(VIEWS[name])
    with torch.enable_grad():
        for _ in range(4):
            x = torch.randn(2, 3, device=device.device, requires_grad=True)
            got, expected = step(x), eager(x)
            got = got.value if outputs == "view" else got
            same(got, expected)
            assert flags(got, x) == flags(expected, x)
    assert step.report().replays


def test_a_returned_view_may_be_written_with_grad_mode_on(device: Device) -> None:
    step = segue.graph(lambda x: x[:])
    weight = torch.ones(3, device=device.device, requires_grad=True)
    with torch.enable_grad():
        for _ in range(4):
            got = step(torch.randn(3, device=device.device))
            got.mul_(weight)
            assert got.requires_grad


def test_an_empty_argument_comes_back_as_itself(device: Device) -> None:
    check(lambda x, y: (x, y + 1), lambda: (torch.zeros(0, device=device.device), torch.randn(2, device=device.device)))


@pytest.mark.parametrize("second", [lambda x: x, lambda x: x[:], lambda x: x.detach()], ids=["same", "view", "detached"])
def test_of_two_arguments_over_one_memory_the_returned_one_comes_back(second: Body, device: Device) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        x = torch.randn(3, device=device.device)
        return x, second(x)

    check(lambda x, y: (y, x is y, x.add_(1)), make)


def test_what_is_done_to_a_returned_view_leaves_the_argument_alone(device: Device) -> None:
    step = segue.graph(lambda x: x[:])
    for _ in range(4):
        x = torch.randn(3, device=device.device)
        step(x).unsqueeze_(0)
        assert x.shape == (3,)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_lasting_tensor_comes_back_as_itself_and_its_views_as_new_objects(
    name: str, requires_grad: bool, device: Device
) -> None:
    weight = torch.randn(2, 3, device=device.device).requires_grad_(requires_grad)
    view = VIEWS[name]
    step = check(lambda x: (x + 1, view(weight)), lambda: (torch.randn(2, device=device.device),), (weight,))
    x = torch.randn(2, device=device.device)
    first, second = (flatten(step(x)[1])[0] for _ in range(2))
    again = flatten(view(weight))[0]
    assert [a is b for a, b in zip(first, second, strict=True)] == [a is weight for a in again]
    if first[0] is not weight:
        first[0].unsqueeze_(0)
        same(step(x)[1], view(weight))


def test_a_view_that_the_callable_keeps_comes_back_as_itself(device: Device) -> None:
    weight = torch.randn(2, 3, device=device.device)
    kept = weight.t()
    check(lambda x: (kept, x * kept), lambda: (torch.randn(2, device=device.device),), (weight, kept))


FRESH: dict[str, Body] = {
    "requiring grad": lambda x: (x * 2).detach().requires_grad_(),
    "one of two": lambda x: ((x * 2).requires_grad_(), x * 3),
    "in inference mode": torch.inference_mode()(lambda x: x * 2),
    "a view in inference mode": torch.inference_mode()(lambda x: (x * 2)[:, ::2]),
    "a gap": lambda x: (x * 2)[:, ::2],
    "expanded": lambda x: (x.sum()).expand(4),
    "one twice, and its views": lambda x: (lambda y: (y, y, y[:], y.detach(), y.t(), y))(x * 2),
    "a view twice": lambda x: (lambda y, z: (y, z, y))((x * 2).t(), x[:, 0]),
    "a view of an argument twice": lambda x: (lambda y: (y, y, x))(x.t()),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_result_has_eagers_flags(name: str, device: Device) -> None:
    check(FRESH[name], lambda: (torch.randn(2, 3, device=device.device),))


@pytest.mark.parametrize("rows", [3, 4])
def test_a_padded_call_returns_lasting_tensors_and_arguments_as_eager_does(rows: int, device: Device) -> None:
    weight = torch.randn(2, 3, device=device.device)

    def body(x: torch.Tensor) -> Any:
        return x, x * 2, weight, weight.t()

    step = segue.graph(body, pad={"x": segue.Pad(ladder=[4])})
    for _ in range(4):
        x = torch.randn(rows, 3, device=device.device)
        got, expected = step(x), body(x)
        same(got, expected)
        assert [f[0] for f in flags(got, x, weight)] == [f[0] for f in flags(expected, x, weight)]


@pytest.mark.parametrize("name", COMPLEX_VIEWS)
@pytest.mark.parametrize("source", ["argument", "buffer", "fresh"])
def test_a_break_returns_what_eager_would(name: str, source: str, device: Device) -> None:
    buffer = torch.randn(3, 2, dtype=torch.complex64, device=device.device)

    @segue.eager_on_graph
    def cut(x: torch.Tensor) -> Any:
        return COMPLEX_VIEWS[name]({"argument": x, "buffer": buffer, "fresh": x * 1}[source])

    def body(x: torch.Tensor) -> Any:
        y = x * 2
        leaves = flatten(cut(y))[0]
        shares = source == "argument"
        if shares:
            y.add_(1)
        return [leaf * 2 for leaf in leaves], y

    check(body, lambda: (torch.randn(3, 2, dtype=torch.complex64, device=device.device),))


def test_a_buffer_that_becomes_its_conjugate_is_noticed(device: Device) -> None:
    module = torch.nn.Module()
    module.register_buffer("factor", torch.randn(3, dtype=torch.complex64, device=device.device))
    step = segue.graph(lambda x: x * module.factor)
    for call in range(9):
        x = torch.randn(3, device=device.device)
        same(step(x), x * module.factor)
        if call in (3, 6):
            module.factor.data = module.factor.data.conj()
    assert step.report().captures == 3


# -- what a pass writes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [None, "first", "every:2"])
@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_running_statistics_are_written_once_a_call(verify: str | None, backend: str, device: Device) -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4, momentum=0.3))
    module = module.to(device.device)
    eager = copy.deepcopy(module)
    step = segue.graph(module, verify=verify, backend=backend)
    for _ in range(7):
        x = torch.randn(3, 4, device=device.device)
        torch.manual_seed(1)
        got = step(x)
        torch.manual_seed(1)
        same(got, eager(x))
        same(module.state_dict(), eager.state_dict())
    assert step.report().replays


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("shared", ["nothing", "a view", "the module's"])
def test_statistics_given_as_arguments_are_written_as_in_eager(is_training: bool, shared: str, device: Device) -> None:
    modules = [torch.nn.BatchNorm1d(4).to(device.device) for _ in range(2)]

    def body_of(module: torch.nn.Module) -> Body:
        def body(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
            return F.batch_norm(x, mean, var, training=is_training), module(x) + mean, mean.clone()

        return body

    step, eager = segue.graph(body_of(modules[0])), body_of(modules[1])
    for _ in range(5):
        x, mean, var = (torch.rand(*size, device=device.device) for size in ((3, 4), (4,), (4,)))
        answers = []
        for call, module in ((step, modules[0]), (eager, modules[1])):
            own = [mean.clone(), var.clone()]
            if shared == "a view":
                own[0] = own[1][:]
            elif shared == "the module's":
                own[0] = module.running_mean
            answers.append((call(x, *own), own, module.state_dict()))
        same(*answers)


UNDECLARED = [
    (op, overload)
    for op in ("native_batch_norm", "batch_norm_update_stats", "batch_norm_gather_stats")
    for overload in getattr(torch.ops.aten, op).overloads()
]


@pytest.mark.parametrize(("name", "overload"), UNDECLARED)
def test_writes_that_no_schema_declares_are_known(name: str, overload: str) -> None:
    op = operation(getattr(getattr(torch.ops.aten, name), overload))
    tensors = [torch.rand(4) for _ in range(5)]
    places = [a.name for a in op.overload._schema.arguments]
    args = [True if n == "training" else tensors[i] if i < 5 else 0.1 for i, n in enumerate(places)]
    args = args[: len([a for a in op.overload._schema.arguments if not a.kwarg_only])]
    statistics = [args[places.index("running_mean")], args[places.index("running_var")]]
    assert [t is s for t, s in zip(op.written(tuple(args), {}), statistics, strict=True)] == [True, True]


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda w: w.mul_(2),
    "through a view": lambda w: w[1:].mul_(2),
    "through a detached alias": lambda w: w.detach().mul_(2),
    "through .data": lambda w: w.data.mul_(2),
    "first seen, last not": lambda w: (w.mul_(2), w.data.mul_(2)),
    "by out=": lambda w: torch.mul(w, 2, out=w),
    "not at all": lambda w: w * 2,
}


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_autograd_notices_what_a_replay_writes_as_what_eager_writes(name: str, is_argument: bool, device: Device) -> None:
    def outcome(wrap: Callable[[Body], Any]) -> str:
        saved, other = torch.ones(4, device=device.device), torch.ones(4, device=device.device)

        def body(w: torch.Tensor) -> torch.Tensor:
            WRITES[name](w if is_argument else saved)
            return w + 1

        step = wrap(body)
        for _ in range(3):
            step(saved.clone() if is_argument else other)
        leaf = torch.ones(4, device=device.device, requires_grad=True)
        with torch.enable_grad():
            loss = (leaf * saved).sum()
        step(saved if is_argument else other)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)[:60]
        return "no error"

    assert outcome(segue.graph) == outcome(lambda body: body)


def test_running_statistics_may_be_written_between_forward_and_backward(device: Device) -> None:
    """Eager does not count these writes."""
    module = torch.nn.BatchNorm1d(4).to(device.device)
    step = segue.graph(module, inference=True)
    x = torch.randn(3, 4, device=device.device)
    for _ in range(3):
        step(x)
    with torch.enable_grad():
        loss = module(x.clone().requires_grad_()).sum()
    step(x)
    loss.backward()
    assert step.report().replays == 2


# -- what a pass does to an argument beside its data ------------------------------------------------------------------


def _twice(x: torch.Tensor) -> Any:
    x.t_()
    y = x * 2
    x.t_()
    return y


CHANGED: dict[str, Body] = {
    "t_": lambda x: x.t_() * 2,
    "unsqueeze_": lambda x: (x.unsqueeze_(0), x * 2),
    "requires_grad_": lambda x: (x.requires_grad_(), x.detach() * 2),
    "resize_": lambda x: x.resize_(2, 2) * 2,
    "as_strided_": lambda x: x.as_strided_((3, 2), (1, 3)) * 2,
    "set_": lambda x: x.set_(torch.ones(3, device=x.device)) * 2,
    ".data": lambda x: (setattr(x, "data", x.data.t()), x * 2),
    ".grad": lambda x: (setattr(x, "grad", torch.ones_like(x)), x * 2)[1],
    "an attribute": lambda x: (setattr(x, "tag", 5), x * 2)[1],
    "a write too": lambda x: (x.add_(1), x.t_(), x * 2),
    "apply_": lambda x: (x.apply_(lambda v: v * 2), x + 1)[1],
    "map_": lambda x: (x.map_(x * 3, lambda a, b: a + b), x + 1)[1],
    "nothing in the end": _twice,
}


@pytest.mark.parametrize("min_hits", [1, 2])
@pytest.mark.parametrize("name", CHANGED)
def test_what_a_pass_does_to_an_argument_beside_its_data_is_done_at_every_call(name: str, min_hits: int) -> None:
    step = segue.graph(CHANGED[name], min_hits=min_hits)
    for _ in range(5):
        ours = torch.randn(2, 3)
        theirs = ours.clone()
        got, expected = step(ours), CHANGED[name](theirs)
        same(got, expected)
        same(ours, theirs)
        assert flags(got, ours) == flags(expected, theirs)
        assert facts_but_places(ours) == facts_but_places(theirs)
    assert (step.report().replays > 0) == (name == "nothing in the end"), step.report()


def facts_but_places(t: torch.Tensor) -> Any:
    grad = None if t.grad is None else t.grad.tolist()
    return t.shape, t.stride(), t.storage_offset(), t.requires_grad, vars(t), grad


def test_a_mark_that_every_argument_has_already_is_noticed() -> None:
    step = segue.graph(CHANGED["an attribute"])
    x = torch.randn(3)
    for _ in range(80):
        step(x)
    other = torch.randn(3)
    same(step(other), other * 2)
    assert other.tag == 5


@pytest.mark.parametrize("name", ["t_", "requires_grad_", "an attribute"])
def test_a_padded_argument_that_a_pass_changes_beside_its_data_runs_eagerly(name: str) -> None:
    step = segue.graph(CHANGED[name], pad={"x": segue.Pad(ladder=[4])})
    for _ in range(4):
        ours = torch.randn(3, 3)
        theirs = ours.clone()
        same(step(ours), CHANGED[name](theirs))
        assert facts_but_places(ours) == facts_but_places(theirs)


@pytest.mark.parametrize("holder", ["argument", "weight"])
def test_forward_mode_differentiation_runs_eagerly(holder: str, device: Device) -> None:
    layer = torch.nn.Linear(3, 3).to(device.device)

    def body(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layer.weight).tanh()

    step = segue.graph(body)
    x = torch.randn(2, 3, device=device.device)
    for _ in range(3):
        same(step(x), body(x))
    with forward_ad.dual_level():
        given = x
        if holder == "argument":
            given = forward_ad.make_dual(x, torch.ones_like(x))
        else:
            dual = forward_ad.make_dual(layer.weight.detach(), torch.ones_like(layer.weight))
            del layer.weight
            layer.weight = dual
        for call in (step, segue.graph(body, min_hits=1)):
            got, expected = forward_ad.unpack_dual(call(given)), forward_ad.unpack_dual(body(given))
            same(got.primal, expected.primal)
            same(got.tangent, expected.tangent)
            assert expected.tangent is not None
    assert eager_reasons(step)["debug"] == 1
