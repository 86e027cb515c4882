"""What a user may set of an engine, and how "auto" is settled: pure functions of the model and the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from segue.config import GraphConfig, PhaseConfig
from segue.device import get_device
from segue.errors import ConfigError
from segue.llm.facts import ModelFacts
from segue.llm.host_memory import available_bytes
from segue.llm.kv_cache import PagedKVCache
from segue.llm.pages import NUM_RESERVED_PAGES, PAGE_SIZE, pages_for
from segue.llm.step_sampling import VARIANTS

_CPU_CACHE_BYTES = 1 << 30
_CPU_MAX_CONTEXT = 1024
DEFAULT_MEMORY_FRACTION = 0.9
_CPU_GATHER_COPIES = 4  # SmolLM2-135M, 1454 requests, context 1024: 11 GB at the most, where one copy is 2.3 GB


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. Counts are in requests and tokens; "auto" follows from device and model.

    `chunk_size` bounds the tokens of one prefill step, `max_requests` the requests that run at once, `max_context` the
    prompt and output of one request together, `num_pages` the cache (16 tokens a page, two of them reserved).
    `memory_fraction` sizes the cache instead, on CUDA: how much of the device's memory may be in use once the engine has
    started, other processes and the largest eager pass included. `fuse` says whether the model's layers are fused
    (`segue.llm.fuse`); "auto" is on cuda. `sampling_graphs` names the ways of sampling that decode graphs are recorded with,
    besides taking the likeliest token: "drawn" (temperature, min-p), "sorted" (top-k, top-p as well). None by default: each
    makes as many graphs again (36 rungs of an 8B model: 1.7 s on an H200), and a step without is a replay with its sampling
    queued behind it, which runs ahead of the host as well.
    """

    device: str | torch.device = "auto"
    dtype: torch.dtype | Literal["auto"] = "auto"
    chunk_size: int | Literal["auto"] = "auto"
    max_requests: int | Literal["auto"] = "auto"
    max_context: int | Literal["auto"] = "auto"
    num_pages: int | Literal["auto"] = "auto"
    memory_fraction: float | Literal["auto"] = "auto"
    attention: str = "auto"
    experts: str = "auto"
    fuse: bool | Literal["auto"] = "auto"
    overlap: bool | Literal["auto"] = "auto"
    sampling_graphs: tuple[str, ...] = ()
    graphs: GraphConfig = field(default_factory=GraphConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.device, (str, torch.device)):
            raise ConfigError(f"device is {self.device!r}; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
        if self.dtype != "auto" and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be 'auto' or a floating-point torch.dtype")
        if not isinstance(self.attention, str):
            raise ConfigError(f"attention is {self.attention!r}; it must be 'auto' or the name of one")
        if not isinstance(self.experts, str):
            raise ConfigError(f"experts is {self.experts!r}; it must be 'auto' or the name of one")
        for name in ("fuse", "overlap"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True, False or 'auto'")
        ways = self.sampling_graphs
        if not isinstance(ways, tuple) or not all(way in VARIANTS for way in ways):
            raise ConfigError(f"sampling_graphs is {ways!r}; it must be a tuple of {', '.join(VARIANTS)}")
        if not isinstance(self.graphs, GraphConfig):
            raise ConfigError(f"graphs is {self.graphs!r}; it must be a GraphConfig, such as GraphConfig(decode='full')")
        for name, least in (("chunk_size", 1), ("max_requests", 1), ("max_context", 2), ("num_pages", 3)):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name} is {value!r}; it must be 'auto' or an integer of at least {least}")
        self._check_memory_fraction()
        if self.graphs.capture not in ("startup", "manual"):
            raise ConfigError(
                f"graphs.capture is {self.graphs.capture!r}; the engine captures at 'startup', or when told to ('manual')"
            )

    def _check_memory_fraction(self) -> None:
        fraction = self.memory_fraction
        if fraction == "auto":
            return
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ConfigError(f"memory_fraction is {fraction!r}; it must be 'auto', or above 0 and at most 1")
        if self.num_pages != "auto":
            raise ConfigError(
                f"memory_fraction is {fraction} and num_pages is {self.num_pages}: both size the KV cache; set one of them"
            )


class Sizes(NamedTuple):
    """The settled sizes of an engine. `notes` has a line for each that is smaller than what was asked for."""

    chunk_size: int
    max_requests: int
    max_context: int
    num_pages: int
    prefill_slots: int
    notes: tuple[str, ...] = ()

    def explain(self) -> str:
        """What start-up prints: the sizes in a line, and one for each note."""
        head = (
            f"sizes: chunk {self.chunk_size} tokens, {self.max_requests} requests ({self.prefill_slots} in a prefill), "
            f"context {self.max_context} tokens, {self.num_pages} pages"
        )
        return "\n  ".join((head, *self.notes))


def torch_device(name: str | torch.device) -> torch.device:
    """The device of a setting. Raises ConfigError where it is unknown or absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        get_device(device)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device is {str(name)!r}: {str(error).splitlines()[0]}") from None
    return device


def settle_sizes(
    config: EngineConfig, facts: ModelFacts, device: torch.device, *, is_gathered: bool = True, reserve_bytes: int = 0
) -> Sizes:
    """Replaces every "auto". On cuda the cache gets what is free of the device's memory up to a fraction of it, less
    `reserve_bytes` for what is still to come.

    What can never be reached is cut down: requests to the cache's pages, since each that runs holds one, and the chunk
    to the tokens that all requests of a prefill can bring. `is_gathered` says that the attention copies the context that it
    reads. Raises ConfigError where sizes that were asked for need more memory than there is.
    """
    is_cpu = device.type == "cpu"
    if is_cpu and config.memory_fraction != "auto":
        raise ConfigError(
            f"memory_fraction is {config.memory_fraction}; it bounds the memory of a CUDA device, and this engine runs on "
            "cpu: set num_pages"
        )
    chunk = (256 if is_cpu else 2048) if config.chunk_size == "auto" else config.chunk_size
    requests = (8 if is_cpu else 256) if config.max_requests == "auto" else config.max_requests
    longest = min(facts.max_context, _CPU_MAX_CONTEXT) if is_cpu else facts.max_context
    context = longest if config.max_context == "auto" else min(config.max_context, facts.max_context)
    pages = config.num_pages
    if pages == "auto":
        pages = _num_pages(facts, requests, context, _cache_budget(config, device, reserve_bytes), is_cuda=not is_cpu)
    sizes = reachable_sizes(chunk, requests, context, pages, is_cpu=is_cpu)
    _check_memory(config, sizes, facts, device, is_gathered=is_gathered)
    return sizes


def used_fraction(config: EngineConfig) -> float:
    """Of the device's memory that may be in use, the default where none is set."""
    return DEFAULT_MEMORY_FRACTION if config.memory_fraction == "auto" else config.memory_fraction


def reachable_sizes(chunk: int, requests: int, context: int, pages: int, *, is_cpu: bool) -> Sizes:
    """The sizes with those cut down that no batch can reach: nothing is captured that could never be used."""
    notes = []
    for_requests = pages - NUM_RESERVED_PAGES
    if requests > for_requests:
        notes.append(f"max_requests {requests} -> {for_requests}: each request holds a page of the cache, at least")
        requests = for_requests
    slots = min(requests if is_cpu else max(8, chunk // 64), requests, chunk)
    most = min(slots * context, for_requests * PAGE_SIZE)
    if chunk > most:
        notes.append(f"chunk_size {chunk} -> {most}: {slots} requests of up to {context} tokens bring no more at once")
        chunk = most
    return Sizes(chunk, requests, context, pages, slots, tuple(notes))


def fitted_graphs(graphs: GraphConfig, sizes: Sizes) -> GraphConfig:
    """`graphs` for sizes that were cut down: a rung that lay above them now lies at their end, and still holds what is
    between it and the rung below."""
    if not sizes.notes:
        return graphs
    ends = {"decode": sizes.max_requests, "prefill": sizes.chunk_size}
    fitted: dict[str, Any] = {}
    for phase, end in ends.items():
        asked: PhaseConfig = getattr(graphs, phase)
        if not isinstance(asked.ladder, str):
            fitted[phase] = replace(asked, ladder=tuple(sorted({min(rung, end) for rung in asked.ladder})))
    return replace(graphs, **fitted)


def _check_memory(config: EngineConfig, sizes: Sizes, facts: ModelFacts, device: torch.device, *, is_gathered: bool) -> None:
    """ConfigError where a size that was asked for needs more memory than is left, by a low estimate.

    A decode step may gather K and V of all requests (and copies them more than once on cpu) and has a row of logits for
    each; a prefill holds some eight rows of the hidden size for each token. Both run at start-up, at their largest.
    """
    left = available_bytes(device)
    if left is None:
        return
    kv_row = facts.num_kv_heads * (facts.head_dim + facts.value_head_dim) * facts.dtype.itemsize
    copies = int(is_gathered) * (_CPU_GATHER_COPIES if device.type == "cpu" else 1)
    needs = {
        "num_pages": sizes.num_pages * bytes_per_page(facts),
        "max_requests": sizes.max_requests * (copies * sizes.max_context * kv_row + 4 * facts.vocab_size),
        "chunk_size": sizes.chunk_size * 8 * facts.hidden_size * facts.dtype.itemsize,
    }
    for name, need in needs.items():
        if getattr(config, name) != "auto" and need > left:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, which needs at least {need / 2**30:.1f} GiB for "
                f"{'the cache' if name == 'num_pages' else 'one step'}, and {left / 2**30:.1f} GiB are left: "
                f"set a smaller {name}" + (" or max_context" if name == "max_requests" else "")
            )


def bytes_per_page(facts: ModelFacts) -> int:
    """What a page of the cache costs over all layers."""
    return PagedKVCache.bytes_per_page(
        facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.dtype, value_head_dim=facts.value_head_dim
    )


def _cache_budget(config: EngineConfig, device: torch.device, reserve_bytes: int) -> int:
    if device.type == "cpu":
        return _CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - used_fraction(config)) * total) - reserve_bytes


def _num_pages(facts: ModelFacts, requests: int, context: int, budget: int, *, is_cuda: bool) -> int:
    enough = requests * pages_for(context, PAGE_SIZE) + NUM_RESERVED_PAGES
    per_page = bytes_per_page(facts)
    affordable = budget // per_page
    least = pages_for(context, PAGE_SIZE) + NUM_RESERVED_PAGES
    if affordable < least:
        raise ConfigError(
            f"the cache of one request of {context} tokens takes {least * per_page / 2**20:.0f} MiB, and "
            f"{max(budget, 0) / 2**20:.0f} MiB are left for it: set a smaller max_context"
            + (", or a larger memory_fraction" if is_cuda else "")
        )
    return min(enough, affordable)
