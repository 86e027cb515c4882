"""Sampling against transformers' processors, exact counting and a Python hash; and draws that no batch can change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from segue.llm.sampler import (
    SamplerInputs,
    SamplingParams,
    _inverse_cdf,
    choose,
    draw_seed,
    prepare,
    processed_logits,
    sample,
    token_logprobs,
    uniforms,
)  # fmt: skip

# 0.999 quantile of chi-square by degrees of freedom (tables; NIST handbook 1.3.6.7.4).
CHI_SQUARE_999 = {7: 24.322, 15: 37.697}


@dataclass
class State:
    params: SamplingParams
    seed: int = 0
    prompt_ids: Sequence[int] = ()
    generated_ids: Sequence[int] = field(default_factory=list)


@st.composite
def sampled_states(draw: st.DrawFn) -> State:
    token = st.integers(0, 30)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 31, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
    )
    prompt = draw(st.lists(token, min_size=1, max_size=8))
    return State(params, draw(st.integers(-(2**70), 2**70)), prompt, draw(st.lists(token, max_size=8)))


def by_transformers(logits: torch.Tensor, state: State) -> torch.Tensor:
    """One row through transformers' own processors; the two vLLM penalties by a loop."""
    hf = pytest.importorskip("transformers")
    params, scores = state.params, logits.float()[None]
    ids = torch.tensor([[*state.prompt_ids, *state.generated_ids]])
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = scores.clone()
    for token in set(state.generated_ids):
        scores[0, token] -= params.frequency_penalty * state.generated_ids.count(token)  # type: ignore[attr-defined]
        scores[0, token] -= params.presence_penalty
    if params.is_greedy:
        return scores[0]
    scores = hf.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k > 0:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0]


