"""Known failure classes that only a GPU shows (F9, F15, F16, F23): streams, host memory, workspaces, other threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import segue
from call_support import same
from segue.device import get_device
from segue.errors import StrictModeError
from tests_support import churn

pytestmark = pytest.mark.gpu

SLOW = 20_000_000  # device cycles, some ten milliseconds
LARGE = 1 << 24


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def model(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sqrt() * 3


def large(seed: int) -> torch.Tensor:
    return torch.full((LARGE,), float(seed), device="cuda").add_(torch.arange(LARGE, device="cuda") % 7)


def recorded(**options: Any) -> Any:
    step = segue.graph(model, **options)
    for seed in (1, 2):
        step(large(seed))
    torch.cuda.synchronize()
    return step


# -- F9: a late reader of an output, and the next replay ----------------------------------------------------------------


@pytest.mark.parametrize("first_is_late", [True, False])
def test_f9_two_streams_call_at_once(first_is_late: bool) -> None:
    step = recorded()
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [large(seed) for seed in (3, 4)]
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (place == 0) == first_is_late:
                    torch.cuda._sleep(SLOW)
                results.append(step(inputs[place]))
        torch.cuda.synchronize()
        for got, x in zip(results, inputs, strict=True):
            same(got, model(x))
    assert step.report().replays == 20


def test_f9_two_threads_with_streams_of_their_own() -> None:
    step = recorded()
    barrier = threading.Barrier(2)

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        x = large(seed)
        expected = model(x)
        torch.cuda.synchronize()
        barrier.wait()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(30):
                got = step(x)
                stream.synchronize()
                assert torch.equal(got, expected)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, seed) for seed in (5, 6)]:
            future.result()


def test_f9_a_lease_is_read_late_on_its_own_stream_and_on_a_named_one() -> None:
    step = recorded(outputs="view")
    caller, reader, other = (torch.cuda.Stream() for _ in range(3))
    inputs = [large(seed) for seed in (3, 4)]
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(caller):
            lease = step(inputs[0])
            view = lease.value
        reader.wait_stream(caller)
        with torch.cuda.stream(reader):
            torch.cuda._sleep(SLOW)
            late = view.clone()
        lease.record_stream(reader)
        with torch.cuda.stream(caller):
            torch.cuda._sleep(SLOW // 2)
            later = view.clone()
        with torch.cuda.stream(other):
            second = step(inputs[1]).clone()
        torch.cuda.synchronize()
        for got, x in ((late, inputs[0]), (later, inputs[0]), (second, inputs[1])):
            same(got, model(x))


# -- results of a pass that ran on the lane's stream -----------------------------------------------------------------------


def test_results_that_are_lazily_conjugated_are_handed_over_without_harm() -> None:
    """Each shape's trace hands its results to the caller's stream; a heap that was harmed ends the process."""
    lines = (
        "import torch, segue",
        "step = segue.graph(lambda x: (x.conj(), x.conj().imag, x * 2), max_graphs=256)",
        "with torch.no_grad():",
        "    for size in range(1, 200):",
        "        for _ in range(3):",
        "            x = torch.randn(size, dtype=torch.complex64, device='cuda')",
        "            a, b, c = step(x)",
        "            assert torch.equal(a, x.conj()) and torch.equal(b, -x.imag) and torch.equal(c, x * 2)",
        "print(step.report().captures)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, int(done.stdout or 0)) == (0, 199), (done.returncode, done.stdout, done.stderr[-2000:])


SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda x: torch.sparse_coo_tensor(torch.arange(3, device="cuda")[None], x, (5,)),
    "csr": lambda x: torch.sparse_csr_tensor(
        torch.tensor([0, 2, 3], device="cuda"), torch.arange(3, device="cuda"), x, (2, 3)
    ),
}


@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_result_is_eagers(layout: str) -> None:
    step = segue.graph(SPARSE[layout])
    for _ in range(4):
        x = torch.randn(3, device="cuda")
        got, expected = step(x), SPARSE[layout](x)
        assert got.layout == expected.layout and torch.equal(got.to_dense(), expected.to_dense())


# -- F15: host memory that a recording might read again -------------------------------------------------------------------


def _outside(host: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * host.to(x.device, non_blocking=True)


def _made_inside(host: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * torch.tensor([2.0, 3.0, 4.0], pin_memory=host.is_pinned()).to(x.device, non_blocking=True)


def _into_a_buffer(host: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def f(x: torch.Tensor) -> torch.Tensor:
        scale = torch.empty_like(x)
        scale.copy_(host, non_blocking=True)
        return x * scale

    return f


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("make", [_outside, _made_inside, _into_a_buffer])
def test_f15_an_upload_is_never_stale(make: Any, is_pinned: bool) -> None:
    host = torch.ones(3, pin_memory=is_pinned)
    f = make(host)
    step = segue.graph(f)
    for value in range(1, 12):
        torch.cuda.synchronize()
        host.fill_(value)
        x = torch.randn(3, device="cuda")
        got = step(x)
        torch.cuda.synchronize()
        same(got, f(x))
        others = [torch.full((3,), -9.0).pin_memory() for _ in range(32)]  # whoever re-reads freed memory shows it
        del others
        gc.collect(1)
    print(f"\n{make.__name__.strip('_')}, pinned {is_pinned}: {step.report()}")


@pytest.mark.parametrize("is_pinned", [True, False])
def test_f15_a_host_buffer_that_is_read_and_written_back_goes_on_from_call_to_call(is_pinned: bool) -> None:
    ours, theirs = torch.ones(3, pin_memory=is_pinned), torch.ones(3, pin_memory=is_pinned)

    def f(host: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = host.to(x.device) * 2 + x
        host.copy_(y)
        return y + 1

    step = segue.graph(lambda x: f(ours, x))
    for _ in range(6):
        x = torch.randn(3, device="cuda")
        got, expected = step(x), f(theirs, x)
        torch.cuda.synchronize()
        same(got, expected)
        same(ours, theirs)


# -- F16: the end of one graph ----------------------------------------------------------------------------------------------


def _products(width: int) -> torch.nn.Module:
    layers = [torch.nn.Linear(width, width) for _ in range(3)]
    return torch.nn.Sequential(*layers).to("cuda").half()


@pytest.mark.parametrize("shares_a_lane", [True, False])
def test_f16_graphs_end_one_by_one_and_the_others_stay_right(shares_a_lane: bool) -> None:
    if shares_a_lane:
        shared = _products(256)
        steps: list[Any] = [segue.graph(shared)] * 5
        models: list[Any] = [shared] * 5
    else:
        models = [_products(256) for _ in range(5)]
        steps = [segue.graph(m) for m in models]
    inputs = [torch.randn(8 * (i + 1), 256, device="cuda", dtype=torch.half) for i in range(5)]
    expected = [m(x) for m, x in zip(models, inputs, strict=True)]
    for _ in range(3):
        for step, x in zip(steps, inputs, strict=True):
            step(x)
    for ended in range(5):
        if shares_a_lane:
            site = next(iter(steps[0]._dispatch.sites.values()))
            with site.lane.exclusive():
                site.store.drop(next(iter(site.store.recorded)), segue.Reason.EVICTED)
        else:
            steps[ended].close()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(16)]
        for place in range(ended + 1, 5):
            assert steps[place].explain(inputs[place]).is_replay
            same(steps[place](inputs[place]), expected[place])
        del held


def test_f16_evictions_under_load_leave_the_survivors_right() -> None:
    whole = _products(128)
    step = segue.graph(whole, max_graphs=3)
    inputs = {n: torch.randn(n, 128, device="cuda", dtype=torch.half) for n in range(1, 9)}
    expected = {n: whole(x) for n, x in inputs.items()}
    for turn in range(12):
        for n in (1 + (turn + i) % 8 for i in range(3)):  # what is busy moves on
            for _ in range(60):
                same(step(inputs[n]), expected[n])
        torch.cuda.empty_cache()
        churn(get_device("cuda"))
    report = step.report()
    assert report.evictions > 0 and len(report.rows) <= 3


# -- F23: other threads on the device during captures -----------------------------------------------------------------------


def test_f23_a_thread_pins_memory_and_uploads_while_another_captures() -> None:
    stop, errors, rounds = threading.Event(), [], [0]

    def upload() -> None:
        generator = torch.Generator().manual_seed(1)
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    host = torch.randn(1 << 14, generator=generator).pin_memory()
                    there = host.to("cuda", non_blocking=True)
                    scratch = torch.empty(1 << 16, device="cuda").fill_(1.0)
                    stream.synchronize()
                    if not torch.equal(there.cpu(), host) or float(scratch.sum()) != 1 << 16:
                        raise AssertionError("the thread's own work is wrong")
                    rounds[0] += 1
        except BaseException as error:
            errors.append(error)

    whole = _products(64)
    step = segue.graph(whole, max_graphs=64)
    thread = threading.Thread(target=upload)
    thread.start()
    try:
        for n in range(1, 49):
            x = torch.randn(n, 64).to("cuda").half()
            for _ in range(4):
                same(step(x), whole(x))
    finally:
        stop.set()
        thread.join()
    assert not errors, errors
    assert rounds[0] > 0 and step.report().captures == 48 and step.report().replays == 96


# -- kernels that torch's dispatcher does not launch --------------------------------------------------------------------


@pytest.fixture(scope="module")
def scale() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``x *= factor`` by a Triton kernel, launched as users launch theirs."""
    pytest.importorskip("triton")
    from triton_support import scale_kernel

    def launch(x: torch.Tensor, factor: torch.Tensor) -> None:
        scale_kernel[(1,)](x, factor, x.numel(), BLOCK=1024)

    return launch


