"""What a callable can tell of a call, or somebody else changes around it, without a trace in the arguments' values."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset, TensorDataset

import segue
from call_support import eager_reasons, same
from segue._compat import num_modes
from segue.device.watch import HostReads
from segue.errors import ReplayError
from segue.graph.guard import is_capturing
from segue.memory import lane as lanes

NULL = torch.zeros(4)
POOL = [torch.full((4,), float(n)) for n in range(3)]
ONE, TWO = torch.ones(4), torch.full((4,), 2.0)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# -- arguments that are tensors which the callable holds ----------------------------------------------------------------


class Guided(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("null", torch.ones(4))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if c is self.null else self.linear(x) + c


def is_global(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x if c is NULL else x * 100 + c


def is_in_pool(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x - c if any(c is p for p in POOL) else x + c


def begins_alike(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x - c if c.data_ptr() == NULL.data_ptr() else x + c


def is_a_view(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x - c if c._base is NULL else x + c


def takes_another(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x + (ONE if c is NULL else TWO)  # the same operations


def says_so(x: torch.Tensor, c: torch.Tensor) -> Any:
    return x + c, c is NULL


HELD: list[tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = [
    (is_global, lambda: NULL),
    (is_in_pool, lambda: POOL[1]),
    (begins_alike, lambda: NULL.detach()),
    (is_a_view, lambda: NULL[:]),
    (takes_another, lambda: NULL),
    (says_so, lambda: NULL),
]


@pytest.mark.parametrize(("function", "held"), HELD, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("is_held_first", [False, True])
def test_a_callable_may_ask_whether_an_argument_is_a_tensor_that_it_holds(
    function: Callable[..., Any], held: Callable[[], torch.Tensor], is_held_first: bool
) -> None:
    step = segue.graph(function)
    x = torch.arange(4.0)
    for turn in range(6):
        for is_held in (is_held_first, not is_held_first):
            for _ in range(3 if turn < 2 else 1):
                c = held() if is_held else torch.full((4,), 5.0)
                same(step(x + turn, c), function(x + turn, c))
    assert step.report().replays >= 8  # with arguments that are not held
    assert eager_reasons(step)["aliased_inputs"]
    assert "treated otherwise" in str(step.report())


def test_a_call_that_looks_as_an_earlier_one_is_not_taken_for_it_where_an_argument_is_held() -> None:
    model = Guided()
    step = segue.graph(model)
    x = torch.ones(1, 4)
    for n in range(200):
        c = model.null if n % 50 == 49 else torch.full((4,), float(n))
        same(step(x, c), model(x, c))
    one = segue.graph(lambda c: c - 1 if c is NULL else c + 1)
    for _ in range(3):
        same(one(torch.ones(4)), torch.full((4,), 2.0))
    same(one(NULL), torch.full((4,), -1.0))


def test_a_held_argument_that_is_not_asked_after_is_replayed() -> None:
    model = Guided()
    other = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    model.extra = other
    step = segue.graph(model)
    x = torch.ones(2, 4)
    for n in range(5):
        same(step(x, other), model(x, other))
        other.add_(n)
    assert step.report().replays == 3
    model.extra = torch.nn.Parameter(torch.full((4,), 3.0), requires_grad=False)
    for _ in range(5):
        same(step(x, model.extra), model(x, model.extra))
    same(step(x, model.null), model(x, model.null))
    assert step.report().replays == 6  # the new one took the place of the other: one call more until it is recorded


def test_capturing_a_call_with_a_held_argument_reports_its_own_recording() -> None:
    step = segue.graph(lambda x, c: x + c * NULL)
    report = step.capture(torch.ones(4), NULL)
    assert report.records and not report.failures
    report = segue.graph(is_global).capture(torch.ones(4), NULL)
    assert not report.records and "treated otherwise" in str(report.failures[0][1])


# -- functions of torch's that others take the place of -----------------------------------------------------------------


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def helper(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


PATCHED: list[tuple[Callable[..., Any], Any, str, Callable[..., Any]]] = [
    (Attention(), F, "scaled_dot_product_attention", lambda q, k, v: q * 100),
    (lambda x: F.scaled_dot_product_attention(x, x, x), F, "scaled_dot_product_attention", lambda q, k, v: q * 100),
    (lambda x: torch.sigmoid(x), torch, "sigmoid", lambda x: x * 3),
    (lambda x: helper(x) + 1, F, "gelu", lambda x: x * ONE.sum()),
    (lambda x: torch.cat([torch.nn.functional.pad(x, (1, 1)), F.pad(x, (1, 1))]), F, "pad", lambda x, size: x),
]


@pytest.mark.parametrize(("function", "module", "name", "other"), PATCHED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_function_of_torchs_that_user_code_names_may_be_replaced(
    function: Callable[..., Any], module: Any, name: str, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = segue.graph(function)
    x = torch.randn(2, 4, 4)
    for _ in range(4):
        same(step(x), function(x))
    assert step.report().replays == 2
    monkeypatch.setattr(module, name, other)
    for n in range(4):
        same(step(x + n), function(x + n))
    monkeypatch.undo()
    for n in range(4):
        same(step(x + n), function(x + n))
    assert eager_reasons(step)["rebound"] == 2 and step.report().captures == 3


def test_what_else_torchs_modules_come_to_hold_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    step = segue.graph(lambda x: torch.sigmoid(F.gelu(x)))
    for n in range(6):
        monkeypatch.setattr(F, "relu6", lambda x, n=n: x * n)
        monkeypatch.setattr(torch, f"of_a_test_{n}", n, raising=False)
        step(torch.ones(4))
    assert step.report().replays == 4


# -- tensors that objects of libraries hold -----------------------------------------------------------------------------


def _array() -> Any:
    array = np.empty((2, 2), dtype=object)
    array[:] = [[ONE, TWO], [TWO, 1.0]]
    return array


def _dispatched() -> Any:
    @functools.singledispatch
    def scaled(x: Any) -> Any:
        return x

    scaled.register(torch.Tensor, lambda x: x * 2)
    return scaled


def _other() -> torch.Tensor:
    return torch.full((4,), 7.0)


def _dataset() -> Any:
    return TensorDataset(torch.ones(3, 4))


Holder = tuple[Callable[[], Any], Callable[[Any], torch.Tensor], Callable[[Any], Any]]
HOLDERS: dict[str, Holder] = {
    "array": (_array, lambda h: h[0, 1], lambda h: h.__setitem__((0, 1), _other())),
    "dataset": (_dataset, lambda h: h.tensors[0][0], lambda h: setattr(h, "tensors", (torch.full((3, 4), 7.0),))),
    "subset": (
        lambda: Subset(_dataset(), [1, 2]),
        lambda h: h[0][0],
        lambda h: setattr(h.dataset, "tensors", (torch.full((3, 4), 7.0),)),
    ),
    "adapter": (
        lambda: logging.LoggerAdapter(logging.getLogger(__name__), {"weights": [ONE]}),
        lambda h: h.extra["weights"][0],
        lambda h: h.extra["weights"].__setitem__(0, _other()),
    ),
    "timer": (
        lambda: threading.Timer(1, print, kwargs={"weight": ONE}),
        lambda h: h.kwargs["weight"],
        lambda h: setattr(h, "kwargs", {"weight": _other()}),
    ),
    "interpreter": (
        lambda: torch.fx.Interpreter(torch.fx.symbolic_trace(torch.nn.Linear(4, 4))),
        lambda h: h.module(ONE),
        lambda h: setattr(h.module, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    ),
    "dispatched": (_dispatched, lambda h: h(TWO), lambda h: h.register(torch.Tensor, lambda x: x * 7)),
}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_tensor_that_an_object_of_a_library_holds_may_be_another_one(name: str, is_inner: bool) -> None:
    make, read, change = HOLDERS[name]
    held = types.SimpleNamespace(item=make())
    direct = held.item
    function = (lambda x: x * read(held.item)) if is_inner else (lambda x: x * read(direct))
    step = segue.graph(function)
    x = torch.arange(4.0)
    for _ in range(4):
        same(step(x), function(x))
    assert step.report().replays == 2
    change(held.item)
    for n in range(4):
        same(step(x + n), function(x + n))
    assert step.report().replays == 4


def test_a_thread_that_ends_while_it_is_recorded_has_ended() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.weight = ONE  # type: ignore[attr-defined]

    def f(x: torch.Tensor) -> torch.Tensor:
        if is_capturing() and thread.ident is None:
            thread.start()
            thread.join()
        return x * thread.weight  # type: ignore[attr-defined]

    step = segue.graph(f)
    for _ in range(4):
        same(step(TWO), TWO)
    assert not thread.is_alive() and step.report().replays == 2


# -- what only watching would make an error of --------------------------------------------------------------------------


def masked(x: torch.Tensor) -> torch.Tensor:
    return torch.masked.masked_tensor(x, x > 0).sum(0).to_tensor(0)


def jagged(x: torch.Tensor) -> torch.Tensor:
    ragged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 4]))
    return F.linear(ragged, x).reshape(2, -1, 4, 1).values()


def nested(x: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.nested.nested_tensor([x[:2], x[2:]]), x).to_padded_tensor(0.0)


def fake(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        size = F.linear(torch.empty(4, 4), torch.empty(4, 4)).shape
    return x.view(size) * 2


def flexible(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 1, 4, 4).repeat(1, 1, 4, 4)
    return flex_attention(q, q, q)


def compiled_inside(x: torch.Tensor) -> Any:
    return torch.compile(lambda a: (a * 2).relu(), backend="eager", fullgraph=True)(x)


def conditional(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (x,))


class Packed(torch.Tensor):
    """A weight of torchao's kind: an object around others, with operations of its own."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.inner, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].inner, args[0].scale)
        plain = [a.inner.float() * a.scale if isinstance(a, Packed) else a for a in args]
        return func(*plain, **(kwargs or {}))


