"""Overlap: giving the device its next step before the last one's tokens are known changes no text and loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segue import config as c
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.pages import PagePool
from segue.llm.sampler import sample
from segue.llm.scheduler import Request, Scheduler

pytest.importorskip("transformers")
from llm_support import greedy, prompt_of, tiny_model

ENDS = [prompt_of(1, seed)[0] for seed in range(12)]
"""tokens that end a text: many, so that texts end at many places"""


def engine_of(overlap: Any, decode: str = "full", **changes: Any) -> Engine:
    graphs = c.GraphConfig(
        decode=c.PhaseConfig(backend=decode, ladder=(1, 2, 4), max_padding=4.0),
        prefill=c.PhaseConfig(backend="breakable", ladder=(32,), max_padding=32.0),
    )
    sizes: dict[str, Any] = {"chunk_size": 32, "max_requests": 4, "max_context": 96, "overlap": overlap} | changes
    return Engine(tiny_model(eos_token_id=ENDS), EngineConfig(device="cpu", graphs=graphs, **sizes))


PROMPTS = [prompt_of(n, n) for n in (3, 5, 17, 31, 40, 2, 9)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=n % 2 == 0) for n in (1, 9, 24, 2, 17, 30, 12)]


def texts(engine: Engine, params: Any = PARAMS) -> list[tuple[tuple[int, ...], str]]:
    return [(o.token_ids, o.finish_reason) for o in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("decode", ["full", "breakable", "disabled"])
def test_the_texts_are_those_without_overlap(decode: str) -> None:
    with engine_of(False, decode) as plain:
        expected = texts(plain)
    assert {reason for _, reason in expected} == {"stop", "length"}
    with engine_of(True, decode) as engine:
        assert texts(engine) == expected
        assert texts(engine) == expected  # nothing of the first call is left
        stats = engine.stats()
        assert stats["running"] == stats["waiting"] == 0 and stats["free_pages"] == stats["pages"]


def test_the_text_is_that_of_transformers() -> None:
    oracle = tiny_model(eos_token_id=ENDS)
    with engine_of(True) as engine:
        (output,) = engine.generate([PROMPTS[2]], SamplingParams(temperature=0.0, max_tokens=40))
    assert list(output.token_ids) == greedy(oracle, PROMPTS[2], 40)


DRAWS = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=1.3, min_p=0.02, seed=-5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2**63 + 11, max_tokens=9),
]
SORTS = [
    *DRAWS,
    SamplingParams(temperature=1.5, top_k=12, seed=3, max_tokens=21, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.8, seed=4, max_tokens=30),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01, seed=6, max_tokens=15, ignore_eos=True),
]


def by_hand(params: SamplingParams, prompt: list[int]) -> tuple[int, ...]:
    """A text token by token: transformers' logits, and the sampler over what the host knows."""
    oracle, request = tiny_model(eos_token_id=ENDS), Request("by hand", prompt, params)
    while len(request.generated_ids) < params.max_tokens:
        with torch.inference_mode():
            logits = oracle(torch.tensor([[*prompt, *request.generated_ids]])).logits[0, -1:]
            request.generated_ids += sample(logits, [request]).token_ids.tolist()
        if request.generated_ids[-1] in ENDS and not params.ignore_eos:
            break
    return tuple(request.generated_ids)


@pytest.fixture(scope="module")
def drawn_by_hand() -> list[tuple[int, ...]]:
    return [by_hand(params, prompt) for params, prompt in zip(SORTS, PROMPTS, strict=True)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("decode", "recorded"),
    [("full", ()), ("full", ("drawn",)), ("full", ("sorted",)), ("breakable", ("drawn", "sorted")), ("disabled", ())],
)
def test_draws_are_those_made_by_hand(
    decode: str, recorded: tuple[str, ...], overlap: bool, drawn_by_hand: list[tuple[int, ...]]
) -> None:
    with engine_of(overlap, decode, sampling_graphs=recorded) as engine:
        for params in (DRAWS, SORTS):  # a batch of four; then seven of all kinds, three of which wait
            found = engine.generate(PROMPTS[: len(params)], params)
            assert [o.token_ids for o in found] == drawn_by_hand[: len(params)]
        alone = [engine.generate(p, q)[0].token_ids for p, q in zip(PROMPTS, SORTS, strict=True)]
        assert alone == drawn_by_hand
        graphs = engine.stats()["phases"]["decode"]["graphs"]
        assert {g["variant"] for g in graphs} == (set() if decode == "disabled" else {"", *recorded})
        assert all(g["hits"] for g in graphs if g["tokens"] == 1)


