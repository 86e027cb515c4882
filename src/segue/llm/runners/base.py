"""What decode and prefill share: a batch of requests through the model, by way of static memory.

All integers of a batch lie in one static buffer. A load pads the batch on the host (`pad_into` makes padded rows
harmless) and copies every field whole, in one copy, so no tail is ever left from an earlier batch.
The attention then plans for the batch: a live plan where attention runs between segments or eagerly, a static one where
it is recorded. The recording holds the model, the LM head for the last token of each request slot, and the choice of its
token; the variant of its key says how tokens are chosen. A batch that asks for another way than any recording holds gets
its logits by replay, and its tokens by operations behind it, from the same static memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from segue.backends import Backend, Forward
from segue.graph import Call, calling
from segue.inputs import PackedInputs, Padding, Slot
from segue.llm.attention import Attention, StaticPlan
from segue.llm.batch import BatchArrays, BatchTensors, ForwardBatch, HostBatch, dummy_batch, fill_ids, pad_into, to_device
from segue.llm.pages import pages_for
from segue.llm.parts import Parts
from segue.llm.step_sampling import NUM_INTEGERS, NUM_NUMBERS, StepSampling, chosen, covering, pad_sampling_into
from segue.observe.decision import Decision
from segue.runners import Live, Runner, Settings
from segue.shapes.key import ShapeKey
from segue.shapes.ladder import geometric


class StepOutput(NamedTuple):
    """What a step answers, a row a request slot; of a replay, valid until the lane's next one."""

    logits: torch.Tensor
    """``[R, vocabulary]`` of each slot's last token"""
    chosen: torch.Tensor
    """``[2, R]`` int64: the chosen token, and whether the largest logit is finite (no NaN or infinity in the row)"""

    def first(self, count: int) -> StepOutput:
        return StepOutput(self.logits[:count], self.chosen[:, :count])


Model = Callable[[ForwardBatch], StepOutput]

FIRST_CONTEXT_RUNG = 256
CONTEXT_FACTOR = 4


class Limits(NamedTuple):
    """The largest batch of a phase: rungs of the ladder, request slots, tokens of context a request, and tokens in all."""

    ladder: tuple[int, ...]
    max_requests: int
    max_context: int
    max_tokens: int


