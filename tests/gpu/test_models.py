"""On a GPU: models of real shapes with random weights, in bf16, replay bit for bit as the same padded batch runs eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from segue.config import GraphConfig
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.attention import ATTENTIONS
from segue.llm.batch import RequestRows, build_batch
from segue.llm.pages import pages_for
from segue.llm.runners import BatchRunner

pytestmark = pytest.mark.gpu

LIBRARIES = {"flashinfer": "flashinfer", "fa4": "flash_attn.cute"}

SHAPES = {
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip


def random_model(shape: str) -> Any:
    """Random weights of a real shape, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, **SHAPES[shape])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    inverse = 1.0 / (10_000.0 ** (torch.arange(0, config.head_dim, 2, device="cuda").float() / config.head_dim))
    model.model.rotary_emb.inv_freq = inverse
    model.model.rotary_emb.original_inv_freq = inverse.clone()
    model.tie_weights()
    return model


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = random_model(request.param)
    yield made
    made.to("meta")
    torch.cuda.empty_cache()


def engine_of(model: Any, decode: str, prefill: str, attention: str = "auto", **changes: Any) -> Engine:
    sizes: dict[str, Any] = {"max_requests": 8, "max_context": 512, "chunk_size": 256, "num_pages": 400}
    graphs = GraphConfig(decode=decode, prefill=prefill)
    if attention in LIBRARIES:
        pytest.importorskip(LIBRARIES[attention])
    return Engine(model, EngineConfig(device="cuda", attention=attention, graphs=graphs, **(sizes | changes)))


def batches(engine: Engine, runner: BatchRunner) -> Iterator[Any]:
    """Batches of many sizes over distinct pages, caches filled with random values."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(1,) * n for n in (3, 8, 1, 5)] if runner.phase == "decode" else [(7,), (100, 30), (5, 1, 250 - 6), (2, 2, 2)]
    for new in lengths:
        rows, page = [], 2
        for count in new:
            cached = int(torch.randint(0, 200, (), generator=generator))
            num_pages = pages_for(cached + count)
            ids = torch.randint(0, engine.facts.vocab_size, (count,), generator=generator).tolist()
            rows.append(RequestRows(ids, cached, list(range(page, page + num_pages))))
            page += num_pages
        yield build_batch(rows)


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name != "auto"])
@pytest.mark.parametrize(("decode", "prefill"), [("full", "breakable"), ("breakable", "full")], ids=lambda name: str(name))
def test_replay_is_bit_equal_to_eager_on_the_padded_batch(model: Any, decode: str, prefill: str, attention: str) -> None:
    with engine_of(model, decode, prefill, attention) as engine, torch.inference_mode():
        for runner in engine.runners:
            for tensor in (*engine.cache.keys, *engine.cache.values):
                tensor[32:].normal_()
            for batch in batches(engine, runner):
                decision = runner.decide(batch)
                assert decision.key is not None, decision
                state = [t.clone() for t in (*engine.cache.keys, *engine.cache.values)]
                expected = runner.run_padded_eagerly(batch, decision.key).logits.clone()
                written = [t.clone() for t in (*engine.cache.keys, *engine.cache.values)]
                for tensor, before in zip((*engine.cache.keys, *engine.cache.values), state, strict=True):
                    tensor.copy_(before)
                got = runner.execute(batch).logits.clone()
                assert torch.isfinite(got).all()
                assert torch.equal(got, expected), (runner.phase, runner.backend.name, batch.query_lens)
                for tensor, after in zip((*engine.cache.keys, *engine.cache.values), written, strict=True):
                    assert torch.equal(tensor[32:], after[32:])
                    assert not tensor[:16].any(), "the null page was written"
                unpadded = runner.run_eagerly(batch).logits
                assert (got - unpadded).abs().max() <= 0.05 * unpadded.abs().max()


def test_text_is_the_same_with_and_without_graphs(model: Any) -> None:
    """Greedy tokens of float32-free bf16 may differ where two logits tie; the first token comes from equal shapes."""
    prompts = [[5, 6, 7], list(range(100, 400)), [9] * 40]
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with engine_of(model, "full", "breakable") as engine:
        outputs = engine.generate(prompts, greedy)
        again = engine.generate(prompts, greedy)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in again]
        assert engine.stats()["phases"]["decode"]["eager"] == {}
        assert engine.stats()["phases"]["prefill"]["eager"] == {}


DRAWS = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.3, min_p=0.02, seed=5, max_tokens=24, ignore_eos=True),
]
SORTS = [*DRAWS[:2], SamplingParams(temperature=1.1, top_k=50, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)]


@pytest.mark.parametrize("params", [DRAWS, SORTS], ids=["drawn", "sorted"])
def test_draws_are_the_same_recorded_or_behind_the_replay_and_ahead_or_not(model: Any, params: list[SamplingParams]) -> None:
    prompts = [[5, 6, 7], list(range(100, 400)), [9] * 40]
    found = set()
    for recorded in ((), ("drawn", "sorted")):
        for overlap in (True, False):
            with engine_of(model, "full", "breakable", sampling_graphs=recorded, overlap=overlap) as engine:
                found.add(tuple(o.token_ids for o in engine.generate(prompts, params)))
                assert engine.stats()["phases"]["decode"]["eager"] == {}
    assert len(found) == 1


@pytest.mark.parametrize("params", [DRAWS[1:2] * 3, DRAWS, SORTS], ids=["greedy", "drawn", "sorted"])
def test_a_decode_step_takes_one_copy_to_the_device(model: Any, params: list[SamplingParams]) -> None:
    with engine_of(model, "full", "breakable", overlap=True) as engine:
        for n, each in enumerate(params):
            engine.add_request([5 + n] * 9, each)
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                engine.step()
            torch.cuda.synchronize()
    copies = [event for event in profile.events() if "HtoD" in event.name]
    assert len(copies) == 5
