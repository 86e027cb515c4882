"""Arguments that breaks hand back, evictions of the last recording, operations whose results depend on data, errors that
first come at a replay, and settings that a pass makes for itself. The plain function is the oracle."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import segue
from call_support import eager_reasons, same
from segue.device import Device
from segue.errors import ReplayError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device == torch.device("cpu") else device)


MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["alone", "beside a new tensor", "a view", "in a dict"])
@pytest.mark.parametrize("write", ["add_", "data", "batch_norm"])
def test_what_is_written_after_a_break_handed_it_back_is_written(mode: str, way: str, write: str, device: Device) -> None:
    @segue.eager_on_graph
    def hand_back(x: torch.Tensor, kept: torch.Tensor) -> Any:
        results = {"alone": kept, "a view": kept.view(-1), "in a dict": {"kept": kept}}
        return results.get(way, (x * 2, kept))

    def function(x: torch.Tensor, kept: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        got = hand_back(x, kept)
        kept = got["kept"] if isinstance(got, dict) else got[1] if isinstance(got, tuple) else got
        if write == "batch_norm":
            return F.batch_norm(x, kept, var, training=True)
        (kept.data if write == "data" else kept).add_(1)
        return x.sum(0) + kept

    step = segue.graph(function)
    with MODES[mode]():
        both = [[torch.zeros(2, 3, device=device.device)[0], torch.ones(3, device=device.device)] for _ in range(2)]
        for _ in range(6):
            x = torch.randn(4, 3, device=device.device) + 5
            expected, got = function(x, *both[0]), step(x, *both[1])
            torch.testing.assert_close(got, expected)
            for mine, theirs in zip(both[1], both[0], strict=True):
                torch.testing.assert_close(mine, theirs)
    assert step.report().replays


@pytest.mark.parametrize("mode", MODES)
def test_a_slice_beside_the_one_that_a_break_hands_back(mode: str, device: Device) -> None:
    hand_back = segue.eager_on_graph(lambda k: k)

    def function(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hand_back(k)
        v.add_(1)
        return v * 2

    step = segue.graph(function)
    with MODES[mode]():
        for _ in range(6):
            pairs = [torch.zeros(2, 3, device=device.device) for _ in range(2)]
            same(step(*pairs[0]), function(*pairs[1]))
            same(*pairs)


@pytest.mark.parametrize("options", [{}, {"debug": "forward"}, {"debug": "ops"}], ids=["", "forward", "ops"])
@pytest.mark.parametrize("is_break", [True, False])
def test_a_recording_that_replaces_the_only_other_one_keeps_its_memory(
    options: dict[str, Any], is_break: bool, device: Device
) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    broken = segue.eager_on_graph(double)
    step = segue.graph((lambda x: broken(x)) if is_break else double, max_graphs=1, **options)
    sizes = [4] * 3 + [5] * 40 + [4] * 90
    with torch.no_grad():
        for n in sizes:
            x = torch.randn(n, device=device.device)
            same(step(x), x * 2)
    report = step.report()
    assert report.evictions and report.replays > 40
    if not (is_break or options):
        assert report.pool_bytes


# -- operations that read data ----------------------------------------------------------------------------------------


@torch.library.custom_op("segue_test_passed_on::count", mutates_args=())
def count(x: torch.Tensor) -> int:
    return int((x > 0).sum())


@torch.library.custom_op("segue_test_passed_on::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


def test_a_number_that_an_operation_of_the_users_returns_is_read() -> None:
    step = segue.graph(lambda x: x + count(x))
    with torch.no_grad():
        for value in (0.0, 0.0, 0.0, 1.0, 2.0):
            x = torch.full((3,), value)
            same(step(x), x + int((x > 0).sum()))
    assert set(eager_reasons(step)) == {"first_seen", "data_dependent"}


def test_a_result_of_another_shape_is_an_error_and_no_answer() -> None:
    step = segue.graph(lambda x: positive(x).sum())
    with torch.no_grad():
        for values in ([1.0, 2, 3],) * 2 + ([4.0, 5, 6],):
            same(step(torch.tensor(values)), torch.tensor(values).sum())
        with pytest.raises(ReplayError, match="shape depends on data"):
            step(torch.tensor([7.0, -1, -1]))


def test_packed_sequences_are_not_recorded_on_the_cpu() -> None:
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(2, 4, batch_first=True)

    def packs(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return pack_padded_sequence(x, lengths, batch_first=True).data.mean(0)

    def runs(data: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return pad_packed_sequence(lstm(PackedSequence(data, sizes))[0], batch_first=True)[0].sum()

    steps = segue.graph(packs), segue.graph(runs)
    with torch.no_grad():
        for lengths in ([5, 4, 3],) * 3 + ([5, 5, 2], [4, 4, 4]):
            x, told = torch.randn(3, 5, 2), torch.tensor(lengths)
            same(steps[0](x, told), packs(x, told))
            packed = pack_padded_sequence(x, told, batch_first=True)
            same(steps[1](packed.data, packed.batch_sizes), runs(packed.data, packed.batch_sizes))


# -- errors and settings ----------------------------------------------------------------------------------------------


def test_what_was_written_before_an_operation_raised_stays_written() -> None:
    table = torch.randn(4, 3)

    def function(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return F.embedding(index, table) * count

    step, counts = segue.graph(function), [torch.zeros(3), torch.zeros(3)]
    with torch.no_grad():
        for index in ([0, 1], [1, 2], [2, 3], [9, 9], [1, 1], [0, 2]):
            for call, count in zip((function, step), counts, strict=True):
                with contextlib.suppress(IndexError):
                    call(count, torch.tensor(index))
            same(*counts)
    assert step.report().replays


@pytest.mark.parametrize("made", ["set", "with"])
def test_a_default_device_hinders_no_recording(made: str, device: Device) -> None:
    step = segue.graph(torch.nn.Linear(3, 3, device=device.device))
    name = device.device.type
    with torch.device(name) if made == "with" else contextlib.nullcontext(), torch.inference_mode():
        if made == "set":
            torch.set_default_device(name)
        for _ in range(5):
            x = torch.randn(2, 3, device=device.device)
            same(step(x), step.eager(x))
    assert step.report().replays == 3


def _in_double(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        half = x / 3
    finally:
        torch.set_default_dtype(torch.float32)
    return half + (x / 3).sum() + torch.ones(3)


WEIGHT = torch.randn(16, 3, 3, 3)


def _without_onednn(x: torch.Tensor) -> torch.Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return F.conv2d(x.float().expand(2, 3, 16, 3), WEIGHT, padding=1)


@pytest.mark.parametrize("function", [_in_double, _without_onednn])
def test_settings_that_a_pass_makes_for_itself_count(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    step = segue.graph(function)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(5):
            x = torch.arange(i, i + 3)
            same(step(x), function(x))


# -- state ------------------------------------------------------------------------------------------------------------


def test_what_each_thread_has_for_itself_is_not_recorded() -> None:
    local = threading.local()
    local.scale = torch.ones(2)
    step = segue.graph(lambda x: x * local.scale)
    found: list[torch.Tensor] = []

    def other() -> None:
        local.scale = torch.full((2,), 5.0)
        with torch.no_grad():
            found.append(step(torch.ones(2)))

    with torch.no_grad():
        for _ in range(3):
            same(step(torch.ones(2)), torch.ones(2))
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    same(found[0], torch.full((2,), 5.0))
    assert "threading.local" in str(step.report())


@pytest.mark.parametrize("how", ["every:1", "first"])
def test_verification_leaves_generators_of_closures_as_eager_does(how: str) -> None:
    def draws(**options: Any) -> list[float]:
        make = torch.Generator().manual_seed(0)
        step = segue.graph(lambda x: x + torch.rand(1, generator=make), **options)
        with torch.no_grad():
            return [step(torch.zeros(1)).item() for _ in range(6)]

    make = torch.Generator().manual_seed(0)
    assert draws(verify=how) == draws() == [torch.rand(1, generator=make).item() for _ in range(6)]


@pytest.mark.parametrize("is_attribute", [True, False])
def test_the_order_of_a_dict_that_the_callable_holds(is_attribute: bool) -> None:
    stages = {"a": torch.sin, "b": torch.exp}

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = stages

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self.stages.values():
                x = stage(x)
            return x

    def chain(x: torch.Tensor) -> torch.Tensor:
        for stage in stages.values():
            x = stage(x)
        return x

    step = segue.graph(Chain() if is_attribute else chain)
    with torch.no_grad():
        for _ in range(3):
            same(step(torch.ones(2)), torch.ones(2).sin().exp())
        stages["a"] = stages.pop("a")
        for _ in range(4):
            same(step(torch.ones(2)), torch.ones(2).exp().sin())
    assert step.report().replays >= 3


@pytest.mark.parametrize("options", [{}, {"debug": "forward"}, {"debug": "forward", "inference": True}], ids=str)
def test_an_argument_that_is_state_of_the_function(options: dict[str, Any], device: Device) -> None:
    buffer = torch.zeros(2, device=device.device)

    def function(x: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return x * 2 + buffer

    step = segue.graph(function, **options)
    with torch.no_grad():
        for _ in range(4):
            buffer.zero_()
            same(step(torch.ones(2, device=device.device)), torch.full((2,), 3.0, device=device.device))
        for _ in range(3):
            buffer.zero_()
            same(step(buffer), torch.full((2,), 3.0, device=device.device))


# -- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8, 5), (5, 8), (11, 8), (3, 3), (8, 8), (10, 1), (5, 5)])
def test_a_live_size_may_be_the_rung_of_another_axis(sizes: tuple[int, int], device: Device) -> None:
    step = segue.graph(lambda x, y: (x * 2, y * 2), pad={"x": segue.Pad(ladder=(11,)), "y": segue.Pad(ladder=(8,))})
    with torch.no_grad():
        for _ in range(4):
            x, y = (torch.randn(n, 3, device=device.device) for n in sizes)
            same(step(x, y), (x * 2, y * 2))
    assert step.report().replays == 2


def test_one_axis_may_lie_along_several_dimensions(device: Device) -> None:
    pad = {"x": segue.Pad(dim=0, axis="s", ladder=(8,)), "mask": segue.Pad(dim=1, axis="s", ladder=(8,))}
    step = segue.graph(lambda x, mask: (x * 2, mask + 1), pad=pad)
    with torch.no_grad():
        for n in (5, 5, 5, 7, 8, 1):
            x, mask = torch.randn(n, 3, device=device.device), torch.randn(2, n, device=device.device)
            same(step(x, mask), (x * 2, mask + 1))
    assert step.report().replays == 4


LYING: dict[str, Callable[[int], torch.Tensor]] = {
    "whole": lambda n: torch.zeros(n, 4),
    "columns": lambda n: torch.zeros(n, 8)[:, :4],
    "every other column": lambda n: torch.zeros(n, 8)[:, ::2],
    "every other row": lambda n: torch.zeros(2 * n, 4)[::2],
    "turned": lambda n: torch.zeros(4, n).T,
    "turned columns": lambda n: torch.zeros(4, n + 3)[:, :n].T,
}


@pytest.mark.parametrize("order", [list(LYING), list(LYING)[::-1]], ids=["forwards", "backwards"])
def test_a_padded_argument_keeps_its_gaps(order: list[str]) -> None:
    """What tells an alias from a copy (`contiguous`, `reshape`) must not depend on padding."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        flat = x.contiguous()
        flat.add_(1)
        rows = x.reshape(-1, 2)
        rows.mul_(3)
        return flat, x + 1, x.is_contiguous()

    step = segue.graph(function, pad={"x": segue.Pad(ladder=(8,))})
    with torch.no_grad():
        for kind in order:
            for n in (5, 5, 3, 8, 6):
                ours, theirs = LYING[kind](n), LYING[kind](n)
                expected, got = function(theirs), step(ours)
                torch.testing.assert_close(got[:2], expected[:2], rtol=0, atol=0)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
                assert got[2] == expected[2]
    assert step.report().replays