PACKED = Packed(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5))


def packed(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, PACKED)


WATCHED = {
    masked: "MaskedTensor", jagged: "NestedTensor", nested: "nested tensor", fake: "FakeTensor", packed: "Packed",
    flexible: "flex_attention", conditional: "cond", compiled_inside: "",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", WATCHED, ids=lambda f: f.__name__)
def test_what_cannot_be_watched_runs_eagerly_and_leaves_torch_as_it_is(function: Callable[..., Any]) -> None:
    step = segue.graph(function)
    x = torch.randn(4, 4)
    for n in range(4):
        same(step(x + n), function(x + n))
    assert WATCHED[function] in str(step.report())
    assert num_modes() == (0, 0)
    if WATCHED[function]:
        assert eager_reasons(step) == {"first_seen": 1, "capture_failed": 3}
    other = segue.graph(torch.nn.Linear(4, 4))
    for _ in range(4):
        other(x)
    assert other.report().replays == 2
    assert torch.compile(lambda a: a + 1, backend="eager", fullgraph=True)(x).equal(x + 1)


class Late(Exception):
    """What a handler of a signal raises."""


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
@pytest.mark.parametrize("mode", [TorchDispatchMode, TorchFunctionMode])
@pytest.mark.parametrize("num", range(3))
def test_no_mode_is_left_where_a_signal_interrupts_one_that_begins_or_ends(
    mode: Any, method: str, event: str, num: int
) -> None:
    met = 0

    def ring(frame: Any, what: str, _: Any) -> None:
        nonlocal met
        if what == event and frame.f_code is getattr(mode, method).__code__:
            met += 1
            if met == num + 1:
                sys.setprofile(None)
                raise Late

    step = segue.graph(torch.nn.Linear(4, 4))
    x = torch.ones(1, 4)
    with suppress(Late), torch.device("cpu"):
        step(x)
        before = num_modes()
        sys.setprofile(ring)
        try:
            step(x)
        finally:
            sys.setprofile(None)
            assert num_modes() == before
    for _ in range(3):
        same(step(x), step.eager(x))
    assert step.report().replays


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_runs_eagerly_and_the_reason_names_what_it_holds() -> None:
    floats = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model = torch.ao.quantization.quantize_dynamic(floats, {torch.nn.Linear})
    step = segue.graph(model)
    x = torch.randn(2, 8)
    for n in range(4):
        same(step(x + n), model(x + n))
    assert "Sequential.0._packed_params._packed_params is a LinearPackedParamsBase" in str(step.report())
    assert "plain weights" in str(step.report())
    linear = torch.nn.Linear(4, 4)
    linear.weight = torch.nn.Parameter(PACKED, requires_grad=False)
    step = segue.graph(linear)
    for _ in range(4):
        same(step(x[:, :4]), linear(x[:, :4]))
    assert "takes a Packed" in str(step.report()) and __file__ in str(step.report())


# -- calls that depend on being recorded --------------------------------------------------------------------------------

LINEAR = torch.nn.Linear(4, 4).requires_grad_(False)


def jvp(x: torch.Tensor) -> Any:
    return torch.func.jvp(LINEAR, (x,), (torch.ones_like(x),))


def hessian(x: torch.Tensor) -> Any:
    return torch.func.hessian(lambda a: LINEAR(a).tanh().sum())(x)


def integers(x: torch.Tensor) -> Any:
    return x.view(torch.int32)


CANNOT = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 has no forward derivatives of batches in inference mode"
)


