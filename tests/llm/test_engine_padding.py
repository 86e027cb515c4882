"""Padding does no harm: whatever lies in padded rows, scrap and unused table entries, real rows keep every bit.

The oracle is the same padded batch, clean, run eagerly. And in tiny form each family writes transformers' own text,
with contexts that cross every boundary: page, window, chunk, context rung.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from segue import config as c
from segue.graph import calling
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.batch import NULL_PAGE, PAGE_SIZE, SCRAP_PAGE, HostBatch, RequestRows, build_batch, pad_host
from segue.llm.experts import guard_experts
from segue.llm.pages import pages_for
from segue.llm.runners import BatchRunner
from segue.shapes.key import ShapeKey

pytest.importorskip("transformers")
from llm_support import FAMILIES, MORE_FAMILIES, VOCABULARY, assert_same_text, greedy, prompt_of, tiny_model

SPARE = VOCABULARY - 1  # a token whose embedding is NaN
NUM_PAGES = 40
POISON_PAGE = NUM_PAGES - 1
MODES = [("full", "breakable"), ("breakable", "full")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def engine_of(model: Any, decode: str, prefill: str, **changes: Any) -> Engine:
    graphs = c.GraphConfig(
        decode=c.PhaseConfig(backend=decode, ladder=(1, 2, 6, 8)),
        prefill=c.PhaseConfig(backend=prefill, ladder=(16, 48), max_padding=3.0),
        strict=True,
    )
    sizes = {"chunk_size": 48, "max_requests": 8, "max_context": 300, "num_pages": NUM_PAGES} | changes
    return Engine(model, EngineConfig(device="cpu", graphs=graphs, **sizes))


CASES = [(f, *m, "as-is") for f in FAMILIES for m in MODES] + [(f, *m, "fused") for f in ("Llama", "Mixtral") for m in MODES]


@pytest.fixture(scope="module", params=CASES, ids=lambda p: "-".join(p))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    family, decode, prefill, kind = request.param
    model = tiny_model(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[SPARE] = float("nan")
    with engine_of(model, decode, prefill, fuse=kind == "fused") as engine:
        yield engine


def batch_of(engine: Engine, kind: str) -> HostBatch:
    """Three requests of different lengths: one new token each, or a chunk each that begins anywhere in a page."""
    cached, new = ((5, 31, 48), (1, 1, 1)) if kind == "decode" else ((0, 17, 30), (7, 9, 3))
    rows, page = [], 2
    for number, (before, count) in enumerate(zip(cached, new, strict=True)):
        num_pages = pages_for(before + count)
        rows.append(RequestRows(prompt_of(count, number), before, range(page, page + num_pages)))
        page += num_pages
    assert page < POISON_PAGE
    return build_batch(rows)


def poisoned(host: HostBatch, runner: BatchRunner, key: ShapeKey) -> HostBatch:
    """`host` padded to `key`, with the worst in every place that no live row may read."""
    table = host.arrays.block_table
    padded = pad_host(host, key.tokens, runner.slots(key.tokens), pages_for(runner.limits.max_context))
    ids, tables = padded.arrays.input_ids.copy(), np.full_like(padded.arrays.block_table, POISON_PAGE)
    ids[host.num_tokens :] = SPARE
    for row, length in enumerate(host.seq_lens):
        used = pages_for(length)
        tables[row, :used] = table[row, :used]
    return replace(padded, arrays=padded.arrays._replace(input_ids=ids, block_table=tables))


def fill_cache(engine: Engine) -> None:
    generator = torch.Generator().manual_seed(3)
    for tensor in (*engine.cache.keys, *engine.cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
        tensor[: PAGE_SIZE * (NULL_PAGE + 1)] = 0
        for page in (SCRAP_PAGE, POISON_PAGE):
            tensor[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = float("nan")


def replayed(runner: BatchRunner, host: HostBatch, key: ShapeKey, num_requests: int) -> torch.Tensor:
    decision = runner.decide(host)
    assert decision.key == key
    with runner.lane.exclusive(), calling(runner.load(host, decision)):
        return runner.store.get(key).replay().logits[:num_requests].clone()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_poison_in_padding_changes_no_bit_of_a_real_row(engine: Engine, kind: str) -> None:
    runner: BatchRunner = engine.decode if kind == "decode" else engine.prefill
    host = batch_of(engine, kind)
    key = runner.decide(host).key
    assert key is not None and key.tokens > host.num_tokens
    bad = poisoned(host, runner, key)
    with torch.inference_mode():
        fill_cache(engine)
        expected = runner.run_padded_eagerly(host, key).logits.clone()
        fill_cache(engine)
        eager = runner.run_padded_eagerly(bad, key).logits.clone()
        fill_cache(engine)
        written = set(host.tensors.slot_mapping.tolist())
        outside = written | set(range(SCRAP_PAGE * PAGE_SIZE, (SCRAP_PAGE + 1) * PAGE_SIZE))
        before = engine.cache.checksum(outside)
        got = replayed(runner, bad, key, host.num_requests)
    assert torch.isfinite(expected).all() and expected.shape == (3, VOCABULARY)
    assert torch.equal(eager, expected)
    assert torch.equal(got, expected)
    assert engine.cache.checksum(outside) == before
    assert engine.cache.checksum() != engine.cache.checksum(written)  # the checksum sees what was written
    for tensor in (*engine.cache.keys, *engine.cache.values):
        assert not tensor[:PAGE_SIZE].any()
        assert torch.isfinite(tensor[sorted(written)]).all()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_replay_is_near_the_unpadded_call(engine: Engine, kind: str) -> None:
    runner: BatchRunner = engine.decode if kind == "decode" else engine.prefill
    host = batch_of(engine, kind)
    with torch.inference_mode():
        fill_cache(engine)
        expected = runner.run_eagerly(host).logits.clone()
        fill_cache(engine)
        got = runner.execute(host).logits.clone()
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_experts_of_padded_tokens_are_the_sentinel() -> None:
    """What the experts themselves are given: real rows as routed, padded ones nowhere."""
    model = tiny_model("Mixtral")
    with engine_of(model, "full", "breakable") as engine:
        seen: list[torch.Tensor] = []
        experts = model.model.layers[0].mlp.experts
        handle = experts.register_forward_pre_hook(lambda module, args: seen.append(args[1].clone()))
        host = batch_of(engine, "decode")
        with torch.inference_mode():
            fill_cache(engine)
            engine.decode.run_padded_eagerly(host, ShapeKey("decode", 6, requests=6, uniform=True, context=256))
        handle.remove()
        index = seen[0]
        assert index.shape == (6, 2) and (index[:3] < experts.num_experts).all()
        assert (index[3:] == experts.num_experts).all()


def test_experts_are_guarded_once_and_answer_as_themselves_outside_an_engine() -> None:
    plain, guarded = tiny_model("Mixtral"), tiny_model("Mixtral")
    assert guard_experts(guarded) == 2 and guard_experts(guarded) == 2 and guard_experts(tiny_model("Llama")) == 0
    assert len(guarded.model.layers[0].mlp.experts._forward_pre_hooks) == 1
    ids = torch.tensor([prompt_of(9)])
    with torch.inference_mode():
        assert torch.equal(guarded(ids).logits, plain(ids).logits)


def lengths() -> Sequence[int]:
    """Prompts that end just before, at and after a page, the windows, the chunk, and the first context rung."""
    return (1, 2, 15, 16, 17, 18, 20, 22, 33, 47, 48, 49, 97, 240)


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE_FAMILIES)])
def test_each_family_writes_the_text_of_transformers(family: str) -> None:
    reference = tiny_model(family)
    prompts = [prompt_of(length) for length in lengths()]
    expected = [greedy(reference, prompt, GREEDY.max_tokens) for prompt in prompts]
    assert len({tuple(text) for text in expected}) == len(prompts)  # the texts tell the prompts apart
    for decode, prefill in MODES:
        with engine_of(tiny_model(family), decode, prefill, num_pages=60) as engine:
            outputs = engine.generate(prompts, GREEDY)
            for prompt, output, text in zip(prompts, outputs, expected, strict=True):
                assert_same_text(reference, prompt, output.token_ids, text, f"{family}, {decode}, {prefill}")
            stats = engine.stats()["phases"]
            assert stats["decode"]["eager"] == stats["prefill"]["eager"] == {}
            contexts = {graph["context"] for graph in stats["decode"]["graphs"] if graph["hits"]}
            assert contexts == ({256, 300} if decode == "full" else {None})
