"""`segue.graph` beside eager: what it wraps, keys, arguments, outputs, control."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import segue
from call_support import check_calls, eager_reasons, same
from segue.device import Device
from segue.errors import CaptureNotAllowed, ConfigError, LeaseError, StrictModeError


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def calls(new: Any, *sizes: tuple[int, ...], n: int = 5) -> list[Any]:
    return [(tuple(new(*size) for size in sizes), {}) for _ in range(n)]


# -- what it wraps ----------------------------------------------------------------------------------------------------


def test_a_function_replays_from_its_third_call_on(new: Any) -> None:
    step = segue.graph(lambda x, y: (x @ y).relu())
    check_calls(step, lambda x, y: (x @ y).relu(), calls(new, (3, 4), (4, 2)))
    report = step.report()
    assert (report.replays, report.captures, dict(report.eager)) == (3, 1, {"first_seen": 2})
    assert report.to_dict()["graphs"][0]["hits"] == 3
    assert "call[3 tokens" in str(report)


def test_a_decorator_keeps_the_signature(new: Any) -> None:
    @segue.graph(min_hits=1)
    def scaled(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
        """Scales."""
        return x * by

    assert scaled.__name__ == "scaled" and scaled.__doc__ == "Scales."
    assert list(inspect.signature(scaled).parameters) == ["x", "by"]
    x = new(3)
    for by in (2.0, 3.0, 2.0):
        same(scaled(x, by=by), x * by)
    assert scaled.report().captures == 2


def test_a_method_has_recordings_for_each_object_and_none_keeps_it_alive(new: Any) -> None:
    class Scaler:
        def __init__(self, by: torch.Tensor) -> None:
            self.by = by

        @segue.graph
        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    objects = [Scaler(new(3)) for _ in range(2)]
    for _ in range(4):
        for scaler in objects:
            x = new(3)
            same(scaler.scale(x), x * scaler.by)
    assert objects[0].scale.report().replays == 2 and objects[0].scale is objects[0].scale
    copied = copy.deepcopy(objects[0])
    same(copied.scale(x), x * copied.by)
    assert copied.scale.report().replays == 0
    seen = weakref.ref(objects[0])
    del objects[0], scaler
    gc.collect()
    assert seen() is None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.randn(3))

    @segue.graph
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def test_copies_of_an_object_do_not_share_its_methods_recordings(new: Any) -> None:
    model = Model()
    x = torch.randn(3)
    for _ in range(3):
        same(model.step(x), x * model.by)
    for copied in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.by = torch.nn.Parameter(torch.randn(3))
        copied._parameters = dict(copied._parameters)
        for _ in range(3):
            same(copied.step(x), x * copied.by)
        assert copied.step.report().replays == 1
    whole = segue.graph(torch.nn.Linear(2, 2))
    again = pickle.loads(pickle.dumps(whole))
    same(again(torch.ones(1, 2)), whole(torch.ones(1, 2)))


def test_a_modules_attributes_pass_through(device: Device, new: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(device.device)
    step = segue.graph(model)
    check_calls(step, model, calls(new, (2, 4)))
    assert step.module is model
    assert [n for n, _ in step.named_parameters()] == ["0.weight", "0.bias"]
    step.note = 3
    assert model.note == 3
    assert step.eager(new(2, 4)).shape == (2, 4)
    with pytest.raises(AttributeError):
        _ = step.no_such_thing
    with pytest.raises(AttributeError, match="not a module"):
        _ = segue.graph(lambda x: x).module


def test_what_cannot_be_wrapped_or_asked_is_refused() -> None:
    with pytest.raises(TypeError, match="callables"):
        segue.graph(3)
    for options in (
        {"backend": "fast"},
        {"max_graphs": 0},
        {"verify": "often"},
        {"outputs": "steal"},
        {"pad": {"z": segue.Pad(ladder=[1])}},
        {"pad": segue.Pad(ladder=[1])},
        {"pad": {"x": [1, 2]}},
        {"strict": "no"},
        {"inference": "false"},
    ):
        with pytest.raises(ConfigError):
            segue.graph(lambda x: x, **options)
    for pad in ({"ladder": 4}, {"ladder": "48"}, {"ladder": [4], "dim": True}, {"ladder": [4], "dim": -1}):
        with pytest.raises(ConfigError, match=r"ladder|dim"):
            segue.Pad(**pad)
    with pytest.raises(ValueError, match="holds no tensor"):
        segue.copy_to(3)
    with pytest.raises(TypeError):
        segue.graph(lambda x: x, speed=11)
    for arguments in ((), (1, 2)):
        with pytest.raises(TypeError, match="argument"):
            segue.graph(lambda x: x).explain(*arguments)


async def a_coroutine(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def a_generator(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x + 1


class Later(torch.nn.Module):
    forward = a_coroutine


@pytest.mark.parametrize("later", [a_coroutine, a_generator, functools.partial(a_generator), Later()])
def test_what_runs_after_its_call_returned_is_refused(later: Any) -> None:
    with pytest.raises(TypeError, match="runs after its call has returned"):
        segue.graph(later)


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, torch.empty, torch.rand])
def test_an_empty_tensor_that_is_made_inside_is_recorded(device: Device, new: Any, make: Any) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        none = make(0, 3, device=device.device)
        return x * 2, none, torch.cat([x, none]), none.sum(1)

    step = segue.graph(f)
    check_calls(step, f, calls(new, (2, 3)))
    assert step.report().replays == 3


def test_plain_values_count_by_type_and_value(new: Any) -> None:
    def f(x: torch.Tensor, n: Any) -> Any:
        return x * 2, type(n).__name__, n

    step = segue.graph(f)
    x = new(2)
    values = [1, True, 1.0, "1", None, -0.0, 0.0, float("nan"), (1, "a"), 1]
    for _ in range(3):
        for value in values:
            got, expected = step(x, value), f(x, value)
            assert repr(got[1:]) == repr(expected[1:])
    assert step.report().captures == 9


def test_shape_dtype_and_layout_are_told_apart(new: Any) -> None:
    step = segue.graph(lambda x: (x.sum(0), x.t()))
    square = new(4, 4)
    variants = [
        square,
        square.t(),
        square.double(),
        new(4, 3),
        square.t().contiguous(),
        new(8, 4)[::2],
        new(4, 1).expand(4, 4),
    ]
    for _ in range(3):
        for x in variants:
            got, expected = step(x), (x.sum(0), x.t())
            same(got, expected)
            assert 0 in x.stride() or got[1].stride() == expected[1].stride()


def test_objects_without_a_value_run_eagerly(new: Any) -> None:
    step = segue.graph(lambda x, o: x + len(str(o)) * 0)
    for other in (object(), [object()], torch.Generator(), slice(1), {1, 2}):
        for _ in range(3):
            step(new(2), other)
    reasons = eager_reasons(step)
    assert reasons.pop("first_seen", 0) <= 4 and reasons["unhashable_argument"] >= 9


def test_modes_are_part_of_the_key(device: Device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to(device.device)
    step = segue.graph(model)
    x = torch.randn(4, 8, device=device.device)
    for _ in range(4):
        for training in (True, False):
            model.train(training)
            torch.manual_seed(7)
            expected = model(x)
            torch.manual_seed(7)
            same(step(x), expected)
        with torch.autocast(device.kind, dtype=torch.bfloat16):
            same(step(x), model(x))
        with torch.inference_mode():
            same(step(x), model(x))
        torch.set_default_dtype(torch.float64)
        try:
            same(step(x), model(x))
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_submodules_training_flag_is_seen(device: Device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(1.0)).to(device.device).eval()
    step = segue.graph(model)
    x = torch.randn(4, 8, device=device.device)
    for _ in range(3):
        assert step(x).abs().sum() > 0
    model[1].train()
    for _ in range(4):
        assert step(x).abs().sum() == 0
    assert eager_reasons(step)["rebound"] == 1


def test_grad_mode_runs_eagerly_unless_told_otherwise(device: Device) -> None:
    model = torch.nn.Linear(4, 4).to(device.device)
    x = torch.randn(2, 4, device=device.device)
    with torch.enable_grad():
        step = segue.graph(model)
        for _ in range(3):
            step(x).sum().backward()
        assert eager_reasons(step) == {"autograd": 3} and model.weight.grad is not None
        step = segue.graph(model, inference=True)
        for _ in range(3):
            assert not step(x).requires_grad
        assert step.report().replays == 1
        weight = torch.randn(4, 4, device=device.device, requires_grad=True)
        hidden = segue.graph(lambda x: x @ weight)
        for _ in range(4):
            assert hidden(x).requires_grad
        assert eager_reasons(hidden)["autograd"] == 3


# -- arguments --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: Any


class Named(NamedTuple):
    a: torch.Tensor
    b: int


def test_every_leaf_of_nested_arguments_is_refreshed(new: Any) -> None:
    def f(pair: Pair, *rest: Any, named: Named, table: dict[str, Any]) -> Any:
        return Pair(pair.left + rest[0][0], {"n": named.a * named.b}), [table["x"][1] - pair.right["y"]]

    step = segue.graph(f)
    made = [
        (
            (Pair(new(3), {"y": new(3)}), [new(3)]),
            {"named": Named(new(2), 5), "table": {"x": (None, new(3))}},
        )
        for _ in range(5)
    ]
    check_calls(step, f, made)
    assert step.report().replays == 3


def test_presence_and_spelling_of_arguments_are_part_of_the_key(new: Any) -> None:
    def f(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x if mask is None else x * mask

    step = segue.graph(f)
    for _ in range(4):
        x, mask = new(4), new(4)
        for args, kwargs in (
            ((x,), {}),
            ((x, mask), {}),
            ((x,), {"mask": mask}),
            ((), {"mask": mask, "x": x}),
            ((x, None), {}),
        ):
            same(step(*args, **kwargs), f(*args, **kwargs))
    assert step.report().captures == 5


def test_writes_into_arguments_reach_the_caller(new: Any) -> None:
    def f(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state[1:].mul_(0.5).add_(x)
        return state.sum() + x

    step = segue.graph(f)
    check_calls(step, f, calls(new, (3, 2), (2,)))
    state, eager = new(3, 2), None
    eager = state.clone()
    for _ in range(4):
        x = new(2)
        same(step(state, x), f(eager, x))
        same(state, eager)
    part, whole = new(6, 4), None
    whole = part.clone()
    for _ in range(3):  # a view of something larger
        x = new(2)
        same(step(part[::2, 1:3], x), f(whole[::2, 1:3], x))
        same(part, whole)
    assert step.report().captures >= 1


def test_one_tensor_passed_twice_stays_one(new: Any) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a.add_(1)
        return a * b, b - a

    step = segue.graph(f)
    for _ in range(4):
        x, y = new(3), new(3)
        for args in ((x, x), (x, y)):
            ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
            same(step(*ours), f(*theirs))
            same(ours, theirs)
    assert step.report().captures == 2


def test_overlapping_arguments_replay_where_nothing_is_written(new: Any) -> None:
    step = segue.graph(lambda a, b: a + b)
    for _ in range(4):
        base = new(6)
        same(step(base[:4], base[2:]), base[:4] + base[2:])
    assert step.report().replays == 2

    def write(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    step = segue.graph(write)
    for _ in range(4):
        base = new(6)
        theirs = base.clone()
        same(step(base[:4], base[2:]), write(theirs[:4], theirs[2:]))
        same(base, theirs)
    assert eager_reasons(step)["aliased_inputs"] == 3


def test_an_argument_that_is_part_of_written_state_runs_eagerly(device: Device) -> None:
    cache = torch.zeros(4, device=device.device)

    def f(x: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return x * 2

    step = segue.graph(f)
    for _ in range(3):
        step(torch.ones(4, device=device.device))
    for _ in range(3):  # kinds of their own
        cache.zero_()
        same(step(cache), torch.full((4,), 2.0, device=device.device))
        same(step(cache[:]), torch.full((4,), 4.0, device=device.device))
    assert eager_reasons(step)["aliased_inputs"] == 2


def test_tensors_of_other_devices_run_eagerly(new: Any) -> None:
    step = segue.graph(lambda x, y: y.shape[0])
    for _ in range(3):
        assert step(new(2), torch.empty(3, device="meta")) == 3
    assert eager_reasons(step) == {"other_device": 3}


def test_no_argument_and_no_result_is_kept_alive(new: Any) -> None:
    body = segue.eager_on_graph(lambda y, o: (y + 1, o[0]))
    step = segue.graph(lambda x, options: body(x * 2, options["t"])[0] - 1)
    seen = []
    for _ in range(4):
        x, other = new(3), new(2)
        y = step(x, {"t": [other]})
        seen += [weakref.ref(t) for t in (x, other, y)]
        del x, other, y
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)
    assert step.report().replays == 2


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_returned_arguments_and_lasting_tensors_are_those_themselves(device: Device, new: Any) -> None:
    state = torch.zeros(3, device=device.device)

    def f(x: torch.Tensor) -> Any:
        state.add_(x)
        y = x * 2
        return x, x[1:], state, y, y, y[:2]

    step = segue.graph(f)
    for _ in range(4):
        x = new(3)
        got = step(x)
        assert got[0] is x and got[1].data_ptr() == x[1:].data_ptr()
        assert got[2].data_ptr() == state.data_ptr()
        assert got[3] is got[4]
        got[3].zero_()
        assert got[5].abs().sum() == 0
    assert step.report().replays == 2


def test_results_keep_their_strides(new: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        return y.t(), (y + 1)[:, :1].expand(4, 6), (y + 2)[::2], (y + 3)[:, 1:]

    step = segue.graph(f)
    for _ in range(4):
        x = new(4, 6)
        got, expected = step(x), f(x)
        same(got, expected)
        assert [g.stride() for g in got] == [e.stride() for e in expected]


def test_a_lease_ends_with_the_next_replay(new: Any) -> None:
    step = segue.graph(lambda x: {"y": x * 2}, outputs="view")
    xs = [new(3) for _ in range(4)]
    leases = []
    for x in xs:
        lease = step(x)
        same(lease.value, {"y": x * 2})
        leases.append((lease, lease.clone()))
    assert [lease.is_valid for lease, _ in leases] == [True, True, False, True]
    with pytest.raises(LeaseError, match="next replay"):
        _ = leases[2][0].value
    for (_, copied), x in zip(leases, xs, strict=True):
        same(copied, {"y": x * 2})
    leases[3][0].record_stream(None if x.device.type == "cpu" else torch.cuda.current_stream())
    step(xs[0])


def test_copy_to_answers_in_the_callers_memory(device: Device, new: Any) -> None:
    target = {"y": torch.empty(3, device=device.device)}
    step = segue.graph(lambda x: {"y": x * 2}, outputs=segue.copy_to(target))
    for _ in range(4):
        x = new(3)
        assert step(x) is target
        same(target["y"], x * 2)
    with pytest.raises(ValueError, match="does not fit"):
        step(new(4))


def test_copy_to_refuses_what_is_no_tensor_and_is_not_what_its_target_holds(new: Any) -> None:
    target = {"y": new(3), "n": 1}
    step = segue.graph(lambda x, n: {"y": x * n, "n": n}, outputs=segue.copy_to(target))
    x = new(3)
    for _ in range(4):
        same(step(x, 1), {"y": x, "n": 1})
    for _ in range(4):
        with pytest.raises(ValueError, match=r"returned 2 where its target holds 1.*return it as a tensor"):
            step(x, 2)
    same(target, {"y": x, "n": 1})


def test_an_earlier_output_may_come_back_as_an_argument(new: Any) -> None:
    for outputs in ("clone", "view"):
        step = segue.graph(lambda x: x * 0.5 + 1, outputs=outputs)
        x = new(4)
        expected = x.clone()
        for _ in range(5):
            got = step(x)
            x = got.value if outputs == "view" else got
            expected = expected * 0.5 + 1
            same(x, expected)


# -- control ----------------------------------------------------------------------------------------------------------


def test_capture_records_now_and_explain_runs_nothing(new: Any) -> None:
    ran = []

    def f(x: torch.Tensor) -> torch.Tensor:
        ran.append(1) if len(ran) < 0 else None
        return x + 1

    step = segue.graph(f)
    x = new(3)
    assert step.explain(x).reason is segue.Reason.FIRST_SEEN
    report = step.capture(x)
    same(report.output, x + 1)
    assert len(report.records) == 1 and report.pool_bytes >= 0 and "call[3" in str(report)
    decision = step.explain(x)
    assert decision.is_replay and "replays" in str(decision)
    assert step.report().replays == 0
    same(step(x), x + 1)
    assert not step.capture(x).records


def test_freeze_and_close(new: Any) -> None:
    step = segue.graph(lambda x: x + 1)
    for _ in range(3):
        step(new(3))
    step.freeze()
    for _ in range(3):
        step(new(4))
    step(new(3))
    assert eager_reasons(step) == {"first_seen": 3, "not_captured": 2} and step.report().replays == 2
    with pytest.raises(CaptureNotAllowed, match="freeze"):
        step.capture(new(5))
    with step:
        pass
    x = new(3)
    same(step(x), x + 1)
    assert eager_reasons(step)["disabled"] == 1 and not step.report().rows


def test_disabled_nests(new: Any) -> None:
    step = segue.graph(lambda x: x + 1)
    for _ in range(3):
        step(new(3))
    with segue.disabled():
        with segue.disabled():
            step(new(3))
        step(new(3))
    step(new(3))
    assert eager_reasons(step)["disabled"] == 2 and step.report().replays == 2


def test_a_wrapped_call_inside_another_runs_inline(new: Any) -> None:
    inner = segue.graph(lambda x: x * 2)
    outer = segue.graph(lambda x: inner(x) + inner(x + 1))
    check_calls(outer, lambda x: x * 2 + (x + 1) * 2, calls(new, (3,)))
    assert outer.report().replays == 3 and inner.report().replays == 0

    @segue.eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    around = segue.graph(lambda x: body(x + 1) - 1)
    check_calls(around, lambda x: (x + 1) * 2 - 1, calls(new, (3,)))


def test_strict_mode_raises_with_the_reason(new: Any) -> None:
    step = segue.graph(lambda x, o: x + 1, strict=True)
    with pytest.raises(StrictModeError, match="unhashable_argument"):
        step(new(2), object())
    step = segue.graph(lambda x: x * x.sum().item(), strict=True)
    step(new(2))
    with pytest.raises(StrictModeError, match="data_dependent"):
        step(new(2))


def test_breaks_see_the_live_call_and_write_through(new: Any) -> None:
    @segue.eager_on_graph
    def body(y: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(y)
        return y * segue.current().args[2]["scale"].item()

    def f(x: torch.Tensor, state: torch.Tensor, options: dict[str, torch.Tensor]) -> torch.Tensor:
        return body(x + 1, state[1:]) * 2

    step = segue.graph(f)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for i in range(5):
                x, state, options = new(3), new(4), {"scale": torch.full((), float(i), device=new(1).device)}
                expected_state = state.clone()
                expected_state[1:] += x + 1
                same(step(x, state, options), (x + 1) * i * 2)
                same(state, expected_state)
    report = step.report()
    assert report.replays == 6 and all(row.record.breaks == 1 for row in report.rows)


@pytest.mark.parametrize("backend", ["full", "breakable", "disabled"])
def test_every_backend_answers_alike(backend: str, new: Any) -> None:
    body = segue.eager_on_graph(lambda y: y.exp())
    step = segue.graph(lambda x: body(x * 2) + 1, backend=backend)
    check_calls(step, lambda x: (x * 2).exp() + 1, calls(new, (5,)))
    assert (step.report().replays == 0) == (backend == "disabled")


def test_a_callable_without_tensors_among_its_arguments(device: Device) -> None:
    model = torch.nn.Linear(2, 2).to(device.device)
    model.forward = lambda n: model.weight * n  # type: ignore[method-assign]
    step = segue.graph(model)
    for _ in range(3):
        same(step(3), model.weight * 3)
    assert step.report().replays == 1


# -- random numbers, verification --------------------------------------------------------------------------------------


def test_random_draws_are_eagers(new: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    step = segue.graph(f)
    for seed in (1, 2, 3, 4, 4):
        x = new(64)
        torch.manual_seed(seed)
        expected = [f(x), f(x), torch.rand(3)]
        torch.manual_seed(seed)
        same([step(x), step(x), torch.rand(3)], expected)


def test_a_generator_in_a_closure_draws_as_in_eager() -> None:
    ours, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    step = segue.graph(lambda x: x + torch.rand(3, generator=ours))
    for _ in range(5):
        x = torch.randn(3)
        same(step(x), x + torch.rand(3, generator=theirs))
    assert step.report().replays == 3


@pytest.mark.parametrize(("verify", "expected"), [("first", 1), ("every:2", 2)])
def test_verification_counts_and_leaves_eagers_state(verify: str, expected: int, device: Device, new: Any) -> None:
    total = torch.zeros(3, device=device.device)

    def f(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        x.mul_(2)
        return total + torch.rand_like(x)

    step = segue.graph(f, verify=verify)
    for seed in range(6):
        x, before = new(3), total.clone()
        torch.manual_seed(seed)
        draws = torch.rand_like(x)
        torch.manual_seed(seed)
        given = x.clone()
        same(step(given), before + x + draws)
        same((given, total), (x * 2, before + x))
    row = step.report().rows[0]
    assert row.verified == expected and not row.unverified


def test_verification_finds_a_stale_value_and_drops_the_recording(new: Any) -> None:
    class Scale:
        value = 2.0  # a class attribute: not seen at each call

    step = segue.graph(lambda x: x * Scale.value, verify="every:1")
    for _ in range(3):
        x = new(3)
        same(step(x), x * 2)
    Scale.value = 3.0
    for _ in range(4):
        x = new(3)
        same(step(x), x * 3)
    assert eager_reasons(step)["mismatch"] == 4 and not step.report().rows


def test_what_a_break_writes_must_be_named_to_be_verified(new: Any) -> None:
    body = segue.eager_on_graph(lambda y: y + 1)
    step = segue.graph(lambda x: body(x) * 2, verify="first")
    check_calls(step, lambda x: (x + 1) * 2, calls(new, (3,)))
    assert "writes" in step.report().rows[0].unverified


@segue.eager_on_graph(writes=("total",))
def _adding(x: torch.Tensor, total: torch.Tensor, unit: int = 1) -> torch.Tensor:
    total.add_(x * unit)
    return total * 1


@segue.eager_on_graph(writes=("total", "unit"))
def _adding_by_default(x: torch.Tensor, total: torch.Tensor, unit: int = 1) -> torch.Tensor:
    return _adding.__wrapped__(x, total, unit)  # type: ignore[attr-defined]


WRITING: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "positional": lambda x, c: _adding(x * 1, c),
    "keyword": lambda x, c: _adding(total=c, x=x * 1),
    "a view": lambda x, c: _adding(x[1:] * 1, c[1:]),
    "also read": lambda x, c: _adding(x * 1, c) + c,
    "also written": lambda x, c: (c.mul_(1), _adding(x * 1, c), c.add_(1))[1],
    "in a list": lambda x, c: _adding_listed([x * 1, c]),
    "a name left to its default": lambda x, c: _adding_by_default(x * 1, c),
}


@segue.eager_on_graph(writes=("both",))
def _adding_listed(both: list[torch.Tensor]) -> torch.Tensor:
    both[1].add_(both[0])
    return both[1] * 1


@pytest.mark.parametrize("verify", ["every:1", "every:2", "first"])
@pytest.mark.parametrize("name", WRITING)
def test_what_a_break_writes_is_written_once_while_replays_are_verified(name: str, verify: str, new: Any) -> None:
    ours = new(3).zero_()
    theirs = ours.clone()
    step = segue.graph(lambda x: WRITING[name](x, ours), verify=verify)
    for _ in range(6):
        x = new(3)
        same(step(x), WRITING[name](x, theirs))
        same(ours, theirs)
    row = step.report().rows[0]
    assert not row.unverified and row.verified >= 1 and "mismatch" not in eager_reasons(step)


class _Held(torch.nn.Module):
    """Multiplies by whatever `held` makes of an input."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.held, tuple):
            return x * self.held[0]
        return x * (self.held(x) if callable(self.held) else self.held)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 3), (5, 3)),
        (_double, torch.relu),
        (_double, lambda x: x - 1),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
    ],
    ids=["tuple of numbers", "function", "lambda", "int to float", "int to bool", "sign of zero"],
)
def test_a_rebound_attribute_of_any_kind_is_noticed(before: Any, after: Any, new: Any) -> None:
    model = _Held(before)
    step = segue.graph(model)
    x = torch.arange(1, 5) if isinstance(before, int) else new(4)
    for _ in range(4):
        same(step(x), model(x))
    model.held = after
    for _ in range(4):
        got, expected = step(x), model(x)
        same(got, expected)
        assert got.dtype == expected.dtype and torch.equal(torch.signbit(got.float()), torch.signbit(expected.float()))