@pytest.mark.parametrize("recorded", [(), ("drawn",)])
def test_steps_that_draw_run_ahead(recorded: tuple[str, ...]) -> None:
    with engine_of(True, sampling_graphs=recorded, max_requests=2) as engine:
        for params in (DRAWS[0], SORTS[-1]):
            name = engine.add_request(PROMPTS[1], params)
            engine.step()
            engine.step()
            assert engine._flight is not None
            engine.abort(name)
            engine.take_output(name)
            engine._land()


def test_ways_of_sampling_are_refused_by_name() -> None:
    for wrong in (("greedy",), ["drawn"], "drawn"):
        with pytest.raises(c.ConfigError, match=r"sampling_graphs is .*; it must be a tuple of drawn, sorted"):
            EngineConfig(sampling_graphs=wrong)  # type: ignore[arg-type]


def test_a_shape_without_its_recording_of_draws_takes_the_greedy_one() -> None:
    params = [SamplingParams(temperature=0.9, seed=n, max_tokens=12, ignore_eos=True) for n in range(2)]
    with engine_of(False, sampling_graphs=("drawn",)) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS[:2], params)]
        for key in [key for key in engine.decode.store if key.variant == "drawn"]:
            engine.decode.evict(key)
        assert [o.token_ids for o in engine.generate(PROMPTS[:2], params)] == expected
        assert engine.stats()["phases"]["decode"]["eager"] == {}


def test_requests_with_penalties_or_log_probabilities_run_in_step() -> None:
    params = [SamplingParams(temperature=0.9, seed=7, max_tokens=20, logprobs=2)] * 3
    params += [SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=20)] * 2 + PARAMS[:2]
    with engine_of(False) as plain, engine_of(True) as engine:
        assert texts(engine, params) == texts(plain, params)


