"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, and one draw, for a whole batch at once.

The hard idea is that a draw belongs to a request, not to a batch. The uniform number of (seed, position) comes from a
counter-based hash (`uniforms`), computed with integer operations on device tensors; the token is found by inverting the
cumulative distribution in vocabulary order. So the same request gets the same tokens in any batch, padded or not,
eager or replayed, and torch's generators are neither read nor advanced.

`prepare` turns what requests ask for into tensors (host work, before a step); `choose` is recordable: no host read, no
shape that depends on data, and which operations it runs depends on `SamplerInputs.mode` alone. `sample` is both. Rows
that leave a processor off pass through it bit for bit, so a row's result does not depend on its neighbours' settings.

The processors mean what transformers' do (`TopKLogitsWarper` and the others), in vLLM's order. Presence and frequency
penalties follow vLLM: they count the output alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from segue.llm.sampling_params import SamplingParams, draw_seed

__all__ = [
    "Logprobs", "Sampled", "SamplerInputs", "SamplerMode", "SamplerState", "SamplingParams", "choose", "draw",
    "draw_seed", "has_penalty", "integers_of", "numbers_of", "prepare", "processed_logits", "sample", "token_logprobs",
    "uniforms",
]  # fmt: skip

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_STREAM_STEP = 0x632BE59BD9B4E019  # any large odd number; gamma of another splitmix stream
_UNIFORM_BITS = 24  # all that a float32 in [0, 1) holds exactly


class SamplerState(Protocol):
    """What the sampler needs of a request; `segue.llm.scheduler.Request` is one."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def generated_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class SamplerMode:
    """Which operations `choose` runs. Equal modes record the same operations, so it belongs into a recording's key."""

    is_all_greedy: bool
    uses_penalties: bool
    uses_sort: bool  # top-k or top-p
    uses_min_p: bool


@dataclass(frozen=True, slots=True, eq=False)
class SamplerInputs:
    """The settings of R rows as tensors.

    `numbers[6, R]` float32: temperature, 1 - top_p, min_p, repetition, presence and frequency penalty. `integers[4, R]`
    int64: top_k (the vocabulary size where off), seed, position of the token to draw, whether the row is greedy.
    `prompt_history` and `output_history` ``[R, H]`` int64 hold token ids, the vocabulary size in unused places; they
    have no columns where no row has a penalty.
    """

    numbers: torch.Tensor
    integers: torch.Tensor
    prompt_history: torch.Tensor
    output_history: torch.Tensor
    mode: SamplerMode


class Logprobs(NamedTuple):
    """Log-probabilities under the model's own distribution: of the chosen token, and of the K likeliest."""

    chosen: torch.Tensor  # [R]
    top_values: torch.Tensor  # [R, K]
    top_ids: torch.Tensor  # [R, K]


class Sampled(NamedTuple):
    """One token a row (int64), and its log-probabilities where a row asked for them."""

    token_ids: torch.Tensor
    logprobs: Logprobs | None


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> Sampled:
    """Choose the next token of each row of `logits` ``[R, V]`` for the request in the same place of `states`."""
    if logits.shape[0] != len(states):
        raise ValueError(f"logits have {logits.shape[0]} rows for {len(states)} requests; pass one row a request")
    if all(state.params.is_greedy and not has_penalty(state.params) for state in states):
        token_ids = logits.argmax(dim=-1)
    else:
        token_ids = choose(logits, prepare(states, logits.shape[-1], logits.device))
    asked = [state.params.logprobs for state in states if state.params.logprobs is not None]
    return Sampled(token_ids, token_logprobs(logits, token_ids, max(asked)) if asked else None)


def prepare(
    states: Sequence[SamplerState],
    vocab_size: int,
    device: torch.device | str,
    *,
    num_rows: int | None = None,
    history_width: int | None = None,
) -> SamplerInputs:
    """The settings of `states` as tensors on `device`.

    `num_rows` pads with greedy rows. `history_width` fixes the columns of both histories for a recording; ValueError
    where a request's history is longer.
    """
    params = [state.params for state in states]
    uses_penalties = any(map(has_penalty, params))
    mode = SamplerMode(
        is_all_greedy=all(p.is_greedy for p in params),
        uses_penalties=uses_penalties,
        uses_sort=any(not p.is_greedy and (p.top_k > 0 or p.top_p < 1) for p in params),
        uses_min_p=any(not p.is_greedy and p.min_p > 0 for p in params),
    )
    padding = (len(states) if num_rows is None else num_rows) - len(states)
    if padding < 0:
        raise ValueError(f"{len(states)} requests do not fit into num_rows={num_rows}")
    numbers = [numbers_of(p) for p in params] + [(1.0, 0.0, 0.0, 1.0, 0.0, 0.0)] * padding
    integers = [integers_of(state, vocab_size) for state in states] + [(vocab_size, 0, 0, 1)] * padding
    penalised = [state if uses_penalties and has_penalty(state.params) else None for state in states]
    penalised += [None] * padding
    prompts = [() if state is None else state.prompt_ids for state in penalised]
    outputs = [() if state is None else state.generated_ids for state in penalised]
    return SamplerInputs(
        numbers=torch.tensor(numbers, dtype=torch.float32).T.contiguous().to(device),
        integers=torch.tensor(integers, dtype=torch.int64).T.contiguous().to(device),
        prompt_history=_history(prompts, vocab_size, history_width).to(device),
        output_history=_history(outputs, vocab_size, history_width).to(device),
        mode=mode,
    )


