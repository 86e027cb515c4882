"""Every attention against softmax attention by its definition: live and static plans, any lengths, pages and padding.

On a CPU the Triton kernels run on Triton's interpreter, so their cases are small. On CUDA (marker gpu) the same tests run
compiled, and a captured graph is replayed over other batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attention_support import Form, Request, Scene
from segue.config import GraphSupport
from segue.errors import ConfigError
from segue.llm.attention import ATTENTIONS, Attention, AttentionChoice, choose_attention
from segue.llm.kernels.launch import Launches
from segue.shapes.key import ShapeKey

NAMES = [name for name in ATTENTIONS if name != "auto"]
ARMS = [("cpu", name) for name in ("torch_sdpa", "triton")] + [
    pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in NAMES
]
FORMS = {
    "grouped": Form(),
    "one head each": Form(heads=2, kv_heads=2),
    "three": Form(heads=9, kv_heads=3, dim=16, value_dim=16),
    "eight": Form(heads=8, kv_heads=1),
    "smaller values": Form(value_dim=6, dim=12),
    "window": Form(window=21),
    "window of one": Form(window=1),
    "cap": Form(softcap=1.5),
    "sinks": Form(has_sinks=True),
    "all": Form(heads=6, kv_heads=2, window=37, softcap=2.0, has_sinks=True),
}
CUDA_FORMS = {
    "llama": Form(heads=32, kv_heads=8, dim=128, value_dim=128, dtype=torch.bfloat16),
    "smollm2": Form(heads=9, kv_heads=3, dim=64, value_dim=64, dtype=torch.bfloat16),
    "half": Form(heads=8, kv_heads=8, dim=96, value_dim=96, dtype=torch.float16),
    "gemma": Form(heads=8, kv_heads=4, dim=256, value_dim=256, window=40, softcap=50.0, dtype=torch.bfloat16),
    "gpt-oss": Form(heads=64, kv_heads=8, dim=64, value_dim=64, window=128, has_sinks=True, dtype=torch.bfloat16),
    "single": Form(heads=16, kv_heads=4, dim=128, value_dim=128),
}
DECODE = ShapeKey("decode", tokens=4, requests=4, uniform=True, context=512)
EXTEND = ShapeKey("prefill", tokens=40, requests=4, context=512)
MANY_SLOTS = ShapeKey("prefill", tokens=40, requests=300, context=512)


@pytest.fixture(params=ARMS, ids=lambda arm: "-".join(arm))
def arm(request: pytest.FixtureRequest) -> tuple[str, str]:
    device, name = request.param
    if name == "triton":
        pytest.importorskip("triton")
    return device, name


def attention_of(scene: Scene, name: str) -> Attention:
    """Skips where it cannot serve the scene's model on this machine."""
    try:
        return choose_attention(name, scene.form.needs, torch.device(scene.device)).make(scene.cache)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_decode_is_softmax_attention(arm: tuple[str, str], form: Form) -> None:
    device, name = arm
    scene = Scene(form, device)
    attention = attention_of(scene, name)
    step = scene.step([Request(1, 0), Request(1, 15), Request(1, 150)])
    scene.check(scene.run(attention.plan_live(step.batch), step), step)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_extend_is_softmax_attention(arm: tuple[str, str], form: Form) -> None:
    device, name = arm
    scene = Scene(form, device)
    attention = attention_of(scene, name)
    step = scene.step([Request(3, 0), Request(1, 16), Request(20, 70)])
    scene.check(scene.run(attention.plan_live(step.batch), step), step)


def test_a_model_may_have_written_k_and_v_itself(arm: tuple[str, str]) -> None:
    device, name = arm
    scene = Scene(FORMS["all"], device)
    attention = attention_of(scene, name)
    for requests in ([(1, 0), (1, 63), (1, 64), (1, 150)], [(3, 0), (20, 70)]):
        step = scene.step([Request(*r) for r in requests])
        scene.cache.write(0, step.batch.slot_mapping, step.k, step.v)
        out = attention.plan_live(step.batch).run(step.q, None, None, scene.spec, scene.sinks)
        scene.check(out, step)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", CUDA_FORMS.values(), ids=CUDA_FORMS)
