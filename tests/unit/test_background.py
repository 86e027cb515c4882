"""`capture="background"`: calls run eagerly, and fast, until another thread has recorded them in idle moments."""

from __future__ import annotations

import copy
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import segue
from call_support import check_calls, eager_reasons, same
from segue.device import Device
from segue.errors import ConfigError, StrictModeError
from segue.graph.guard import is_capturing
from segue.runners.callable import GraphedCallable


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def settled(step: GraphedCallable) -> None:
    wait_for(lambda: not any(e.pending for s in step._dispatch.sites.values() for e in list(s.store.entries.values())))


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "segue-capture"]


class Layers(torch.nn.Module):
    """Keeps what it computes in an attribute on the way, as code that no two threads may run at once does."""

    def __init__(self, depth: int = 30, width: int = 16) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(depth)])
        self.hidden: Any = None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x
        for layer in self.layers:
            self.hidden = layer(self.hidden).tanh()
        self.get_buffer("calls").add_(1)
        hidden, self.hidden = self.hidden, None
        return hidden


def test_calls_run_eagerly_for_their_reason_until_the_recording_is_there(device: Device) -> None:
    model = Layers().to(device.device)
    ours = copy.deepcopy(model)  # what is captured is not run beside it: docs/safety.md
    step = segue.graph(ours, capture="background")
    made = [torch.randn(n % 2 + 1, 16, device=device.device) for n in range(12)]
    for x in made:
        same(step(x), model(x))
    settled(step)
    for x in made:
        assert step.explain(x).is_replay
        same(step(x), model(x))
    report = step.report()
    assert report.captures == 2 and report.replays >= 12 and float(ours.get_buffer("calls")) == 24
    if not report.notes:
        assert report.eager["first_seen"] == 4 and set(report.eager) <= {"first_seen", "in_background"}
    step.close()
    assert not workers()


def test_a_waiting_call_is_explained(device: Device) -> None:
    release = threading.Event()

    def f(x: torch.Tensor) -> torch.Tensor:
        if is_capturing():
            release.wait(20)
        return x + 1

    step = segue.graph(f, capture="background", strict=True)
    x = torch.ones(3)
    for _ in range(2):
        step(x)
    decision = step.explain(x)
    assert str(decision.reason) == "in_background" and "idle moment" in decision.detail
    assert "in_background" in str(step.report())
    release.set()
    settled(step)
    same(step(x), x + 1)
    assert step.report().replays == 1


def test_a_call_that_arrives_interrupts_the_capture_and_everything_is_put_back() -> None:
    started, attempts = threading.Event(), []
    table: dict[str, torch.Tensor] = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        if is_capturing():
            attempts.append(1)  # a global's list: put back after each attempt
            table["half"] = x
            seen.put(time.monotonic())
            started.set()
            for _ in range(200):
                x = x + 1
                time.sleep(0.001)
            return x - 199
        return x + 1

    seen: queue.SimpleQueue[float] = queue.SimpleQueue()  # outside of what a capture puts back
    step = segue.graph(f, capture="background")
    x = torch.ones(3)
    step(x)
    step(x)
    for _ in range(3):
        assert started.wait(20)
        started.clear()
        begun = time.monotonic()
        same(step(x), x + 1)
        assert time.monotonic() - begun < 0.1, "it waited for a capture of 0.2 s"
        assert not table and not attempts
    settled(step)
    assert seen.qsize() == 4 and not table
    assert eager_reasons(step)["in_background"] == 3
    assert "unsafe_effects" in str(step.report()), "it fills the table at each recording"


def test_where_no_moment_is_idle_one_call_waits() -> None:
    model = Layers()
    step = segue.graph(copy.deepcopy(model), capture="background")
    x = torch.randn(4, 16)
    deadline = time.monotonic() + 30
    while not step.report().replays:
        same(step(x), model(x))
        assert time.monotonic() < deadline
    assert step.report().captures == 1


def test_what_goes_wrong_is_the_keys_reason_and_no_callers_error(device: Device) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    step = segue.graph(f, capture="background")
    for _ in range(2):
        x = torch.randn(3, device=device.device)
        same(step(x), f(x))
    settled(step)
    for _ in range(70):
        x = torch.randn(3, device=device.device)
        same(step(x), f(x))
    text = str(step.report())
    assert "data_dependent" in text and "test_background.py" in text
    assert eager_reasons(step)["data_dependent"] >= 65


class Odd(BaseException):
    pass


def test_an_error_of_any_kind_in_the_background_is_remembered() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if is_capturing():
            raise Odd("never lost")
        return x + 1

    step = segue.graph(f, capture="background")
    x = torch.ones(3)
    for _ in range(2):
        step(x)
    settled(step)
    same(step(x), x + 1)
    assert "capture_failed" in str(step.report()) and "never lost" in str(step.report())
    strict = segue.graph(f, capture="background", strict=True)
    for _ in range(2):
        strict(x)
    settled(strict)
    with pytest.raises(StrictModeError, match="never lost"):
        strict(x)


def test_modes_go_along(device: Device) -> None:
    step = segue.graph(lambda x: x @ x, capture="background")
    x = torch.randn(4, 4, device=device.device)
    with torch.inference_mode():
        for _ in range(2):
            step(x)
        settled(step)
        assert step.explain(x).is_replay and step(x).is_inference()
    with torch.autocast(device.device.type, dtype=torch.bfloat16):
        for _ in range(2):
            step(x)
        settled(step)
        assert step.explain(x).is_replay
        same(step(x), x @ x)
        assert step(x).dtype == torch.bfloat16


