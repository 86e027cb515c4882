"""Which attention an engine runs: the one that was asked for, or the best that can serve the model here, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segue.errors import ConfigError
from segue.llm.attention.base import Attention, Needs
from segue.llm.attention.fa4 import Fa4Attention
from segue.llm.attention.flashinfer import FlashInferAttention
from segue.llm.attention.torch_sdpa import TorchSdpaAttention
from segue.llm.attention.triton import TritonAttention
from segue.llm.facts import ModelFacts
from segue.llm.kv_cache import PagedKVCache

_KINDS: dict[str, type[Attention]] = {
    kind.name: kind for kind in (TorchSdpaAttention, TritonAttention, FlashInferAttention, Fa4Attention)
}
ATTENTIONS = ("auto", *_KINDS)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """An attention by name. `asked` is what the configuration said, `why` one clause."""

    name: str
    asked: str
    why: str

    @property
    def is_gathered(self) -> bool:
        """Whether it copies the context that it reads."""
        return _KINDS[self.name].bounds_context

    def explain(self) -> str:
        """What start-up prints."""
        arrow = self.name if self.asked == self.name else f"{self.asked} -> {self.name}"
        return f"attention: {arrow} ({self.why})"

    def make(self, cache: PagedKVCache) -> Attention:
        return make_attention(self.name, cache)


def make_attention(name: str, cache: PagedKVCache) -> Attention:
    """The attention called `name`, which must be one of them."""
    return _KINDS[name](cache)


def choose_attention(asked: str, needs: Needs, device: torch.device) -> AttentionChoice:
    """Settles "auto". Raises ConfigError where there is none of that name, or it cannot serve the model here."""
    if asked == "auto":
        if device.type != "cuda":
            return AttentionChoice(
                TorchSdpaAttention.name, asked, f"triton's kernels are for CUDA, and this is a {device.type}"
            )
        refusal = TritonAttention.refusal(needs, device)
        if refusal is None:
            return AttentionChoice(
                TritonAttention.name, asked, "it reads the pages where they lie, and no more than is there"
            )
        return AttentionChoice(TorchSdpaAttention.name, asked, f"not triton: {refusal}")
    if asked not in _KINDS:
        raise ConfigError(f"attention is {asked!r}; it must be one of {', '.join(ATTENTIONS)}")
    refusal = _KINDS[asked].refusal(needs, device)
    if refusal is not None:
        raise ConfigError(f"attention is {asked!r}, which cannot run here: {refusal}; choose another, or 'auto'")
    return AttentionChoice(asked, asked, "as asked")


def needs_of(facts: ModelFacts) -> Needs:
    """What a model asks of its attention."""
    return Needs(
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        value_head_dim=facts.value_head_dim,
        dtype=facts.dtype,
        has_window=facts.sliding_window is not None,
        has_softcap=facts.softcap is not None,
        has_sinks=facts.has_sinks,
    )
