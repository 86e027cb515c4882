"""Decode: one new token for each running request. One graph a rung by default, since every step has the same form."""

from __future__ import annotations

from collections.abc import Sequence

from segue.llm.batch import HostBatch
from segue.llm.runners.base import BatchRunner
from segue.runners import Live
from segue.shapes.key import ShapeKey


class DecodeRunner(BatchRunner):
    """Rungs count requests; a recording of R tokens has R request slots."""

    def slots(self, tokens: int) -> int:
        return tokens

    def keys(self) -> Sequence[ShapeKey]:
        if self.backend.is_segmented:
            return [
                ShapeKey("decode", tokens=rung, variant=variant) for rung in self.limits.ladder for variant in self.variants
            ]
        return [
            ShapeKey("decode", tokens=rung, requests=rung, uniform=True, context=context, variant=variant)
            for rung in self.limits.ladder
            for context in self.contexts()
            for variant in self.variants
        ]

    def describe(self, batch: HostBatch) -> Live:
        return Live(batch.num_tokens, batch.num_requests, batch.width == 1, max(batch.width, 1), batch.max_seq_len)