def test_a_tuple_of_tensors_that_is_replaced_is_noticed(new: Any) -> None:
    model = _Held((new(4),))
    step = segue.graph(model)
    x = new(4)
    for _ in range(4):
        same(step(x), model(x))
    model.held = (new(4),)
    for _ in range(4):
        same(step(x), model(x))


def test_weights_behind_a_nested_wrapper_are_audited(device: Device, new: Any) -> None:
    layer = torch.nn.Linear(4, 4, device=device.device)
    inner = segue.graph(layer, inference=True)
    outer = segue.graph(lambda x: inner(x) + 1, inference=True)
    x = new(3, 4)
    for _ in range(4):
        outer(x)
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight))
    with torch.no_grad():
        for _ in range(3):
            same(outer(x), layer(x) + 1)


@pytest.mark.parametrize("view", [lambda x: x[1:], lambda x: x.t(), lambda x: x.view(-1), lambda x: x], ids=str)
def test_a_view_of_a_padded_argument_comes_back(view: Any, new: Any) -> None:
    step = segue.graph(lambda x: (view(x), x * 2), pad={"x": segue.Pad(ladder=[4, 8])})
    for rows in (3, 3, 3, 2, 4, 3):
        x = new(rows, 3)
        _, doubled = step(x)
        same(doubled, x * 2)


