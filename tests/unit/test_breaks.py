"""Eager breaks: the body runs once in a warm-up and once in a replay, never in a capture; whatever it returns goes on as in
eager; and what does not fit is an error that leaves the recording usable."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

import segue
from segue.backends import make_backend
from segue.errors import BreakOutputError, CaptureError, ReplayError
from segue.graph import Call, calling, current
from segue.memory.lane import Lane
from tests_support import check_against_eager, record, replay

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    tensor: torch.Tensor
    name: str
    inner: Any = None


WARM_UPS = {"breakable": 1, "tc_piecewise": 2}
"""How often a body runs before the capture: a compiler learns the breaks from a run of its own."""


@pytest.fixture(params=list(WARM_UPS))
def segmented(request: pytest.FixtureRequest) -> str:
    """The backends whose recordings break. The compiler of the second is the eager one, so that bits are comparable."""
    return str(request.param)


def brk(body: Callable[..., Any]) -> Callable[..., Any]:
    return segue.eager_on_graph(body)


def rand(lane: Lane, *size: int) -> torch.Tensor:
    return torch.randn(*size, device=lane.device.device)


# -- when the body runs ------------------------------------------------------------------------------------------------


def test_a_body_runs_once_in_the_trace_and_once_in_each_replay_and_never_in_capture(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)
    runs: list[str] = []

    @segue.eager_on_graph
    def body(y: torch.Tensor) -> torch.Tensor:
        runs.append("run")
        return y + 1

    def forward() -> torch.Tensor:
        return body(x * 2) * 3

    backend = make_backend(segmented, lane, compiler="eager")
    with torch.no_grad(), lane.exclusive():
        _, trace = backend.trace(forward)
        warm = WARM_UPS[segmented]
        assert len(runs) == warm
        recorded = backend.record(segue_key(), forward, trace)
        assert len(runs) == warm
    for n in range(warm + 1, warm + 4):
        assert torch.equal(replay(lane, recorded), (x * 2 + 1) * 3)  # type: ignore[arg-type]
        assert len(runs) == n


def segue_key() -> Any:
    from segue.shapes.key import ShapeKey

    return ShapeKey("call", 1)


@pytest.mark.parametrize(
    ("pattern", "segments", "breaks"),
    [("b", 0, 1), ("bb", 0, 2), ("sb", 1, 1), ("bs", 1, 1), ("sbs", 2, 1), ("sbbs", 2, 2), ("bsb", 1, 2), ("bbsbsbb", 2, 5)],
)
def test_first_last_and_adjacent_breaks_make_no_empty_segment(
    lane: Lane, segmented: str, pattern: str, segments: int, breaks: int
) -> None:
    x = rand(lane, 4, 4)
    body = brk(lambda y: y.sin() + 1)

    def forward() -> torch.Tensor:
        y = x
        for step in pattern:
            y = body(y) if step == "b" else y * 1.5 + 0.5
        return y

    recorded = record(lane, forward, segmented)
    assert (recorded.record.segments, recorded.record.breaks) == (segments, breaks)
    check_against_eager(lane, recorded, forward, [x])


def test_a_break_inside_a_break_is_part_of_it(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)
    inner = brk(lambda y: y * 2)
    outer = brk(lambda y: inner(y) + inner(y + 1))
    recorded = record(lane, lambda: outer(x + 1) - 1, segmented)
    assert recorded.record.breaks == 1
    check_against_eager(lane, recorded, lambda: outer(x + 1) - 1, [x])


def test_under_full_the_body_is_recorded_and_does_not_run_at_replay(lane: Lane) -> None:
    x = rand(lane, 4)
    runs = []

    @segue.eager_on_graph
    def body(y: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return y + 1

    recorded = record(lane, lambda: body(x) * 2, "full")
    assert len(runs) == 2
    check_against_eager(lane, recorded, lambda: (x + 1) * 2, [x])
    assert (len(runs), recorded.record.breaks, recorded.record.segments) == (2, 0, 1)


def test_outside_a_capture_the_mark_is_a_plain_call() -> None:
    result = object()
    assert brk(lambda: result)() is result
    assert segue.break_graph() is None


def test_break_graph_splits_and_does_nothing(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)

    def forward() -> torch.Tensor:
        y = x * 2
        segue.break_graph()
        return y + 1

    recorded = record(lane, forward, segmented)
    assert (recorded.record.segments, recorded.record.breaks) == (2, 1)
    check_against_eager(lane, recorded, forward, [x])


# -- what a body may return --------------------------------------------------------------------------------------------


def _container(y: torch.Tensor) -> Any:
    return {"a": y + 1, "b": [y * 2, (y - 1, 3)], "c": Pair(y.sum(), None), "d": Box(y * 3, "box", (y[0] * 1,))}


def _use_container(out: Any) -> torch.Tensor:
    assert out["b"][1][1] == 3 and out["d"].name == "box" and out["c"].right is None
    return out["a"] + out["b"][0] * out["b"][1][0] + out["c"].left + out["d"].tensor + out["d"].inner[0]


def _two_of_one_storage(y: torch.Tensor) -> Any:
    base = torch.zeros(8, 4, device=y.device)
    base[:4] = y
    return base[:4], base[2:6], base


def _use_shared(out: Any) -> Any:
    head, middle, base = out
    head.add_(1)
    middle.mul_(2)
    return head.clone(), middle.clone(), base.clone()


def _mixed_dtypes(y: torch.Tensor) -> Any:
    base = y[0, :3].clone()
    return base.view(torch.uint8), base, base[:1]


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda y: y @ y, lambda out: out + 1),
    "tuple": (lambda y: (y + 1, y * 2), lambda out: out[0] * out[1]),
    "nested containers": (_container, _use_container),
    "the argument": (lambda y: y.add_(1), lambda out: out * 2),
    "the argument twice": (lambda y: (y, y.mul_(2)), lambda out: out[0].add_(out[1])),
    "a view of the argument": (lambda y: y[1:, ::2], lambda out: out.add_(1) * 2),
    "a transposed view": (lambda y: y.t(), lambda out: out.contiguous() + 1),
    "bits of the argument": (lambda y: y.view(torch.int32), lambda out: out + 1),
    "two that share a storage": (_two_of_one_storage, _use_shared),
    "two of one storage, other dtypes": (_mixed_dtypes, lambda out: (out[0].clone(), out[1].add_(1).clone(), out[2] + 0)),
    "one tensor twice": (lambda y: (lambda z: (z, z))(y + 1), lambda out: (out[0].add_(1), out[1] * 1)),
    "expanded": (lambda y: y[:, :1].clone().expand(4, 6), lambda out: out + 1),
    "expanded, beside its base": (
        lambda y: (lambda z: (z, z.expand(4, 4)))(y[:, :1].clone()),
        lambda out: (out[0].add_(1).clone(), out[1] * 2),
    ),
    "overlapping windows": (lambda y: y.flatten().clone().unfold(0, 4, 2), lambda out: out * 2),
    "not contiguous": (lambda y: (y + 1).t(), lambda out: out.reshape(-1) * 2),
    "a strided piece of something fresh": (lambda y: (y + 1)[::2, 1::2], lambda out: out * 2),
    "empty": (lambda y: y[:0] + 1, lambda out: torch.cat([out, out]).sum()),
    "empty views of one storage": (lambda y: (lambda z: (z[:0], z, z[4:]))(y + 1), lambda out: torch.cat(out)),
    "a scalar tensor": (lambda y: y.sum(), lambda out: out * 2),
    "another dtype": (lambda y: (y > 0, y.argmax(1), y.half()), lambda out: (out[0].sum(), out[1] + 1, out[2] * 2)),
    "a list": (lambda y: list(y.unbind(0)), lambda out: torch.stack(out)),
    "a conjugate": (lambda y: torch.complex(y, y).conj(), lambda out: out.imag + 1),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_whatever_a_body_returns_goes_on_as_in_eager(lane: Lane, segmented: str, case: str) -> None:
    make, use = OUTPUTS[case]
    x = rand(lane, 4, 4)
    body = brk(make)

    def forward() -> Any:
        y = x * 2
        return use(body(y)), y.clone()

    recorded = record(lane, forward, segmented)
    assert recorded.record.breaks == 1
    check_against_eager(lane, recorded, forward, [x])


def test_plain_results_are_constants(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)

    @segue.eager_on_graph
    def body(y: torch.Tensor) -> Any:
        y.add_(1)
        return 3, 2.5, "text", None, float("nan"), torch.float32

    def forward() -> torch.Tensor:
        y = x * 2
        three, half, text, nothing, nan, dtype = body(y)
        assert text == "text" and nothing is None and nan != nan and dtype is torch.float32
        return y * three + half

    check_against_eager(lane, record(lane, forward, segmented), forward, [x])


class Cached:
    """A module-like holder whose break returns its own buffer."""

    def __init__(self, lane: Lane) -> None:
        self.cache = rand(lane, 6, 4)
        self.runs = 0

    @segue.eager_on_graph
    def write(self, row: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.cache[1] = row
        return self.cache

    @segue.eager_on_graph
    def part(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache[2] = row
        return self.cache[1:3], row + 1

    @segue.eager_on_graph
    def change(self) -> None:
        self.cache.mul_(2)


@pytest.mark.parametrize("inference", [False, True])
def test_a_cache_that_a_body_returns_is_that_cache_and_no_copy(lane: Lane, segmented: str, inference: bool) -> None:
    """What later segments write there shows in the cache, and what later breaks write there shows in the segments."""
    holder = Cached(lane)
    x = rand(lane, 4)

    def forward() -> Any:
        with torch.inference_mode(inference):
            whole = holder.write(x * 2)
            whole.add_(1)
            piece, fresh = holder.part(x)
            piece.mul_(3)
            holder.change()
            return whole.sum(0), piece + fresh

    recorded = record(lane, forward, segmented)
    check_against_eager(lane, recorded, forward, [x, holder.cache])
    assert holder.runs == WARM_UPS[segmented] + 3 * 2


def test_methods_get_their_own_object(lane: Lane, segmented: str) -> None:
    first, second = Cached(lane), Cached(lane)
    x = rand(lane, 4)

    def forward() -> torch.Tensor:
        return first.write(x).sum(0) + second.write(x + 1).sum(0) * 2

    check_against_eager(lane, record(lane, forward, segmented), forward, [x, first.cache, second.cache])


def test_a_function_with_out_writes_the_bridge_itself(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4, 4)
    given: list[bool] = []

    @segue.eager_on_graph
    def product(y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        given.append(out is not None)
        return torch.mm(y, y, out=out)

    def forward() -> torch.Tensor:
        return product(x + 1) * 2

    recorded = record(lane, forward, segmented)
    check_against_eager(lane, recorded, forward, [x], rounds=1)
    assert given == [False] * WARM_UPS[segmented] + [False, True]

    def positional() -> torch.Tensor:
        return product(x + 1, None) * 2

    check_against_eager(lane, record(lane, positional, segmented), positional, [x])


def test_out_given_by_the_caller_is_an_argument(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4, 4)

    @segue.eager_on_graph
    def product(y: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return torch.mm(y, y, out=out)

    def forward() -> torch.Tensor:
        buffer = torch.empty_like(x)
        return product(x + 1, out=buffer) * 2 + buffer

    check_against_eager(lane, record(lane, forward, segmented), forward, [x])


def test_containers_go_in_and_each_replay_gets_new_ones(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)

    @segue.eager_on_graph
    def body(parts: list[torch.Tensor], options: dict[str, Any], box: Box) -> torch.Tensor:
        assert len(parts) == 2 and options["scale"] == 2
        copied = list(parts)
        copied.append(box.tensor)
        return torch.stack(copied).sum(0) * options["scale"] + options["shift"]

    def forward() -> torch.Tensor:
        return body([x, x + 1], {"scale": 2, "shift": x * 3}, box=Box(x * 4, "b")) - 1

    check_against_eager(lane, record(lane, forward, segmented), forward, [x])


def _append(y: torch.Tensor, found: Any) -> None:
    found["list"].append(y + 1)


def _replace(y: torch.Tensor, found: Any) -> None:
    found["key"] = y + 1


def _remove(y: torch.Tensor, found: Any) -> None:
    found.pop("key")


@pytest.mark.parametrize("change", [_append, _replace, _remove])
def test_a_body_that_changes_its_container_is_refused_with_the_arguments_name(
    lane: Lane, segmented: str, change: Any
) -> None:
    """Capture does not run the body, so code behind it would go on with the old contents."""
    x = rand(lane, 4)
    body = brk(change)

    def forward() -> torch.Tensor:
        found: dict[str, Any] = {"list": [x], "key": x * 1}
        body(x, found)
        return torch.stack([*found["list"], found.get("key", x)])

    with pytest.raises(CaptureError, match="found"):
        record(lane, forward, segmented)
    assert torch.equal(replay(lane, record(lane, lambda: x * 2)), x * 2)


def test_the_live_call_reaches_the_body(lane: Lane, segmented: str) -> None:
    """Case F4: a metadata object that changes from call to call."""
    x = rand(lane, 4)
    body = brk(lambda y: y * current().batch["scale"] + len(current().args))
    with calling(Call(batch={"scale": 1})):
        recorded = record(lane, lambda: body(x) + 1, segmented)
    for scale in (2, 5):
        with calling(Call(args=(1, 2), batch={"scale": scale})):
            assert torch.equal(replay(lane, recorded), x * scale + 2 + 1)
    with pytest.raises(LookupError, match="outside a call"):
        current()


# -- what does not fit -------------------------------------------------------------------------------------------------


class Moody:
    """Returns `usual()` until told otherwise."""

    def __init__(self, usual: Callable[[torch.Tensor], Any]) -> None:
        self.answer = usual

    @segue.eager_on_graph
    def __call__(self, y: torch.Tensor) -> Any:
        return self.answer(y)


def _sum(value: Any) -> Any:
    leaves = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return sum(t.sum() for t in leaves)


MISFITS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any], str]] = {
    "shape": (lambda y: y + 1, lambda y: (y + 1)[:2], r"\[2\].*\[4\]"),
    "broadcastable shape": (lambda y: y + 1, lambda y: y[:1] + 1, r"\[1\].*\[4\]"),
    "dtype": (lambda y: y + 1, lambda y: (y + 1).double(), "float64.*float32"),
    "fewer results": (lambda y: (y + 1, y + 2), lambda y: (y + 1,), "structure"),
    "a list for a tuple": (lambda y: (y + 1,), lambda y: [y + 1], "list.*tuple"),
    "other keys": (lambda y: {"a": y + 1}, lambda y: {"b": y + 1}, "structure"),
    "a number": (lambda y: (y + 1, 3), lambda y: (y + 1, 4), "returned 4.*returned 3"),
    "a number's type": (lambda y: (y + 1, 1), lambda y: (y + 1, True), "True.*1"),
    "nothing for a tensor": (lambda y: y + 1, lambda y: None, "returned None"),
    "a tensor for nothing": (lambda y: None, lambda y: y + 1, "returned None"),
    "a fresh tensor for the argument": (lambda y: y.add_(1), lambda y: y + 1, "other memory"),
    "another view": (lambda y: y[:2], lambda y: y[1:3], "other memory"),
    "two storages for one": (lambda y: (lambda z: (z[:2], z[2:]))(y + 1), lambda y: (y[:2] + 1, y[2:] + 1), "share memory"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_result_that_does_not_fit_is_an_error_and_the_recording_stays_usable(
    lane: Lane, segmented: str, case: str
) -> None:
    usual, other, words = MISFITS[case]
    x = rand(lane, 4)
    moody = Moody(usual)

    def forward() -> Any:
        y = x * 2
        out = moody(y)
        return _sum((out, y)) + 1

    recorded = record(lane, forward, segmented)
    check_against_eager(lane, recorded, forward, [x], rounds=1)
    moody.answer = other
    with pytest.raises(BreakOutputError, match=words) as caught:
        replay(lane, recorded)
    assert "Moody.__call__" in str(caught.value)
    moody.answer = usual
    check_against_eager(lane, recorded, forward, [x])


def test_other_memory_for_a_lasting_tensor_is_an_error(lane: Lane, segmented: str) -> None:
    holder = Cached(lane)
    recorded = record(lane, lambda: holder.write(holder.cache[0] * 2) + 1, segmented)
    kept, holder.cache = holder.cache, rand(lane, 6, 4)
    with pytest.raises(BreakOutputError, match="a lasting tensor"):
        replay(lane, recorded)
    holder.cache = kept
    check_against_eager(lane, recorded, lambda: holder.write(holder.cache[0] * 2) + 1, [kept])


class Mishap(Exception):
    pass


def test_an_exception_in_a_body_arrives_unchanged_and_the_next_replay_works(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)
    moody = Moody(lambda y: y + 1)
    recorded = record(lane, lambda: moody(x * 2) * 3, segmented)
    mishap = Mishap("mine")

    def fail(y: torch.Tensor) -> Any:
        raise mishap

    usual, moody.answer = moody.answer, fail
    with pytest.raises(Mishap) as caught:
        replay(lane, recorded)
    assert caught.value is mishap and mishap.__cause__ is None and mishap.__context__ is None
    assert not lane.is_entered
    moody.answer = usual
    check_against_eager(lane, recorded, lambda: moody(x * 2) * 3, [x])


def test_an_exception_in_a_body_during_the_warm_up_arrives_unchanged(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)

    @segue.eager_on_graph
    def body(y: torch.Tensor) -> torch.Tensor:
        raise Mishap("mine")

    with pytest.raises(Mishap):
        record(lane, lambda: body(x) * 2, segmented)
    assert torch.equal(replay(lane, record(lane, lambda: x * 2)), x * 2)


def test_a_break_marked_inside_the_forward_pass_is_refused_with_advice(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)

    def forward() -> torch.Tensor:
        body = brk(lambda y: y + 1)
        return body(x) * 2

    with pytest.raises(CaptureError, match=r"mark it outside|cannot make one graph.*test_breaks.py"):
        record(lane, forward, segmented)


def test_a_changed_plain_argument_is_named(lane: Lane, segmented: str) -> None:
    """Case F4: an undeclared scalar that a replay would see with its captured value."""
    x = rand(lane, 4)
    length = [3]
    loose = brk(lambda y, layer, length: y * length)
    declared = segue.eager_on_graph(lambda y, layer, length: y * length, static=("length",))

    def two_traces(body: Callable[..., Any]) -> tuple[Any, Any]:
        backend = make_backend(segmented, lane, compiler="eager")
        traces = []
        for n in (3, 4):
            length[0] = n
            with torch.no_grad():
                traces.append(backend.trace(lambda: body(x, 0, length=length[0]) + 1)[1])
        return traces[0], traces[1]

    before, after = two_traces(loose)
    with pytest.raises(CaptureError, match=r"argument length was 3 and then 4.*segue\.current"):
        before.check_scalars(after)
    before.check_scalars(before)
    before, after = two_traces(declared)
    before.check_scalars(after)


def test_options_that_name_no_parameter_are_a_misuse() -> None:
    for option in ("static", "writes"):
        with pytest.raises(ValueError, match=rf"{option}=.*'cash'.*no such parameter"):
            segue.eager_on_graph(**{option: ("cash",)})(lambda cache: None)
    segue.eager_on_graph(static=("a",), writes=("b",))(lambda a, b: None)
    segue.eager_on_graph(static=("anything",))(lambda **kwargs: None)


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["none", "no_grad", "inference_mode", "autocast"])
@pytest.mark.parametrize("inner", ["none", "no_grad", "inference_mode", "autocast"])
def test_bodies_run_under_the_modes_of_the_call_and_of_the_pass(lane: Lane, segmented: str, outer: str, inner: str) -> None:
    device = lane.device.kind
    x, weight = rand(lane, 4, 4), rand(lane, 4, 4)
    seen: list[tuple[bool, bool, bool]] = []

    def mode(name: str) -> Any:
        if name == "autocast":
            return torch.autocast(device, dtype=torch.bfloat16)
        return {"none": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[name]()

    @segue.eager_on_graph
    def body(y: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device)))
        return (y @ weight).float()

    def forward() -> torch.Tensor:
        first = body(x * 2)
        with mode(inner):
            second = body(first + 1)
        return first @ weight + second

    def call(run: Callable[[], Any]) -> Any:
        with mode(outer):
            return run().clone()

    backend = make_backend(segmented, lane, compiler="eager")
    with mode(outer), lane.exclusive():
        _, trace = backend.trace(forward)
        recorded = backend.record(segue_key(), forward, trace)
    for _ in range(2):
        x.normal_()
        seen.clear()
        expected = call(forward)
        with lane.exclusive():
            got = call(recorded.replay)
        assert torch.equal(got, expected) and got.dtype == expected.dtype
        assert seen[:2] == seen[2:]


def test_replay_under_another_grad_mode_than_capture(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4, 4)
    moody = Moody(lambda y: (y + 1, y.mul_(2)))
    recorded = record(lane, lambda: _sum(moody(x + 1)), segmented)
    expected = _sum(moody(x + 1))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode(), lane.exclusive():
            assert torch.equal(recorded.replay(), expected)


def test_a_device_context_of_the_caller_reaches_the_body(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)
    kinds = []

    @segue.eager_on_graph
    def body(y: torch.Tensor) -> torch.Tensor:
        kinds.append(torch.empty(1).device.type)
        return y + 1

    with torch.device("meta"):
        recorded = record(lane, lambda: body(x) * 2, segmented)
        replay(lane, recorded)
    assert kinds == ["meta"] * (WARM_UPS[segmented] + 1)


# -- lanes, closing ----------------------------------------------------------------------------------------------------


def test_a_replay_inside_a_replay_of_the_same_lane_is_an_error_and_both_stay_usable(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)
    inner = record(lane, lambda: x + 1)
    moody = Moody(lambda y: y * 2)
    outer = record(lane, lambda: moody(x) + 1, segmented)
    usual, moody.answer = moody.answer, lambda y: replay(lane, inner)
    with pytest.raises(ReplayError, match="inside another one of the same lane"):
        replay(lane, outer)
    moody.answer = usual
    check_against_eager(lane, inner, lambda: x + 1, [x])
    check_against_eager(lane, outer, lambda: moody(x) + 1, [x])


def test_a_replay_in_a_break_in_another_lane_is_fine(lane: Lane, segmented: str) -> None:
    x = rand(lane, 4)
    other = Lane(lane.device)
    inner = record(other, lambda: x * 5)
    moody = Moody(lambda y: replay(other, inner) + y)
    outer = record(lane, lambda: moody(x * 2) + 1, segmented)
    check_against_eager(lane, outer, lambda: x * 5 + x * 2 + 1, [x])
    other.close()


def test_a_closed_recording_says_so(lane: Lane) -> None:
    x = rand(lane, 4)
    recorded = record(lane, lambda: x + 1)
    recorded.close()
    with pytest.raises(ReplayError, match="closed"):
        recorded.recording.replay()


def test_named_steps_replay_as_others_do(lane: Lane, segmented: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEGUE_NVTX puts a profiler's range around each step, where there is a profiler to see it."""
    monkeypatch.setenv("SEGUE_NVTX", "1")
    x = torch.randn(4, device=lane.device.device)
    plus_one = segue.eager_on_graph(lambda y: y + 1)
    run = record(lane, lambda: plus_one(x * 2) * 3, segmented)
    for _ in range(2):
        x.normal_()
        torch.testing.assert_close(replay(lane, run), (x * 2 + 1) * 3, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["result", "argument"])
def test_a_sparse_tensor_at_a_break_is_refused_clearly_and_the_call_answers(side: str, lane: Lane) -> None:
    x = torch.eye(4, device=lane.device.device)
    if side == "result":
        body = segue.eager_on_graph(lambda y: y.to_sparse())

        def forward(x: torch.Tensor) -> torch.Tensor:
            return body(x * 2).to_dense() + 1
    else:
        body = segue.eager_on_graph(lambda s: s.to_dense())
        sparse = x.to_sparse()

        def forward(x: torch.Tensor) -> torch.Tensor:
            return body(sparse) * 2 * x + 1

    with pytest.raises(CaptureError, match="sparse_coo tensor"):
        record(lane, lambda: forward(x), "breakable")
    step = segue.graph(forward)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(step(x), forward(x))
    assert step.report().eager == {"first_seen": 1, "capture_failed": 2}
    assert "sparse_coo" in str(step.report())
