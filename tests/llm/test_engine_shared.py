"""A model in memory that others use as well: other engines, plain calls, callers with modes of their own."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

import segue
from segue import GraphConfig, PhaseConfig
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.batch import PAGE_SIZE

transformers = pytest.importorskip("transformers")

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7]
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25, "pad_token_id": 0,
}  # fmt: skip


def make(family: str = "Llama", **more: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def config_of(**more: Any) -> EngineConfig:
    return EngineConfig(**({"device": "cpu", "max_requests": 2, "max_context": 128, "chunk_size": 64} | more))


def expected_of(model: Any, prompt: list[int] = PROMPT, count: int = 8) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[0, len(prompt) :].tolist()


def text(engine: Engine) -> list[int]:
    return list(engine.generate([PROMPT], GREEDY)[0].token_ids)


@pytest.mark.parametrize("fuse", [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_weights_bound_anew_reach_all_engines_of_one_model(fuse: tuple[bool, bool], family: str) -> None:
    model, others = make(family), [make(family) for _ in range(3)]
    first, second = (Engine(model, config_of(fuse=f, max_context=c)) for f, c in zip(fuse, (128, 200)))
    with first, second:
        for number, other in enumerate(others):
            model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
            expected = expected_of(other)
            order = (first, second) if number % 2 else (second, first)
            for engine in (*order, *order):
                assert text(engine) == expected
        before = [engine.num_recaptures for engine in (first, second)]
        for _ in range(3):
            assert text(first) == text(second) == expected
        assert [engine.num_recaptures for engine in (first, second)] == before  # neither makes the other capture again


FAMILIES = {"Llama": {}, "Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": 16}, "Gemma2": {"head_dim": 16}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fuse", [True, False])
def test_outside_an_engine_the_model_answers_as_before(family: str, fuse: bool) -> None:
    model = make(family, **FAMILIES[family])
    plain = copy.deepcopy(model)
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 8, 7, 6, 5, 4]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])

    def answers(of: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            begun = of(ids[1:], use_cache=True)
            name = "cache" if "cache" in inspect.signature(type(of).forward).parameters else "past_key_values"
            further = of(torch.tensor([[10, 11, 12]]), **{name: begun.past_key_values}).logits
            return [
                of(ids, attention_mask=mask).logits[mask.bool()],
                further,
                of.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0),
            ]

    expected = answers(plain)
    with Engine(model, config_of(fuse=fuse)) as engine:
        text_before = text(engine)
        assert text_before == expected_of(plain)
        for found, wanted in zip(answers(model), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        assert text(engine) == text_before
        own = model.config._attn_implementation
        model.set_attn_implementation("eager")  # which is for calls outside
        assert text(engine) == text_before
        model.set_attn_implementation(own)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.config))):
            config = getattr(twin, "config", twin)
            assert config == model.config and model.config == config and config.to_dict() == model.config.to_dict()
            assert config != plain.config and plain.config != config  # whose pad_token_id is another
        assert type(pickle.loads(pickle.dumps(model.config))) is type(plain.config)
    for found, wanted in zip(answers(model), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "graphs", [GraphConfig(), GraphConfig(prefill="full"), GraphConfig.off()], ids=["default", "full", "off"]
)
def test_autocast_of_the_caller_changes_nothing(graphs: GraphConfig) -> None:
    prompts = [[(7 * i + j * j) % 500 + 2 for j in range(20 + i)] for i in range(6)]
    model = make()
    with Engine(model, config_of(graphs=graphs)) as engine:
        expected = [list(out.token_ids) for out in engine.generate(prompts, GREEDY)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert [list(out.token_ids) for out in engine.generate(prompts, GREEDY)] == expected
    with torch.autocast("cpu", dtype=torch.bfloat16), Engine(model, config_of(graphs=graphs, fuse=True)) as engine:
        found = [list(out.token_ids) for out in engine.generate(prompts, GREEDY)]
    assert found == expected == [expected_of(model, prompt) for prompt in prompts]


def test_a_resize_that_fails_keeps_the_size() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    with Engine(make(), config_of()) as engine:
        before = engine.stats()["pages"]
        with pytest.raises(RuntimeError, match="no"):
            engine.resize_cache(10, refuse)
        engine.wake()
        assert engine.stats()["pages"] == before
        prompt = [9] * (before * PAGE_SIZE // 2 - 10)
        assert list(engine.generate([prompt], GREEDY)[0].token_ids) == expected_of(engine.model, prompt)


def test_the_reason_under_a_budget_is_the_budget_or_the_length() -> None:
    graphs = GraphConfig(memory_budget=1, prefill=PhaseConfig(max_size=32))
    with Engine(make(), config_of(graphs=graphs)) as engine:
        engine.generate([[5] * 60], GREEDY)
        engine.generate([[5] * 10], GREEDY)
        assert set(engine.stats()["phases"]["prefill"]["eager"]) == {"no_rung", "over_budget"}


def test_a_closed_engine_is_not_entered() -> None:
    engine = Engine(make(), config_of())
    engine.close()
    with pytest.raises(Exception, match="this engine is closed"), engine:
        pass


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("graphs", [GraphConfig(), GraphConfig.off()], ids=["graphs", "eager"])
def test_parts_of_the_model_may_be_copies_of_themselves(graphs: GraphConfig, fuse: bool) -> None:
    model = make()
    plain = copy.deepcopy(model)
    prompts = [[(7 * i + j) % 500 + 2 for j in range(20 + 9 * i)] for i in range(3)]
    expected = [expected_of(plain, prompt) for prompt in prompts]
    with Engine(model, config_of(graphs=graphs, fuse=fuse)) as engine:

        def texts() -> list[list[int]]:
            return [list(out.token_ids) for out in engine.generate(prompts, GREEDY)]

        assert texts() == expected
        model.model.layers[1].self_attn = copy.deepcopy(model.model.layers[1].self_attn)
        assert texts() == expected
        model.model.layers[2].self_attn.config = copy.deepcopy(model.config)
        assert texts() == expected
        if not fuse:  # what is fused cannot be pickled
            model.model.layers[0] = pickle.loads(pickle.dumps(model.model.layers[0]))
            assert texts() == expected
        model.model.layers[2] = copy.deepcopy(model.model.layers[0])
        model.model.layers[2].self_attn.layer_idx = 2
        plain.model.layers[2] = copy.deepcopy(plain.model.layers[0])
        plain.model.layers[2].self_attn.layer_idx = 2
        assert texts() == [expected_of(plain, prompt) for prompt in prompts]


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_model_of_an_engine_can_be_wrapped_by_itself(family: str) -> None:
    model = make(family)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with Engine(model, config_of(fuse=True)) as engine:
            before = text(engine)
            step = segue.graph(lambda ids: model(ids, use_cache=False).logits)
            for _ in range(4):
                torch.testing.assert_close(step(ids), expected)
            assert text(engine) == before
        for _ in range(4):
            torch.testing.assert_close(step(ids), expected)