def test_real_head_sizes(name: str, form: Form) -> None:
    scene = Scene(form, "cuda", num_pages=600)
    attention = attention_of(scene, name)
    for requests in (
        [(1, 0), (1, 15), (1, 4000)],
        [(1, n) for n in range(0, 300, 17)],
        [(3, 0), (1, 16), (300, 700), (130, 1)],
    ):
        step = scene.step([Request(*r) for r in requests])
        scene.check(scene.run(attention.plan_live(step.batch), step), step)


def decode_steps() -> list[list[Request]]:
    return [
        [Request(1, 3), Request(1, 0), Request(1, 200), Request(1, 64)],
        [Request(1, 300)],
        [Request(1, 63), Request(1, 127)],
        [Request(1, 3), Request(1, 0), Request(1, 31)],
    ]


def extend_steps() -> list[list[Request]]:
    return [
        [Request(40, 0)],
        [Request(5, 60), Request(1, 130)],
        [Request(1, 0), Request(2, 0), Request(3, 17), Request(34, 5)],
        [Request(1, 77)],
        [Request(8, 16), Request(31, 1)],
    ]


@pytest.mark.parametrize("key", [DECODE, EXTEND], ids=["decode", "extend"])
@pytest.mark.parametrize("form", [FORMS["grouped"], FORMS["all"]], ids=["grouped", "all"])
@pytest.mark.parametrize("kind", ["static_plan", "break_plan"])
def test_one_plan_serves_other_lengths_pages_and_counts(arm: tuple[str, str], kind: str, key: ShapeKey, form: Form) -> None:
    """All of `GraphSupport.ALWAYS`: an attention that declares less is asked for decodes alone."""
    device, name = arm
    scene = Scene(form, device)
    attention = attention_of(scene, name)
    if key is EXTEND and attention.support is not GraphSupport.ALWAYS:
        pytest.skip(f"{name} declares {attention.support.name}")
    plan = getattr(attention, kind)(key)
    if plan is None:
        assert kind == "break_plan" and name != "triton"
        return
    for requests in decode_steps() if key is DECODE else extend_steps():
        step = scene.step(requests, key.tokens, key.requests)
        plan.update(step.batch)
        out = scene.run(plan, step)
        scene.check(out, step)
        assert torch.equal(scene.run(plan, step), out), "a second run has other bits"


def test_lengths_on_both_sides_of_every_split(arm: tuple[str, str]) -> None:
    device, name = arm
    scene = Scene(Form(heads=2, kv_heads=1), device)
    attention = attention_of(scene, name)
    plan = attention.static_plan(ShapeKey("decode", tokens=1, requests=1, uniform=True, context=1536))
    edges = (64, 128, 192) if device == "cpu" else range(16, 1500, 16)
    for length in sorted({1, 2, 1100, *(edge + shift for edge in edges for shift in (0, 1, 2))}):
        step = scene.step([Request(1, length - 1)])
        plan.update(step.batch)
        scene.check(scene.run(plan, step), step)


def test_live_and_static_plans_agree_bit_for_bit_where_nothing_bounds_the_context(arm: tuple[str, str]) -> None:
    device, name = arm
    scene = Scene(FORMS["all"], device)
    attention = attention_of(scene, name)
    if attention.bounds_context:
        pytest.skip(f"the static plans of {name} read another number of rows than its live ones")
    for key, steps in ((DECODE, decode_steps()), (EXTEND, extend_steps())):
        plans = [plan for plan in (attention.static_plan(key), attention.break_plan(key)) if plan is not None]
        for requests in steps[:2]:
            step = scene.step(requests, key.tokens, key.requests)
            expected = scene.run(attention.plan_live(step.batch, key), step)
            for plan in plans:
                plan.update(step.batch)
                assert torch.equal(scene.run(plan, step), expected)


