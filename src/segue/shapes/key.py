"""The frozen description of one captured shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend", "denoise", "call"]


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """What one recording was made for; equal keys may share a recording.

    `tokens` counts rows along the token axis after padding. `requests` is the number of request slots, None where the
    recording is keyed on tokens alone. `uniform` says that each request brings exactly `width` tokens. `context` bounds
    the tokens of context that an attention may read, None where nothing bounds it. `variant` separates recordings of
    one shape that differ in something else (a LoRA, a guidance mode).
    """

    phase: Phase
    tokens: int
    requests: int | None = None
    uniform: bool = False
    width: int = 1
    context: int | None = None
    variant: str = ""

    def __str__(self) -> str:
        parts = [f"{self.tokens} tokens"]
        if self.requests is not None:
            parts.append(f"{self.requests} requests")
        if self.context is not None:
            parts.append(f"context {self.context}")
        if self.variant:
            parts.append(self.variant)
        return f"{self.phase}[{', '.join(parts)}]"
