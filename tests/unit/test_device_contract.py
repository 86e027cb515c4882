"""The contract of a device, for the cpu device and for CUDA: what is recorded replays as eager does, capture executes
nothing, and whatever goes wrong in a capture leaves the device as it was."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from segue.device import Device, get_device
from segue.device.streams import NUM_STREAMS
from segue.errors import CaptureError, HostReadError
from segue.memory.lane import Lane
from tests_support import churn, record, replay

Program = Callable[[torch.Tensor, torch.Tensor], Any]


def _in_place(x: torch.Tensor, state: torch.Tensor) -> Any:
    state.add_(x).mul_(0.5)
    return state[1:3].relu()


def _views(x: torch.Tensor, state: torch.Tensor) -> Any:
    a = x.view(2, 2, 16).permute(1, 0, 2)[:, 1].unsqueeze(0).expand(3, 2, 16)
    return (a + 1).reshape(3, 32)


def _write_through_view(x: torch.Tensor, state: torch.Tensor) -> Any:
    y = x * 2
    y[:, ::2].add_(1)
    y.t()[3].fill_(7)
    return y


def _multi_output(x: torch.Tensor, state: torch.Tensor) -> Any:
    values, indices = x.topk(3, dim=1)
    ordered, order = x.sort(dim=0)
    return F.layer_norm(values, (3,)), indices, ordered, order, torch.var_mean(x, dim=1)


def _lists(x: torch.Tensor, state: torch.Tensor) -> Any:
    pieces = x.split([1, 3]) + x.chunk(2, dim=1)
    return [torch.cat([pieces[0], pieces[1]]), torch.stack([p.sum() for p in pieces])]


def _gather(x: torch.Tensor, state: torch.Tensor) -> Any:
    index = x.argsort(dim=0)
    state.scatter_add_(0, index, x)
    state[index[:, 0]] = x
    return x.gather(0, index), state.index_select(0, index[0, :2]), torch.where(x > 0, x, state)


def _matmul(x: torch.Tensor, state: torch.Tensor) -> Any:
    return F.scaled_dot_product_attention(x[None, None], state[None, None], x[None, None]), x @ state.t()


def _dtypes(x: torch.Tensor, state: torch.Tensor) -> Any:
    half = x.to(torch.bfloat16)
    return F.layer_norm(half, (16,)), half.float() + 1, (x * 100).to(torch.int32) % 7, x > state


def _factories(x: torch.Tensor, state: torch.Tensor) -> Any:
    steps = torch.arange(4, device=x.device, dtype=x.dtype)
    mask = torch.ones(4, 16, device=x.device, dtype=torch.bool).tril()
    return x.masked_fill(mask, 0) + steps[:, None] + torch.zeros_like(x) + torch.full((), 2.0, device=x.device)


def _out_argument(x: torch.Tensor, state: torch.Tensor) -> Any:
    torch.mul(x, 3, out=state)
    return torch.empty_like(x).copy_(state)


def _empty(x: torch.Tensor, state: torch.Tensor) -> Any:
    return torch.cat([x[:0], x * 2]), x[:0].sum()


def _in_place_views(x: torch.Tensor, state: torch.Tensor) -> Any:
    y = x * 2
    y.unsqueeze_(0).transpose_(1, 2).squeeze_(0)
    return y.t_().add_(1), x[0] @ state.t()


def _lazy_conjugates(x: torch.Tensor, state: torch.Tensor) -> Any:
    z = torch.complex(x, state).conj()
    return z.clone(), z.imag.clone(), z.imag, z, z * 2, torch.fft.hfft(z[0])


def _tensor_lists(x: torch.Tensor, state: torch.Tensor) -> Any:
    torch._foreach_add_([state[0], state[1]], [x[0], x[1]])
    return torch._foreach_mul([x, state], 2.0), torch.unbind_copy(x), torch.split_with_sizes_copy(x, [1, 3])


def _empty_pieces(x: torch.Tensor, state: torch.Tensor) -> Any:
    y = x * 2
    return y[4:], torch.cat([y[4:], y]), y[:0].exp().sum(0), (y[:, :0] @ y[:, :0].t()) + 1


PROGRAMS = [
    _in_place, _views, _write_through_view, _multi_output, _lists, _gather, _matmul, _dtypes, _factories, _out_argument,
    _empty, _in_place_views, _lazy_conjugates, _tensor_lists, _empty_pieces,
]  # fmt: skip


def _fresh(device: Device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, state = torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)
    return x.to(device.device), state.to(device.device)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_replay_equals_eager(lane: Lane, program: Program) -> None:
    x, state = _fresh(lane.device, 0)
    recorded = record(lane, lambda: program(x, state))
    for seed in range(1, 4):
        live_x, live_state = _fresh(lane.device, seed)
        x.copy_(live_x)
        state.copy_(live_state)
        churn(lane.device)
        got = replay(lane, recorded)
        expected = program(live_x, live_state)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(state, live_state, rtol=0, atol=0)


def test_capture_executes_nothing(lane: Lane) -> None:
    x, state = _fresh(lane.device, 0)
    counted = 0

    def forward() -> torch.Tensor:
        nonlocal counted
        counted += 1
        if counted == 2:  # the capture
            before.copy_(state)
        return state.add_(x) + torch.rand_like(x)

    # What the capture leaves behind is compared with the state after the trace: take it through a break-free look.
    before = torch.empty_like(state)
    made: list[torch.Tensor] = []
    generator_states: list[torch.Tensor] = []

    def watched() -> torch.Tensor:
        made.append(state)
        return state.add_(x) + torch.rand_like(x)

    from segue.backends import make_backend
    from segue.shapes.key import ShapeKey

    backend = make_backend("full", lane)
    with torch.no_grad(), lane.exclusive(), lane.capture_pass():
        with lane.device.on_stream(lane.stream):
            _, trace = backend.trace(watched)
        after_trace = state.clone()
        generator_states.append(_generator_state(lane.device))
        backend.record(ShapeKey("call", 4), watched, trace)
    assert len(made) == 2
    assert torch.equal(state, after_trace)
    assert torch.equal(_generator_state(lane.device), generator_states[0])


def _generator_state(device: Device) -> torch.Tensor:
    return torch.cuda.get_rng_state() if device.kind == "cuda" else torch.get_rng_state()


def test_random_draws_are_those_of_eager(lane: Lane) -> None:
    x = torch.ones(64, 64, device=lane.device.device)

    def forward() -> Any:
        return F.dropout(x, 0.5, training=True), torch.rand_like(x), torch.empty_like(x).bernoulli_(0.3)

    recorded = record(lane, forward)
    torch.manual_seed(7)
    got = [replay(lane, recorded) for _ in range(3)]
    torch.manual_seed(7)
    for call in got:
        torch.testing.assert_close(call, forward(), rtol=0, atol=0)


def test_memory_is_reused_and_freed(lane: Lane) -> None:
    x = torch.randn(256, 256, device=lane.device.device)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(60):
            y = y * 1.01 + 1
        return y

    recorded = record(lane, forward)
    expected = x
    for _ in range(60):
        expected = expected * 1.01 + 1
    assert torch.equal(replay(lane, recorded), expected)
    assert lane.reserved_bytes <= 4 << 20, "60 temporaries of 256 KiB share their memory"
    anchor = 512 if lane.device.kind == "cuda" else 0
    assert sum(lane.pool.state().live.values()) <= anchor


def test_recordings_of_one_pool_replay_in_any_order(lane: Lane) -> None:
    inputs = {n: torch.randn(n, 32, device=lane.device.device) for n in (64, 8, 32, 16)}
    weight = torch.randn(32, 32, device=lane.device.device)
    recorded = {n: record(lane, lambda x=x: (x @ weight).relu() @ weight) for n, x in inputs.items()}
    for n in (8, 64, 16, 64, 32, 8):
        inputs[n].normal_()
        churn(lane.device)
        expected = (inputs[n] @ weight).relu() @ weight
        torch.testing.assert_close(replay(lane, recorded[n]), expected, rtol=0, atol=0)


def test_closing_one_recording_leaves_the_others_valid(lane: Lane) -> None:
    inputs = [torch.randn(16, 32, device=lane.device.device) for _ in range(4)]
    weight = torch.randn(32, 32, device=lane.device.device)
    recorded = [record(lane, lambda x=x: x @ weight @ weight) for x in inputs]
    recorded.pop(0).close()
    lane.device.flush()
    churn(lane.device)
    for x, rec in zip(inputs[1:], recorded, strict=True):
        torch.testing.assert_close(replay(lane, rec), x @ weight @ weight, rtol=0, atol=0)


# -- what a recording cannot hold --------------------------------------------------------------------------------------


def _item(x: torch.Tensor) -> Any:
    return x * x.sum().item()


def _nonzero(x: torch.Tensor) -> Any:
    return (x * 2).nonzero()


def _bool_mask(x: torch.Tensor) -> Any:
    y = x * 2
    return y[y > 0]


def _branch(x: torch.Tensor) -> Any:
    return x + 1 if (x * 2).sum() > 0 else x - 1


def _tolist(x: torch.Tensor) -> Any:
    return x * len((x * 2).tolist())


def _upload(x: torch.Tensor) -> Any:
    return x * 2 + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)[:, None]


READS = [_item, _nonzero, _bool_mask, _branch, _tolist]


@pytest.mark.parametrize("program", [*READS, _upload], ids=lambda p: p.__name__)
def test_host_reads_are_refused_with_the_users_line(lane: Lane, program: Callable[[torch.Tensor], Any]) -> None:
    x, _ = _fresh(lane.device, 0)
    with pytest.raises(CaptureError) as caught:
        record(lane, lambda: program(x))
    assert f"test_device_contract.py:{program.__code__.co_firstlineno}" in _near(caught.value.location, program)


def _near(location: str | None, program: Callable[..., Any]) -> str:
    """The location with its line pulled back to the first line of the function, if it lies inside it."""
    assert location is not None
    path, rest = location.split(":", 1)
    line = int(rest.split(" ")[0])
    first = program.__code__.co_firstlineno
    assert first < line <= first + 3, location
    return f"{path}:{first}"


@pytest.mark.parametrize("method", ["numpy", "cpu", "__repr__", "__array__"])
def test_python_level_reads_are_refused_on_the_cpu_device(method: str) -> None:
    lane = Lane(get_device("cpu"))
    x = torch.randn(4)
    with pytest.raises(HostReadError, match="reads tensor data"):
        record(lane, lambda: (getattr(x * 2, method)(), x + 1)[1])


def test_a_refusal_cannot_be_swallowed(lane: Lane) -> None:
    x, _ = _fresh(lane.device, 0)

    def forward() -> torch.Tensor:
        y = x * 2
        try:
            n = int(y.sum().item())
        except RuntimeError:
            n = 3
        return y + n

    with pytest.raises(CaptureError):
        record(lane, forward)
    assert torch.equal(replay(lane, record(lane, lambda: x * 3)), x * 3)


def test_an_out_that_would_be_resized_is_refused_on_the_cpu_device() -> None:
    lane = Lane(get_device("cpu"))
    x = torch.randn(4)
    with pytest.raises(CaptureError, match="resizes its out"):
        record(lane, lambda: torch.mul(x, 2, out=torch.empty(0)) + 1)


def test_sparse_tensors_are_refused_on_the_cpu_device() -> None:
    lane = Lane(get_device("cpu"))
    x = torch.randn(4, 4)
    sparse = torch.eye(4).to_sparse_csr()
    for forward in (lambda: sparse @ x, lambda: x.to_sparse().to_dense(), lambda: torch.sparse.sum(x.to_sparse())):
        with pytest.raises(CaptureError, match="sparse"):
            record(lane, forward)
    assert torch.equal(replay(lane, record(lane, lambda: x * 2)), x * 2)


def test_places_to_split_at_that_are_a_tensor_are_refused_on_the_cpu_device() -> None:
    lane = Lane(get_device("cpu"))
    x, places = torch.randn(4), torch.tensor([1, 3])
    for mode in (torch.no_grad, torch.inference_mode):
        with pytest.raises(CaptureError, match="tensor_split"):
            record(lane, lambda mode=mode: [mode(), x.tensor_split(places)][1])
    assert torch.equal(replay(lane, record(lane, lambda: x.tensor_split(2)[1])), x[2:])


def test_a_replay_casts_nothing_that_was_not_recorded(lane: Lane) -> None:
    """Autocast of whoever replays is no concern of a recording."""
    x, weight = torch.randn(4, 16).to(lane.device.device), torch.randn(16, 16).to(lane.device.device)
    recorded = record(lane, lambda: (x @ weight).softmax(1) @ weight)
    expected = (x @ weight).softmax(1) @ weight
    with torch.autocast(lane.device.kind, dtype=torch.bfloat16):
        assert torch.equal(replay(lane, recorded), expected)


def test_two_captures_under_one_autocast_share_no_casts(lane: Lane) -> None:
    x = torch.randn(4, 16).to(lane.device.device)
    linear = torch.nn.Linear(16, 16).to(lane.device.device)
    with torch.autocast(lane.device.kind, dtype=torch.bfloat16), torch.no_grad():
        linear(x)  # in the caller's cache from here on
        first, second = record(lane, lambda: linear(x)), record(lane, lambda: linear(x + 1) * 2)
        for _ in range(2):
            linear.weight.normal_()
            x.normal_()
            torch.clear_autocast_cache()
            expected = linear(x), linear(x + 1) * 2
            assert torch.equal(replay(lane, second), expected[1])
            assert torch.equal(replay(lane, first), expected[0])


def test_a_pass_with_a_backward_is_refused_and_without_one_recorded(lane: Lane) -> None:
    from segue.backends import make_backend
    from segue.shapes.key import ShapeKey

    x, linear = torch.randn(4, 16).to(lane.device.device), torch.nn.Linear(16, 16).to(lane.device.device)
    backend = make_backend("full", lane)
    with lane.exclusive():
        result, trace = backend.trace(lambda: linear(x).relu())
        assert result.requires_grad
        with pytest.raises(CaptureError, match="no_grad"):
            backend.record(ShapeKey("call", 4), lambda: linear(x).relu(), trace)
        del result, trace
        for forward in (torch.no_grad()(lambda: linear(x).relu()), lambda: (x @ x.t()).relu(), lambda: linear.weight):
            _, trace = backend.trace(forward)
            recorded = backend.record(ShapeKey("call", 4), forward, trace)
            assert torch.equal(recorded.replay(), forward())


def test_resizing_under_capture_is_refused_on_the_cpu_device() -> None:
    lane = Lane(get_device("cpu"))
    x = torch.randn(4)
    with pytest.raises(CaptureError, match="captured address"):
        record(lane, lambda: (x * 2).resize_(8))


def test_raw_pointers_are_out_of_reach_on_the_cpu_device() -> None:
    """A kernel called through a pointer would run during capture, unrecorded."""
    lane = Lane(get_device("cpu"))
    x = torch.randn(4)
    with pytest.raises(RuntimeError, match="data pointer"):
        record(lane, lambda: (x * 2).data_ptr())
    assert torch.equal(replay(lane, record(lane, lambda: x * 2)), x * 2)


def test_a_peak_says_what_was_live_and_what_was_taken_for_it(lane: Lane) -> None:
    from segue.backends import make_backend
    from segue.shapes.key import ShapeKey

    mib, device, backend = 1 << 20, lane.device, make_backend("full", lane)

    def forward() -> torch.Tensor:
        wide = torch.ones(3 * mib // 4, device=device.device)
        return wide.repeat(2).sum() + (wide * 2).sum()

    expected = forward()
    device.flush()
    with device.measure_peak() as peak:
        forward()
    assert 9 * mib <= peak.nbytes < 10 * mib and peak.nbytes <= peak.held_bytes <= 24 * mib
    with torch.no_grad(), lane.exclusive():
        trace = backend.trace(forward)[1]
        device.flush()
        before = lane.pool.state().reserved_bytes
        with device.measure_peak(lane.pool) as peak:
            recorded = backend.record(ShapeKey("call", 1), forward, trace)
        grown = lane.pool.state().reserved_bytes - before
        assert 9 * mib <= peak.nbytes < 10 * mib and peak.nbytes <= grown == recorded.record.pool_bytes
        assert grown <= peak.held_bytes <= grown + 4 * mib, "on CUDA the generator's own words may lie elsewhere"
    assert torch.equal(replay(lane, recorded), expected)


# -- streams of lanes --------------------------------------------------------------------------------------------------


@pytest.fixture
def unused(device: Device) -> Device:
    """A device of the same kind whose streams nobody holds."""
    from segue.device.cpu import CpuDevice

    if device.kind == "cpu":
        return CpuDevice()
    from segue.device.cuda import CudaDevice

    return CudaDevice(torch.cuda.current_device())


def test_lanes_in_turn_use_one_stream(unused: Device) -> None:
    streams = []
    for _ in range(40):
        lane = Lane(unused)
        streams.append(lane.stream)
        lane.close()
        lane.close()
    assert len(set(streams)) == 1
    streams = [Lane(unused).stream for _ in range(3)]
    assert len(set(streams)) == 1, "a lane that is dropped gives its stream back as well"


def test_open_lanes_share_no_stream_while_torch_has_another(unused: Device) -> None:
    lanes = [Lane(unused) for _ in range(NUM_STREAMS // 2)]
    for lane in lanes[::3]:  # as lanes come and go the streams that are held lie anywhere in torch's round
        lane.close()
    lanes = [lane for at, lane in enumerate(lanes) if at % 3]
    while len(lanes) < NUM_STREAMS:
        lanes.append(Lane(unused))
    assert len({lane.stream for lane in lanes}) == NUM_STREAMS
    more = [Lane(unused) for _ in range(2 * NUM_STREAMS)]
    assert set(Counter(lane.stream for lane in (*lanes, *more)).values()) == {3}
    more[5].close()
    again = Lane(unused)
    assert again.stream == more[5].stream, "the one with the fewest holders"
    for lane in (*lanes, *more, again):
        lane.close()
    assert Lane(unused).stream == again.stream


def test_threads_take_streams_of_their_own(unused: Device) -> None:
    taken: list[Any] = []

    def work() -> None:
        for _ in range(50):
            unused.give_stream_back(unused.take_stream())
        taken.append(unused.take_stream())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 8


@pytest.mark.gpu
def test_lanes_in_turn_leave_no_workspace_behind_for_each() -> None:
    from segue.device.cuda import CudaDevice

    device = CudaDevice(torch.cuda.current_device())  # its streams are held by nobody
    x = torch.randn(256, 256, device="cuda")
    held: list[int] = []
    gc.collect()
    for _ in range(40):
        lane = Lane(device)
        run = record(lane, lambda: x @ x)
        assert torch.equal(replay(lane, run), x @ x)
        run.close()
        lane.close()
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert set(held[1:]) == {held[0]}