@given(st.lists(sampled_states(), min_size=1, max_size=5), st.integers(0, 2**31), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_processors_are_those_of_transformers(states: list[State], seed: int, has_ties: bool) -> None:
    logits = torch.randn(len(states), 31, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if has_ties else logits
    got = processed_logits(logits, prepare(states, 31, "cpu"))
    for row, state in enumerate(states):
        expected = by_transformers(logits[row], state)
        assert torch.equal(got[row].isneginf(), expected.isneginf()) or (has_ties and _same_by_value(got[row], expected))
        if not has_ties:
            torch.testing.assert_close(got[row].softmax(-1), expected.softmax(-1), rtol=0, atol=1e-6)


def _same_by_value(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Among equal logits at the edge of top-p an unstable sort may keep another one: the kept values must agree."""
    return bool(torch.allclose(got.sort().values.softmax(-1), expected.sort().values.softmax(-1), atol=1e-6))


@given(st.lists(sampled_states(), min_size=2, max_size=6), st.integers(0, 2**31), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_a_row_draws_the_same_token_in_any_batch(states: list[State], seed: int, padding: int) -> None:
    logits = torch.randn(len(states) + padding, 31, generator=torch.Generator().manual_seed(seed)) * 3
    logits[len(states) :] = float("nan")
    together = choose(logits, prepare(states, 31, "cpu", num_rows=len(logits), history_width=20))
    backwards = sample(logits[: len(states)].flip(0), states[::-1]).token_ids.flip(0)
    for row, state in enumerate(states):
        alone = sample(logits[row : row + 1], [state]).token_ids[0]
        assert together[row] == alone == backwards[row]
    assert ((together >= 0) & (together < 31)).all()


@given(st.lists(sampled_states(), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_a_token_that_was_ruled_out_is_never_drawn(states: list[State], seed: int) -> None:
    logits = torch.randn(len(states), 31, generator=torch.Generator().manual_seed(seed)) * 8
    inputs = prepare(states, 31, "cpu")
    chosen = choose(logits, inputs)
    assert (processed_logits(logits, inputs).softmax(-1).gather(1, chosen[:, None]) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_take_the_argmax(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    greedy, drawing = State(SamplingParams(temperature=0)), State(SamplingParams(top_p=0.9, frequency_penalty=0.1))
    expected = logits.argmax(-1)
    assert torch.equal(sample(logits, [greedy] * 64).token_ids, expected)
    mixed = sample(logits, [greedy, drawing] * 32).token_ids
    assert torch.equal(mixed[::2], expected[::2]) and not torch.equal(mixed[1::2], expected[1::2])


def reference_uniform(seed: int, position: int, stream: int) -> float:
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask)
    state = mix((state + stream * 0x632BE59BD9B4E019) & mask) if stream else state
    return (state >> 40) / 2**24


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_the_uniform_is_the_hash_in_plain_integers(seed: int, position: int, stream: int) -> None:
    got = uniforms(torch.tensor([seed]), torch.tensor([position]), stream)
    assert got.dtype == torch.float32 and got.item() == reference_uniform(seed, position, stream)


def test_the_first_splitmix_output_is_the_published_one() -> None:
    """splitmix64 seeded with 0 begins with 0xE220A8397B1DCDAF; the hash mixes it once more with the position."""
    mask = (1 << 64) - 1
    z = 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    assert z ^ (z >> 31) == 0xE220A8397B1DCDAF


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["seed", "position", "stream"])
def test_uniforms_are_uniform_along_each_argument(vary: str) -> None:
    counter, zero = torch.arange(40000), torch.zeros(40000, dtype=torch.int64)
    if vary == "stream":
        drawn = torch.stack([uniforms(zero[:20], counter[:20], stream) for stream in range(2000)]).flatten()
    else:
        drawn = uniforms(counter, zero) if vary == "seed" else uniforms(zero, counter)
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = torch.histc(drawn, bins=16, min=0, max=1).double()
    assert chi_square(counts, torch.full((16,), 1 / 16)) < CHI_SQUARE_999[15]
    pairs = (drawn[:-1:2] * 4).long() * 4 + (drawn[1::2] * 4).long()
    assert chi_square(torch.bincount(pairs, minlength=16).double(), torch.full((16,), 1 / 16)) < CHI_SQUARE_999[15]


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_follow_the_processed_distribution(vary: str) -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, 1.0, 0.0, 3.0, -8.0, 1.5, 0.2, -0.3, 2.2, 1.1])
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.97, min_p=0.01, frequency_penalty=0.3)
    inputs = prepare([State(params, generated_ids=[5])] * 6000, 12, "cpu")
    inputs.integers[1 if vary == "seed" else 2] = torch.arange(6000)
    expected = processed_logits(logits[None].expand(6000, -1), inputs)[0].softmax(-1)
    counts = torch.bincount(choose(logits.expand(6000, -1), inputs), minlength=12).double()
    alive = expected > 0
    assert counts[~alive].sum() == 0 and int(alive.sum()) == 8
    assert chi_square(counts[alive], expected[alive]) < CHI_SQUARE_999[7]


def test_the_edges_of_the_distribution_go_to_the_token_that_begins_there() -> None:
    probabilities = torch.tensor([[0.0, 0.375, 0.0, 0.625]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.375 - 2**-24, 0.375, 1 - 2**-24])
    assert _inverse_cdf(probabilities, uniform).tolist() == [1, 1, 3, 3]


def test_no_generator_of_torch_is_read_or_advanced() -> None:
    before = torch.get_rng_state()
    logits, states = torch.randn(4, 50, generator=torch.Generator()), [State(SamplingParams(seed=1), 1)] * 4
    first = sample(logits, states).token_ids
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(sample(logits, states).token_ids, first)
    assert draw_seed() != draw_seed()


def test_choosing_can_be_recorded_and_serves_other_requests() -> None:
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.1)

    def draw(index: int) -> tuple[torch.Tensor, SamplerInputs]:
        states = [State(params, index + row, [row, 3], [index, 4]) for row in range(3)]
        states.append(State(SamplingParams(temperature=0)))
        return torch.randn(4, 31, generator=generator), prepare(states, 31, "cpu", history_width=4)

    logits, inputs = draw(0)

    def body(logits: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return choose(logits, SamplerInputs(*tensors, mode=inputs.mode))

    def tensors(inputs: SamplerInputs) -> list[torch.Tensor]:
        return [inputs.numbers, inputs.integers, inputs.prompt_history, inputs.output_history]

    recorded = make_fx(body, tracing_mode="fake")(logits, *tensors(inputs))
    for index in range(5):
        logits, inputs = draw(index)
        assert torch.equal(recorded(logits, *tensors(inputs)), choose(logits, inputs))


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    states = [State(SamplingParams(temperature=0.2, logprobs=n)) for n in (0, 4, None)]
    result = sample(logits, states)
    expected = logits.log_softmax(-1)
    assert result.logprobs is not None
    assert torch.equal(result.logprobs.chosen, expected[range(3), result.token_ids])
    assert torch.equal(result.logprobs.top_values, expected.sort(descending=True).values[:, :4])
    assert token_logprobs(logits, result.token_ids, 100).top_ids.shape == (3, 20)
    assert sample(logits, [State(SamplingParams())] * 3).logprobs is None


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -2),
        ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0),
        ("presence_penalty", float("inf")), ("frequency_penalty", "1"), ("stop", ("",)), ("stop", (3,)),
        ("stop_token_ids", (-1,)), ("logprobs", -1), ("seed", 0.5), ("seed", True),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named_with_its_value(field_name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field_name) as caught:
        SamplingParams(**{field_name: value})
    assert repr(value) in str(caught.value)


def test_parameters_are_values() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3])
    assert params.stop == params.stop_strings == ("END",) and params.stop_token_ids == (3,)
    assert params == SamplingParams(stop=["END"], stop_token_ids=(3,)) and hash(params) is not None


def test_rows_and_requests_must_agree() -> None:
    with pytest.raises(ValueError, match="3 rows for 1 requests"):
        sample(torch.zeros(3, 5), [State(SamplingParams())])
    state = State(SamplingParams(repetition_penalty=2.0), prompt_ids=[1, 2, 3])
    with pytest.raises(ValueError, match="history_width=2"):
        prepare([state], 5, "cpu", history_width=2)
    with pytest.raises(ValueError, match="num_rows=1"):
        prepare([state, state], 5, "cpu", num_rows=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1e-6}, "temperature is 1e-06; it must be 0, or from 1e-05 to 100000"),
        ({"temperature": 1e-60}, "temperature is 1e-60"),
        ({"temperature": 1e39}, "temperature is 1e"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40; it must be from 0.001 to 1000"),
        ({"repetition_penalty": 1e39}, "repetition_penalty is 1e"),
        ({"presence_penalty": -1e39}, "presence_penalty is -1e"),
        ({"frequency_penalty": 1e39}, "frequency_penalty is 1e"),
    ],
)
def test_what_float32_cannot_hold_is_refused_with_the_bound(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"stop": 3}, {"stop": None}, {"stop": b"x"}, {"stop_token_ids": 3}, {"stop_token_ids": {}}]
)
def test_stops_of_another_kind_are_type_errors(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(changes))} is "):
        SamplingParams(**changes)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e5])
def test_at_its_bounds_every_setting_gives_finite_scores(temperature: float) -> None:
    logits = torch.tensor([[60.0, -60.0, 0.0, 3.0]])
    for repetition, penalty in ((1e-3, -1e4), (1e3, 1e4)):
        params = SamplingParams(
            temperature=temperature, repetition_penalty=repetition, presence_penalty=penalty, frequency_penalty=penalty
        )
        state = State(params, prompt_ids=[0, 1], generated_ids=[2] * 50)
        scores = processed_logits(logits, prepare([state], 4, "cpu"))
        assert scores.isfinite().all() and scores.softmax(-1).isfinite().all()
