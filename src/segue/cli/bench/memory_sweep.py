"""What `segue bench memory` measures: engines, each with its ceiling or rung, over one shape and with the same cache."""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any, NamedTuple

from segue.cli.bench.common import sizes_of
from segue.cli.output import note
from segue.cli.usage import UsageError

_ROOM = 16
"""tokens of context beyond twice the chunk"""
MIXED = tuple(twelfth / 12 for twelfth in (7, 3, 11, 1, 9, 12, 5, 2, 10, 4, 8, 6))
"""lengths of the mixed prefills, as shares of the chunk, in their order"""


def context_for(chunk: int) -> int:
    """Tokens of context that the sweep needs."""
    return 2 * chunk + _ROOM


class Reading(NamedTuple):
    """One engine. Bytes; `ceiling` 0 is the engine without graphs. `resident` are weights, cache and what else stays
    outside of the graph pools, `reserved` what the allocator holds for all of that and the pools. One prefill of the chunk
    size (or one decode) had tensors of `peak` bytes at most on top, for which the allocator took `held` of the driver;
    prefills of many lengths made it take `mixed`."""

    ceiling: int
    graphs: int
    resident: int
    reserved: int
    pool: int
    driver: int
    peak: int
    held: int
    mixed: int | None
    seconds: float

    @property
    def graph_bytes(self) -> int:
        return self.pool + self.driver

    @property
    def total(self) -> int:
        """Of tensors: what is needed at once."""
        return self.resident + self.graph_bytes + self.peak

    @property
    def held_total(self) -> int:
        """Of the allocator and the driver, after all prefills: what nobody else can have."""
        return self.reserved + self.driver + max(self.held, self.mixed or 0)

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"graph_bytes": self.graph_bytes, "total": self.total, "held_total": self.held_total}


class Sweep:
    """Engines one after another over one model, all with the same cache."""

    def __init__(self, model: Any, options: argparse.Namespace, chunk: int, most: int) -> None:
        from segue.llm.pages import NUM_RESERVED_PAGES, pages_for

        self._model, self._options = model, options
        self._chunk, self._most = chunk, most
        self._context = min(context_for(chunk), model.config.get_text_config().max_position_embeddings)
        if chunk >= self._context:
            raise UsageError(
                f"--chunk-size is {chunk}, and the shape's context holds {self._context} tokens with the output"
            )
        self._pages = NUM_RESERVED_PAGES + pages_for(self._context) + 2 * most

    def prefill(self, ceiling: int) -> Reading:
        from segue.config import GraphConfig, PhaseConfig

        ladder = sizes_of(self._options.ladder, "ladder") or "auto"
        backend = self._options.prefill if ceiling else "disabled"
        phase = PhaseConfig(backend=backend, ladder=ladder, max_size=ceiling or None)
        graphs = GraphConfig(prefill=phase, decode="disabled", lend_pool=self._options.lend)
        lengths = [max(round(share * self._chunk), 1) for share in MIXED]
        return self._measure(graphs, ceiling, max(self._chunk, ceiling), [_prompt(self._chunk)], lengths, num_tokens=1)

    def decode(self, rung: int) -> Reading:
        from segue.config import GraphConfig, PhaseConfig

        phase = PhaseConfig(backend="full" if rung else "disabled", max_size=rung or None)
        graphs = GraphConfig(prefill="disabled", decode=phase, lend_pool=self._options.lend)
        return self._measure(graphs, rung, self._chunk, [[token % 97] for token in range(self._most)], [], num_tokens=3)

    def _measure(
        self, graphs: Any, ceiling: int, chunk: int, prompts: list[list[int]], mixed: list[int], num_tokens: int
    ) -> Reading:
        from segue.llm import Engine, EngineConfig, SamplingParams

        start = time.perf_counter()
        config = EngineConfig(
            device=self._options.device, attention=self._options.attention, graphs=graphs, chunk_size=chunk,
            max_requests=self._most, max_context=self._context, num_pages=self._pages,
        )  # fmt: skip
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        with Engine(self._model, config) as engine:
            seconds = time.perf_counter() - start
            for _ in range(2):  # first calls load kernels and make workspaces, and a pool that is lent grows
                engine.generate(prompts, params)
            names = [engine.add_request(prompt, params) for prompt in prompts]
            decoded = engine.stats()["steps"]["decode"]
            while num_tokens > 1 and engine.stats()["steps"]["decode"] == decoded:  # the next step is one of decoding
                engine.step()
            ledger, device = engine.ledger(), engine.device
            device.flush()
            resident, reserved = _staying(engine, ledger.pool_bytes)
            with device.measure_peak() as peak:
                engine.step()
            nbytes = min(peak.nbytes, peak.held_bytes) if self._options.lend else peak.nbytes  # the rest lay in the pool
            for name in names:
                engine.abort(name)
            device.flush()
            with device.measure_peak() as of_mixed:
                for length in mixed:
                    engine.generate([_prompt(length)], params)
        gc.collect()
        device.flush()
        note(f"  {ceiling or 'no graphs'}: {seconds:.1f} s")
        return Reading(
            ceiling, len(ledger.graphs), resident, reserved, ledger.pool_bytes, ledger.driver_bytes, nbytes,
            peak.held_bytes, of_mixed.held_bytes if mixed else None, seconds,
        )  # fmt: skip


def _prompt(length: int) -> list[int]:
    return [token % 97 for token in range(length)]


def _staying(engine: Any, pool_bytes: int) -> tuple[int, int]:
    """Bytes of tensors that stay, outside of the graph pools, and of the memory held for them and for the pools: as the
    allocator says on CUDA, counted on cpu."""
    if engine.device.kind == "cuda":
        reading = engine.device.memory()
        return reading.allocated, reading.reserved
    model = engine.model
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    nbytes = sum(t.nbytes for t in tensors.values()) + engine.cache.nbytes + sum(r.static_bytes for r in engine.runners)
    return nbytes, nbytes + pool_bytes
