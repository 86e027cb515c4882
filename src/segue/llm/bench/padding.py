"""What padding costs a full prefill graph: tokens beyond the real ones, and request slots beyond the real requests.

Each figure is the difference of two recordings that run the same real tokens, measured in turn: one that fits, and one
that is padded. Attention and experts skip padded tokens by the true count, matrix products do not; an empty request slot
has no token, and costs what looking at its length costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from segue.backends import make_backend
from segue.config import GraphConfig, PhaseConfig
from segue.errors import ConfigError
from segue.graph import calling
from segue.llm.batch import HostBatch
from segue.llm.bench.measure import Sample, interleaved
from segue.llm.bench.prefill import prefill_batch
from segue.llm.engine import Engine
from segue.llm.engine_config import EngineConfig
from segue.llm.pages import PAGE_SIZE, pages_for
from segue.llm.runners import Limits, PrefillRunner

NUM_SLOTS = 32
_Times = Callable[[Mapping[str, Callable[[], object]]], dict[str, Sample]]


def measure_padding(
    model: Any,
    device: torch.device,
    attention: str,
    experts: str,
    tokens: Sequence[tuple[int, int]],
    slot_tokens: int,
    empty: Sequence[int],
    *,
    rounds: int = 7,
    calls: int = 10,
) -> dict[str, Any]:
    """`tokens` has pairs of real tokens and rung; `empty` numbers of empty slots of `NUM_SLOTS`, beside whose requests
    `slot_tokens` tokens are spread. Seconds of a replay.

    Raises ConfigError where the attention cannot be recorded for a prefill.
    """
    longest = max(slot_tokens, *(rung for _, rung in tokens))
    config = EngineConfig(
        device=device, attention=attention, experts=experts, chunk_size=longest, max_requests=min(NUM_SLOTS, longest),
        max_context=longest + PAGE_SIZE, num_pages=2 * pages_for(longest) + 2 * NUM_SLOTS + 8,
        graphs=GraphConfig(prefill=PhaseConfig(backend="full", ladder=(longest,)), decode="disabled", capture="manual"),
    )  # fmt: skip
    with Engine(model, config) as engine, torch.inference_mode():
        if engine.resolved.phase("prefill").backend != "full":
            raise ConfigError(
                f"attention is {engine.attention.name!r}, which no full prefill graph can hold; choose another"
            )
        times = partial(interleaved, device=device, rounds=rounds, calls=calls)
        by_tokens = [_tokens(engine, times, real, rung) for real, rung in tokens]
        by_slots = [_slots(engine, times, slot_tokens, number) for number in empty]
        return {"tokens": by_tokens, "slots": by_slots, "attention": engine.attention.name, **_verdict(by_tokens, by_slots)}


def _tokens(engine: Engine, times: _Times, real: int, rung: int) -> dict[str, Any]:
    """`real` tokens of one request in a recording of as many and in one of `rung`; and `rung` tokens in the latter."""
    seconds = _timed(
        engine,
        times,
        {
            "fits": (real, 1, prefill_batch(real)),
            "padded": (rung, 1, prefill_batch(real)),
            "filled": (rung, 1, prefill_batch(rung)),
        },
    )
    return {"real": real, "rung": rung, "seconds": seconds} | _cost(seconds, rung - real)


def _slots(engine: Engine, times: _Times, tokens: int, empty: int) -> dict[str, Any]:
    """The same requests in a recording of as many slots and in one of `NUM_SLOTS`."""
    requests = NUM_SLOTS - empty
    host = prefill_batch(tokens, requests)
    seconds = _timed(engine, times, {"fits": (tokens, requests, host), "padded": (tokens, NUM_SLOTS, host)})
    return {"tokens": tokens, "requests": requests, "empty": empty, "seconds": seconds} | _cost(seconds, empty)


def _timed(engine: Engine, times: _Times, arms: dict[str, tuple[int, int, HostBatch]]) -> dict[str, Any]:
    """Each arm is a rung, request slots and a batch, and gets a recording and static inputs of its own."""
    runners = {name: _runner(engine, rung, slots) for name, (rung, slots, _) in arms.items()}
    calls: dict[str, Callable[[], object]] = {}
    with engine.lane.exclusive():
        for name, (_, _, host) in arms.items():
            runner = runners[name]
            decision = runner.decide(host)
            assert decision.key is not None, decision
            with calling(runner.load(host, decision)):
                calls[name] = runner.store.get(decision.key).replay
        timed = times(calls)
    for runner in runners.values():
        runner.close()
    return {name: sample._asdict() for name, sample in timed.items()}


def _runner(engine: Engine, rung: int, slots: int) -> PrefillRunner:
    settings = replace(engine.resolved.phase("prefill"), ladder=(rung,), request_slots=slots, max_padding=float(rung))
    runner = PrefillRunner(
        settings,
        make_backend(settings.backend, engine.lane),
        engine._run_model,
        engine.attention.make(engine.cache),
        Limits((rung,), slots, engine.sizes.max_context, rung),
        parts=engine.parts,
    )
    runner.capture()
    return runner


def _cost(seconds: dict[str, Any], count: int) -> dict[str, float]:
    cost = seconds["padded"]["median"] - seconds["fits"]["median"]
    return {"cost_s": cost, "cost_each_s": cost / count, "cost_share": cost / seconds["fits"]["median"]}


def _verdict(by_tokens: Sequence[dict[str, Any]], by_slots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The dearest padding of each kind, as a share of the time without; the claim is that slots cost less."""
    token, slot = (max(row["cost_share"] for row in rows) for rows in (by_tokens, by_slots))
    return {"most_for_tokens": token, "most_for_slots": slot, "is_claim_shown": slot < token}
