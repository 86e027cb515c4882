"""How the "auto" of an engine's settings is settled: pure functions of the model and the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from segue.device import Device, get_device
from segue.errors import ConfigError
from segue.llm.engine_config import EngineConfig
from segue.llm.facts import ModelFacts
from segue.llm.host_memory import available_bytes
from segue.llm.kv_cache import PagedKVCache
from segue.llm.pages import NUM_RESERVED_PAGES, PAGE_SIZE, pages_for

_CPU_CACHE_BYTES = 1 << 30
_CPU_MAX_CONTEXT = 1024
DEFAULT_MEMORY_FRACTION = 0.9
_CPU_GATHER_COPIES = 4  # SmolLM2-135M, 1454 requests, context 1024: 11 GB at the most, where one copy is 2.3 GB


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


def recording_device(setting: str | torch.device | Device) -> Device:
    """What records for a setting. Raises ConfigError where it is unknown or absent."""
    return setting if isinstance(setting, Device) else get_device(torch_device(setting))


def torch_device(name: str | torch.device | Device) -> torch.device:
    """The device of a setting. Raises ConfigError where it is unknown or absent."""
    if isinstance(name, Device):
        return name.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        get_device(device)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].removeprefix(f"device {str(name)!r} was asked for, and ")
        raise ConfigError(f"device is {str(name)!r}: {reason}") from None
    return device


def settle_sizes(
    config: EngineConfig, facts: ModelFacts, device: torch.device, *, is_gathered: bool = True, reserve_bytes: int = 0
) -> Sizes:
    """Replaces every "auto". On cuda the cache gets what is free of the device's memory up to a fraction of it, less
    `reserve_bytes` for what is still to come.

    What can never be reached is cut down: requests to the cache's pages, since each that runs holds one, and the chunk
    to the tokens that all requests of a prefill can bring. `is_gathered` says that the attention copies the context that it
    reads. Raises ConfigError where sizes that were asked for need more memory than there is, and where more requests were
    asked for than the cache that fits has pages.
    """
    is_cpu = device.type == "cpu"
    if is_cpu and config.memory_fraction != "auto":
        raise ConfigError(
            f"memory_fraction is {config.memory_fraction}; it bounds the memory of a CUDA device, and this engine runs on "
            "cpu: leave it out (EngineConfig.num_pages sizes the cache there)"
        )
    chunk, requests, context = _asked(config, facts, is_cpu=is_cpu)
    pages = config.num_pages
    if pages == "auto":
        pages = _num_pages(facts, requests, context, _cache_budget(config, device, reserve_bytes), is_cuda=not is_cpu)
        _check_requests(config, pages)
    sizes = reachable_sizes(chunk, requests, context, pages, is_cpu=is_cpu)
    if config.max_context != "auto" and config.max_context > context:
        sizes = sizes._replace(notes=(f"max_context {config.max_context} -> {context}: the model's longest", *sizes.notes))
    _check_memory(config, sizes, facts, device, is_gathered=is_gathered)
    return sizes


def resized(config: EngineConfig, facts: ModelFacts, device: torch.device, num_pages: int) -> Sizes:
    """The sizes that were asked for, as far as another number of pages lets them be reached."""
    is_cpu = device.type == "cpu"
    return reachable_sizes(*_asked(config, facts, is_cpu=is_cpu), num_pages, is_cpu=is_cpu)


def check_pages(num_pages: int, held_bytes: int, facts: ModelFacts, device: torch.device) -> None:
    """ConfigError where so many pages need more memory than is left, once `held_bytes` are given back."""
    left, need = available_bytes(device), num_pages * bytes_per_page(facts)
    if left is not None and need > left + held_bytes:
        raise _too_much("num_pages", num_pages, need, left + held_bytes)


def _too_much(name: str, value: Any, need: int, left: int) -> ConfigError:
    return ConfigError(
        f"{name} is {value}, which needs at least {need / 2**30:.1f} GiB for "
        f"{'the cache' if name == 'num_pages' else 'one step'}, and {left / 2**30:.1f} GiB are left: "
        f"set a smaller {name}" + (" or max_context" if name == "max_requests" else "")
    )


def _asked(config: EngineConfig, facts: ModelFacts, *, is_cpu: bool) -> tuple[int, int, int]:
    """Tokens of a chunk, requests, and tokens of context."""
    chunk = (256 if is_cpu else 2048) if config.chunk_size == "auto" else config.chunk_size
    requests = (8 if is_cpu else 256) if config.max_requests == "auto" else config.max_requests
    longest = min(facts.max_context, _CPU_MAX_CONTEXT) if is_cpu else facts.max_context
    return chunk, requests, longest if config.max_context == "auto" else min(config.max_context, facts.max_context)


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


def _check_requests(config: EngineConfig, pages: int) -> None:
    most = pages - NUM_RESERVED_PAGES
    if config.max_requests != "auto" and config.max_requests > most:
        raise ConfigError(
            f"max_requests is {config.max_requests}, and the cache that fits has {most} pages, of which each request holds "
            f"one at least: set max_requests to at most {most}, or num_pages"
        )


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
            raise _too_much(name, getattr(config, name), need, left)


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
