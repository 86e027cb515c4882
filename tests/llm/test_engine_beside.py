"""Models beside an engine's: copies of it, parts of it in other models, and what hooks in its passes call. Models that no
engine has seen are the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engine_shared import PROMPT, SIZES

import segue
from segue import GraphConfig
from segue.llm import Engine, EngineConfig, SamplingParams

transformers = pytest.importorskip("transformers")

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def config_of(family: str) -> Any:
    return getattr(transformers, f"{family}Config")(**SIZES)


def make(family: str = "Llama", config: Any = None) -> Any:
    return getattr(transformers, f"{family}ForCausalLM")(config or config_of(family)).eval()


def engine_of(model: Any, *, fuse: bool = False, graphs: GraphConfig | None = None) -> Engine:
    sizes: dict[str, Any] = {"max_requests": 2, "max_context": 128, "chunk_size": 64}
    return Engine(model, EngineConfig(device="cpu", fuse=fuse, graphs=graphs or GraphConfig(), **sizes))


def expected_of(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[0, len(PROMPT) :].tolist()


def text(engine: Engine) -> list[int]:
    return list(engine.generate([PROMPT], GREEDY)[0].token_ids)


LAYERS: dict[str, Callable[[Any], Any]] = {
    "a copy": lambda model: copy.deepcopy(model.model.layers[1]),
    "itself": lambda model: model.model.layers[1],
}


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("taken", LAYERS)
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_layer_of_an_engines_model_serves_another_one(family: str, taken: str, fuse: bool, is_closed: bool) -> None:
    model, other, plain = make(family), make(family), make(family)
    plain.load_state_dict(other.state_dict())
    plain.model.layers[1] = copy.deepcopy(model.model.layers[1])
    expected, before = expected_of(plain), expected_of(model)
    with engine_of(model, fuse=fuse) as engine:
        assert text(engine) == before
        if is_closed:
            engine.close()
        other.model.layers[1] = LAYERS[taken](model)
        assert expected_of(other) == expected
        with engine_of(other, fuse=fuse) as second:
            assert text(second) == expected
            if not is_closed:
                assert text(engine) == before and text(second) == expected
        assert expected_of(other) == expected and expected_of(model) == before


def test_a_layer_of_a_model_that_no_engine_has_seen_serves_another_one() -> None:
    model, other = make(), make()
    other.model.layers[1] = make().model.layers[1]
    expected = expected_of(other)
    with engine_of(model), engine_of(other) as engine:
        assert text(engine) == expected


def _of_another_engine(model: Any, config: Any, fuse: bool) -> Any:
    other = type(model)(copy.deepcopy(config)).eval()
    engine_of(other, fuse=fuse)
    return other


BESIDE: dict[str, Callable[[Any, Any, bool], Any]] = {
    "a copy": lambda model, config, fuse: copy.deepcopy(model),
    "another engine's": _of_another_engine,
    "one of the same configuration": lambda model, config, fuse: type(model)(config).eval(),
}


@pytest.mark.parametrize("graphs", [GraphConfig(decode="breakable"), GraphConfig.off()], ids=["graphs", "eager"])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_model_that_a_hook_calls_in_a_pass_answers_as_it_does_outside(
    family: str, beside: str, fuse: bool, graphs: GraphConfig
) -> None:
    config = config_of(family)
    model = make(family, config)
    many = torch.arange(2 * 9).view(2, 9) + 3

    @segue.eager_on_graph
    def changed(output: torch.Tensor) -> torch.Tensor:
        """By what the other model answers: to other shapes than a step's, and to as many tokens as one has."""
        with torch.no_grad():
            answers = [other(ids, use_cache=False).logits[-1, -1, :64] for ids in (many, many[:1, :1], many[:1, :3])]
        return output + 5 * torch.stack(answers).sum(0)

    expected = expected_of(model)
    with engine_of(model, fuse=fuse, graphs=graphs) as engine:
        assert text(engine) == expected
        other = BESIDE[beside](model, config, fuse)
        handle = model.model.layers[1].register_forward_hook(lambda _, args, output: changed(output))
        expected_with_hook = expected_of(model)
        assert expected_with_hook != expected
        for _ in range(3):
            assert text(engine) == expected_with_hook
        handle.remove()
        assert text(engine) == expected


@pytest.mark.parametrize("family", ["Llama", "Mixtral", "Gemma2"])
def test_a_copy_of_an_engines_model_has_weights_of_its_own(family: str) -> None:
    model, other = make(family), make(family)
    expected = expected_of(model)
    with engine_of(model, fuse=True) as engine:
        twin = copy.deepcopy(model)
        twin.load_state_dict(other.state_dict())
        assert expected_of(twin) == expected_of(other)
        with engine_of(twin, fuse=True) as second:
            assert text(second) == expected_of(other) and text(engine) == expected
        assert expected_of(model) == expected and expected_of(twin) == expected_of(other)


def test_a_configuration_that_others_hold_stays_as_it_is() -> None:
    config = config_of("Llama")
    model, other = make(config=config), make(config=config)
    before = copy.deepcopy(config)
    with engine_of(model) as engine, engine_of(model) as second:
        assert config == before and type(config) is type(before) and other.config is config
        assert model.config is model.model.config is model.model.layers[0].self_attn.config
        assert text(engine) == text(second) == expected_of(model)