class BatchRunner(Runner[HostBatch]):
    """Runs `HostBatch`es; the output is a `StepOutput` of the live requests."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        model: Model,
        attention: Attention,
        limits: Limits,
        *,
        parts: Parts,
        variants: Sequence[str] = (),
        strict: bool = False,
        lends: bool = False,
    ) -> None:
        """`parts` are of the model behind `model`. `variants` are recorded besides the one that takes the likeliest tokens.
        With `lends`, eager passes run in the lane's pool."""
        super().__init__(settings, backend, strict=strict)
        self.variants = (*sorted(set(variants), reverse=True), "")  # of equal shapes the largest is recorded first
        self.lends = lends
        self._has_run_eagerly = False
        self._model = model
        self._parts = parts
        self._attention = attention
        self.limits = limits
        self._device = attention.cache.keys[0].device
        self._pages = pages_for(limits.max_context, attention.cache.page_size)
        self._plans: dict[ShapeKey, StaticPlan] = {}
        self._inputs: PackedInputs | None = None
        if limits.ladder:
            most = self.slots(limits.ladder[-1])
            self._inputs = PackedInputs(_slots(self._pages), self._device, limits.ladder[-1], most)

    def slots(self, tokens: int) -> int:
        """Request slots of a recording of `tokens` tokens."""
        return self.limits.max_requests

    def contexts(self) -> Sequence[int | None]:
        """Context rungs of the keys: none where attention is not recorded or reads only what is there."""
        if self.backend.is_segmented or not self._attention.bounds_context:
            return (None,)
        longest = self.limits.max_context
        return geometric(min(FIRST_CONTEXT_RUNG, longest), longest, CONTEXT_FACTOR)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest batch that the phase can meet, recorded or not."""
        return self.limits.max_tokens

    @property
    def static_bytes(self) -> int:
        return 0 if self._inputs is None else self._inputs.nbytes

    def max_padding(self, live: Live) -> float:
        """The smallest rung is never too large: what it wastes is small whatever the factor."""
        smallest = self.limits.ladder[0] if self.limits.ladder else 1
        return max(self.settings.max_padding, smallest / live.tokens)

    # -- Runner --------------------------------------------------------------------------------------------------------

    def decide(self, batch: HostBatch) -> Decision:
        live = self.describe(batch)
        wanted = covering("" if batch.sampling is None else batch.sampling.variant)
        decisions = (self.decide_live(live._replace(variant=variant)) for variant in wanted if variant in self.variants)
        for decision in decisions:
            if decision.key is not None:
                break
        return decision

    def prepare(self, key: ShapeKey) -> Call:
        page_size, longest = self._attention.cache.page_size, self.limits.max_context
        host = dummy_batch(key.tokens, self.slots(key.tokens), longest=longest, page_size=page_size)
        return self._load(host, key)

    def forward(self, key: ShapeKey) -> Forward:
        batch = self._bare_batch(key, dummy_batch(1, 1))  # attention takes the plan, and the host's view, of the live call
        return lambda: self._model(batch)

    def load(self, batch: HostBatch, decision: Decision) -> Call:
        assert decision.key is not None
        return self._load(batch, decision.key)

    def live_output(self, output: StepOutput, batch: HostBatch, key: ShapeKey) -> StepOutput:
        live = output.first(batch.num_requests)
        if batch.sampling is None or key.variant:
            return live
        held = self._held_sampling(key, batch.sampling.variant).first(batch.num_requests)
        return StepOutput(live.logits, chosen(live.logits, held))

    def run_eagerly(self, batch: HostBatch) -> StepOutput:
        inputs = to_device(batch, self._device)  # reads what an earlier replay may have left in the pool
        if not self._can_lend():
            return self.run_on(inputs).first(batch.num_requests)
        with self.lane.lend() as loan:
            return loan.keep(self.run_on(inputs).first(batch.num_requests))

    def prepare_to_lend(self) -> None:
        """Runs a small batch without a loan: what an eager pass makes once and keeps must not lie in the pool."""
        if self.lends:
            with self.lane.device.on_stream(self.lane.stream):
                self.run_on(to_device(dummy_batch(1, 1, longest=self.limits.max_context), self._device))
            self._has_run_eagerly = True

    def _can_lend(self) -> bool:
        return self._has_run_eagerly and self.lane.num_graphs > 0 and not self.lane.borrowed_bytes

    def run_padded_eagerly(
        self, batch: HostBatch, key: ShapeKey, run: Callable[[Forward], StepOutput] = lambda forward: forward()
    ) -> StepOutput:
        """The batch padded to `key` exactly as a replay sees it, but run eagerly, or by `run`: the oracle for replays."""
        with self.lane.exclusive(), calling(self._load(batch, key)):
            return self.live_output(run(self.forward(key)), batch, key)

    def run_on(self, batch: ForwardBatch) -> StepOutput:
        """The model over a device batch, eagerly, with a live plan."""
        planned = batch.planned(self._attention.plan_live(batch), self._parts)
        with calling(Call(batch=planned)):
            return self._model(planned)

    def close_recordings(self) -> None:
        super().close_recordings()
        self._plans.clear()

    def close(self) -> None:
        """Closes every recording and lets go of static memory. The lane stays open; the runner is of no more use."""
        super().close()
        self._plans.clear()
        self._inputs = None

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _load(self, batch: HostBatch, key: ShapeKey) -> Call:
        assert self._inputs is not None
        slots = self.slots(key.tokens)
        with self._inputs.loading(key.tokens, slots) as held:
            host = pad_into(BatchArrays(*[held[name] for name in BatchArrays._fields]), batch)
            pad_sampling_into(held["sample_numbers"], held["sample_integers"], batch.sampling)
        fill_ids(self._inputs.view(key.tokens, slots)["input_ids"], host)
        return Call(batch=self._static_batch(key, host))

    def _bare_batch(self, key: ShapeKey, host: HostBatch) -> ForwardBatch:
        """Static memory for `key`, without a plan."""
        assert self._inputs is not None
        views = self._inputs.view(key.tokens, self.slots(key.tokens))
        sampling = self._held_sampling(key, key.variant) if key.variant else None
        tensors = {name: views[name] for name in BatchTensors._fields}
        return ForwardBatch(**tensors, host=host, sampling=sampling, parts=self._parts)

    def _static_batch(self, key: ShapeKey, host: HostBatch) -> ForwardBatch:
        batch = self._bare_batch(key, host)
        shape = replace(key, variant="") if key.variant else key  # variants differ behind the attention
        plan = self._plans.get(shape)
        if plan is None:
            plan = (self._attention.break_plan if self.backend.is_segmented else self._attention.static_plan)(shape)
            if plan is None:
                return batch.planned(self._attention.plan_live(batch, key), self._parts)
            self._plans[shape] = plan
        plan.update(batch)
        return batch.planned(plan, self._parts)

    def _held_sampling(self, key: ShapeKey, variant: str) -> StepSampling:
        """What the rows last loaded for `key` ask for, in static memory."""
        assert self._inputs is not None
        views = self._inputs.view(key.tokens, self.slots(key.tokens))
        return StepSampling(variant, views["sample_numbers"], views["sample_integers"])


def _slots(pages: int) -> list[Slot]:
    """Each is written whole, padded on the host, so no policy has a tail to treat."""
    whole = Padding.FOREACH_COPY
    return [
        Slot("input_ids", "tokens", torch.int32, whole),
        Slot("positions", "tokens", torch.int32, whole),
        Slot("slot_mapping", "tokens", torch.int32, whole),
        Slot("query_start", "requests", torch.int32, whole, extra=1),
        Slot("seq_lens", "requests", torch.int32, whole),
        Slot("block_table", "requests", torch.int32, whole, shape=(pages,)),
        Slot("num_tokens", None, torch.int32, whole, shape=(1,)),
        Slot("last_index", "requests", torch.int64, whole),
        Slot("sample_numbers", "requests", torch.float32, whole, shape=(NUM_NUMBERS,)),
        Slot("sample_integers", "requests", torch.int64, whole, shape=(NUM_INTEGERS,)),
    ]