def choose(logits: torch.Tensor, inputs: SamplerInputs) -> torch.Tensor:
    """The chosen token of each row, int64 ``[R]``. Recordable. Greedy rows take the argmax after penalties."""
    mode = inputs.mode
    scores = logits.float()
    if mode.uses_penalties:
        scores = _penalised(scores, inputs)
    greedy = scores.argmax(dim=-1)
    if mode.is_all_greedy:
        return greedy
    return torch.where(inputs.integers[3].bool(), greedy, draw(scores, inputs))


def draw(scores: torch.Tensor, inputs: SamplerInputs) -> torch.Tensor:
    """A token of each row of float32 `scores` (after penalties), drawn even where the row is greedy. Recordable."""
    _, seeds, positions, _ = inputs.integers
    return _inverse_cdf(_restricted(scores, inputs).softmax(dim=-1), uniforms(seeds, positions))


def processed_logits(logits: torch.Tensor, inputs: SamplerInputs) -> torch.Tensor:
    """The logits that are sampled from, float32, -inf where a token was ruled out. Recordable.

    A greedy row counts as one with temperature 1.
    """
    scores = logits.float()
    if inputs.mode.uses_penalties:
        scores = _penalised(scores, inputs)
    return _restricted(scores, inputs)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Numbers in [0, 1), float32, a pure function of each (seed, position, stream); any equal-shaped int64 tensors.

    `stream` separates several draws for one position (a speculative decoder needs an acceptance and a residual).
    """
    state = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    if stream:
        state = _mix(state + _signed(stream * _STREAM_STEP))
    return _shift_right(state, 64 - _UNIFORM_BITS).to(torch.float32) * 2.0**-_UNIFORM_BITS


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `token_ids` and of the `num_top` likeliest tokens of each row. Recordable."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(logprobs.gather(1, token_ids[:, None])[:, 0], top.values, top.indices)


def has_penalty(params: SamplingParams) -> bool:
    """Whether earlier tokens change the logits."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def numbers_of(params: SamplingParams) -> tuple[float, ...]:
    """A row of `SamplerInputs.numbers`."""
    return (
        1.0 if params.is_greedy else params.temperature,
        0.0 if params.is_greedy else 1.0 - params.top_p,
        0.0 if params.is_greedy else params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def integers_of(state: SamplerState, vocab_size: int, ahead: int = 0) -> tuple[int, int, int, int]:
    """A row of `SamplerInputs.integers`, where `ahead` tokens more were generated than the state knows."""
    params = state.params
    is_limited = params.top_k > 0 and not params.is_greedy
    top_k = min(params.top_k, vocab_size) if is_limited else vocab_size
    position = len(state.prompt_ids) + len(state.generated_ids) + ahead
    return top_k, _signed(state.seed), position, int(params.is_greedy)


def _history(rows: Sequence[Sequence[int]], vocab_size: int, width: int | None) -> torch.Tensor:
    longest = max(map(len, rows), default=0)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a request's history of {longest} tokens exceeds history_width={width}; raise it")
    padded = [[*row, *[vocab_size] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64).view(len(rows), width)


def _penalised(scores: torch.Tensor, inputs: SamplerInputs) -> torch.Tensor:
    repetition, presence, frequency = (row[:, None] for row in inputs.numbers[3:])
    output_counts = _counts(scores, inputs.output_history)
    seen = (output_counts + _counts(scores, inputs.prompt_history)) > 0
    scaled = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(seen, scaled, scores)
    return scores - frequency * output_counts - presence * (output_counts > 0)


def _counts(scores: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """How often each token of the vocabulary stands in each row of `history`, float32 ``[R, V]``."""
    counts = scores.new_zeros(scores.shape[0], scores.shape[1] + 1)
    counts.scatter_add_(1, history, torch.ones_like(history, dtype=counts.dtype))
    return counts[:, :-1]


def _restricted(scores: torch.Tensor, inputs: SamplerInputs) -> torch.Tensor:
    """Temperature, top-k, top-p and min-p applied: what is ruled out becomes -inf."""
    temperature, below_top_p, min_p = (row[:, None] for row in inputs.numbers[:3])
    scores = scores / temperature
    if inputs.mode.uses_sort:
        scores = scores.masked_fill(_outside_top_k_top_p(scores, inputs.integers[0][:, None], below_top_p), -torch.inf)
    if inputs.mode.uses_min_p:
        probabilities = scores.softmax(dim=-1)
        scores = scores.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)
    return scores


def _outside_top_k_top_p(scores: torch.Tensor, top_k: torch.Tensor, below_top_p: torch.Tensor) -> torch.Tensor:
    """True where a token falls outside top-k or top-p, with one sort for both.

    As in transformers, ties with the k-th value stay, and top-p drops, from the least likely up, what together has a
    probability of at most ``1 - top_p``, but never the likeliest.
    """
    ascending, order = scores.sort(dim=-1)
    threshold = ascending.gather(1, scores.shape[1] - top_k)
    ascending = ascending.masked_fill(ascending < threshold, -torch.inf)
    cumulative = ascending.softmax(dim=-1).cumsum(dim=-1)
    is_outside = (cumulative <= below_top_p) & (below_top_p > 0)
    is_outside[:, -1] = False
    return is_outside.scatter(1, order, is_outside) | (scores < threshold)


def _inverse_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds `uniform` times the total; never one of probability 0.

    A parallel prefix sum may step by its rounding over a token of probability 0: such a draw takes the likeliest.
    """
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    found = found.clamp(max=probabilities.shape[1] - 1)
    is_possible = probabilities.gather(1, found[:, None])[:, 0] > 0
    return torch.where(is_possible, found, probabilities.argmax(dim=-1))


def _mix(state: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; int64 products wrap, as the algorithm wants."""
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: torch's ``>>`` keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(seed: int) -> int:
    """Any integer as the signed 64-bit one with the same low bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