@pytest.mark.parametrize("function", [jvp, pytest.param(hessian, marks=CANNOT), integers])
def test_what_differs_by_being_recorded_is_told_so_and_promised_nothing(function: Callable[..., Any]) -> None:
    step = segue.graph(function)
    with torch.inference_mode():
        for n in range(12):
            x = torch.full((2, 4), float(n))
            same(step(x), function(x))
        decision = step.explain(x)
    assert decision.reason is segue.Reason.CAPTURE_FAILED
    assert "each time and at the same place" in decision.detail and "later call" not in decision.detail
    assert eager_reasons(step)["rebound"] <= 2


def test_a_difference_that_another_one_follows_is_none_of_being_recorded() -> None:
    captures = itertools.count()

    def f(x: torch.Tensor) -> torch.Tensor:
        made = next(captures) if is_capturing() else 3
        return (torch.sin, torch.cos, torch.tanh)[made](x) if made < 3 else x * 2

    step = segue.graph(f)
    for _ in range(16):
        same(step(TWO), TWO * 2)
    assert step.report().replays


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_call_that_a_signal_interrupts_at_any_place_is_none_of_the_next_ones_business(is_recorded: bool) -> None:
    met = at = 0

    def ring(frame: Any, what: str, _: Any) -> None:
        nonlocal met
        met += what in ("call", "return")
        if met == at:
            sys.setprofile(None)
            raise Late

    x = torch.ones(1, 4)
    caches = torch.is_autocast_cache_enabled()
    for place in (*range(1, 140), *range(140, 900, 13)):  # each of those around a recording, and some of its own
        met, at = 0, place
        step = segue.graph(torch.nn.Linear(4, 4))
        for _ in range(2 if is_recorded else 1):
            step(x)
        with suppress(Late):
            sys.setprofile(ring)
            try:
                step(x)
            finally:
                sys.setprofile(None)
        assert num_modes() == (0, 0) and torch.is_autocast_cache_enabled() == caches
        for _ in range(2):
            same(step(x), step.eager(x))
        assert not {"capturing", "lane_busy"} & set(eager_reasons(step))
        step.close()