class Scaled(torch.nn.Module):
    """Reads a buffer, a plain attribute and an argument through raw launches, and writes an argument."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("factor", torch.full((1,), 2.0, device="cuda"))
        self.held = {"other": torch.full((1,), 3.0, device="cuda")}

    def forward(self, x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        y = x + 1
        self.scale(y, self.factor)
        self.scale(into, self.held["other"])
        return y * 2


def test_what_raw_launches_write_reaches_the_caller_and_what_they_read_is_watched(scale: Any) -> None:
    step, plain = segue.graph(Scaled(scale)), Scaled(scale)
    for turn in range(12):
        if turn == 6:
            for module in (step.module, plain):
                module.factor = torch.full((1,), 5.0, device="cuda")
        if turn == 9:
            for module in (step.module, plain):
                module.held["other"] = torch.full((1,), 7.0, device="cuda")
        x = torch.arange(100.0, device="cuda") + turn
        mine, theirs = torch.ones(50, device="cuda"), torch.ones(50, device="cuda")
        same(step(x, mine), plain(x, theirs))
        same(mine, theirs)
        churn(get_device("cuda"))
    report = step.report()
    assert sum(row.calls for row in report.rows) >= 1
    assert "no torch operation" in str(report)


def test_raw_launches_into_padded_arguments_reach_the_caller(scale: Any) -> None:
    factor = torch.full((1,), 2.0, device="cuda")

    def double(x: torch.Tensor) -> torch.Tensor:
        scale(x, factor)
        return x + 1

    step = segue.graph(double, pad={"x": segue.Pad(dim=0, ladder=(4, 8), fill=0.0)})
    for rows in (3, 3, 4, 3, 7, 7, 8, 5):
        x = torch.arange(float(rows), device="cuda")
        got = step(x)
        expected = torch.arange(float(rows), device="cuda") * 2
        same(x, expected)
        same(got, expected + 1)


def test_strict_mode_refuses_raw_launches(scale: Any) -> None:
    step = segue.graph(Scaled(scale), strict=True)
    with pytest.raises(StrictModeError, match="no torch operation"):
        for _ in range(3):
            step(torch.ones(100, device="cuda"), torch.ones(50, device="cuda"))
