"""Fusion: fused models write transformers' text, and what is not the same is not fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from segue import config as c
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.attention import register
from segue.llm.fuse import FusionReport, explain_fusion, fuse
from segue.llm.kernels import reference
from segue.llm.load import LoadedModel, load_model

pytest.importorskip("transformers")
from llm_support import assert_same_text, greedy, prompt_of, tiny_model

MIXTURES = ("Mixtral", "Qwen3Moe", "Glm4Moe")
WHOLE = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", *MIXTURES)
"""families whose layers are fused whole"""
NUM_TOKENS = 12


def loaded(family: str = "Llama", **changes: Any) -> LoadedModel:
    register()
    return load_model(tiny_model(family, **changes), device="cpu")


def fused(model: LoadedModel) -> FusionReport:
    return fuse(model.model, model.facts, 128)


def engine_of(model: Any, decode: str, prefill: str, **changes: Any) -> Engine:
    graphs = c.GraphConfig(
        decode=c.PhaseConfig(backend=decode, ladder=(1, 3), max_padding=3.0),
        prefill=c.PhaseConfig(backend=prefill, ladder=(32,), max_padding=32.0),
    )
    sizes = {"chunk_size": 32, "max_requests": 3, "max_context": 128} | changes
    return Engine(model, EngineConfig(device="cpu", graphs=graphs, **sizes))


@pytest.mark.parametrize("family", WHOLE)
def test_every_part_of_these_families_is_fused(family: str) -> None:
    report = fused(loaded(family))
    assert report.left == {}
    mlps = 2 if family not in MIXTURES or family == "Glm4Moe" else 0  # Glm4Moe's are a dense one, and one for all tokens
    routers = 1 if family == "Glm4Moe" else 2 if family in MIXTURES else 0
    assert report.fused["layer"] == report.fused["attention"] == 2 and report.fused["rotary"] == 1
    assert (report.fused["mlp"], report.fused["router"]) == (mlps, routers)


@pytest.mark.parametrize("family", [*WHOLE, "DeepseekV3", "Qwen2Moe", "Gemma2", "GptOss", "Granite", "Olmo2", "Starcoder2"])
@pytest.mark.parametrize(("decode", "prefill"), [("full", "breakable"), ("breakable", "full"), ("disabled", "disabled")])
def test_a_fused_model_writes_the_text_of_transformers(family: str, decode: str, prefill: str) -> None:
    oracle = tiny_model(family)
    prompts = [prompt_of(n) for n in (3, 21, 45)]
    with engine_of(tiny_model(family), decode, prefill, fuse=True) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
        assert engine.fusion is not None and engine.fusion.fused
        assert not any(reason != "disabled" for p in engine.stats()["phases"].values() for reason in p["eager"])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_text(oracle, prompt, output.token_ids, greedy(oracle, prompt, NUM_TOKENS), f"{family} fused")


def test_a_fused_model_may_be_taken_again_fused_or_not() -> None:
    model, oracle, prompt = tiny_model("Qwen3"), tiny_model("Qwen3"), prompt_of(13)
    expected = greedy(oracle, prompt, NUM_TOKENS)
    for is_fused in (True, True, False, True):
        with engine_of(model, "full", "breakable", fuse=is_fused) as engine:
            (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
            assert (engine.fusion is not None) is (engine.stats()["fusion"] is not None) is is_fused
            assert engine.fusion is None or engine.fusion.fused["layer"] == 2
            assert is_fused == ("forward" in vars(model.model.layers[0]))
        assert_same_text(oracle, prompt, output.token_ids, expected, f"fused {is_fused}")


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mixtral"])
def test_a_fused_model_answers_as_itself_outside_an_engine(family: str) -> None:
    model, oracle = loaded(family), tiny_model(family)
    fused(model)
    prompt = prompt_of(9)
    assert greedy(model.model, prompt, NUM_TOKENS) == greedy(oracle, prompt, NUM_TOKENS)


def test_a_layer_that_scales_its_residual_is_not_fused_whole() -> None:
    report = fused(loaded("Granite", residual_multiplier=0.22))
    assert report.fused["layer"] == 0 and report.fused["attention"] == report.fused["mlp"] == 2
    why = "GraniteDecoderLayer: it computes something else"
    assert report.left["layer", why] == 2
    assert explain_fusion(report) == (
        "fusion: 5 norm, 2 mlp, 2 attention, 1 rotary; 2 parts as they were (why: segue doctor --model)"
    )
    assert report.to_dict()["left"] == [{"kind": "layer", "reason": why, "count": 2}]
    assert explain_fusion(None).startswith("fusion: off")


@pytest.mark.parametrize("part", ["input_layernorm", "self_attn", "mlp", "self_attn.q_proj", "mlp.up_proj"])
def test_what_has_hooks_still_calls_them(part: str) -> None:
    """An mlp is called as a module in a fused layer; a layer whose attention has hooks is not fused."""
    model = tiny_model()
    calls = []
    model.model.layers[0].get_submodule(part).register_forward_hook(lambda *_: calls.append(part))
    with engine_of(model, "disabled", "disabled", fuse=True) as engine:
        calls.clear()
        engine.generate([prompt_of(5)], SamplingParams(temperature=0.0, max_tokens=2))
        assert engine.fusion is not None and engine.fusion.fused["layer"] == (2 if "mlp" in part else 1)
    assert len(calls) == 2


@pytest.mark.parametrize("what", ["groups", "scale", "scores"])
def test_a_router_that_chooses_in_another_way_is_left_alone(what: str) -> None:
    """One that limits the choice to some groups of experts, scales otherwise than its attribute says, or squares scores."""
    changes: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2} if what == "groups" else {}
    model = loaded("Glm4Moe", **changes)
    router = model.model.model.layers[1].mlp.gate
    if what != "groups":

        class OtherRouter(type(router)):  # type: ignore[misc]
            def forward(self, hidden: torch.Tensor) -> Any:
                logits, weights, index = super().forward(hidden)
                return logits, weights * 2.5 if what == "scale" else weights.square(), index

        router.__class__ = OtherRouter
    report = fused(model)
    assert report.fused["router"] == 0 and report.fused["layer"] == 2
    name = type(router).__name__
    assert report.left == {("router", f"{name}: it computes something else"): 1}


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj"])
def test_a_linear_layer_of_another_kind_is_left_alone(name: str) -> None:
    def changed() -> Any:
        model = tiny_model()
        parent, _, attribute = name.rpartition(".")
        old = model.model.layers[1].get_submodule(name)
        new = Doubling(old.in_features, old.out_features, bias=False)
        new.load_state_dict(old.state_dict())
        setattr(model.model.layers[1].get_submodule(parent), attribute, new)
        return model.eval()

    prompt = prompt_of(7)
    with engine_of(changed(), "full", "breakable", fuse=True) as engine:
        (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
        assert engine.fusion is not None and engine.fusion.fused["layer"] == (2 if "mlp" in name else 1)
    oracle = changed()
    assert_same_text(oracle, prompt, output.token_ids, greedy(oracle, prompt, NUM_TOKENS), name)


def test_a_weight_loaded_in_place_reaches_the_fused_model_and_its_recordings() -> None:
    model, other = tiny_model(), tiny_model(initializer_range=0.2)
    prompt = prompt_of(11)
    with engine_of(model, "full", "breakable", fuse=True) as engine:
        engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2))
        model.load_state_dict(other.state_dict())
        (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    assert_same_text(other, prompt, output.token_ids, greedy(other, prompt, NUM_TOKENS), "after the load")


def test_merged_weights_take_no_further_memory() -> None:
    model = loaded("Qwen2")
    before = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.model.parameters()}
    fused(model)
    after = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.model.parameters()}
    assert sum(after.values()) == sum(before.values()) and len(after) < len(before)


def test_engines_share_the_merged_weights_of_one_model() -> None:
    model, oracle, prompt = tiny_model("Qwen2"), tiny_model("Qwen2"), prompt_of(13)
    expected = greedy(oracle, prompt, NUM_TOKENS)
    with engine_of(model, "full", "breakable", fuse=True) as first:
        places = [p.data_ptr() for p in model.parameters()]
        with engine_of(model, "breakable", "full", fuse=True) as second:
            assert [p.data_ptr() for p in model.parameters()] == places
            for engine in (first, second, first):
                (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
                assert_same_text(oracle, prompt, output.token_ids, expected, "shared")
            captures = first.stats()["phases"]["decode"]["captures"]
        assert captures == 2  # nothing was captured again


# -- the operations -----------------------------------------------------------------------------------------------------


def test_rms_norm_is_the_formula() -> None:
    x, w = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    rms = 12.5**0.5
    torch.testing.assert_close(reference.rms_norm(x, w, 0.0, False), torch.tensor([[3 / rms, 8 / rms]]))
    torch.testing.assert_close(reference.rms_norm(x, w, 0.0, True), torch.tensor([[6 / rms, 12 / rms]]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 257])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (4, 4, 40), (64, 8, 64)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_the_kernels_are_near_the_reference(
    dtype: torch.dtype, rows: int, heads: int, kv_heads: int, dim: int, has_norm: bool
) -> None:
    make = torch.Generator("cuda").manual_seed(rows * dim)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=dtype, device="cuda", generator=make)

    close = {"atol": 3e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 4e-2, "rtol": 2e-2}
    x, w = rand(rows, heads * dim), rand(heads * dim)
    for adds_one in (False, True):
        got = torch.ops.segue.rms_norm(x, w, 1e-6, adds_one)
        torch.testing.assert_close(got, reference.rms_norm(x, w, 1e-6, adds_one), **close)
    for activation in reference.ACTIVATIONS:
        both = rand(rows, 2 * (heads * dim + 8))
        torch.testing.assert_close(torch.ops.segue.gated(both, activation), reference.gated(both, activation), **close)
    bias = rand(heads * dim + 8)
    weight, both_weights = rand(heads * dim + 8, heads * dim) / 16, rand(2 * (heads * dim + 8), heads * dim) / 16
    norm = (x, w, 1e-6, has_norm)
    close_sum = {"atol": 1e-3, "rtol": 1e-3} if dtype is torch.float32 else {"atol": 0.3, "rtol": 5e-2}
    for b in (None, bias):
        expected = reference.norm_linear(*norm, weight, b)
        torch.testing.assert_close(torch.ops.segue.norm_linear(*norm, weight, b), expected, **close_sum)
        both_bias = None if b is None else torch.cat((b, b))
        expected = reference.norm_linear_gated(*norm, both_weights, both_bias, "silu")
        got = torch.ops.segue.norm_linear_gated(*norm, both_weights, both_bias, "silu")
        torch.testing.assert_close(got, expected, atol=3 * close_sum["atol"], rtol=close_sum["rtol"])
        hidden = rand(rows, heads * dim + 8)
        expected = hidden.clone()
        reference.linear_add(expected, x, weight, b)
        torch.ops.segue.linear_add(hidden, x, weight, b)
        torch.testing.assert_close(hidden, expected, **close_sum)
    logits = rand(rows, 50_257)
    logits[-1, 7] = float("nan")
    logits[0, 33] = logits[0, 40_000] = 50.0  # equals: the first
    got = torch.ops.segue.greedy(logits)
    is_finite = torch.ones(rows, dtype=torch.int64, device="cuda")
    is_finite[-1] = 0
    assert torch.equal(got[1], is_finite) and torch.equal(got[0, :-1], logits[:-1].argmax(dim=-1))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there by Triton's interpreter


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "turned"),
    [(1, 9, 3, 64, 64), (7, 4, 4, 40, 40), (5, 16, 2, 128, 64), (3, 6, 2, 40, 24)],
)
@pytest.mark.parametrize("norm", [None, False, True])
def test_rotating_is_near_the_reference(
    dtype: torch.dtype, rows: int, heads: int, kv_heads: int, dim: int, turned: int, norm: bool | None
) -> None:
    pytest.importorskip("triton")
    from segue.llm.kernels import triton_kernels

    make = torch.Generator(DEVICE).manual_seed(rows * dim)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.float32, device=DEVICE, generator=make).to(dtype)

    table = rand(rows, 2 * turned)
    qkv, cos, sin = rand(rows, (heads + 2 * kv_heads) * dim), table[:, :turned], table[:, turned:]
    weights = (None, None) if norm is None else (rand(dim), rand(dim))
    slots = torch.randperm(40, device=DEVICE, generator=make)[:rows].int()
    caches = [[torch.zeros(40, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2)] for _ in range(2)]
    got, expected = torch.empty(2, rows, heads, dim, dtype=dtype, device=DEVICE)
    triton_kernels.rotate_into(qkv, cos, sin, *weights, 1e-6, bool(norm), slots, got, *caches[0])
    reference.rotate_into(qkv, cos, sin, *weights, 1e-6, bool(norm), slots, expected, *caches[1])
    close = {"atol": 3e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 4e-2, "rtol": 2e-2}
    torch.testing.assert_close(got, expected, **close)
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.kernel
def test_a_remembered_launch_is_of_the_same_binary() -> None:
    """Sizes of 1, of 16 and of neither, and addresses off the alignment, each compiled for apart, in turn and again."""
    pytest.importorskip("triton")
    from segue.llm.kernels import triton_kernels

    x = torch.randn(48, 67, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    for _ in range(2):
        for rows in (1, 16, 7):
            for part in (x[:rows, :64], x[:rows, 1:65], x[:rows, :33], x[:rows, 3:4]):
                weight = x[40, : part.shape[1]]
                got = triton_kernels.rms_norm(part, weight, 1e-6, False)
                torch.testing.assert_close(got, reference.rms_norm(part, weight, 1e-6, False))
