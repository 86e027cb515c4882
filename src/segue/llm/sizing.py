"""How large the KV cache may be: what else needs memory is measured first, and the cache gets the rest.

Graphs, static inputs and the largest eager pass are needed beside the cache, and how much they take is only known from
running them. So start-up makes a cache of a few pages and runners over it: the largest passes run eagerly for their peak,
a few recordings of each phase are made, and everything is thrown away again. What stays (kernels that the driver loaded,
workspaces of libraries) is needed anyway, and is in use when the cache is sized.

The dummy batches of a capture use two reserved pages alone, which is why a few pages are enough. A measurement draws no
random numbers of the caller's and counts no decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue._compat import without_autocast
from segue.device import Device, MemoryReading
from segue.errors import ConfigError
from segue.llm.batch import dummy_batch, to_device
from segue.llm.config import Sizes
from segue.llm.engine_config import EngineConfig
from segue.llm.pages import NUM_RESERVED_PAGES
from segue.llm.runners import BatchRunner
from segue.memory.estimate import Estimate, family_sample, sampled
from segue.memory.lane import Lane
from segue.shapes.key import ShapeKey

FEW_PAGES = NUM_RESERVED_PAGES + 1
MAX_ATTEMPTS = 3
_LOGIT_COPIES = 4
"""float32 rows of logits a request that sampling holds at once"""
_MISSED_SHARE = 0.25
_MISSED_OF_TOTAL = 0.01
"""of the memory that the fraction leaves free, and of all: an estimate that missed by less is not worth a second capture"""


def is_measured(config: EngineConfig, device: torch.device) -> bool:
    """Whether the cache is sized from measurements: on cuda, unless its pages are given."""
    return device.type == "cuda" and config.num_pages == "auto"


def measure(runners: Sequence[BatchRunner], sizes: Sizes, vocab_size: int, lane: Lane) -> Estimate:
    """What `runners`, made for this and closed afterwards, show of the memory that such runners need.

    Raises:
        CaptureError: a shape cannot be recorded, and its phase is configured to raise.
        ConfigError: there is not even room for the largest eager pass.
    """
    device = lane.device
    devices = [device.device] if device.kind == "cuda" else []
    with torch.inference_mode(), without_autocast(), torch.random.fork_rng(devices):
        peak = max((_eager_peak(runner, sizes, device) for runner in runners), default=0)
        static_bytes = sum(_static_bytes(runner, device) for runner in runners)
        families = []
        for runner in runners:
            keys = _by_size(runner)
            chosen = [keys[place] for place in sampled(len(keys))]
            records = runner.capture(chosen).records
            families.append(family_sample(runner.phase, records, len(keys)))
    pool_bytes = lane.reserved_bytes
    sampling = sizes.max_requests * vocab_size * 4 * _LOGIT_COPIES
    eager = max(peak, sampling)
    lends = all(runner.lends for runner in runners)
    return Estimate(
        families=tuple(families),
        pool_bytes=pool_bytes,
        static_bytes=static_bytes,
        eager_peak_bytes=eager,
        lent_bytes=eager - max(peak - pool_bytes, sampling) if lends else 0,
    )


def missing_bytes(reading: MemoryReading, fraction: float, estimate: Estimate) -> int:
    """What is in use beyond the fraction, after the capture and with the eager peak still to come; 0 where the estimates
    held, or missed by little. Read it after a flush, when nothing is cached."""
    over = reading.driver_used + estimate.eager_peak_bytes - estimate.lent_bytes - int(fraction * reading.driver_total)
    bearable = min(_MISSED_SHARE * (1 - fraction), _MISSED_OF_TOTAL) * reading.driver_total
    return over if over > bearable else 0


def fewer_pages(pages: int, missing: int, page_bytes: int) -> int:
    """Pages of a cache that gives `missing` bytes back; an eighth of them where nobody knows how much is missing.

    Raises:
        ConfigError: nothing would be left.
    """
    less = -(-missing // page_bytes) if missing else max(pages // 8, 1)
    if pages - less <= NUM_RESERVED_PAGES:
        raise ConfigError(
            f"graphs and the largest eager pass leave no room for a KV cache: of {pages} pages {less} are too many; set a "
            "larger memory_fraction, or a smaller chunk_size, max_requests or max_context"
        )
    return pages - less


def _eager_peak(runner: BatchRunner, sizes: Sizes, device: Device) -> int:
    """Of the largest batches the phase can meet: all slots full, and one request with as long a past as there can be."""
    tokens = min(runner.max_tokens, sizes.max_context)
    past = sizes.max_context - tokens
    batches = [dummy_batch(runner.max_tokens, runner.limits.max_requests, longest=sizes.max_context)]
    if past:
        batches.append(dummy_batch(tokens, 1, context=past, longest=sizes.max_context))
    most = 0
    for batch in batches:
        try:
            with device.measure_peak() as peak:
                runner.run_on(to_device(batch, device.device))
        except torch.OutOfMemoryError as error:
            first_line = str(error).splitlines()[0]
            raise ConfigError(
                f"the largest {runner.phase} batch ({batch.num_tokens} tokens, context {batch.max_seq_len}) does not fit "
                f"beside the weights: {first_line}; set a smaller chunk_size, max_requests or max_context"
            ) from None
        most = max(most, peak.nbytes)
    return most


def _static_bytes(runner: BatchRunner, device: Device) -> int:
    before = device.memory().allocated
    for key in _by_size(runner):
        runner.prepare(key)
    return device.memory().allocated - before + runner.static_bytes


def _by_size(runner: BatchRunner) -> list[ShapeKey]:
    if runner.settings.backend == "disabled":
        return []
    return sorted(runner.keys(), key=lambda key: (key.tokens, key.context or 0), reverse=True)
