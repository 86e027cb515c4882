"""Prefill: chunks of prompts, several requests to a batch.

Breakable by default: attention runs between segments over the live lengths, so a recording depends on the number of
tokens alone. As a full graph (opt-in) it is keyed on tokens, request slots and context.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.llm.batch import HostBatch
from segue.llm.runners.base import BatchRunner
from segue.observe.decision import Decision, Reason
from segue.runners import Live
from segue.shapes.key import ShapeKey


class PrefillRunner(BatchRunner):
    """Rungs count tokens; every recording has the same number of request slots."""

    def keys(self) -> Sequence[ShapeKey]:
        if self.backend.is_segmented:
            return [ShapeKey("prefill", tokens=rung) for rung in self.limits.ladder]
        return [
            ShapeKey("prefill", tokens=rung, requests=self.limits.max_requests, context=context)
            for rung in self.limits.ladder
            for context in self.contexts()
        ]

    def describe(self, batch: HostBatch) -> Live:
        return Live(batch.num_tokens, batch.num_requests, False, 1, batch.max_seq_len)

    def decide(self, batch: HostBatch) -> Decision:
        """A recording has a fixed number of request slots, whatever it is keyed on."""
        decision = super().decide(batch)
        if decision.key is not None and batch.num_requests > self.limits.max_requests:
            return Decision(None, "disabled", Reason.TOO_MANY_REQUESTS, decision.real, decision.real)
        return decision
