"""Mixtures of experts: which code runs them, that graphs can hold it, and that our kernels compute the same."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from segue import config as c
from segue.graph import calling
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.bench.decode import decode_batch
from segue.llm.bench.prefill import prefill_batch
from segue.llm.kernels import reference
from segue.llm.moe import FEW_ROWS, SINGLE_ROWS, choose_experts

pytest.importorskip("transformers")
from llm_support import assert_same_text, greedy, prompt_of, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ("Qwen3Moe", "Mixtral", "Qwen2Moe", "Olmoe", "DeepseekV3", "Glm4Moe")


def engine_of(model: Any, decode: str, prefill: str, **changes: Any) -> Engine:
    graphs = c.GraphConfig(
        decode=c.PhaseConfig(backend=decode, ladder=(1, 4), max_padding=4.0),
        prefill=c.PhaseConfig(backend=prefill, ladder=(48,), max_padding=48.0),
        strict=True,
    )
    sizes = {"chunk_size": 48, "max_requests": 4, "max_context": 128} | changes
    return Engine(model, EngineConfig(device="cpu", graphs=graphs, **sizes))


@pytest.mark.parametrize("experts", ["segue", "grouped_mm", "batched_mm", "by_rows"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("decode", "prefill"), [("full", "breakable"), ("breakable", "full")])
def test_experts_in_graphs_write_the_text_of_transformers(family: str, experts: str, decode: str, prefill: str) -> None:
    oracle, prompts = tiny_model(family), [prompt_of(n) for n in (3, 21, 45)]
    with engine_of(tiny_model(family), decode, prefill, experts=experts) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
        assert engine.stats()["experts"] == experts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_text(oracle, prompt, output.token_ids, greedy(oracle, prompt, 12), f"{family} with {experts}")


BF16, FP16 = torch.bfloat16, torch.float16
CHOICES = [
    ("Qwen3Moe", BF16, (9, 0), "by_rows", "up to 64 rows, torch's grouped product beyond"),
    ("Mixtral", BF16, (10, 3), "by_rows", "up to 64 rows"),
    ("GptOss", BF16, (9, 0), "grouped_mm", "reads nothing on the host here"),
    ("Qwen3Moe", FP16, (9, 0), "segue", "reads on the host with float16 on compute capability 9.0"),
    ("Mixtral", BF16, (8, 0), "segue", "reads on the host with bfloat16 on compute capability 8.0"),
    ("GptOss", BF16, (8, 9), "batched_mm", "they have biases"),
    ("Qwen3Moe", torch.float32, None, "grouped_mm", "torch's grouped product"),
]


@pytest.mark.parametrize(("family", "dtype", "capability", "name", "why"), CHOICES)
def test_the_choice_follows_what_torch_s_grouped_product_can(
    family: str, dtype: torch.dtype, capability: tuple[int, int] | None, name: str, why: str
) -> None:
    """torch 2.11 to 2.13, `_grouped_mm_cuda`: CUTLASS for bfloat16 on capability 9 and 10, else ``offs.cpu()``."""
    model = tiny_model(family).to(dtype)
    choice = choose_experts(model, "auto", capability)
    assert choice is not None and choice.name == name == model.config._experts_implementation and why in choice.why
    assert choice.explain().startswith(f"experts: auto -> {name} (")
    assert choose_experts(tiny_model("Llama"), "auto", capability) is None


@pytest.mark.parametrize("rows", [1, SINGLE_ROWS + 1, FEW_ROWS, FEW_ROWS + 1])
def test_by_rows_takes_ours_for_few(rows: int) -> None:
    model, seen = tiny_model("Qwen3Moe"), []
    choose_experts(model, "by_rows", None)

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    x = torch.randn(1, rows, 32)
    with torch.no_grad(), Names():
        got = model.model.layers[0].mlp(x)
    assert ("segue::pairs_up" in seen) == (rows <= SINGLE_ROWS)
    assert ("segue::experts_up" in seen) == (SINGLE_ROWS < rows <= FEW_ROWS)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(got, model.model.layers[0].mlp(x))


def test_what_cannot_run_experts_is_refused() -> None:
    with pytest.raises(c.ConfigError, match="experts is 'fast'; it must be one of auto, grouped_mm"):
        engine_of(tiny_model("Mixtral"), "full", "breakable", experts="fast")
    with pytest.raises(c.ConfigError, match="experts is 'segue', which cannot run these: they have biases"):
        engine_of(tiny_model("GptOss"), "full", "breakable", experts="segue")


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_nothing_depends_on_the_routing_but_in_the_loop_over_experts(family: str) -> None:
    """On fake tensors, which hold no values: what asks for one, or makes a shape of one, raises."""
    for name in ("segue", "grouped_mm", "batched_mm", "by_rows", "eager"):
        model = tiny_model(family).to(BF16)
        choose_experts(model, "segue", None)
        model.set_experts_implementation(name)
        block = model.model.layers[0].mlp
        raises = pytest.raises(DynamicOutputShapeException) if name == "eager" else nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), raises:
            for rows in (1, 5, FEW_ROWS + 1):
                assert block(torch.empty(1, rows, 32, dtype=BF16)).shape == (1, rows, 32)


def test_pairs_without_an_expert_cost_nothing_and_spoil_nothing() -> None:
    """Rows beyond the true count hold NaN, go to no expert, and come out as zeros."""
    model = tiny_model("Qwen3Moe")
    with engine_of(model, "full", "breakable", experts="segue") as engine:
        experts = model.model.layers[0].mlp.experts
        x, scales = torch.randn(6, 32), torch.rand(6, 2)
        index = torch.tensor([[0, 3], [1, 2], [3, 1], [0, 1], [2, 2], [0, 0]])
        expected = experts(x[:3], index[:3], scales[:3])
        x[3:], scales[3:] = float("nan"), float("nan")
        host = engine.decode.prepare(engine.decode.keys()[0])
        host.batch.num_tokens.fill_(3)
        with calling(host):
            got = experts(x, index, scales)
    assert torch.equal(got[:3], expected) and not got[3:].any()


DTYPES = [torch.float32, torch.float16, *([BF16] if DEVICE == "cuda" else [])]
"""On a CPU by Triton's interpreter, which cannot multiply bfloat16."""


