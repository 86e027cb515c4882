"""What the engine gives back for a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probabilities under the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. `token_ids` are the generated ones, an end token included; `finish_reason` is ``stop``,
    ``length`` or ``abort``. `logprobs` has one entry a token where they were asked for: the token's, and the likeliest."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
