"""What a user may ask of the sampling of one request, checked when it is made.

The values mean what they mean in vLLM and transformers. This module needs no torch, so that schedulers and servers can
use it alone; the sampling itself is in `segue.llm.sampler`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Logits are float32: within these bounds none overflows, and none of the settings rounds to 0.
TEMPERATURES = (1e-5, 1e5)
REPETITION_PENALTIES = (1e-3, 1e3)
MAX_PENALTY = 1e4
VARIANTS = ("drawn", "sorted")
"""ways of sampling that a decode graph can be recorded with (`segue.llm.step_sampling`)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Frozen; one may serve many requests.

    `temperature` 0 takes the likeliest token; others lie in `TEMPERATURES`. `top_k` 0 or -1, `top_p` 1 and `min_p` 0
    are off. `repetition_penalty` counts prompt and output, `presence_penalty` and `frequency_penalty` the output alone.
    `stop` strings end the text before they appear; `stop_token_ids` end it after the token. `logprobs` asks for the
    log-probability of the chosen token and of that many likeliest ones, under the model's own distribution (before
    penalties and temperature). Equal `seed`s give equal draws at equal positions in whatever batch; None draws a seed
    at admission.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop, "a str or a sequence of str")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids, "a sequence of int"))
        self._check_integers()
        self._check_numbers()
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop is {self.stop!r}; each stop string must be a non-empty str")
        if not all(_is_int(token) and token >= 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r}; each must be an int >= 0")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever it was given as."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_integers(self) -> None:
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an int >= 1")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an int >= 1, or 0 or -1 for off")
        _require(
            self.logprobs is None or (_is_int(self.logprobs) and self.logprobs >= 0),
            "logprobs",
            self.logprobs,
            "None or an int >= 0",
        )
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "None or an int")

    def _check_numbers(self) -> None:
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            _require(is_number, name, value, "a finite number")
        least, most = TEMPERATURES
        is_scale = self.temperature == 0 or least <= self.temperature <= most
        _require(is_scale, "temperature", self.temperature, f"0, or from {least:g} to {most:g}")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        least, most = REPETITION_PENALTIES
        is_factor = least <= self.repetition_penalty <= most
        _require(is_factor, "repetition_penalty", self.repetition_penalty, f"from {least:g} to {most:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(abs(getattr(self, name)) <= MAX_PENALTY, name, getattr(self, name), f"within +-{MAX_PENALTY:g}")


def draw_seed() -> int:
    """A fresh seed for a request that named none: from the system, so that no generator of torch or Python advances."""
    return secrets.randbits(63)


def _tuple(name: str, value: object, kinds: str) -> tuple[Any, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise TypeError(f"{name} is {value!r}; it must be {kinds}")
    return tuple(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: object, bound: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {bound}")