def test_preempted_requests_write_the_same_texts() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with engine_of(False) as plain:
        expected = texts(plain, params)
    with engine_of(True, num_pages=2 + 6) as engine:
        assert texts(engine, params) == expected
        assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_come_and_go_between_steps(overlap: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with engine_of(False) as plain:
        expected = [plain.generate([p], params)[0].token_ids for p in PROMPTS]
    with engine_of(overlap) as engine:
        names = [engine.add_request(PROMPTS[0], params), engine.add_request(PROMPTS[1], params)]
        for _ in range(6):
            engine.step()
        names.append(engine.add_request(PROMPTS[2], params))
        engine.step()
        assert engine.abort(names[1])
        names.append(engine.add_request(PROMPTS[3], params))
        while engine.step():
            pass
        outputs = [engine.take_output(name) for name in names]
    assert all(outputs)
    assert [o.token_ids for i, o in enumerate(outputs) if o is not None and i != 1] == [expected[i] for i in (0, 2, 3)]
    aborted = outputs[1]
    assert aborted is not None and aborted.finish_reason == "abort" and 0 < len(aborted.token_ids) < 20
    assert aborted.token_ids == expected[1][: len(aborted.token_ids)]


def test_an_exception_in_a_step_that_runs_ahead_loses_nothing() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with engine_of(False, "disabled") as plain:
        expected = plain.generate([PROMPTS[1]], params)[0].token_ids
    with engine_of(True, "disabled") as engine:
        calls = 0

        def fail(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls in (4, 5, 9):
                raise KeyError("mine")

        name = engine.add_request(PROMPTS[1], params)
        engine.step()
        handle = engine.model.model.layers[0].register_forward_pre_hook(fail)
        failures = 0
        while (output := engine.take_output(name)) is None:
            try:
                engine.step()
            except KeyError:
                failures += 1
        handle.remove()
    assert failures == 3 and output is not None and output.token_ids == expected


def test_weights_written_between_generations_count_at_once() -> None:
    other = tiny_model(eos_token_id=ENDS, initializer_range=0.2)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with engine_of(True) as engine:
        engine.generate(PROMPTS[:2], params)
        engine.model.load_state_dict(other.state_dict())
        outputs = engine.generate(PROMPTS[:2], params)
    assert [list(o.token_ids) for o in outputs] == [greedy(other, p, 20) for p in PROMPTS[:2]]


def test_sleep_takes_the_step_back_that_ran_ahead() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with engine_of(False) as plain:
        expected = plain.generate([PROMPTS[1]], params)[0].token_ids
    with engine_of(True) as engine:
        name = engine.add_request(PROMPTS[1], params)
        for _ in range(5):
            engine.step()
        engine.sleep(preempt=True)
        engine.wake()
        while engine.step():
            pass
        output = engine.take_output(name)
    assert output is not None and output.token_ids == expected


# -- the scheduler ------------------------------------------------------------------------------------------------------


def scheduler(num_pages: int = 10, **limits: int) -> Scheduler:
    settings = {"max_running": 2, "chunk_size": 16, "max_context": 64} | limits
    return Scheduler(PagePool(num_pages), eos_token_ids=frozenset({99}), **settings)


def started(num_requests: int = 2, max_tokens: int = 30, **limits: int) -> Scheduler:
    made = scheduler(**limits)
    for i in range(num_requests):
        made.add(Request(str(i), [1, 2, 3], SamplingParams(max_tokens=max_tokens)))
    step = made.schedule()
    assert step is not None and step.kind == "prefill" and made.schedule_ahead() is None
    made.complete(step, [5] * len(step.rows))
    return made


def test_steps_scheduled_ahead_are_completed_in_order() -> None:
    made = started()
    first = made.schedule()
    assert first is not None
    second = made.schedule_ahead()
    assert second is not None and made.schedule_ahead() is None
    made.complete(first, [6, 7])
    third = made.schedule_ahead()
    assert third is not None
    made.complete(second, [8, 99])  # the second request ends, and runs in vain in the third step
    assert made.schedule_ahead() is None
    added = made.complete(third, [9, 10])
    assert [(new.request.id, new.token_id) for new in added] == [("0", 9)]
    assert added[0].request.generated_ids == [5, 6, 8, 9]
    following = made.schedule()
    assert following is not None and [row.request.id for row in following.rows] == ["0"]


def test_nothing_is_scheduled_ahead_of_what_is_not_certain() -> None:
    ends_next = started(max_tokens=2)
    assert ends_next.schedule() is not None and ends_next.schedule_ahead() is None
    waits = started(num_requests=1)
    waits.add(Request("new", [1], SamplingParams()))
    step = waits.schedule()
    assert step is not None and step.kind == "prefill" and waits.schedule_ahead() is None
    full = started(num_pages=2 + 3)
    for _ in range(12):
        step = full.schedule()
        assert step is not None
        full.complete(step, [1, 1])
    assert all(len(r.pages) == 1 and r.num_tokens == 16 for r in full._running)
    step = full.schedule()  # both 17th tokens need a page, and one is left
    assert step is not None and full.schedule_ahead() is None


def test_taking_a_step_back_takes_the_one_ahead_with_it() -> None:
    made = started()
    first = made.schedule()
    assert first is not None
    ahead = made.schedule_ahead()
    assert ahead is not None
    made.cancel(ahead)
    assert made.schedule_ahead() is not None
    made.cancel(first)
    again = made.schedule()
    assert again is not None and [r.request.num_cached for r in again.rows] == [3, 3]