def test_any_strides(arm: tuple[str, str]) -> None:
    """Heads before tokens, as transformers has them, and slices of one fused projection."""
    device, name = arm
    scene = Scene(FORMS["grouped"], device)
    attention = attention_of(scene, name)
    for requests in ([(1, 9), (1, 40)], [(7, 9), (2, 0)]):
        step = scene.step([Request(*r) for r in requests])
        transposed = step._replace(q=step.q.transpose(0, 1).contiguous().transpose(0, 1))
        fused = torch.cat([step.q.flatten(1), step.k.flatten(1), step.v.flatten(1)], dim=1)
        q, k, v = fused.split([t[0].numel() for t in (step.q, step.k, step.v)], dim=1)
        sliced = step._replace(q=q.unflatten(1, (4, 8)), k=k.unflatten(1, (2, 8)), v=v.unflatten(1, (2, 8)))
        backwards = step._replace(q=step.q.transpose(1, 2).contiguous().transpose(1, 2))
        for variant in (transposed, sliced, backwards):
            scene.check(scene.run(attention.plan_live(step.batch), variant), step)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [CUDA_FORMS["llama"], CUDA_FORMS["gpt-oss"]], ids=["llama", "gpt-oss"])
@pytest.mark.parametrize("key", [DECODE, EXTEND], ids=["decode", "extend"])
def test_a_captured_graph_replays_over_other_batches(name: str, form: Form, key: ShapeKey) -> None:
    """Bit for bit what the plan computes eagerly on the same padded batch, and right by the definition."""
    scene = Scene(form, "cuda")
    attention = attention_of(scene, name)
    steps = decode_steps() if key is DECODE else extend_steps()
    plan = attention.static_plan(key)
    first = scene.step(steps[0], key.tokens, key.requests)
    static = first._replace(q=first.q.clone(), k=first.k.clone(), v=first.v.clone())
    plan.update(first.batch)
    scene.run(plan, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scene.run(plan, static)
    for requests in (*steps[1:], *steps):
        step = scene.step(requests, key.tokens, key.requests)
        before = [t.clone() for t in (scene.cache.keys[0], scene.cache.values[0])]
        plan.update(step.batch)
        eager = scene.run(plan, step).clone()
        for tensor, old in zip((scene.cache.keys[0], scene.cache.values[0]), before, strict=True):
            tensor.copy_(old)
        junk = [torch.full((n,), float("nan"), device="cuda") for n in (64, 4096, 1 << 20)]
        del junk
        for mine, new in zip(static[1:4], step[1:4], strict=True):
            mine.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        scene.check(out, step)
        assert torch.equal(out, eager)


@pytest.mark.parametrize("form", [FORMS["grouped"], FORMS["all"]], ids=["grouped", "all"])
@pytest.mark.parametrize("writes", [True, False], ids=["k and v given", "k and v in the cache"])
@pytest.mark.parametrize("kind", ["static_plan", "break_plan"])
@pytest.mark.parametrize("key", [EXTEND, pytest.param(MANY_SLOTS, marks=pytest.mark.gpu)], ids=["4 slots", "300 slots"])
def test_a_prepared_run_serves_other_batches_as_a_run_does(
    arm: tuple[str, str], key: ShapeKey, kind: str, form: Form, writes: bool
) -> None:
    """As the replays of a break do it: always the same tensors, a new batch in them."""
    device, name = arm
    scene = Scene(form, device)
    attention = attention_of(scene, name)
    if attention.support is not GraphSupport.ALWAYS:
        pytest.skip(f"{name} declares {attention.support.name}")
    plan = getattr(attention, kind)(key)
    if plan is None:
        assert kind == "break_plan" and name != "triton"
        return
    first = scene.step(extend_steps()[0], key.tokens, key.requests)
    q, k, v = held = first.q.clone(), first.k.clone(), first.v.clone()
    out = q.new_empty(*q.shape[:2], form.value_dim)
    new = (k, v) if writes else (None, None)
    prepared = None
    for requests in extend_steps() * 2:
        step = scene.step(requests, key.tokens, key.requests)
        for tensor, live in zip((*held, out), (step.q, step.k, step.v, torch.full_like(out, float("nan"))), strict=True):
            tensor.copy_(live)
        plan.update(step.batch)
        if not writes:
            scene.cache.write(0, step.batch.slot_mapping, k, v)
        if prepared is None:
            found = plan.run(q, *new, scene.spec, scene.sinks, out)
            launches = plan.prepared(q, *new, scene.spec, scene.sinks, out)
            prepared = None if launches is None else Launches(launches, 0)
        else:
            prepared()
            found = out
        scene.check(found, step)
        assert torch.equal(found, plan.run(q, *new, scene.spec, scene.sinks))
        if not attention.bounds_context:  # then a live plan reads another number of rows
            assert torch.equal(found, attention.plan_live(step.batch, key).run(q, *new, scene.spec, scene.sinks))
    assert (prepared is not None) == (arm == ("cuda", "triton"))


# -- the choice --------------------------------------------------------------------------------------------------------


def test_auto_takes_the_reference_on_a_cpu_and_says_why() -> None:
    choice = choose_attention("auto", Form().needs, torch.device("cpu"))
    assert choice.name == "torch_sdpa"
    assert choice.explain() == "attention: auto -> torch_sdpa (triton's kernels are for CUDA, and this is a cpu)"


@pytest.mark.gpu
def test_auto_takes_triton_on_cuda() -> None:
    cuda = torch.device("cuda")
    assert choose_attention("auto", Form().needs, cuda).name == "triton"
    choice = choose_attention("auto", Form(dim=512).needs, cuda)
    assert choice.name == "torch_sdpa" and "512" in choice.explain()


def test_what_cannot_serve_the_model_is_refused_with_the_reason() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match=r"'flash'; it must be one of auto, torch_sdpa"):
        choose_attention("flash", Form().needs, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"'triton', which cannot run here: .*float64; choose another"):
        choose_attention("triton", Form(dtype=torch.float64).needs, torch.device("cpu"))
    with pytest.raises(ConfigError, match="512"):
        choose_attention("triton", Form(value_dim=512).needs, torch.device("cpu"))
    assert choose_attention("torch_sdpa", Form().needs, torch.device("cpu")) == AttentionChoice(
        "torch_sdpa", "torch_sdpa", "as asked"
    )