# -- breaks and what they say of themselves ---------------------------------------------------------------------------


def test_writes_that_name_an_object_are_not_known() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(1))

        @segue.eager_on_graph(writes=("self",))
        def put(self, x: torch.Tensor) -> torch.Tensor:
            self.kept.add_(x)
            return x * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.put(x) + self.kept

    net = Net()
    step = segue.graph(net, verify="every:1")
    with torch.no_grad():
        for i in range(1, 6):
            assert (step(torch.ones(1)).item(), net.kept.item()) == (2.0 + i, float(i))
    assert "unverified" in str(step.report())


def test_state_among_the_arguments_of_the_traced_call_is_state_afterwards(device: Device) -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(1, device=device.device))

    @segue.eager_on_graph
    def state(a: torch.Tensor) -> torch.Tensor:
        return module.kept

    step = segue.graph(lambda x: state(x) + x)
    zero = torch.zeros(1, device=device.device)
    with torch.no_grad():
        for x in (zero, module.kept, zero, zero, module.kept, zero, zero):
            same(step(x), 1 + x)
    assert step.report().replays


def test_compiled_functions_may_be_called_inside() -> None:
    inner = torch.compile(lambda x: x.sin() + 1, backend="eager")
    step = segue.graph(lambda x: inner(x) * 2)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3)
            same(step(x), (x.sin() + 1) * 2)
    assert step.report().replays == 2


