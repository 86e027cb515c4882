"""What a user may set of an engine, and how "auto" is settled: pure functions of the model and the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from segue.config import GraphConfig
from segue.errors import ConfigError
from segue.llm.facts import ModelFacts
from segue.llm.kv_cache import PagedKVCache
from segue.llm.pages import NUM_RESERVED_PAGES, PAGE_SIZE, pages_for

_CPU_CACHE_BYTES = 1 << 30
_CPU_MAX_CONTEXT = 1024
_CUDA_MEMORY_FRACTION = 0.8


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. Counts are in requests and tokens; "auto" follows from device and model.

    `chunk_size` bounds the tokens of one prefill step, `max_requests` the requests that run at once, `max_context` the
    prompt and output of one request together, `num_pages` the cache (16 tokens a page, two of them reserved).
    """

    device: str = "auto"
    dtype: torch.dtype | Literal["auto"] = "auto"
    chunk_size: int | Literal["auto"] = "auto"
    max_requests: int | Literal["auto"] = "auto"
    max_context: int | Literal["auto"] = "auto"
    num_pages: int | Literal["auto"] = "auto"
    attention: str = "auto"
    graphs: GraphConfig = field(default_factory=GraphConfig)

    def __post_init__(self) -> None:
        for name, least in (("chunk_size", 1), ("max_requests", 1), ("max_context", 2), ("num_pages", 3)):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name} is {value!r}; it must be 'auto' or an integer of at least {least}")
        if self.graphs.capture not in ("startup", "manual"):
            raise ConfigError(
                f"graphs.capture is {self.graphs.capture!r}; the engine captures at 'startup', or when told to ('manual')"
            )


class Sizes(NamedTuple):
    """The settled sizes of an engine."""

    chunk_size: int
    max_requests: int
    max_context: int
    num_pages: int
    prefill_slots: int


def settle_sizes(config: EngineConfig, facts: ModelFacts, device: torch.device) -> Sizes:
    """Replaces every "auto". On cuda the cache gets what is free of the device's memory up to a fraction of it."""
    is_cpu = device.type == "cpu"
    chunk = (256 if is_cpu else 2048) if config.chunk_size == "auto" else config.chunk_size
    requests = (8 if is_cpu else 256) if config.max_requests == "auto" else config.max_requests
    longest = min(facts.max_context, _CPU_MAX_CONTEXT) if is_cpu else facts.max_context
    context = longest if config.max_context == "auto" else min(config.max_context, facts.max_context)
    pages = _num_pages(facts, device, requests, context) if config.num_pages == "auto" else config.num_pages
    slots = requests if is_cpu else max(8, chunk // 64)
    return Sizes(chunk, requests, context, pages, min(slots, requests, chunk))


def _num_pages(facts: ModelFacts, device: torch.device, requests: int, context: int) -> int:
    enough = requests * pages_for(context, PAGE_SIZE) + NUM_RESERVED_PAGES
    per_page = PagedKVCache.bytes_per_page(
        facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.dtype, value_head_dim=facts.value_head_dim
    )
    budget = _CPU_CACHE_BYTES
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - _CUDA_MEMORY_FRACTION) * total)
    affordable = budget // per_page
    least = pages_for(context, PAGE_SIZE) + NUM_RESERVED_PAGES
    if affordable < least:
        raise ConfigError(
            f"the cache of one request of {context} tokens takes {least * per_page / 2**20:.0f} MiB, and "
            f"{max(budget, 0) / 2**20:.0f} MiB are left for it: set a smaller max_context"
        )
    return min(enough, affordable)
