"""Handlers of signals that raise, wherever they interrupt a call, and forks: what is begun afterwards finds nothing held."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from test_background import settled

import segue
from call_support import eager_reasons, same
from segue._compat import num_modes
from segue.device.cpu_pool import CpuPool
from segue.runners.background import Gate
from segue.runners.callable import GraphedCallable

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # what is raised in a finaliser
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of forks beside threads
]
TORCH = Path(torch.__file__).parent
WATCHED = (
    str(Path(segue.__file__).parent),
    contextlib.__file__,
    str(TORCH / "autograd" / "grad_mode.py"),
    str(TORCH / "utils" / "_python_dispatch.py"),
    str(TORCH / "overrides.py"),
)
WEIGHT = torch.arange(16.0).view(4, 4) / 16


class Late(BaseException):
    """What a handler of a signal raises."""


def interrupts(call: Callable[[], Any], at: int, within: tuple[str, ...] = WATCHED) -> bool:
    """Whether `call` was interrupted at the `at`-th place where the interpreter looks for signals: where a function begins,
    and behind a builtin that was called."""
    met, has_rung = 0, False

    def ring(frame: Any, what: str, _: Any) -> None:
        nonlocal met, has_rung
        if what in ("call", "c_return") and frame.f_code.co_filename.startswith(within):
            met += 1
            if met > at:
                has_rung = True
                sys.setprofile(None)
                raise Late

    sys.setprofile(ring)
    try:
        call()
    except Late:
        pass
    finally:
        sys.setprofile(None)
    return has_rung


def entered() -> dict[str, Any]:
    """What a block may have left in this thread."""
    found: dict[str, Any] = {v.name: x for v, x in contextvars.copy_context().items() if v.name.startswith("segue_") and x}
    found["grad mode"], found["inference mode"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    found["modes"], found["autocast"] = num_modes(), torch.is_autocast_enabled("cpu")
    found["keys"] = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    found["keys"] = tuple(map(str, found["keys"]))
    found["collector"] = gc.isenabled(), gc.get_freeze_count()
    return found


def held(step: GraphedCallable) -> list[Any]:
    lanes = [site.lane for site in step._dispatch.sites.values()]
    found = [(lane.is_entered, lane.num_aside, lane.is_recording) for lane in lanes]
    return [state for state in found if any(state)]


def body(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum() > 0)


marked = segue.eager_on_graph(body)


def straight(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ WEIGHT + 1)


def broken(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = marked(x @ WEIGHT)
    return torch.relu(x + 1) @ WEIGHT


FUNCTIONS = pytest.mark.parametrize("function", [straight, broken])


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize(("num_calls", "stride"), [(1, 41), (4, 3)], ids=["recorded", "replayed"])
@FUNCTIONS
def test_an_interrupted_call_leaves_nothing_behind(
    function: Callable[..., Any], num_calls: int, stride: int, has_grad: bool
) -> None:
    x = torch.ones(2, 4)
    expected = function(x)
    with torch.set_grad_enabled(has_grad):
        before = entered()
        for at in range(has_grad, 100_000, stride):
            step = segue.graph(function, inference=has_grad)
            for _ in range(num_calls):
                step(x)
            if not interrupts(lambda step=step: step(x), at):
                break
            assert entered() == before and not held(step), at
            same(function(x), expected)
            for _ in range(3):
                same(step(x), expected)
            assert step.report().replays and entered() == before, (at, str(step.report()))
        assert at > 20 * stride


ENDING = tuple(str(Path(segue.__file__).parent / file) for file in ("runners/call_store.py", "device", "memory/lane.py"))


def test_a_call_that_is_interrupted_while_it_drops_a_recording_leaves_a_callable_that_answers() -> None:
    x, other = torch.ones(2, 4), torch.ones(3, 4)
    for at in range(10_000):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        step = segue.graph(model, inference=True)
        for _ in range(3):
            step(x)
        model[0].weight = torch.nn.Parameter(torch.ones(4, 4))  # rebound: the next call drops its recording, and the pool
        if not interrupts(lambda step=step: step(x), at, ENDING):
            break
        for _ in range(4):
            for given in (x, other):
                same(step(given), model(given))
        for _ in range(100):
            step(x)
        assert step.report().replays > 20, (at, str(step.report()))
        step.close()
    assert at > 10


@FUNCTIONS
def test_an_interrupted_call_ends_nothing_once_its_traceback_is_forgotten(function: Callable[..., Any]) -> None:
    x = torch.ones(2, 4)
    errors: list[BaseException] = []

    def call(step: GraphedCallable) -> None:
        try:
            step(x)
        except BaseException as error:
            errors.append(error)

    with torch.no_grad():
        for at in range(0, 100_000, 97):
            step = segue.graph(function)
            step(x)
            if not interrupts(lambda step=step: call(step), at):
                break
            with segue.disabled(), torch.inference_mode():
                before = entered()
                errors.clear()
                assert entered() == before, at
        assert not torch.is_grad_enabled() and num_modes() == (0, 0)


# -- captures in the background -----------------------------------------------------------------------------------------


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    def ring(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_call_that_is_interrupted_while_it_waits_for_a_capture_holds_up_no_other(alarm: Callable[[float], None]) -> None:
    started, release = threading.Event(), threading.Event()

    def f(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            started.set()
            assert release.wait(20)
        return x * 2 + 1

    step = segue.graph(f, capture="background")
    x = torch.ones(3)
    with torch.no_grad():
        for _ in range(2):
            step(x)
        assert started.wait(20)
        with pytest.raises(Late):
            alarm(0.05)
            step(x)
        release.set()
        settled(step)
        same(step(x), f(x))
    assert step.report().captures == 1 and step.report().replays == 1
    step.close()


def test_a_gate_can_be_closed_wherever_a_call_through_it_was_interrupted() -> None:
    step = segue.graph(lambda x: x + 1, capture="background")
    assert step._runner._background is not None
    gate: Gate = step._runner._background.gate
    x = torch.ones(3)
    with torch.no_grad():
        for at in range(10_000):
            if not interrupts(lambda: step(x), at, WATCHED[:1]):
                break
            assert gate.depth() == 0 and not gate._waiting and not gate._lock._is_owned(), at  # type: ignore[attr-defined]
            assert not gate.should_stop()
        for _ in range(3):
            step(x)
        settled(step)
        same(step(x), x + 1)
    assert at > 20 and step.report().replays
    step.close()


# -- the cpu device's pool ----------------------------------------------------------------------------------------------


def test_a_pool_that_is_interrupted_knows_what_is_live() -> None:
    is_interrupted = True
    at = 0
    while is_interrupted:
        pool = CpuPool()
        kept = [pool.allocate(torch.float32, (n,), (1,)) for n in (10, 300, 1000, 300_000)]
        for free in (1, 3, 1):
            del kept[free % len(kept)]

        def use(pool: CpuPool = pool, kept: list[torch.Tensor] = kept) -> None:
            kept += [pool.allocate(torch.float32, (n,), (1,)) for n in (200, 300_000, 20)]
            kept.pop(0)
            pool.state()

        is_interrupted = interrupts(use, at)
        live = pool.state().live
        assert {t.data_ptr() for t in kept} <= live.keys() and len(live) <= len(kept) + 3
        kept.clear()
        assert pool.state().live == {} and pool.live_bytes == 0
        assert pool.reserved_bytes == pool.state().reserved_bytes
        spans = [(address, nbytes) for free in pool._free for nbytes, address in free]
        assert sorted(spans) == pool.state().segments, at
        at += 1
    assert at > 50


# -- forks and tasks ----------------------------------------------------------------------------------------------------


def in_child(call: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether `call` said so in a forked child."""
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            code = 0 if call() else 2
        os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("num_calls", [1, 3], ids=["recorded", "replayed"])
