"""Known failure classes of CUDA-graph users (F4 to F25) met through `segue.graph`: replay equals eager, or a reason."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import segue
from call_support import check_calls, eager_reasons, same
from segue.device import Device
from tests_support import churn


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def mlp(device: Device, width: int = 4) -> torch.nn.Module:
    layers = [torch.nn.Linear(width, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, width)]
    return torch.nn.Sequential(*layers).to(device.device)


# -- F4: a break with plain arguments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    length: int
    name: str | None


def test_f4_a_break_gets_this_calls_plain_arguments(new: Any) -> None:
    @segue.eager_on_graph
    def body(y: torch.Tensor, batch: Batch, n: int) -> torch.Tensor:
        return y * batch.length + n + len(batch.name or "")

    def f(x: torch.Tensor, batch: Batch, n: int) -> torch.Tensor:
        return body(x * 2, batch, n) - 1

    step = segue.graph(f)
    kinds = [(Batch(3, None), 1), (Batch(3, "abc"), 1), (Batch(4, None), 2)]
    for _ in range(4):
        for batch, n in kinds:
            x = new(3)
            same(step(x, batch, n), f(x, batch, n))
    assert step.report().captures == 3


# -- F6, F7: containers and optional arguments -------------------------------------------------------------------------


@dataclasses.dataclass
class Extra:
    tensors: Any


@pytest.mark.parametrize("wrap", [dict, lambda d: list(d.values()), lambda d: tuple(d.values()), lambda d: Extra(dict(d))])
def test_f6_tensors_in_containers_are_refreshed_and_a_changed_structure_is_another_call(wrap: Any, new: Any) -> None:
    def f(x: torch.Tensor, extra: Any) -> torch.Tensor:
        found = extra.tensors if isinstance(extra, Extra) else extra
        for t in found.values() if isinstance(found, dict) else found:
            x = x + t
        return x

    step = segue.graph(f)
    made = []
    for names in ("ab", "ab", "ab", "abc", "a", "ab", "abc", "abc", "a", "a", "ba"):
        made.append(((new(3),), {"extra": wrap({n: new(3) for n in names})}))
    check_calls(step, f, made)
    assert step.report().replays >= 4


def test_f6_a_container_that_the_call_changes_is_changed_at_every_call(new: Any) -> None:
    def f(x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        cache.append(x * 2)
        return x + len(cache)

    for options in ({}, {"pad": {"x": segue.Pad(ladder=[4])}}):
        step = segue.graph(f, **options)
        for _ in range(4):
            x, cache = new(3), [new(1)]
            same(step(x, cache), x + 2)
            assert len(cache) == 2
        assert eager_reasons(step)["unsafe_effects"] == 3


def test_f7_an_optional_tensor_given_or_not(new: Any) -> None:
    def f(x: torch.Tensor, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x if mask is None else x.masked_fill(mask > 0, 0.0)
        return x if bias is None else x + bias

    step = segue.graph(f)
    ways: list[Callable[[], Any]] = [
        lambda: ((new(4),), {}),
        lambda: ((new(4), new(4)), {}),
        lambda: ((new(4),), {"mask": new(4)}),
        lambda: ((new(4),), {"bias": new(4)}),
        lambda: ((new(4), None, new(4)), {}),
    ]
    order = [*range(5), *range(5), *range(5), 3, 1, 0, 2, 4]
    check_calls(step, f, [ways[i]() for i in order])


# -- F8: kept outputs ---------------------------------------------------------------------------------------------------


class Output:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


@pytest.mark.parametrize("min_hits", [1, 2, 3])
@pytest.mark.parametrize(
    "wrap", [lambda y: y, lambda y: y[1:], lambda y: y.detach(), lambda y: (y, [y.t()]), lambda y: {"y": y}]
)
def test_f8_a_kept_result_never_changes(wrap: Any, min_hits: int, new: Any) -> None:
    step = segue.graph(lambda x: wrap(x.exp() + 1), min_hits=min_hits)
    check_calls(step, lambda x: wrap(x.exp() + 1), [((new(3, 3),), {}) for _ in range(6)])


def test_f8_an_output_object_that_segue_cannot_take_apart_is_not_replayed_stale(new: Any) -> None:
    step = segue.graph(lambda x: Output(x * 2))
    kept = []
    for _ in range(5):
        x = new(3)
        kept.append((step(x), x * 2))
    for got, expected in kept:
        same(got.y, expected)
    assert eager_reasons(step)["unsafe_effects"] == 4

    class Note:
        def __init__(self) -> None:
            self.notes: list[str] = []

    step = segue.graph(lambda x: (x * 2, Note()))
    notes = [step(new(3))[1] for _ in range(4)]
    assert len({id(n) for n in notes}) == 4 and eager_reasons(step)["unsafe_effects"] == 3


# -- F10, F11, F12: host integers, content, padding indices --------------------------------------------------------------


def test_f10_a_host_integer_is_part_of_the_key(new: Any) -> None:
    def f(x: torch.Tensor, longest: int) -> torch.Tensor:
        return x[:, :longest].sum(1)

    step = segue.graph(f)
    check_calls(step, f, [((new(2, 8), n), {}) for n in (3, 5, 3, 5, 3, 8, 5, 8, 8)])


def test_f11_a_count_read_from_content_is_never_frozen(device: Device) -> None:
    def f(groups: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(8, device=groups.device)
        for g in groups.unique().tolist():
            out[g] += 1
        return out

    step = segue.graph(f)
    for content in ([0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 1, 0], [4, 5, 6, 7], [0, 0, 0, 0]):
        groups = torch.tensor(content, device=device.device)
        same(step(groups), f(groups))
    assert eager_reasons(step)["data_dependent"] >= 1


def _pads(*sizes: int, **fills: float) -> dict[str, segue.Pad]:
    return {name: segue.Pad(dim=0, ladder=sizes, axis="rows", fill=fill) for name, fill in fills.items()}


def test_f12_padding_rows_change_no_state_where_their_index_is_a_reserved_slot(device: Device, new: Any) -> None:
    cache = torch.zeros(9, 4, device=device.device)  # the last row is reserved
    eager_cache = cache.clone()

    def write(into: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        into[index] = x
        return x * 2

    step = segue.graph(functools.partial(write, cache), pad=_pads(4, 8, x=0.0, index=8))
    for i in range(12):
        rows = 1 + i % 8
        x, index = new(rows, 4), torch.randperm(8)[:rows].to(device.device)
        same(step(x, index), write(eager_cache, x, index))
        same(cache[:8], eager_cache[:8])
    assert step.report().replays == 8 and len(step.report().rows) == 2


@pytest.mark.parametrize("fill", [0.0, float("nan"), 1e30])
def test_f13_real_rows_do_not_depend_on_what_padding_holds(fill: float, device: Device) -> None:
    weight = torch.randn(4, 4, device=device.device)

    def f(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:] = x @ weight
        return torch.nn.functional.layer_norm(out, (4,)).softmax(1)

    step = segue.graph(f, pad=_pads(4, 8, x=fill))
    made = {n: torch.randn(n, 4, device=device.device) for n in (1, 2, 3, 4, 5, 8)}
    for n in (3, 8, 3, 1, 5, 3, 2, 8, 4, 1, 3):
        x = made[n]
        padded = torch.cat([x, torch.zeros((4 if n <= 4 else 8) - n, 4, device=device.device)])
        got = step(x)
        assert got.shape == x.shape
        torch.testing.assert_close(got, f(padded)[:n] if step.explain(x).is_replay else f(x), rtol=1e-6, atol=1e-6)
    step.report()


def test_f14_padded_rows_never_touch_a_live_rows_state(device: Device, new: Any) -> None:
    table = torch.zeros(7, 3, device=device.device)  # row 6 is reserved
    eager_table = table.clone()

    def update(into: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        state = into.index_select(0, rows) * 0.5 + x
        into.index_copy_(0, rows, state)
        return state

    step = segue.graph(functools.partial(update, table), pad=_pads(2, 4, 6, x=0.0, rows=6))
    for count in (1, 6, 2, 3, 5, 1, 4, 6, 2, 3, 3, 1):
        x, rows = new(count, 3), torch.randperm(6)[:count].to(device.device)
        same(step(x, rows), update(eager_table, x, rows))
        same(table[:6], eager_table[:6])


def test_padding_beyond_the_ladder_or_of_disagreeing_sizes_runs_eagerly(new: Any) -> None:
    step = segue.graph(lambda x, y: x.sum(0) + y.sum(0), pad=_pads(2, 4, x=0.0, y=0.0))
    for _ in range(3):
        step(new(5, 2), new(5, 2))
        step(new(0, 2), new(0, 2))
        step(new(3, 2), new(1, 2))
    assert eager_reasons(step) == {"no_rung": 6, "not_uniform": 3}


def test_writes_into_padded_arguments_reach_the_caller_and_no_further(new: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        x.mul_(2)
        return x, x[:, 0], x + 1

    step = segue.graph(f, pad=_pads(4, x=0.0))
    for n in (3, 3, 4, 2, 1, 3):
        whole = new(6, 2)
        expected = whole.clone()
        got, wanted = step(whole[1 : 1 + n]), f(expected[1 : 1 + n])
        same(got, wanted)
        same(whole, expected)
        assert got[0].data_ptr() == whole[1:].data_ptr()
    assert step.report().replays == 4


# -- F17 - F21: what lives outside ------------------------------------------------------------------------------------


def test_f17_a_cache_that_is_filled_once_is_filled_outside(device: Device, new: Any) -> None:
    class Lazy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: torch.Tensor | None = None
            self.seen: dict[int, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(4.0, device=x.device)
            if x.shape[0] not in self.seen:
                self.seen[x.shape[0]] = torch.ones(x.shape[0], 1, device=x.device)
            return x + self.table * self.seen[x.shape[0]]

    for min_hits in (1, 2):
        model = Lazy()
        step = segue.graph(model, min_hits=min_hits)
        check_calls(step, lambda x: x + torch.arange(4.0, device=x.device), [((new(n, 4),), {}) for n in (2, 3, 2, 3, 2, 3)])
        same(model.table, torch.arange(4.0, device=device.device))
        assert step.report().replays == 2 and not step.report().refused, "the first call, which fills it, is not recorded"


def test_f17_an_attribute_that_changes_at_each_call_is_named_and_never_holds_memory_of_the_pool(new: Any) -> None:
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state: Any = 0.0
            self.calls = 0
            self.log: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = self.state * 0.5 + x
            self.calls += 1
            self.log.append(self.calls)
            return self.state + self.calls

    ours, theirs = Running(), Running()
    step = segue.graph(ours)
    for _ in range(6):
        x = new(3)
        same(step(x), theirs(x))
        same(ours.state, theirs.state)
    assert ours.calls == 6 and ours.log == theirs.log
    assert eager_reasons(step)["unsafe_effects"] == 5
    assert "Running.calls" in str(step.report())


def test_f17_the_search_runs_no_code_of_the_users_containers(new: Any) -> None:
    class Makes(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("asked for an item")

    class Odd(dict):  # type: ignore[type-arg]
        def get(self, key: Any) -> Any:  # type: ignore[override]
            raise AssertionError("asked for an item")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.makes, self.odd, self.ordered = Makes(a=1), Odd(a=1), OrderedDict(a=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.odd["b"] = 2
            self.ordered["b"] = self.ordered.get("b", 0) + 1
            return x + 1

    model = Model()
    step = segue.graph(model)
    for i in range(1, 5):
        x = new(3)
        same(step(x), x + 1)
        assert list(model.ordered.items()) == [("a", 1), ("b", i)] and dict(model.odd) == {"a": 1, "b": 2}
    assert "ordered.b" in str(step.report())


def test_f17_a_counter_in_a_closure_is_found(new: Any) -> None:
    count = 0

    def f(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    step = segue.graph(f)
    for i in range(1, 5):
        x = new(3)
        same(step(x), x * i)
    assert count == 4 and "count" in str(step.report())


def test_f18_a_bounded_cache_may_evict_what_a_recording_reads(device: Device, new: Any) -> None:
    cache: dict[int, torch.Tensor] = {}

    def masks(n: int) -> torch.Tensor:
        if n not in cache:
            while len(cache) >= 2:
                cache.pop(next(iter(cache)))
            cache[n] = torch.arange(float(n), device=device.device)
        return cache[n]

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + masks(x.shape[0])

    step = segue.graph(f)
    for _ in range(4):
        for n in (3, 4, 5, 6):
            x = new(n)
            same(step(x), x + torch.arange(float(n), device=device.device))
            churn(device, collect=False)


def test_f19_temporaries_from_before_the_capture_are_kept_alive(device: Device, new: Any) -> None:
    def make(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
        base = torch.full((64, 4), float(seed), device=device.device)
        return lambda x, held=[base[8:12]]: x * held[0]  # type: ignore[misc]

    steps = [segue.graph(make(i)) for i in (2, 3)]
    for _ in range(4):
        for i, step in zip((2, 3), steps, strict=True):
            x = new(4, 4)
            same(step(x), x * i)
            churn(device)


def _load_assign(model: torch.nn.Module) -> None:
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)


def _data(model: torch.nn.Module) -> None:
    model[0].weight.data = torch.randn_like(model[0].weight)  # type: ignore[index]


def _new_parameter(model: torch.nn.Module) -> None:
    model[3].bias = torch.nn.Parameter(torch.randn_like(model[3].bias))  # type: ignore[index]


def _there_and_back(model: torch.nn.Module) -> None:
    device = next(model.parameters()).device
    model.to(torch.float64).to(torch.float32).to(device)
    for p in model.parameters():
        p.mul_(1.5)


def _contiguous(model: torch.nn.Module) -> None:
    model.register_buffer("scale", (model.get_buffer("scale").t() * 2).contiguous())


def _replaced_module(model: torch.nn.Module) -> None:
    model[0] = copy.deepcopy(model[0])  # type: ignore[index,operator]
    model[0].weight.mul_(2)  # type: ignore[index]


def _transposed(model: torch.nn.Module) -> None:
    model.get_submodule("square").weight = torch.nn.Parameter(model.get_submodule("square").weight.t())


def _transposed_in_place(model: torch.nn.Module) -> None:
    model.get_submodule("square").weight.t_()


def _transposed_view(model: torch.nn.Module) -> None:
    weight = model.get_submodule("square").weight
    weight.data = weight.data.t()


REBINDINGS = [
    _load_assign, _data, _new_parameter, _there_and_back, _contiguous, _replaced_module, _transposed, _transposed_in_place,
    _transposed_view,
]  # fmt: skip


class Scaled(torch.nn.Sequential):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("scale", torch.randn(4, 4))
        self.square = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.children())[:4]:
            x = layer(x)
        return self.square(x) @ self.get_buffer("scale")


@pytest.mark.parametrize("rebind", REBINDINGS)
@pytest.mark.parametrize("wrapped_as", ["module", "method", "closure", "inference"])
def test_f20_rebound_weights_are_found_before_the_launch(rebind: Any, wrapped_as: str, device: Device, new: Any) -> None:
    model = Scaled(*mlp(device).children()).to(device.device)
    function: Any = {"module": model, "method": model.forward, "closure": lambda x: model(x), "inference": model}[wrapped_as]
    step = segue.graph(function, inference=wrapped_as == "inference")
    check_calls(step, model, [((new(2, 4),), {}) for _ in range(4)])
    rebind(model)
    check_calls(step, model, [((new(2, 4),), {}) for _ in range(4)])
    assert eager_reasons(step)["rebound"] == 1 and step.report().captures == 2
    for p in model.parameters():
        p.mul_(0.5)
    check_calls(step, model, [((new(2, 4),), {}) for _ in range(2)])
    assert step.report().captures == 2


def test_f20_tensors_in_attributes_lists_and_globals_are_checked_too(device: Device, new: Any) -> None:
    class Holder:
        def __init__(self) -> None:
            self.tables = [{"w": new(3)}]
            self.scale = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.tables[0]["w"] * self.scale

    holder = Holder()
    step = segue.graph(holder.__call__)
    check_calls(step, holder, [((new(3),), {}) for _ in range(3)])
    holder.tables[0]["w"] = new(3)
    check_calls(step, holder, [((new(3),), {}) for _ in range(3)])
    holder.tables = [{"w": new(3)}]
    check_calls(step, holder, [((new(3),), {}) for _ in range(3)])
    holder.scale = 3.0  # a plain attribute of the object itself
    check_calls(step, holder, [((new(3),), {}) for _ in range(3)])
    assert eager_reasons(step)["rebound"] == 3


GLOBAL_TABLE = [torch.ones(3)]


class ReadsGlobal(torch.nn.Module):
    table = torch.full((3,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x) * self.table.to(x.device)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x + GLOBAL_TABLE[0].to(x.device)


def test_f20_globals_that_methods_name_and_tensors_of_classes_are_checked(device: Device, new: Any) -> None:
    model = ReadsGlobal()
    step = segue.graph(model)
    if device.kind == "cuda":
        pytest.skip("uploads its tables at each call")
    check_calls(step, model, [((new(3),), {}) for _ in range(3)])
    GLOBAL_TABLE[0] = torch.full((3,), 4.0)
    check_calls(step, model, [((new(3),), {}) for _ in range(3)])
    ReadsGlobal.table = torch.full((3,), 3.0)
    check_calls(step, model, [((new(3),), {}) for _ in range(3)])
    assert eager_reasons(step)["rebound"] == 2 and step.report().captures == 3


def test_f20_rebinding_again_and_again_settles_for_eager(new: Any) -> None:
    held = [new(3)]
    step = segue.graph(lambda x: x * held[0])
    for _ in range(60):
        held[0] = new(3)
        x = new(3)
        same(step(x), x * held[0])
    assert step.report().captures < 12


def test_f21_a_workspace_that_grew_is_kept_or_found(device: Device, new: Any) -> None:
    class Scratch(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scratch = torch.empty(4, device=device.device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.numel() > self.scratch.numel():
                self.scratch = torch.empty(x.numel() * 2, device=device.device)
            part = self.scratch[: x.numel()]
            part.copy_(x).mul_(2)
            return part + 1

    step = segue.graph(Scratch())
    for n in (3, 3, 3, 20, 3, 20, 20, 3, 50, 20, 3, 3):
        x = new(n)
        same(step(x), x * 2 + 1)
        churn(device, collect=False)


# -- F22: threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["clone", "function"])
def test_f22_four_workers_share_one_callable(outputs: str, device: Device) -> None:
    model = mlp(device)
    step = segue.graph(model, outputs="clone" if outputs == "clone" else (lambda y: y.clone()))
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        barrier.wait()
        with torch.no_grad():
            for _ in range(25):
                n = 1 + int(torch.randint(3, (), generator=generator))
                x = torch.randn(n, 4, generator=generator).to(device.device)
                got = step(x)
                torch.testing.assert_close(got, model(x), rtol=0, atol=0)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, seed) for seed in range(4)]:
            future.result()
    report = step.report()
    assert report.captures == 3 and report.replays + sum(report.eager.values()) == 100


def test_f22_workers_evict_each_others_recordings(device: Device) -> None:
    model = mlp(device).requires_grad_(False)
    body = segue.eager_on_graph(lambda y: y * 2)
    step = segue.graph(lambda x: body(model(x)) + 1, max_graphs=2)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(60):
            x = torch.randn(choose.choice([1, 2, 3, 4, 5]), 4).to(device.device)  # drawn on the host: docs/safety.md
            with torch.no_grad():
                torch.testing.assert_close(step(x), model(x) * 2 + 1, rtol=0, atol=0)
            if choose.random() < 0.1:
                assert len(step.report().rows) <= 2

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, seed) for seed in range(4)]:
            future.result()
    report = step.report()
    assert report.replays + sum(report.eager.values()) == 240


# -- F24: failures --------------------------------------------------------------------------------------------------------


def test_f24_a_host_read_answers_eagerly_names_its_line_and_leaves_the_device_well(device: Device, new: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y * y.sum().item()

    step = segue.graph(f)
    good = segue.graph(lambda x: x + torch.rand_like(x) * 0)
    for _ in range(4):
        x = new(3)
        same(step(x), f(x))
        same(good(x), x)
    assert eager_reasons(step) == {"first_seen": 1, "data_dependent": 3} and good.report().replays == 2
    text = str(step.report())
    assert "test_cases_calls.py" in text and "data_dependent" in text
    assert step.report().pool_bytes <= 4 << 20


def test_f24_a_failure_inside_a_nested_call_or_a_later_segment(new: Any) -> None:
    body = segue.eager_on_graph(lambda y: y + 1)
    inner = segue.graph(lambda y: y * float(y.sum()))

    def f(x: torch.Tensor) -> torch.Tensor:
        return inner(body(x * 2))

    step = segue.graph(f)
    for _ in range(4):
        x = new(3)
        same(step(x), (x * 2 + 1) * float((x * 2 + 1).sum()))
    assert eager_reasons(step)["data_dependent"] == 3


def test_f24_the_users_exception_arrives_once_and_unchanged(new: Any) -> None:
    class Mine(Exception):
        pass

    ran = torch.zeros(1)

    def f(x: torch.Tensor, fail: list[bool]) -> torch.Tensor:
        ran.add_(1)
        if fail[0]:
            raise Mine("unchanged")
        return x + 1

    step = segue.graph(f)
    for i, fail in enumerate([True, True, True]):
        with pytest.raises(Mine, match="unchanged"):
            step(new(3), [fail])
        assert int(ran) == i + 1
    x = new(3)
    for _ in range(4):
        same(step(x, [False]), x + 1)


def test_f24_a_body_that_fails_only_when_run_again_still_answers(new: Any) -> None:
    feed = iter(range(100))
    budget = [2]

    def f(x: torch.Tensor) -> torch.Tensor:
        next(feed)
        if budget[0] == 0:
            raise RuntimeError("once too often")
        budget[0] -= 1
        return x + 1

    step = segue.graph(f)
    x = new(3)
    same(step(x), x + 1)
    same(step(x), x + 1)
    assert eager_reasons(step).get("unsafe_effects") or eager_reasons(step).get("capture_failed")


def test_f24_a_failed_key_is_tried_again_later(new: Any) -> None:
    reads = [True]

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * (x.sum().item() * 0 + 2) if reads[0] else x * 2

    step = segue.graph(f)
    for i in range(90):
        reads[0] = i < 10
        x = new(3)
        same(step(x), x * 2)
    assert step.report().replays > 10


# -- F25: unbounded shapes ------------------------------------------------------------------------------------------------


def test_f25_five_hundred_lengths_and_a_skewed_mix_stay_bounded(device: Device) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).cumsum(0)

    budget = 16 << 20 if device.kind == "cpu" else 128 << 20
    step = segue.graph(f, max_graphs=8, memory_budget=budget)
    made = {n: torch.randn(n, device=device.device) for n in range(1, 501)}
    for x in made.values():
        same(step(x), f(x))
    assert step.report().captures == 0
    for x in made.values():
        step(x)
    assert step.report().captures <= 60, "rare shapes must not drive each other out"
    generator = random.Random(5)
    for _ in range(1500):
        n = generator.choice((7, 8, 9, 10)) if generator.random() < 0.9 else generator.randrange(1, 501)
        same(step(made[n]), f(made[n]))
    before = step.report()
    for _ in range(300):
        n = generator.choice((7, 8, 9, 10))
        same(step(made[n]), f(made[n]))
    report = step.report()
    assert report.replays - before.replays >= 290 and report.captures - before.captures <= 4
    assert len(report.rows) <= 8 and report.used_bytes <= budget
    assert report.eager["first_seen"] >= 500 and "over_budget" in report.eager
    recorded = {row["key"] for row in report.to_dict()["graphs"]}
    eager = {row["key"]: row for row in report.to_dict()["refused"]}
    assert len(eager) == 500 - len(recorded) and not recorded & set(eager), (
        "the report says of each length what became of it"
    )
    assert {row["reason"] for row in eager.values()} <= {"over_budget", "evicted"}
    assert all(row["detail"] for row in eager.values())
    assert f"and {len(eager) - 40} more kinds of call" in str(report)
    decisions = [step.explain(made[n]) for n in (7, 8, 9, 10)]
    assert all(d.is_replay for d in decisions)


def test_f25_a_shape_over_the_budget_runs_eagerly_and_gives_its_memory_back(device: Device) -> None:
    step = segue.graph(lambda x: x * 2 + 1, memory_budget="4MiB" if device.kind == "cpu" else "64MiB")
    small, large = torch.randn(8, device=device.device), torch.randn(1 << 25, device=device.device)
    for _ in range(3):
        same(step(small), small * 2 + 1)
        same(step(large), large * 2 + 1)
    report = step.report()
    assert report.eager["over_budget"] >= 1 and report.used_bytes <= (report.budget_bytes or 0)
    for _ in range(4):
        same(step(small), small * 2 + 1)
    assert step.report().replays >= 3
