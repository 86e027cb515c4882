"""Passes that go another way when they are recorded than in the call before, breaks that are met inside a context of the
pass's, and bodies that later do otherwise. The plain function, with state of its own, is the oracle."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import segue
from call_support import eager_reasons, same
from segue.device import Device
from segue.errors import BreakOutputError, BreakStateError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    with torch.no_grad():
        yield
    torch.set_default_dtype(dtype)


class Lazy(torch.nn.Module):
    """Does `first` in the call of that number and before, `then` afterwards."""

    def __init__(self, then: Callable[[Any, torch.Tensor], Any], number: int = 1) -> None:
        super().__init__()
        self.then, self.number, self.way = then, number, 0
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> Any:
        if self.way < self.number:
            self.way += 1
            return x * 2
        return self.then(self, x)


def rebind(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept = m.kept + x
    return m.kept * 1


def seeding(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.rand(3)


def dtype_setting(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return x * 2


def grad_setting(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(True)
    return x.detach() * 2


THEN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "writes the argument": lambda m, x: x.add_(1),
    "writes a view": lambda m, x: (x[1:].mul_(3), x * 1)[1],
    "writes .data": lambda m, x: (x.data.add_(2), x * 1)[1],
    "returns the argument": lambda m, x: x,
    "writes a buffer": lambda m, x: (m.kept.add_(x), m.kept * 1)[1],
    "binds a buffer": rebind,
    "draws": lambda m, x: x + torch.rand(3),
    "seeds": seeding,
    "sets the dtype": dtype_setting,
    "sets the grad mode": grad_setting,
    "does less": lambda m, x: x + 0,
    "does more": lambda m, x: (x * 2) * 3,
}


@pytest.mark.parametrize("how", ["capture", "min_hits", "later", "verified"])
@pytest.mark.parametrize("name", THEN)
def test_a_pass_that_goes_another_way_when_it_is_recorded_is_eagers(name: str, how: str) -> None:
    number = 2 if how in ("later", "verified") else 1
    ours, theirs = (Lazy(THEN[name], number) for _ in range(2))
    step = segue.graph(ours, min_hits=2 if number == 2 else 1, verify="every:2" if how == "verified" else None)
    for turn in range(6):
        results = []
        x = torch.randn(3)
        for run in (theirs, step.capture if how == "capture" and turn == 0 else step):
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(False)
            torch.manual_seed(7 + turn)
            argument = x.clone()
            result = run(argument)
            result = getattr(result, "output", result)
            state = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(2).tolist())
            results.append((result, argument, (result is argument, *state)))
        same(results[1][:2], results[0][:2])
        assert results[1][2] == results[0][2]
        same(ours.kept, theirs.kept)
    torch.set_grad_enabled(False)
    if name in ("writes the argument", "does less", "does more", "draws", "writes a buffer"):
        assert step.report().replays >= 2 and set(eager_reasons(step)) <= {"first_seen", "rebound"}, step.report()


def test_what_changes_before_a_capture_in_the_background_counts() -> None:
    class Switching(torch.nn.Module):
        in_place = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2 if self.in_place else (x + 1) * 2

    model = Switching()
    model.in_place = False
    with segue.graph(model, capture="background") as step:
        step(torch.zeros(2)), step(torch.zeros(2))
        model.in_place = True  # perhaps before the capture has begun
        deadline = time.monotonic() + 20
        while step.report().replays < 3 and time.monotonic() < deadline:
            x = torch.zeros(2)
            same(step(x), torch.full((2,), 2.0))
            same(x, torch.ones(2))
            time.sleep(0.02)
        assert step.report().replays >= 3


# -- what is held around a break --------------------------------------------------------------------------------------


class Context:
    metadata = 1.0

    def __init__(self) -> None:
        self.metadata = 1.0
        self.table = {"scale": 1.0}
        self.items = [1.0]


HELD = Context()


class AddsToProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + 100 if func is torch.mul else result


class AddsToProductsBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + 100 if func is torch.ops.aten.mul.Tensor else result


@contextlib.contextmanager
def attribute() -> Iterator[None]:
    before, HELD.metadata = HELD.metadata, 3.0
    try:
        yield
    finally:
        HELD.metadata = before


@contextlib.contextmanager
def entry() -> Iterator[None]:
    HELD.table["scale"] = 3.0
    yield
    HELD.table["scale"] = 1.0


@contextlib.contextmanager
def pushed() -> Iterator[None]:
    HELD.items.append(3.0)
    yield
    HELD.items.pop()


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "an attribute": attribute,
    "an entry of a dict": entry,
    "an item of a list": pushed,
    "a default dtype": default_dtype,
    "deterministic algorithms": deterministic,
    "a function mode": AddsToProducts,
    "a dispatch mode": AddsToProductsBelow,
}


@segue.eager_on_graph
def told(x: torch.Tensor) -> torch.Tensor:
    scale = HELD.metadata * HELD.table["scale"] * HELD.items[-1]
    flag = 5.0 if torch.are_deterministic_algorithms_enabled() else 1.0
    return torch.mul(x, scale * flag) + torch.zeros(1).element_size()


def inside(context: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    with context():
        return told(x + 1) * 2


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_break_is_met_in_what_the_pass_holds_around_it(name: str) -> None:
    step = segue.graph(lambda x: inside(CONTEXTS[name], x))
    for turn in range(5):
        x = torch.full((2,), float(turn))
        same(step(x), inside(CONTEXTS[name], x))
    assert step.report().replays == 0 and {"unsafe_effects", "capture_failed"} & set(eager_reasons(step))
    detail = step.report().refused[0][2]
    assert "told" in detail and (name in detail or name.startswith(("an attribute", "an entry", "an item")))


CARRIED: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "inference mode": torch.inference_mode,
    "grad mode": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "what stays": lambda: setattr(HELD, "metadata", 2.0) or contextlib.nullcontext(),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_a_replay_carries_or_stays_is_recorded(name: str) -> None:
    HELD.metadata = 2.0
    step = segue.graph(lambda x: inside(CARRIED[name], x))
    for turn in range(5):
        x = torch.full((2,), float(turn))
        same(step(x), inside(CARRIED[name], x))
    assert step.report().replays == 3, step.report()
    HELD.metadata = 1.0


# -- bodies that later do otherwise -----------------------------------------------------------------------------------


def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.clone()
    return y, y


def overlapping(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.cat([x, x])
    return y[:2], y[1:3]


FLIPS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "a clone, then the argument": (lambda x: x.clone(), lambda x: x),
    "a clone, then a view": (lambda x: x.clone(), lambda x: x[:]),
    "the argument, then a clone": (lambda x: x, lambda x: x.clone()),
    "two, then one": (lambda x: (x.clone(), x.clone()), twice),
    "one, then two": (twice, lambda x: (x.clone(), x.clone())),
    "two, then overlapping": (lambda x: (x.clone(), x.clone()), overlapping),
    "two, then one of the argument": (lambda x: (x.clone(), x.clone()), lambda x: (x.clone(), x)),
    "overlapping, then one of the argument": (overlapping, lambda x: (x, x)),
}


@pytest.mark.parametrize("name", FLIPS)
def test_memory_that_a_body_returns_later_is_compared(name: str, device: Device) -> None:
    early, late = FLIPS[name]
    turns = itertools.count()

    def body(x: torch.Tensor) -> Any:
        return (late if next(turns) == 3 else early)(x)

    def written(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
        result = run(x)
        first = result[0] if isinstance(result, tuple) else result
        first.add_(10)
        return pytree_of(result)

    marked = segue.eager_on_graph(body)
    step, raised = segue.graph(lambda x: written(marked, x)), 0
    for turn in range(6):
        x = torch.full((2,), float(turn), device=device.device)
        ours = x.clone()
        try:
            got = step(ours)
        except BreakOutputError as error:
            raised += 1
            assert turn == 3 and "body" in str(error)
            continue
        same(got, written(early, x))
        same(ours, x)
    assert raised == 1


def pytree_of(result: Any) -> Any:
    return tuple(t * 1 for t in result) if isinstance(result, tuple) else result * 1


def test_one_tensor_that_a_break_returns_twice_stays_one(device: Device) -> None:
    marked = segue.eager_on_graph(twice)
    step = segue.graph(lambda x: (*marked(x + 1), marked(x)))
    for _ in range(4):
        x = torch.randn(3, device=device.device)
        a, b, (c, d) = step(x)
        same((a, c), (x + 1, x))
        assert a is b and c is d and a is not c
    assert step.report().replays == 2


def test_an_argument_that_a_body_turns_at_a_replay_is_an_error_and_no_later_result_is_wrong(device: Device) -> None:
    turns = itertools.count()

    @segue.eager_on_graph
    def turning(x: torch.Tensor) -> torch.Tensor:
        y = (x * 1).contiguous()
        if next(turns) == 3:
            x.t_()
        return y

    step = segue.graph(lambda x: turning(x) * 2)
    for turn in range(7):
        x = torch.randn(2, 2, device=device.device)
        expected = x * 2
        if turn == 3:
            with pytest.raises(BreakStateError):
                step(x)
        else:
            same(step(x), expected)
    assert step.report().replays >= 3


# -- sizes as values, verified breaks, pads by position, counts -------------------------------------------------------


@segue.eager_on_graph
def sized(x: torch.Tensor, size: Any = None) -> Any:
    return x.shape if size is None else (x.reshape(size), size)


SIZED: dict[str, Callable[[torch.Tensor], Any]] = {
    "returned": lambda x: (x * 2, x.shape),
    "alone in a container": lambda x: {"shape": x.shape, "x": x + 1},
    "of a break": lambda x: (x * sized(x).numel(), sized(x)),
    "given to a break": lambda x: sized(x + 1, torch.Size((x.numel(),))),
    "given to a break in a list": lambda x: sized(x + 1, size=[x.numel()])[0] * 2,
}


@pytest.mark.parametrize("name", SIZED)
def test_a_size_stays_a_size(name: str, device: Device) -> None:
    step = segue.graph(SIZED[name])
    for _ in range(4):
        x = torch.randn(2, 3, device=device.device)
        got, expected = step(x), SIZED[name](x)
        same(got, expected)
        leaves = [got.values(), expected.values()] if isinstance(got, dict) else [got, expected]
        assert [type(v) for v in leaves[0]] == [type(v) for v in leaves[1]]
    assert step.report().replays == 2


def test_a_size_among_the_arguments_is_a_value(device: Device) -> None:
    step = segue.graph(lambda x, about: (x.reshape(about["size"]), about["size"].numel()))
    for size in (torch.Size((6,)), torch.Size((3, 2))) * 4:
        x = torch.randn(2, 3, device=device.device)
        same(step(x, {"size": size}), (x.reshape(size), 6))
    assert step.report().replays == 4


def test_a_break_that_takes_from_an_iterator_is_not_run_twice_to_verify_it() -> None:
    items = itertools.count()
    taking = segue.eager_on_graph(lambda: next(items))

    @segue.eager_on_graph
    def next_item() -> torch.Tensor:
        return torch.tensor(float(next(items)))

    step = segue.graph(lambda x: x + next_item(), verify="every:1")
    assert [int(step(torch.zeros(()))) for _ in range(8)] == list(range(8))
    assert "next_item" in step.report().rows[0].unverified and taking() == 8


def test_a_bare_break_hinders_no_verification() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        segue.break_graph()
        return y + 1

    step = segue.graph(body, verify="every:1")
    for _ in range(4):
        same(step(torch.ones(2)), torch.full((2,), 3.0))
    assert step.report().rows[0].verified == 2


@pytest.mark.parametrize("kind", ["keywords", "more", "both"])
def test_pads_hold_for_positions_whatever_else_is_taken(kind: str) -> None:
    body: Any = {
        "keywords": lambda x, **others: x + 1,
        "more": lambda x, *others: x + 1,
        "both": lambda x, *others, **more: x + 1,
    }[kind]
    step = segue.graph(body, pad={"x": segue.Pad(ladder=(8,))})
    for size in range(1, 8):
        for _ in range(2):
            same(step(torch.ones(size, 2)), torch.full((size, 2), 2.0))
    assert step.report().captures == 1


def test_each_call_is_counted_once_and_counts_outlive_close() -> None:
    calls = itertools.count()

    def sometimes(x: torch.Tensor) -> torch.Tensor:
        if next(calls) == 1:
            raise KeyError("not now")
        return x * 2

    class Held:
        scale = 1.0

    held = Held()
    held.inner = Held()  # type: ignore[attr-defined]
    held.inner.scale = 1.0  # type: ignore[attr-defined]
    raising = segue.graph(sometimes)
    differing = segue.graph(lambda x: x * held.inner.scale, verify="every:1")  # type: ignore[attr-defined]
    with raising, differing:
        for turn in range(6):
            with contextlib.suppress(KeyError):
                raising(torch.ones(2))
            held.inner.scale = 1.0 if turn < 4 else 2.0  # type: ignore[attr-defined]
            same(differing(torch.ones(2)), torch.full((2,), held.inner.scale))  # type: ignore[attr-defined]
        before = [step.report() for step in (raising, differing)]
    for report in (*before, raising.report(), differing.report()):
        assert report.replays + sum(report.eager.values()) == 6, report
    assert [r.replays for r in before] == [raising.report().replays, differing.report().replays]


def test_the_plain_function_sees_the_call_too() -> None:
    @segue.eager_on_graph
    def asking(x: torch.Tensor) -> torch.Tensor:
        return x * segue.current().args[1]

    step = segue.graph(lambda x, scale: asking(x + 1))
    for _ in range(3):
        same(step(torch.ones(2), 3), torch.full((2,), 6.0))
    same(step.eager(torch.ones(2), 4), torch.full((2,), 8.0))


# -- state that bodies alone reach, other numbers, writes past the counter --------------------------------------------


class Cached(torch.nn.Module):
    def __init__(self, way: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("kv", torch.zeros(4, 3))
        self.way = way

    @segue.eager_on_graph
    def write(self, x: torch.Tensor) -> torch.Tensor:
        self.kv[:2].add_(x)
        return x.sum()

    @segue.eager_on_graph
    def read(self) -> torch.Tensor:
        return self.kv.sum().clone()

    def forward(self, x: torch.Tensor, kv: torch.Tensor) -> Any:
        return self.way(self, x, kv)


def read_written(m: Any, x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    written = m.write(x * 1)
    return kv.sum() + written


CACHED: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "a body writes": read_written,
    "a body reads": lambda m, x, kv: (kv.add_(x[:1]), m.read())[1],
    "both write": lambda m, x, kv: (kv[2:].add_(1), m.write(x * 1), x * 1)[2],
}


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_an_argument_may_be_state_that_bodies_alone_reach(name: str, is_apart: bool) -> None:
    ours, theirs = Cached(CACHED[name]), Cached(CACHED[name])
    step = segue.graph(ours)
    apart = [torch.zeros(4, 3), torch.zeros(4, 3)]
    for turn in range(6):
        x = torch.full((2, 3), float(turn))
        same(step(x, apart[0] if is_apart else ours.kv), theirs(x, apart[1] if is_apart else theirs.kv))
        same((ours.kv, apart[0]), (theirs.kv, apart[1]))
    assert step.report().replays == (4 if is_apart else 0)
    assert is_apart or eager_reasons(step)["aliased_inputs"] == 4


@segue.eager_on_graph
def parameter(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(x.clone(), requires_grad=False)


FACTS: dict[str, Callable[[torch.Tensor], bool]] = {
    "is a parameter": lambda z: isinstance(z, torch.nn.Parameter),
    "starts later": lambda z: z.storage_offset() == 0,
    "is a view": lambda z: z._base is not None,
}


@pytest.mark.parametrize("name", FACTS)
def test_numbers_that_the_recorded_run_chooses_otherwise_are_noticed(name: str) -> None:
    shifted = segue.eager_on_graph(lambda x: torch.cat([x, x])[x.numel() :])

    def body(x: torch.Tensor) -> torch.Tensor:
        z = parameter(x) if name == "is a parameter" else shifted(x)
        return z * (2 if FACTS[name](z) else 3)

    step = segue.graph(body)
    for _ in range(6):
        x = torch.randn(2)
        same(step(x), body(x))


class Marked(torch.Tensor):
    pass


LATER: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "dlpack": torch.from_dlpack,
    "a kind of tensor": lambda x: x.clone().as_subclass(Marked),
    "the other zero": lambda x: -0.0,
}


@pytest.mark.parametrize("name", LATER)
def test_what_a_body_returns_later_is_told_from_what_it_returned(name: str) -> None:
    turns = itertools.count()

    @segue.eager_on_graph
    def body(x: torch.Tensor) -> Any:
        early = 0.0 if name == "the other zero" else x.clone()
        return LATER[name](x) if next(turns) == 3 else early

    step, raised = segue.graph(lambda x: body(x * 1) + x), []
    for turn in range(6):
        x = torch.full((2,), float(turn))
        try:
            same(step(x), x if name == "the other zero" else x * 2)
        except BreakOutputError:
            raised.append(turn)
    assert raised == [3]


@pytest.mark.parametrize("way", ["numpy", ".data", "in place"])
def test_a_declared_write_reaches_the_caller_whatever_counts_it(way: str) -> None:
    @segue.eager_on_graph(writes=("x",))
    def fill(x: torch.Tensor) -> None:
        if way == "numpy":
            x.numpy().fill(5)
        else:
            (x.data if way == ".data" else x).fill_(5)

    step = segue.graph(lambda x: (fill(x), x * 2)[1])
    for turn in range(5):
        x = torch.full((2,), float(turn))
        same(step(x), torch.full((2,), 10.0))
        same(x, torch.full((2,), 5.0))
    assert step.report().replays == 3


# -- what is set again to what it was, grad that the pass disables, NumPy's numbers ------------------------------------


SET: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "a size": (lambda x: x.shape, True),
    "a tuple": (lambda x: tuple(x.shape), True),
    "a nested tuple": (lambda x: (1, (2.5, "a", (None,))), True),
    "a device": (lambda x: torch.device(str(x.device)), True),
    "a slice": (lambda x: slice(0, x.shape[0]), True),
    "a range": (lambda x: range(x.shape[0]), True),
    "a frozen set": (lambda x: frozenset(x.shape), True),
    "a tuple of lists": (lambda x: ([1],), False),
    "a list": (lambda x: [2, 8], False),
    "a tensor": (lambda x: x * 2, False),
}


@pytest.mark.parametrize("name", SET)
def test_an_attribute_that_is_set_to_what_it_was_hinders_no_recording(name: str) -> None:
    make, is_recorded = SET[name]

    class Setting(torch.nn.Module):
        value: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.table: dict[str, Any] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.value = self.table["value"] = make(x)
            return x * 2

    model = Setting()
    step = segue.graph(model)
    for _ in range(5):
        x = torch.randn(2, 8)
        same(step(x), x * 2)
        assert is_recorded is False or model.value == make(x) == model.table["value"]
    assert step.report().replays == (3 if is_recorded else 0)


@pytest.mark.parametrize("disabling", [torch.no_grad, torch.inference_mode])
def test_a_pass_that_disables_grad_itself_is_replayed_with_grad_on(disabling: Any) -> None:
    linear = torch.nn.Linear(4, 4)
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    @disabling()
    def forward(x: torch.Tensor) -> torch.Tensor:
        return frozen(linear(x))

    step = segue.graph(forward)
    with torch.enable_grad():
        for turn in range(6):
            x = torch.randn(2, 4)
            got, expected = step(x), forward(x)
            same(got, expected)
            assert got.requires_grad == expected.requires_grad and got.is_inference() == expected.is_inference()
            assert turn < 2 or step.report().replays == turn - 1
        free = segue.graph(lambda x: frozen(x))
        for _ in range(4):
            free(x)
        assert free.report().replays == 2
        frozen.requires_grad_()
        assert free(x).requires_grad, "what requires grad only now is not replayed"


def test_numpy_numbers_are_told_apart() -> None:
    np = pytest.importorskip("numpy")
    step = segue.graph(lambda x, scale: x / float(scale))
    for scale in (np.float32(2), np.float64(2), np.int64(2), np.float32(0.0), np.float32(-0.0), np.float32("nan")) * 4:
        x = torch.ones(2)
        same(step(x, scale), x / float(scale))
    assert step.report().captures == 6 and step.report().replays == 12
    assert segue.graph(lambda x, a: x)(x, np.ones(2)) is x


class Unreadable(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("not now")


UNREADABLE = Unreadable(a=1)


@segue.eager_on_graph
def reading(x: torch.Tensor) -> torch.Tensor:
    return x * len(UNREADABLE)


def test_what_a_body_reaches_may_be_unreadable() -> None:
    step = segue.graph(lambda x: reading(x + 1) * 2, pad={"x": segue.Pad(ladder=(8,))})
    for size in (3, 4, 3, 5):
        same(step(torch.ones(size)), torch.full((size,), 4.0))