def replayed(step: Any, lane: lanes.Lane) -> None:
    with torch.no_grad():
        step(TWO)


def held(step: Any, lane: lanes.Lane) -> None:
    with lane.exclusive():
        pass


def measured(step: Any, lane: lanes.Lane) -> None:
    assert lane.reserved_bytes >= 0


@pytest.mark.parametrize(("event", "name"), [("c_return", "acquire"), ("c_call", "release")])
@pytest.mark.parametrize("use", [replayed, held, measured])
def test_a_lane_is_nobodys_after_a_signal_interrupted_who_takes_or_leaves_it(
    event: str, name: str, use: Callable[[Any, lanes.Lane], None]
) -> None:
    def ring(frame: Any, what: str, called: Any) -> None:
        if what == event and called.__name__ == name and frame.f_code.co_filename == lanes.__file__:
            sys.setprofile(None)
            raise Late

    step = segue.graph(torch.sin)
    for _ in range(4):
        step(TWO)
    (site,) = step._dispatch.sites.values()
    done: list[str] = []

    def interrupted() -> None:
        try:
            sys.setprofile(ring)
            use(step, site.lane)
        except Late:
            done.append("interrupted")
        finally:
            sys.setprofile(None)
        again()

    def again() -> None:
        with torch.no_grad(), site.lane.exclusive(), pytest.raises(ReplayError, match="inside another one"):
            site.lane.enter()
        with torch.no_grad():
            same(step(TWO), TWO.sin())
        done.append("used")

    for run in (interrupted, again):
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(10)
    assert done == ["interrupted", "used", "used"]
    assert step.report().replays == 4 + (use is replayed and event == "c_call")