# -- a wrapped module inside another ----------------------------------------------------------------------------------


class Parent(torch.nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.inner = wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x))


@pytest.mark.parametrize("is_recorded_too", [False, True])
def test_a_wrapped_module_in_an_attribute_is_a_child_of_its_parent(is_recorded_too: bool, device: Device, new: Any) -> None:
    plain, parent = Parent(lambda m: m).eval(), Parent(segue.graph).eval()
    assert isinstance(parent.inner, torch.nn.Module)
    assert list(parent.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in parent.named_parameters()] == [n for n, _ in plain.named_parameters()]
    parent.load_state_dict(plain.state_dict())
    plain.to(device.device), parent.to(device.device)
    outer = segue.graph(parent) if is_recorded_too else parent
    inner = parent.inner
    for _ in range(4):
        x = new(3, 4)
        same(outer(x), plain(x))
    assert (outer if is_recorded_too else inner).report().replays == 2
    new_state = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    new_state["inner.1.running_var"].abs_()
    for model in (plain, parent):
        model.load_state_dict({k: v.clone() for k, v in new_state.items()}, assign=True)
    for _ in range(4):
        x = new(3, 4)
        same(outer(x), plain(x))
    assert inner.training is False and parent.train() is parent and inner.training and inner.module[1].training
    assert inner.eval() is inner and not inner.module.training
    parent.double()
    assert all(p.dtype == torch.float64 for p in inner.parameters())
    x = new(2, 4).double()
    same(parent(x), plain.double()(x))
    assert len(torch.nn.Sequential(segue.graph(torch.nn.Linear(2, 2)))) == 1
    again = copy.deepcopy(parent)
    assert isinstance(again.inner, type(inner)) and again.inner.module is not inner.module


def test_a_wrapped_module_keeps_what_its_class_overrides(new: Any) -> None:
    class Own(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state

        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    step = segue.graph(Own(3, 3))
    assert step.state_dict()["_extra_state"] == {"calls": 3}
    step.load_state_dict(step.state_dict())
    assert step.module.loaded == {"calls": 3}
    assert not step.train().training
    seen: list[int] = []
    handle = step.register_forward_hook(lambda *_: seen.append(1))
    step.eager(torch.ones(1, 3))
    handle.remove()
    assert seen == [1]
    same(step.forward(torch.ones(1, 3)), step.module(torch.ones(1, 3)))
