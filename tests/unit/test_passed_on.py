"""Arguments that breaks hand back, evictions of the last recording, operations whose results depend on data, errors that
first come at a replay, and settings that a pass makes for itself. The plain function is the oracle."""

from __future__ import annotations

import contextlib
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