@pytest.mark.parametrize(("name", "extra"), [("flashinfer", "flashinfer"), ("fa4", "fa4")])
def test_an_absent_library_is_named_with_what_installs_it(name: str, extra: str) -> None:
    """Where it is installed, it asks for a GPU instead."""
    with pytest.raises(ConfigError, match=rf"segue\[{extra}\]|it needs a CUDA device") as raised:
        choose_attention(name, CUDA_FORMS["llama"].needs, torch.device("cpu"))
    assert "\n" not in str(raised.value)


def test_flashinfer_gets_the_pages_that_hold_each_length() -> None:
    from segue.llm.attention.flashinfer import _Pages
    from segue.llm.batch import RequestRows, build_batch, pad_host

    lengths = (1, 15, 16, 17, 40)
    rows = [RequestRows([0], length - 1, list(range(10 * i + 2, 10 * i + 5))) for i, length in enumerate(lengths)]
    pages = _Pages.of(pad_host(build_batch(rows), 8, 8, 6))
    assert all(tensor.dtype == torch.int32 for tensor in pages)
    found = [pages.pages[a:b].tolist() for a, b in zip(pages.page_start, pages.page_start[1:], strict=False)]
    assert found == [[2], [12], [22], [32, 33], [42, 43, 44], [0], [0], [0]]
    assert [16 * (len(p) - 1) + n for p, n in zip(found, pages.last_page_len.tolist(), strict=True)] == [*lengths, 1, 1, 1]
    assert pages.query_start.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    pytest.importorskip("transformers")
    from llm_support import tiny_model

    yield tiny_model("GptOss")


@pytest.mark.parametrize(("decode", "prefill"), [("full", "breakable"), ("breakable", "full")])
def test_an_engine_writes_the_same_text_with_triton(model: Any, decode: str, prefill: str) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU; tests/gpu runs engines there")
    from segue.config import GraphConfig
    from segue.llm import Engine, EngineConfig, SamplingParams

    texts = {}
    for name in ("torch_sdpa", "triton"):
        graphs = GraphConfig(decode=decode, prefill=prefill)
        config = EngineConfig(
            device="cpu", attention=name, graphs=graphs, max_requests=2, max_context=64, chunk_size=16, num_pages=20
        )
        with Engine(model, config) as engine:
            outputs = engine.generate([[1, 2, 3], list(range(20))], SamplingParams(max_tokens=3, temperature=0.0))
            texts[name] = [output.token_ids for output in outputs]
            assert engine.stats()["attention"] == name
            for phase in engine.stats()["phases"].values():
                assert phase["eager"] == {}
    assert texts["triton"] == texts["torch_sdpa"]
