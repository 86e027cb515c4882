"""The scheduler under random load against a model of its own: a next token that depends on all tokens before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.llm.batch import RequestRows, build_batch
from segue.llm.pages import PAGE_SIZE, PagePool, pages_for
from segue.llm.sampling_params import SamplingParams
from segue.llm.scheduler import NewToken, Request, RequestState, Scheduler, Step

EOS, STOP = 0, 1


def next_token(tokens: Sequence[int]) -> int:
    """The 'model': ends a text now and then, and differs wherever a token is lost, doubled or out of place."""
    return random.Random(hash(tuple(tokens))).randrange(40)


def expected_output(request: Request, max_context: int) -> tuple[list[int], str]:
    """What the request generates alone, by the plain loop."""
    tokens, output = list(request.prompt_ids), []
    while True:
        output.append(next_token(tokens + output))
        is_eos = output[-1] == EOS and not request.params.ignore_eos
        if is_eos or output[-1] in request.params.stop_token_ids:
            return output, "stop"
        if len(output) == request.params.max_tokens or len(tokens) + len(output) == max_context:
            return output, "length"


class Machine:
    """Runs steps as an engine does: it keeps a KV cache of tokens, so that a lost or shared page shows in the text."""

    def __init__(self, pool: PagePool, scheduler: Scheduler) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.cache: dict[int, int] = {}

    def run(self, step: Step) -> list[NewToken]:
        return self.scheduler.complete(step, self.forward(step))

    def forward(self, step: Step) -> list[int]:
        rows = [RequestRows(row.token_ids, row.request.num_cached, row.request.pages) for row in step.rows]
        tensors = build_batch(rows).tensors
        self.cache.update(zip(tensors.slot_mapping.tolist(), tensors.input_ids.tolist(), strict=True))
        chosen = []
        for row, length in zip(rows, tensors.seq_lens.tolist(), strict=True):
            slots = [row.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(length)]
            chosen.append(next_token([self.cache[slot] for slot in slots]))
        return chosen


@dataclass
class Load:
    requests: list[Request]
    arrivals: list[int]
    aborts: dict[int, list[int]]  # step -> requests to abort, before schedule or between schedule and complete
    num_pages: int
    max_running: int
    chunk_size: int
    max_prefill_requests: int
    max_context: int


@st.composite
def loads(draw: st.DrawFn) -> Load:
    max_context = draw(st.sampled_from([40, 100, 1000]))
    num_pages = 2 + draw(st.sampled_from([7, 9, 14, 30]))
    requests, arrivals = [], []
    for index in range(draw(st.integers(1, 9))):
        length = draw(st.integers(1, min(60, max_context - 1)))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 45)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), (STOP,)])),
        )
        requests.append(Request(str(index), [2 + (index * 7 + place) % 30 for place in range(length)], params))
        arrivals.append(draw(st.integers(0, 60)))
    aborts = draw(st.dictionaries(st.integers(0, 80), st.lists(st.integers(0, len(requests) - 1), max_size=2), max_size=4))
    return Load(
        requests, arrivals, aborts, num_pages, draw(st.integers(1, 6)), draw(st.sampled_from([1, 7, 16, 64, 256])),
        draw(st.integers(1, 6)), max_context,
    )  # fmt: skip


def make_scheduler(load: Load) -> tuple[PagePool, Scheduler]:
    pool = PagePool(load.num_pages)
    scheduler = Scheduler(
        pool, load.max_running, load.chunk_size, load.max_context,
        max_prefill_requests=load.max_prefill_requests, eos_token_ids=frozenset({EOS}),
    )  # fmt: skip
    return pool, scheduler


def check_step(load: Load, step: Step, alive: list[Request], pool: PagePool) -> None:
    alive = sorted(alive, key=lambda request: request.arrival)
    running = [request for request in alive if request.state is RequestState.RUNNING]
    waiting = [request for request in alive if request.state is RequestState.WAITING]
    assert len(running) <= load.max_running and 0 < len(step.rows) <= load.max_running
    assert max((r.arrival for r in running), default=-1) < min((r.arrival for r in waiting), default=10**9)
    held = [page for request in running for page in request.pages]
    assert len(held) == len(set(held)) and not {0, 1} & set(held) and pool.num_free + len(held) == pool.capacity
    assert not any(request.pages for request in waiting)
    assert len({id(row.request) for row in step.rows}) == len(step.rows)
    for row in step.rows:
        assert row.request in running and 0 < row.num_tokens <= row.request.num_uncached
        assert len(row.request.pages) >= pages_for(row.request.num_cached + row.num_tokens)
    if step.kind == "prefill":
        assert step.num_tokens <= load.chunk_size and len(step.rows) <= load.max_prefill_requests
        assert not any(row.request.is_decoding for row in step.rows)
    else:
        assert [row.request for row in step.rows] == running and all(row.num_tokens == 1 for row in step.rows)


@given(loads(), st.booleans())
@settings(max_examples=250, deadline=None)
def test_any_load_is_served_completely_and_leaks_nothing(load: Load, aborts_in_flight: bool) -> None:
    pool, scheduler = make_scheduler(load)
    machine = Machine(pool, scheduler)
    aborted: set[int] = set()
    num_steps = 0
    total = sum(len(r.prompt_ids) + r.params.max_tokens for r in load.requests)
    while scheduler.has_work or num_steps <= max(load.arrivals):
        for request, arrival in zip(load.requests, load.arrivals, strict=True):
            if arrival == num_steps:
                scheduler.add(request)
        victims = load.aborts.get(num_steps, [])
        aborted |= set() if aborts_in_flight else abort(scheduler, load, victims)
        step = scheduler.schedule()
        alive = [r for r in load.requests if r.arrival >= 0 and not r.is_finished]
        assert (step is None) == (not alive)
        if step is not None:
            check_step(load, step, alive, pool)
            chosen = machine.forward(step)
            aborted |= abort(scheduler, load, victims) if aborts_in_flight else set()
            for added in scheduler.complete(step, chosen):
                assert added.request.generated_ids[-1] == added.token_id
        num_steps += 1
        assert num_steps < 100 + 40 * total, "requests starve"
    assert pool.num_free == pool.capacity and scheduler.num_running == scheduler.num_waiting == 0
    for index, request in enumerate(load.requests):
        output, reason = expected_output(request, load.max_context)
        if index in aborted:
            assert request.finish_reason == "abort" and output[: len(request.generated_ids)] == request.generated_ids
        else:
            assert (request.generated_ids, request.finish_reason) == (output, reason)


def abort(scheduler: Scheduler, load: Load, victims: list[int]) -> set[int]:
    return {index for index in victims if scheduler.abort(load.requests[index].id)}


def run_all(scheduler: Scheduler, pool: PagePool) -> list[Step]:
    machine, steps = Machine(pool, scheduler), []
    while (step := scheduler.schedule()) is not None:
        steps.append(step)
        machine.run(step)
    return steps


def endless(name: str, length: int, max_tokens: int) -> Request:
    return Request(name, [3 + len(name)] * length, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def test_prompts_are_packed_into_chunks_in_order_of_arrival() -> None:
    pool = PagePool(40)
    scheduler = Scheduler(pool, 8, 32, 1000)
    for name, length in (("a", 50), ("b", 20), ("c", 5)):
        scheduler.add(endless(name, length, 2))
    steps = run_all(scheduler, pool)
    shown = [(step.kind, [(row.request.id, row.num_tokens) for row in step.rows]) for step in steps]
    assert shown == [
        ("prefill", [("a", 32)]),
        ("prefill", [("a", 18), ("b", 14)]),
        ("prefill", [("b", 6), ("c", 5)]),
        ("decode", [("a", 1), ("b", 1), ("c", 1)]),
    ]


def test_the_latest_arrival_gives_way_and_its_text_stays_the_same() -> None:
    pool = PagePool(2 + 5)
    scheduler = Scheduler(pool, 4, 64, 1000)
    requests = [endless("a", 16, 40), endless("bb", 16, 40)]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, pool)
    assert [request.num_preemptions > 0 for request in requests] == [False, True]
    for request in requests:
        assert (request.generated_ids, request.finish_reason) == expected_output(request, 1000)


def test_a_request_that_ends_in_flight_takes_no_token_and_gives_its_pages_back_once() -> None:
    pool = PagePool(9)
    scheduler = Scheduler(pool, 4, 64, 100)
    requests = [endless("a", 5, 2), endless("b", 5, 1)]
    for request in requests:
        scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None and scheduler.abort("b")
    assert scheduler.complete(step, [7, 8]) == [NewToken(requests[0], 7)]
    assert requests[1].generated_ids == [] and requests[1].finish_reason == "abort"
    step = scheduler.schedule()
    assert step is not None and [row.request for row in step.rows] == [requests[0]]
    assert scheduler.complete(step, [9]) == [NewToken(requests[0], 9)] and not scheduler.has_work
    assert pool.num_free == pool.capacity


def test_a_cancelled_step_runs_again() -> None:
    pool = PagePool(9)
    scheduler = Scheduler(pool, 4, 16, 100)
    request = endless("a", 20, 3)
    scheduler.add(request)
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None and [row.num_tokens for row in step.rows] == [16]
        scheduler.cancel(step)
        with pytest.raises(ValueError, match="not in flight"):
            scheduler.cancel(step)
        with pytest.raises(ValueError, match="not in flight"):
            scheduler.complete(step, [1])
    assert request.num_cached == 0 and request.generated_ids == []
    run_all(scheduler, pool)
    assert (request.generated_ids, request.finish_reason) == expected_output(request, 100)
    assert pool.num_free == pool.capacity


def test_a_request_is_not_admitted_into_the_pages_that_running_ones_need_next() -> None:
    scheduler = Scheduler(PagePool(2 + 3), 4, 64, 1000)
    first, second = endless("a", 16, 30), endless("b", 17, 5)
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.schedule()
    assert step is not None and [row.request for row in step.rows] == [first]
    assert second.state is RequestState.WAITING and second.num_preemptions == 0


def test_a_steady_stream_of_arrivals_starves_nobody() -> None:
    pool = PagePool(2 + 8)
    scheduler = Scheduler(pool, 3, 16, 1000)
    machine = Machine(pool, scheduler)
    first = endless("first", 20, 30)
    scheduler.add(first)
    for index in range(300):
        scheduler.add(endless(f"r{index}", 10, 4))
        step = scheduler.schedule()
        assert step is not None
        machine.run(step)
        if first.is_finished:
            break
    assert first.is_finished


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("x", []), "empty prompt"),
        (endless("x", 100, 1), "no room for output in a context of 100"),
        (endless("x", 60, 30), "may need 6 pages .* has 5; lower max_tokens"),
    ],
)
def test_what_can_never_fit_is_refused(request_: Request, message: str) -> None:
    scheduler = Scheduler(PagePool(2 + 5), 4, 64, 100)
    with pytest.raises(ValueError, match=message):
        scheduler.add(request_)
    assert not scheduler.has_work


def test_what_just_fits_runs_to_its_last_token() -> None:
    pool = PagePool(2 + 5)
    scheduler = Scheduler(pool, 4, 64, 100)
    request = endless("x", 60, 21)  # 80 cached tokens: five pages; the last token needs no slot
    scheduler.add(request)
    run_all(scheduler, pool)
    assert len(request.generated_ids) == 21 and request.finish_reason == "length"


def test_a_text_ends_where_the_context_does() -> None:
    pool = PagePool(40)
    scheduler = Scheduler(pool, 4, 64, 70)
    request = endless("x", 60, 500)
    scheduler.add(request)
    run_all(scheduler, pool)
    assert request.num_tokens == 70 and request.finish_reason == "length"


def test_misuse_is_named() -> None:
    pool = PagePool(9)
    scheduler = Scheduler(pool, 4, 64, 100)
    request = endless("x", 5, 3)
    scheduler.add(request)
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(endless("x", 5, 3))
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(RuntimeError, match="schedule\\(\\) was called twice"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="1 rows but 2 tokens"):
        scheduler.complete(step, [1, 2])
    scheduler.complete(step, [7])
    with pytest.raises(ValueError, match="not in flight"):
        scheduler.complete(step, [7])
    assert scheduler.finish("x", "stop") and not scheduler.abort("x") and request.finish_reason == "stop"
    with pytest.raises(ValueError, match="added before"):
        scheduler.add(request)
    assert pool.num_free == pool.capacity and scheduler.schedule() is None


@pytest.mark.parametrize("name", ["max_running", "chunk_size", "max_context", "max_prefill_requests"])
def test_limits_are_checked(name: str) -> None:
    limits: dict[str, Any] = {"max_running": 1, "chunk_size": 1, "max_context": 2} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Scheduler(PagePool(9), **limits)


def test_a_seed_is_drawn_once_and_only_where_none_is_given() -> None:
    assert Request("a", [1], SamplingParams(seed=5)).seed == 5
    assert Request("a", [1]).seed != Request("b", [1]).seed