def test_a_nested_tensor_inside_runs_eagerly() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.to_padded_tensor(torch.nested.nested_tensor([x[0], x[1, :2]]), 0.0)

    step = segue.graph(function)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 4)
            same(step(x), function(x))
    assert "capture_failed" in eager_reasons(step)


def test_layers_with_a_fast_path_answer_from_it_on_the_cpu() -> None:
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    step, padding = segue.graph(encoder), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 5, 8)
            same(step(x, src_key_padding_mask=padding), encoder(x, src_key_padding_mask=padding))
    assert "set_fastpath_enabled" in str(step.report())


# -- decorators and patches -------------------------------------------------------------------------------------------


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


SCALE: Any = 2.0


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@functools.singledispatch
def _dispatched(x: Any) -> Any:
    raise TypeError


@_dispatched.register(torch.Tensor)
def _(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class _Method(torch.nn.Module):
    @_timed
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE


@functools.wraps(torch.nn.Linear.forward)
def _as_if_torchs(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


DECORATED: dict[str, Callable[[], Any]] = {
    "plain": lambda: _scaled,
    "of torch's": lambda: torch.no_grad()(_scaled),
    "of one's own": lambda: _timed(_scaled),
    "both": lambda: torch.no_grad()(_timed(_scaled)),
    "a method": _Method,
    "named like one of torch's": lambda: _as_if_torchs,
}


@pytest.mark.parametrize("value", [7.0, torch.full((2,), 7.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", DECORATED)
def test_what_a_decorated_function_names_is_followed(kind: str, value: Any) -> None:
    global SCALE
    SCALE = 2.0 if isinstance(value, float) else torch.full((2,), 2.0)
    step = segue.graph(DECORATED[kind]())
    with torch.no_grad():
        for i in range(7):
            if i == 3:
                SCALE = value
            same(step(torch.ones(2)), torch.ones(2) * SCALE)
    assert step.report().replays >= 2


def test_weights_behind_a_dispatched_function_are_followed() -> None:
    global SCALE
    SCALE = torch.full((2,), 2.0)
    step = segue.graph(_dispatched)
    with torch.no_grad():
        for i in range(7):
            if i == 3:
                SCALE = torch.full((2,), 7.0)
            same(step(torch.ones(2)), torch.ones(2) * SCALE)
    assert step.report().replays >= 2


def test_a_patched_forward_that_poses_as_torchs_is_followed() -> None:
    linear = torch.nn.Linear(4, 4, bias=False)
    inner, scale = linear.forward, torch.ones(4)

    @functools.wraps(inner)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + x * scale

    linear.forward = forward  # type: ignore[method-assign]
    model = torch.nn.Sequential(linear)
    step = segue.graph(model)
    with torch.no_grad():
        for i in range(7):
            if i == 3:
                scale = torch.full((4,), 10.0)
            x = torch.randn(2, 4)
            same(step(x), model(x))
    assert step.report().replays >= 2


def test_padded_grey_images_keep_their_order_in_memory() -> None:
    conv = torch.nn.Conv2d(1, 3, 3)
    step = segue.graph(conv, pad={"input": segue.Pad(ladder=[11])})
    with torch.no_grad():
        for at in range(8):
            x = torch.randn(3, 6, 6, 1).permute(0, 3, 1, 2) if at % 2 else torch.randn(3, 1, 6, 6)
            expected, got = conv(x), step(x)
            assert got.stride() == expected.stride()
            torch.testing.assert_close(got, expected)
    assert step.report().replays
