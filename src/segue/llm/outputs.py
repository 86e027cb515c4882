"""What the engine gives back for a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from segue.llm.scheduler import Request
from segue.llm.text import IncrementalDetokenizer


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


@dataclass(slots=True)
class Live:
    """A request under way, with what has come out of it."""

    request: Request
    detokenizer: IncrementalDetokenizer | None
    new_text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, token_id: int, logprobs: Any, place: int) -> bool:
        """One more token, the step's row `place`; whether it completed a stop string."""
        num_top = self.request.params.logprobs
        if logprobs is not None and num_top is not None:
            top = zip(logprobs.top_ids[place, :num_top].tolist(), logprobs.top_values[place, :num_top].tolist(), strict=True)
            self.logprobs.append(TokenLogprob(token_id, float(logprobs.chosen[place]), tuple(top)))
        if self.detokenizer is None:
            return False
        self.new_text += self.detokenizer.push(token_id)
        return self.detokenizer.stopped_by is not None

    def output(self, *, is_settled: bool = False) -> RequestOutput:
        """Of a request that has ended. `is_settled`: with the text as it is, where no more can be made."""
        request, text = self.request, ""
        reason = str(request.finish_reason)
        if self.detokenizer is not None:
            self.new_text += "" if is_settled else self.detokenizer.finish()
            text = self.detokenizer.text
            if reason == "length" and self.detokenizer.stopped_by is not None:
                reason = "stop"  # the last token that was allowed completed a stop string
        logprobs = tuple(self.logprobs) if request.params.logprobs is not None else None
        return RequestOutput(request.id, text, tuple(request.generated_ids), tuple(request.prompt_ids), reason, logprobs)