# -- wrappers around functions of torch's that are written in Python ----------------------------------------------------


def doubled(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: old(*args, **kwargs) * 2


def shifted(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def new(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return old(x - 1, *args, **kwargs) + 3

    return new


class Counting:
    def __init__(self, old: Callable[..., Any]) -> None:
        self.old = old

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.old(*args, **kwargs) + 5


def several(old: Callable[..., Any]) -> Callable[..., Any]:
    return doubled(shifted(Counting(functools.partial(doubled(old)))))


WRAPPED: dict[str, tuple[Any, str, Callable[[torch.Tensor], Any]]] = {
    "softmax": (F, "softmax", lambda x: F.softmax(x, -1)),
    "softmax of a module": (F, "softmax", torch.nn.Softmax(-1)),
    "relu": (F, "relu", lambda x: F.relu(x)),
    "silu": (F, "silu", lambda x: F.silu(x)),
    "gelu": (F, "gelu", lambda x: F.gelu(x)),
    "layer_norm": (F, "layer_norm", lambda x: F.layer_norm(x, (4,), eps=1e-3)),
    "normalize": (F, "normalize", lambda x: F.normalize(x, dim=-1)),
    "interpolate": (F, "interpolate", lambda x: F.interpolate(x, scale_factor=2.0)),
    "max_pool1d": (F, "max_pool1d", lambda x: F.max_pool1d(x, 2, stride=1)),
    "norm": (torch, "norm", lambda x: torch.norm(x, dim=1)),
    "einsum": (torch, "einsum", lambda x: shifting_einsum(x)),
    "Tensor.norm": (torch.Tensor, "norm", lambda x: x.norm(dim=1)),
    "Tensor.add": (torch.Tensor, "add", lambda x: x.add(x, alpha=3)),
    "Tensor.__rsub__": (torch.Tensor, "__rsub__", lambda x: 3 - x),
}


def shifting_einsum(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum(x, [0, 1, 2], x, [0, 2, 3], [0, 1, 3])  # written so, it takes a tensor first


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("case", "wrap"),
    [
        (case, wrap)
        for case, (module, *_) in WRAPPED.items()
        for wrap in (doubled, shifted, several, Counting)
        if module is not torch.Tensor or wrap is not Counting  # an object that is called is no method
    ],
)
def test_a_wrapper_around_a_function_of_torchs_wraps_once(
    case: str, wrap: Callable[..., Any], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, function = WRAPPED[case]
    is_named = isinstance(function, types.FunctionType) and module is not torch.Tensor  # so that a change of it is noticed
    x = torch.randn(2, 4, 4)
    step = segue.graph(function)
    if is_late:
        for n in range(4 if is_named else 1):
            same(step(x + n), function(x + n))
    monkeypatch.setattr(module, name, wrap(getattr(module, name)))
    for n in range(5):
        same(step(x + n), function(x + n))
    assert step.report().replays >= 3
    monkeypatch.undo()
    for n in range(5 if is_named and wrap is not Counting else 0):
        same(step(x + n), function(x + n))


def test_a_function_of_torchs_may_take_the_place_of_another_one_that_is_still_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relu = F.relu
    monkeypatch.setattr(F, "relu", F.leaky_relu)
    step = segue.graph(lambda x: (relu(x), F.relu(x), torch.unique(torch.ones(3))))
    x = torch.randn(4)
    for n in range(5):
        same(step(x - n), (relu(x - n), F.leaky_relu(x - n), torch.ones(1)))


@pytest.mark.parametrize("name", ["tolist", "__repr__", "__array__", "cpu"])
def test_a_read_is_seen_through_a_wrapper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, called = getattr(torch.Tensor, name), []
    monkeypatch.setattr(torch.Tensor, name, lambda *args, **kwargs: (called.append(name), old(*args, **kwargs))[1])
    read = []
    with HostReads(read.append):
        getattr(ONE, name)()
    assert read[:1] == [f"Tensor.{name}"] and len(read) == len(called) == 1
