"""On a GPU: pieces that inductor makes replay bit for bit as their program runs, and an engine of them writes sound text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import segue
from segue.backends import make_backend
from segue.backends.piecewise import PiecewiseBackend
from segue.config import GraphConfig, PhaseConfig
from segue.device import get_device
from segue.errors import CaptureError
from segue.inputs import mark_varying
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.batch import RequestRows, build_batch
from segue.memory.lane import Lane
from segue.shapes.key import ShapeKey
from tests_support import churn, record, replay

pytestmark = pytest.mark.gpu

HIDDEN, HEADS = 256, 4


@segue.eager_on_graph
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = [x.view(x.shape[0], HEADS, -1).transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    return out[0].transpose(0, 1).reshape(q.shape)


class Model(torch.nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        make = torch.nn.Linear
        self.qkv = torch.nn.ModuleList([make(HIDDEN, 3 * HIDDEN, bias=False) for _ in range(num_layers)])
        self.out = torch.nn.ModuleList([make(HIDDEN, HIDDEN, bias=False) for _ in range(num_layers)])
        self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(HIDDEN) for _ in range(num_layers)])
        self.to("cuda", torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, out, norm in zip(self.qkv, self.out, self.norms, strict=True):
            q, k, v = qkv(norm(x)).chunk(3, dim=-1)
            x = x + torch.nn.functional.silu(out(attend(q, k, v)))
        return x


def bound(function: Callable[..., Any], x: torch.Tensor) -> Callable[[], Any]:
    return lambda: function(x)


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_pieces_replay_bit_for_bit_as_their_program_runs(compiler: str) -> None:
    torch.manual_seed(0)
    lane, model = Lane(get_device("cuda")), Model()
    backend = PiecewiseBackend(lane, compiler)
    sizes = [512, 96, 33, 8, 1]
    inputs = {n: torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16) for n in sizes}
    recorded, largest = {}, None
    with torch.inference_mode(), lane.exclusive():
        for n, x in inputs.items():
            mark_varying(x, 0)
            _, trace = backend.trace(bound(model, x), largest)
            largest = largest or trace
            recorded[n] = backend.record(ShapeKey("call", n), bound(model, x), trace)
    assert backend.build.programs == 2  # sizes of one are compiled on their own
    assert all(r.record.segments == 5 and r.record.breaks == 4 for r in recorded.values())
    for n in [*sizes, *reversed(sizes)]:
        inputs[n].normal_()
        churn(lane.device)
        with torch.inference_mode():
            expected, _ = backend.trace(bound(model, inputs[n]))
            expected = expected.clone()
            got = replay(lane, recorded[n])
            eager = model(inputs[n])
        assert torch.equal(got, expected)
        torch.testing.assert_close(got, eager, rtol=5e-2, atol=5e-2)
    for graph in recorded.values():
        graph.close()
    lane.close()


def test_recordings_of_pieces_share_the_pool_as_breakable_ones_do() -> None:
    """Bytes: what crosses breaks is an alias of the pool, for compiled pieces as for recorded operations."""
    model = Model(num_layers=8)
    reserved = {}
    for name in ("breakable", "tc_piecewise"):
        lane = Lane(get_device("cuda"))
        backend = make_backend(name, lane, compiler="inductor")
        largest = None
        kept = []
        with torch.inference_mode(), lane.exclusive():
            for n in (4096, 2048, 1024):
                x = torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16)
                mark_varying(x, 0)
                _, trace = backend.trace(bound(model, x), largest)
                largest = largest or trace
                kept.append(backend.record(ShapeKey("call", n), bound(model, x), trace))
        reserved[name] = lane.reserved_bytes
        for graph in kept:
            graph.close()
        lane.close()
    assert reserved["tc_piecewise"] <= 1.5 * reserved["breakable"]


def test_a_branch_on_data_of_the_host_runs_under_breakable_and_is_refused_here() -> None:
    flags = torch.tensor([0, 1])  # on the host: a capture does not mind
    x = torch.randn(8, HIDDEN, device="cuda")

    def forward() -> torch.Tensor:
        y = attend(x * 2, x, x)
        if flags.sum() > 0:
            y = y + 1
        return y

    lane = Lane(get_device("cuda"))
    with torch.no_grad():
        assert torch.equal(replay(lane, record(lane, forward, "breakable")), forward())
        with pytest.raises(CaptureError, match=r"test_piecewise_gpu.py:\d+ in forward \(if flags"):
            record(lane, forward, "tc_piecewise")
        assert torch.equal(replay(lane, record(lane, lambda: x * 2 + 1)), x * 2 + 1)
    lane.close()


@pytest.mark.parametrize("fuse", [False, True])
def test_an_engine_of_compiled_pieces_agrees_with_its_eager_pass(fuse: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=1024, initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    graphs = GraphConfig(
        prefill=PhaseConfig(backend="tc_piecewise", ladder=(16, 64, 256), max_padding=64.0),
        decode=PhaseConfig(backend="tc_piecewise", ladder=(1, 2, 4)),
    )
    settings: dict[str, Any] = {"chunk_size": 256, "max_requests": 4, "max_context": 512, "num_pages": 256, "fuse": fuse}
    with Engine(model, EngineConfig(device="cuda", graphs=graphs, **settings)) as engine:
        assert "tc_piecewise (inductor)" in engine.resolved.explain()
        for tokens in (10, 64, 200):
            batch = build_batch([RequestRows(list(range(1, tokens + 1)), 0, tuple(range(2, 2 + -(-tokens // 16))))])
            with torch.inference_mode():
                decision = engine.prefill.decide(batch)
                assert decision.key is not None and decision.backend == "tc_piecewise"
                expected = engine.prefill.run_padded_eagerly(batch, decision.key).logits.float().clone()
                got = engine.prefill.execute(batch).logits.float().clone()
                again = engine.prefill.execute(batch).logits.float()
            assert torch.equal(got, again)
            assert (got - expected).abs().max() <= 0.05 * expected.abs().max()
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        outputs = engine.generate([[5, 6, 7], list(range(40))], params)
        assert [len(output.token_ids) for output in outputs] == [16, 16]
        assert all(phase["eager"] == {} for phase in engine.stats()["phases"].values())
