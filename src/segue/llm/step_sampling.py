"""Sampling that a step does itself, inside its recording: temperature, top-k, top-p and min-p.

A step that chooses its tokens on the device needs no look at the logits, so the next one can be given to the device before
its tokens are known. What the choice reads travels with the batch, in the same copy. Which operations a recording
holds is its variant, a part of its key:

- ``""``: every row takes its likeliest token;
- ``"drawn"``: temperature and min-p;
- ``"sorted"``: top-k and top-p besides, for which the vocabulary is sorted.

Each can do what those before it can, a row at a time, to the bit. Penalties and log-probabilities stay with
`sampler.sample`: the former read a history that grows, the latter make tensors of any width.

A draw depends on a request's seed and on the position of the token. A step that runs ahead draws one position further than
the host has counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from segue.llm.sampler import SamplerInputs, SamplerMode, SamplerState, draw, has_penalty, integers_of, numbers_of

_MODES = {
    "drawn": SamplerMode(is_all_greedy=False, uses_penalties=False, uses_sort=False, uses_min_p=True),
    "sorted": SamplerMode(is_all_greedy=False, uses_penalties=False, uses_sort=True, uses_min_p=True),
}
_COVERING = {"": ("",), "drawn": ("drawn", "sorted", ""), "sorted": ("sorted", "")}
NUM_NUMBERS = 3
NUM_INTEGERS = 4
_IDLE_NUMBERS = (1.0, 0.0, 0.0)
_IDLE_INTEGERS = (1, 0, 0, 1)


class StepSampling(NamedTuple):
    """What the rows of a step ask for, as `SamplerInputs` but a row a request. `numbers[R, 3]` float32: temperature,
    1 - top_p, min_p. `integers[R, 4]` int64: top_k, seed, position of the token, whether the row takes its likeliest."""

    variant: str
    numbers: torch.Tensor
    integers: torch.Tensor

    def first(self, rows: int) -> StepSampling:
        return StepSampling(self.variant, self.numbers[:rows], self.integers[:rows])


def pad_sampling_into(numbers: np.ndarray, integers: np.ndarray, sampling: StepSampling | None) -> None:
    """Writes what a step's rows ask for; rows that ask for nothing take their likeliest token."""
    real = 0
    if sampling is not None:
        real = len(sampling.numbers)
        numbers[:real], integers[:real] = sampling.numbers.numpy(), sampling.integers.numpy()
    numbers[real:], integers[real:] = _IDLE_NUMBERS, _IDLE_INTEGERS


def variant_of(states: Sequence[SamplerState]) -> str | None:
    """What a recording must hold to choose the tokens of `states`; None where a row asks for more than any can."""
    params = [state.params for state in states]
    if any(p.logprobs is not None or has_penalty(p) for p in params):
        return None
    drawn = [p for p in params if not p.is_greedy]
    if any(p.top_k > 0 or p.top_p < 1 for p in drawn):
        return "sorted"
    return "drawn" if drawn else ""


def covering(variant: str) -> tuple[str, ...]:
    """Recordings that may answer a step of `variant`, the cheapest first. The last gives the logits alone."""
    return _COVERING[variant]


def step_sampling(states: Sequence[SamplerState], variant: str, vocab_size: int, *, ahead: int) -> StepSampling | None:
    """For a step of `variant`, as host tensors; None where every row takes its likeliest token. `ahead` counts the tokens
    of each row that the device knows and the host does not."""
    if not variant:
        return None
    numbers, integers = array("f"), array("q")
    for state in states:
        numbers.extend(numbers_of(state.params)[:NUM_NUMBERS])
        integers.extend(integers_of(state, vocab_size, ahead))
    return StepSampling(
        variant,
        torch.frombuffer(numbers, dtype=torch.float32).view(-1, NUM_NUMBERS),
        torch.frombuffer(integers, dtype=torch.int64).view(-1, NUM_INTEGERS),
    )


def chosen(logits: torch.Tensor, sampling: StepSampling | None) -> torch.Tensor:
    """``[2, R]`` int64: the token of each row of `logits`, and whether its largest logit is finite. Recordable."""
    likeliest: torch.Tensor = torch.ops.segue.greedy(logits)
    if sampling is None:
        return likeliest
    integers = sampling.integers.T
    history = integers.new_empty(logits.shape[0], 0)
    inputs = SamplerInputs(sampling.numbers.T, integers, history, history, _MODES[sampling.variant])
    tokens = torch.where(integers[3].bool(), likeliest[0], draw(logits.float(), inputs))
    return torch.stack((tokens, likeliest[1]))