def test_workers_share_a_callable_that_records_in_the_background(device: Device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).to(device.device)
    step = segue.graph(model, capture="background")

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(100):
                n = 1 + int(torch.randint(3, (), generator=generator))
                x = torch.randn(n, 4, generator=generator).to(device.device)
                torch.testing.assert_close(step(x), model(x), rtol=0, atol=0)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, seed) for seed in range(4)]:
            future.result()
    settled(step)
    report = step.report()
    assert report.captures == 3 and report.replays + sum(report.eager.values()) == 400


def test_capture_records_now_freeze_and_close_forget_what_waits() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = torch.ones(3)
    step = segue.graph(f, capture="background")
    assert len(step.capture(x).records) == 1 and step.explain(x).is_replay and not workers()

    release = threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        if is_capturing():
            for _ in range(1000):
                x = x + 0
                release.wait(0.005)
        return x + 1

    for end in ("freeze", "close"):
        step = segue.graph(slow, capture="background")
        for n in (3, 3, 4, 4):
            step(torch.ones(n))
        begun = time.monotonic()
        getattr(step, end)()
        if end == "close":
            assert time.monotonic() - begun < 2 and not workers()
            assert step.report().captures == 0
        else:
            release.set()
            settled(step)
            assert step.report().captures <= 1
            assert str(step.explain(torch.ones(4)).reason) == "not_captured"
            step.close()
            release.clear()


def test_the_interpreter_ends_while_something_is_being_captured() -> None:
    code = """
import time, torch, segue
from segue.graph.guard import is_capturing
def f(x):
    if is_capturing():
        print("capturing", flush=True)
        for _ in range(100000):
            x = x + 0
            time.sleep(0.001)
    return x + 1
step = segue.graph(f, capture="background")
with torch.no_grad():
    for _ in range(2):
        step(torch.ones(3))
time.sleep(0.3)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "capturing\n", "")


def test_a_callable_that_nobody_holds_ends_its_thread() -> None:
    step = segue.graph(lambda x: x + 1, capture="background")
    for _ in range(2):
        step(torch.ones(3))
    del step
    wait_for(lambda: not workers())


def test_calls_meanwhile_take_at_most_twice_their_time() -> None:
    """The 99th percentile, over calls from the first on until the recording is there, with pauses as a server has them."""
    model = Layers(depth=60, width=64)
    x = torch.randn(8, 64)

    def percentile(call: Callable[[], Any], until: Callable[[int], bool]) -> float:
        times: list[float] = []
        while not until(len(times)):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
            time.sleep(0.0005)
        return sorted(times)[int(len(times) * 0.99)]

    found = []
    for _ in range(8):  # other processes share the cores
        eager = percentile(lambda: model(x), lambda n: n == 250)
        with segue.graph(model, capture="background", min_hits=200) as step:
            meanwhile = percentile(lambda step=step: step(x), lambda n, step=step: n >= 250 and step.report().replays > 0)
        found.append(meanwhile / eager)
        if found[-1] <= 2:
            break
    assert min(found) <= 2, found


@pytest.mark.gpu
def test_on_a_gpu_it_is_lazy_where_captures_hurt_the_random_draws_of_others() -> None:
    step = segue.graph(lambda x: x + 1, capture="background")
    check_calls(step, lambda x: x + 1, [((torch.randn(3, device="cuda"),), {}) for _ in range(3)])
    settled(step)
    notes = step.report().notes
    failed: list[RuntimeError] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            try:
                torch.rand(8, device="cuda")
            except RuntimeError as error:
                failed.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for n in range(4, 40):
            for _ in range(2):
                step(torch.ones(n, device="cuda"))
        settled(step)
    finally:
        stop.set()
        thread.join()
    print(
        f"\ntorch {torch.__version__}: {notes or 'captures in the background'}; {len(failed)} draws of another thread failed"
    )
    if notes:
        assert "lazy" in notes[0] and "random draws" in notes[0] and not workers()
    else:
        assert not failed


def test_an_unknown_way_to_capture_is_refused() -> None:
    with pytest.raises(ConfigError, match="background"):
        segue.graph(lambda x: x, capture="startup")


@pytest.mark.parametrize("interrupts", [False, True])
def test_an_attribute_that_is_set_between_calls_stays_though_a_capture_is_under_way(interrupts: bool) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.set_factor(1.0)
            self.is_inside = False

        def set_factor(self, factor: float) -> None:
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.is_inside = True
            x = x + 0
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                may_end.wait(0.5 if interrupts else 20)
            x = x * self.factor
            self.is_inside = False
            return x

    model, x = Scaled(), torch.ones(3)
    step = segue.graph(model, capture="background")
    for _ in range(2):
        step(x)
    assert begun.wait(20)
    model.factor = 3.0
    if not interrupts:
        may_end.set()
        settled(step)
    same(step(x), x * 3)  # where it interrupts, in the middle of the body
    may_end.set()
    for _ in range(4):
        settled(step)
        same(step(x), x * 3)
    assert model.factor == 3.0 and not model.is_inside and step.report().replays