def make_rand(seed: int) -> Any:
    make = torch.Generator(DEVICE).manual_seed(seed)
    return lambda *size: torch.randn(*size, device=DEVICE, generator=make)


def choice_of(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return make_rand(tokens)(tokens, experts).topk(top_k).indices


SIZES = [(1, 4, 2), (5, 6, 2), (40, 3, 2), (70, 4, 2), (2, 16, 4), (9, 5, 1), (19, 128, 8), (9, 256, 8)]


@pytest.mark.kernel
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
@pytest.mark.parametrize("real", [1.0, 0.6, 0.0])
def test_pairs_are_sorted_by_expert(tokens: int, experts: int, top_k: int, real: float) -> None:
    """By hand: what is sorted by (expert, place), less what has none."""
    pytest.importorskip("triton")
    from segue.llm.kernels import triton_kernels

    index, count = choice_of(tokens, experts, top_k), int(tokens * real)
    index[::7, -1] = experts
    num_tokens = torch.tensor(count, dtype=torch.int32, device=DEVICE)
    pairs = [
        (e, t * top_k + c) for t, row in enumerate(index.tolist()) for c, e in enumerate(row) if t < count and e < experts
    ]
    order = [pair for _, pair in sorted(pairs)]
    for kernels in (reference, triton_kernels):
        sorted_tokens, places, ends = kernels.pairs_by_expert(index, experts, num_tokens)
        assert sorted_tokens[: len(order)].tolist() == [pair // top_k for pair in order]
        assert ends.tolist() == [sum(e <= expert for e, _ in pairs) for expert in range(experts)]
        assert places.flatten().tolist() == [order.index(p) if p in set(order) else -1 for p in range(tokens * top_k)]
        assert int(sorted_tokens.min()) >= 0 and int(sorted_tokens.max()) < tokens, "all may be gathered"
        whole = kernels.pairs_by_expert(index, experts, None)[2]
        assert int(whole[-1]) == int((index < experts).sum())


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
@pytest.mark.parametrize("is_softmax", [True, False])
def test_a_choice_is_the_reference_s(dtype: torch.dtype, tokens: int, experts: int, top_k: int, is_softmax: bool) -> None:
    pytest.importorskip("triton")
    from segue.llm.kernels import triton_kernels

    rand = make_rand(tokens)
    logits = (rand(tokens, 2 * experts).to(dtype))[:, ::2]
    logits += torch.arange(experts, device=DEVICE).to(dtype) / 64  # few equals
    for bias in (None, rand(experts)):
        for normalizes in (True, False):
            options = (top_k, is_softmax, normalizes, 1.5)
            weights, index = triton_kernels.route(logits, bias, *options, dtype)
            expected, _ = reference.route(logits, bias, *options, dtype)
            assert weights.dtype is expected.dtype and index.dtype is torch.int64
            assert all(len(set(row)) == top_k and min(row) >= 0 and max(row) < experts for row in index.tolist())
            scores = logits.float().softmax(-1) if is_softmax else logits.float().sigmoid()
            ranked = scores if bias is None else scores + bias
            torch.testing.assert_close(ranked.gather(1, index).sort().values, ranked.topk(top_k).values.flip(1))
            chosen = scores.gather(1, index)
            by_hand = 1.5 * (chosen / chosen.sum(-1, keepdim=True) if normalizes else chosen)
            torch.testing.assert_close(weights, by_hand.to(dtype))
            if bias is None:
                torch.testing.assert_close(weights.sort().values, expected.sort().values)


@pytest.mark.kernel
def test_a_logit_that_is_no_number_makes_weights_that_are_none() -> None:
    """Else the text of a broken model would look whole."""
    pytest.importorskip("triton")
    from segue.llm.kernels import triton_kernels

    logits = make_rand(0)(3, 5)
    logits[1, 2] = float("nan")
    logits[2, :] = float("inf")
    for is_softmax in (True, False):
        weights, index = triton_kernels.route(logits, None, 2, is_softmax, True, 1.0, torch.float32)
        assert weights[1].isnan().all() and not weights[0].isnan().any() and 0 <= int(index.min()) <= int(index.max()) < 5
        assert weights[2].isnan().all() == is_softmax


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 4, 2, 32, 16), (5, 6, 2, 40, 24), (40, 3, 2, 64, 72), (130, 4, 2, 96, 40), (2, 16, 4, 16, 16), (9, 5, 1, 130, 33)],
)
def test_the_kernels_are_near_the_reference(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, inner: int
) -> None:
    pytest.importorskip("triton")
    from segue.llm.kernels import triton_kernels as kernels

    rand = make_rand(tokens)
    x = rand(tokens, hidden).to(dtype)
    up, down = (rand(experts, 2 * inner, hidden) / 8).to(dtype), (rand(experts, hidden, inner) / 8).to(dtype)
    index = choice_of(tokens, experts, top_k)
    order, places, ends = reference.pairs_by_expert(index, experts, torch.tensor(tokens // 2 + 1, device=DEVICE))
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 6e-2, "rtol": 3e-2}
    real = int(ends[-1])
    for activation in reference.ACTIVATIONS:
        expected = reference.experts_up(x, order, ends, up, activation)
        got = kernels.experts_up(x, order, ends, up, activation)
        torch.testing.assert_close(got[:real], expected[:real], **close)
    expected[real:] = float("nan")
    rows = reference.experts_down(expected, ends, down)
    torch.testing.assert_close(kernels.experts_down(expected, ends, down)[:real], rows[:real], **close)
    rows[real:] = float("nan")
    for weights in (torch.rand(tokens, top_k, device=DEVICE).to(dtype), torch.rand(tokens, top_k, device=DEVICE)):
        got = kernels.combine(rows, places, weights)
        assert got.dtype is dtype and not got[tokens // 2 + 1 :].any()
        torch.testing.assert_close(got, reference.combine(rows, places, weights), **close)
    if tokens > 9:  # each pair by itself is for few
        return
    count = torch.tensor(tokens // 2 + 1, device=DEVICE)
    index[0, -1] = experts
    for activation in reference.ACTIVATIONS:
        has_one = (index < experts).flatten() & (torch.arange(tokens * top_k, device=DEVICE) < count * top_k)
        singles = reference.pairs_up(x, index, count, up, activation)
        got = kernels.pairs_up(x, index, count, up, activation)
        torch.testing.assert_close(got[has_one], singles[has_one], **close)
    singles[~has_one] = float("nan")
    for weights in (torch.rand(tokens, top_k, device=DEVICE).to(dtype), torch.rand(tokens, top_k, device=DEVICE)):
        got = kernels.pairs_down(singles, index, count, down, weights)
        assert got.dtype is dtype and not got[tokens // 2 + 1 :].any()
        torch.testing.assert_close(got, reference.pairs_down(singles, index, count, down, weights), **close)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["segue", "grouped_mm", "by_rows"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "Glm4Moe"])
def test_on_a_gpu_experts_replay_bit_for_bit_in_every_mode(family: str, experts: str) -> None:
    wide: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 64}
    model = tiny_model(family, **wide, initializer_range=0.05).to("cuda", BF16)
    prompts = [prompt_of(n) for n in (3, 21, 45)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    for decode, prefill in (("full", "breakable"), ("breakable", "full")):
        graphs = c.GraphConfig(decode=decode, prefill=prefill, strict=True)
        config = EngineConfig(
            device="cuda", experts=experts, graphs=graphs, max_requests=4, chunk_size=128, max_context=128, num_pages=64
        )
        with Engine(model, config) as engine, torch.inference_mode():
            prefills = [(engine.prefill, prefill_batch(*sizes)) for sizes in ((37, 3), (100, 1))]
            for runner, batch in (*prefills, (engine.decode, decode_batch(3, 9))):
                key = runner.decide(batch).key
                assert key is not None and key.tokens > batch.num_tokens
                expected = runner.run_padded_eagerly(batch, key).logits.clone()
                assert torch.isfinite(expected).all() and torch.equal(runner.execute(batch).logits, expected)
            texts = [[o.token_ids for o in engine.generate(prompts, params)] for _ in range(2)]
            assert texts[0] == texts[1]
