"""Any sizes start and answer, what can never be reached is cut down and said, what cannot be held is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue import GraphConfig
from segue.errors import ConfigError
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.batch import dummy_batch
from segue.llm.config import reachable_sizes, settle_sizes
from segue.llm.load import load_model
from segue.llm.pages import pages_for
from segue.shapes.ladder import prefill_ladder

pytest.importorskip("transformers")
from llm_support import prompt_of, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(num_hidden_layers=1)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunk=st.sampled_from([1, 3, 16, 64, 300]) | st.integers(1, 400),
    requests=st.integers(1, 5),
    context=st.sampled_from([2, 15, 16, 17, 128]) | st.integers(2, 140),
    pages=st.just("auto") | st.integers(3, 12),
    prefill=st.sampled_from(["breakable", "full"]),
)
def test_any_sizes_are_captured_and_answer(
    model: Any, chunk: int, requests: int, context: int, pages: Any, prefill: str
) -> None:
    config = EngineConfig(
        device="cpu", chunk_size=chunk, max_requests=requests, max_context=context, num_pages=pages,
        graphs=GraphConfig(prefill=prefill),
    )  # fmt: skip
    with Engine(model, config) as engine:
        sizes = engine.sizes
        assert 1 <= sizes.chunk_size <= min(chunk, sizes.prefill_slots * context)
        assert bool(sizes.notes) == ((sizes.chunk_size, sizes.max_requests) != (chunk, requests))
        longest = min(context - 1, (sizes.num_pages - 2) * 16 - 3)
        outputs = engine.generate([prompt_of(longest)] * 3, GREEDY)
        assert len({output.token_ids for output in outputs}) == 1 and outputs[0].token_ids


def test_rungs_above_what_was_cut_down_still_hold_every_batch(model: Any) -> None:
    from segue.config import PhaseConfig

    graphs = GraphConfig(
        decode=PhaseConfig(ladder=(1, 9), max_padding=9.0), prefill=PhaseConfig(ladder=(16, 512), max_padding=512.0)
    )
    config = EngineConfig(device="cpu", chunk_size=512, max_requests=9, max_context=40, num_pages=2 + 4, graphs=graphs)
    with Engine(model, config) as engine:
        assert (engine.sizes.max_requests, engine.sizes.chunk_size) == (4, 64)
        engine.generate([prompt_of(9), prompt_of(12), prompt_of(3)], GREEDY)
        phases = engine.stats()["phases"]
    assert all(phase["eager"] == {} and phase["replays"] > 0 for phase in phases.values())


def test_a_full_prefill_of_few_slots_and_short_contexts_starts(model: Any) -> None:
    from segue.config import PhaseConfig

    graphs = GraphConfig(prefill=PhaseConfig(backend="full", request_slots=1))
    with Engine(model, EngineConfig(device="cpu", chunk_size=64, max_requests=4, max_context=20, graphs=graphs)) as engine:
        assert len(engine.generate([prompt_of(9)] * 3, GREEDY)) == 3


@settings(max_examples=200, deadline=None)
@given(
    chunk=st.sampled_from([2048, 8192, 10**9]) | st.integers(1, 5000),
    requests=st.sampled_from([1, 256, 10**9]) | st.integers(1, 300),
    context=st.integers(2, 5000),
    pages=st.integers(3, 3000),
    is_cpu=st.booleans(),
)
def test_no_dummy_batch_outgrows_its_table(chunk: int, requests: int, context: int, pages: int, is_cpu: bool) -> None:
    sizes = reachable_sizes(chunk, requests, context, pages, is_cpu=is_cpu)
    assert sizes.chunk_size <= sizes.prefill_slots * context and sizes.prefill_slots <= sizes.max_requests <= pages - 2
    for rung in prefill_ladder("cpu" if is_cpu else "cuda", min(sizes.chunk_size, 4096)):
        host = dummy_batch(rung, sizes.prefill_slots, longest=context)
        assert host.num_pages <= pages_for(context) and host.padded_tokens == rung and host.num_tokens == rung


def test_a_dummy_batch_beyond_its_bound_is_padded() -> None:
    host = dummy_batch(256, 2, longest=20)
    assert host.seq_lens == (20, 20) and host.num_tokens == 40 and host.padded_tokens == 256
    with pytest.raises(ValueError, match="context of 20"):
        dummy_batch(4, 1, context=20, longest=20)


def test_what_start_up_prints_says_what_was_cut_down() -> None:
    text = reachable_sizes(10**9, 10**9, 100, 12, is_cpu=True).explain()
    assert "chunk 160 tokens, 10 requests" in text
    assert "max_requests 1000000000 -> 10" in text and "chunk_size 1000000000 -> 160" in text


@pytest.mark.parametrize("name", ["max_requests", "num_pages"])
def test_what_no_memory_holds_is_refused_with_what_it_needs(model: Any, name: str) -> None:
    sizes: dict[str, Any] = {"num_pages": 10**8}
    if name == "max_requests":
        sizes["max_requests"] = 1 << 16
    with pytest.raises(ConfigError, match=r"num_pages is 100000000, which needs at least [\d.]+ GiB .* are left"):
        Engine(model, EngineConfig(device="cpu", graphs=GraphConfig.off(), **sizes))


def test_a_chunk_of_any_size_starts(model: Any) -> None:
    with Engine(model, EngineConfig(device="cpu", chunk_size=1 << 20, max_requests=1, max_context=40)) as engine:
        assert engine.sizes.chunk_size == 40 and len(engine.generate(prompt_of(9), GREEDY)[0].token_ids) == 3


def test_more_requests_than_the_cache_that_fits_has_pages_are_refused(model: Any) -> None:
    facts = replace(load_model(model, device="cpu").facts, head_dim=1024, value_head_dim=1024)
    sizes: dict[str, Any] = {"device": "cpu", "max_context": 16, "graphs": GraphConfig.off()}
    with pytest.raises(ConfigError, match=r"max_requests is 5000, and the cache that fits has \d+ pages") as caught:
        settle_sizes(EngineConfig(max_requests=5000, **sizes), facts, torch.device("cpu"))
    most = int(str(caught.value).split(" pages")[0].split()[-1])
    assert f"set max_requests to at most {most}, or num_pages" in str(caught.value) and 1000 < most < 5000
    settled = settle_sizes(EngineConfig(max_requests=most, **sizes), facts, torch.device("cpu"))
    assert settled.max_requests == most and settled.notes == ()


def test_a_context_beyond_the_model_s_is_cut_down_and_said(model: Any) -> None:
    config = EngineConfig(device="cpu", max_context=1 << 24, graphs=GraphConfig.off())
    with Engine(model, config) as engine:
        assert (
            engine.sizes.max_context == 512 and "max_context 16777216 -> 512: the model's longest" in engine.sizes.explain()
        )


BAD: dict[str, dict[str, Any]] = {
    "capture": {"graphs": GraphConfig(capture="lazy")},
    "graphs is 'full'": {"graphs": "full"},
    "graphs is None": {"graphs": None},
    "dtype is 'float16'": {"dtype": "float16"},
    "dtype is torch.int32": {"dtype": torch.int32},
    "device is None": {"device": None},
    "attention is 3": {"attention": 3},
    "max_context is 1;": {"max_context": 1},
    "max_requests is 999999999; it must be 'auto' or an integer from 1 to 65536": {"max_requests": 999_999_999},
    "chunk_size is 999999999; .* to 1048576": {"chunk_size": 999_999_999},
    "max_context is 999999999; .* to 16777216": {"max_context": 999_999_999},
    "num_pages is 999999999; .* to 134217728": {"num_pages": 999_999_999},
}


@pytest.mark.parametrize("message", list(BAD))
def test_settings_of_another_kind_are_refused_when_written_down(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**BAD[message])