def test_a_child_that_is_forked_while_another_thread_is_in_a_call_calls_and_replays(num_calls: int) -> None:
    inside, release, is_waiting = threading.Event(), threading.Event(), False

    @segue.eager_on_graph
    def slow(x: torch.Tensor) -> torch.Tensor:
        if is_waiting and threading.current_thread() is not threading.main_thread():
            inside.set()
            assert release.wait(20)
        return x * 2

    step = segue.graph(lambda x: slow(x + 1) - 1)
    x = torch.ones(3)

    def work() -> None:
        with torch.no_grad():
            step(x)

    with torch.no_grad():
        for _ in range(num_calls):
            step(x)
        is_waiting = True
        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(20)

        def answers() -> bool:
            results = [step(x) for _ in range(4)]
            return all(r.equal(x * 4 - 1) for r in results) and step.report().replays >= num_calls and not held(step)

        try:
            assert in_child(answers)
        finally:
            release.set()
            thread.join()
    same(step(x), x * 4 - 1)


def test_a_child_that_is_forked_during_a_capture_in_the_background_makes_its_own() -> None:
    started, release = threading.Event(), threading.Event()
    parent = os.getpid()

    def f(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread() and os.getpid() == parent:
            started.set()
            assert release.wait(20)
        return x * 2 + 1

    step = segue.graph(f, capture="background")
    x, y = torch.ones(3), torch.ones(4)

    def answers() -> bool:
        for _ in range(2):
            step(y)  # what waits is captured along with it
        settled(step)
        return step(x).equal(f(x)) and step(y).equal(f(y)) and step.report().replays == 2 and gc.isenabled()

    with torch.no_grad():
        for _ in range(2):
            step(x)
        assert started.wait(20)
        try:
            assert in_child(answers)
        finally:
            release.set()
        settled(step)
        same(step(x), f(x))
    step.close()


def test_a_task_that_a_break_begins_is_not_inside_the_call_for_good() -> None:
    async def later(y: torch.Tensor) -> None:
        for _ in range(2):
            await asyncio.sleep(0)
        for _ in range(4):
            same(inner(y), y + 1)

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []

        @segue.eager_on_graph
        def begin(x: torch.Tensor) -> torch.Tensor:
            same(inner(x), x + 1)  # as part of this call
            tasks.append(asyncio.get_running_loop().create_task(later(x.clone())))
            return x * 1

        outer = segue.graph(lambda x: begin(x) + 1)
        for _ in range(4):
            same(outer(torch.ones(3)), torch.full((3,), 2.0))
        await asyncio.gather(*tasks)

    inner = segue.graph(lambda x: x + 1)
    with torch.no_grad():
        asyncio.run(main())
    assert eager_reasons(inner)["capturing"] == 3 and inner.report().replays == 15
