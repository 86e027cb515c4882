"""Threads that wait for each other inside wrapped calls: where eager code ends, recorded code ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import segue
from call_support import eager_reasons, same
from segue.memory import lane
from segue.runners import background
from segue.runners.callable import GraphedCallable

WAIT_S = 5.0


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as workers:
        yield workers


def waiting(pool: ThreadPoolExecutor, wrap: Callable[..., Any], mark: Callable[..., Any]) -> Any:
    """A callable that has another thread call it for its rows, and waits for the answer."""

    def other(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return step(x)  # type: ignore[no-any-return]

    @mark
    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([pool.submit(other, row).result(WAIT_S) for row in x])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return rows(x + 1) * 2 if x.dim() == 2 else x - 3

    step = wrap(forward)
    return step


@pytest.mark.parametrize("options", [{}, {"verify": "every:1"}, {"strict": True}, {"debug": "forward"}], ids=str)
def test_a_break_may_wait_for_a_thread_that_calls_the_same_wrapper(
    pool: ThreadPoolExecutor, options: dict[str, Any]
) -> None:
    step: GraphedCallable = waiting(pool, lambda f: segue.graph(f, **options), segue.eager_on_graph)
    plain = waiting(pool, lambda f: f, lambda f: f)
    for _ in range(5):
        x = torch.randn(2, 3)
        same(step(x), plain(x))
    assert step.report().replays == 3 and eager_reasons(step)["lane_busy"] >= 6
    x = torch.randn(3)
    for _ in range(3):
        same(step(x), plain(x))
    assert step.explain(x).is_replay


@pytest.mark.parametrize("options", [{}, {"backend": "full"}], ids=str)
def test_a_body_that_waits_for_such_a_thread_is_not_recorded(
    pool: ThreadPoolExecutor, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "STUCK_S", 0.2)
    mark = segue.eager_on_graph if options else lambda f: f
    step = waiting(pool, lambda f: segue.graph(f, **options), mark)
    plain = waiting(pool, lambda f: f, lambda f: f)
    for _ in range(5):
        x = torch.randn(2, 3)
        same(step(x), plain(x))
    assert eager_reasons(step)["unsafe_effects"] == 4 and "another thread's call" in str(step.explain(x))


def test_a_report_is_given_while_a_break_waits_for_it(pool: ThreadPoolExecutor) -> None:
    reports = []

    @segue.eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        reports.append(pool.submit(step.report).result(WAIT_S))
        return x * 2

    step = segue.graph(lambda x: body(x) + 1)
    for _ in range(4):
        x = torch.randn(3)
        same(step(x), x * 2 + 1)
    assert [r.replays for r in reports] == [0, 0, 1, 2]


def test_threads_wait_for_a_replay_without_breaks(pool: ThreadPoolExecutor) -> None:
    step = segue.graph(lambda x: (x @ x).relu().sum(0))
    x = torch.randn(64, 64)
    for _ in range(2):
        step(x)

    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                y = torch.randn(64, 64)
                same(step(y), (y @ y).relu().sum(0))

    list(pool.map(work, range(4)))
    assert step.report().replays == 200 and eager_reasons(step) == {"first_seen": 2}


def test_a_capture_in_the_background_waits_for_a_break_that_waits_for_a_call(pool: ThreadPoolExecutor) -> None:
    def mark(body: Callable[..., Any]) -> Any:
        @segue.eager_on_graph
        def slow(x: torch.Tensor) -> torch.Tensor:
            time.sleep(background.PATIENCE_S * 1.5)  # no idle moment: the capture is carried through
            return body(x)  # type: ignore[no-any-return]

        return slow

    step: GraphedCallable = waiting(pool, lambda f: segue.graph(f, capture="background"), mark)
    plain = waiting(pool, lambda f: f, lambda f: f)
    for _ in range(5):
        x = torch.randn(2, 3)
        same(step(x), plain(x))
    assert eager_reasons(step)["in_background"] >= 1
    step.close()
