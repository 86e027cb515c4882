"""Priming: it changes no result, keeps the stream's order, and is there where it is worth it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import segue
from segue.backends import make_backend
from segue.backends.base import GraphReplay
from segue.device import get_device
from segue.device.driver import PRIME_FROM, primer
from segue.llm.attention import LayerSpec, Needs, choose_attention
from segue.llm.batch import RequestRows, build_batch, to_device
from segue.llm.kernels.launch import Launches
from segue.llm.kv_cache import PagedKVCache
from segue.llm.pages import NUM_RESERVED_PAGES, pages_for
from segue.memory.lane import Lane
from segue.shapes.key import ShapeKey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs capability 9.0"
    ),
]


def chain(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = x * 1.5 - x.sin()
    return x


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_primed_calls_are_eagers_behind_whatever_came_before(backend: str) -> None:
    middle = segue.eager_on_graph(lambda x: (x @ x.T).softmax(-1) @ x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = chain(x, 20)
        return chain(middle(x) if backend == "breakable" else x, 20)

    weights = torch.randn(4096, 4096, device="cuda") / 64
    step = segue.graph(forward)
    with torch.inference_mode():
        for _ in range(30):
            x = torch.randn(64, 64, device="cuda")
            slow = weights
            for _ in range(4):
                slow = slow @ weights  # the graph must wait for this
            given = x + slow[:64, :64]
            expected = forward(given)
            found = step(given) * 2
            assert torch.equal(found, expected * 2)
    assert step.report().replays > 20


def test_the_primer_waits_for_what_came_before_and_what_follows_waits_for_that() -> None:
    made = primer(0)
    assert made is not None
    total = torch.zeros(1 << 26, device="cuda")
    for number in range(1, 40):
        total.add_(1)  # some 0.1 ms
        (made.first if number % 2 else made.behind)()
        seen = total[-1:].clone()
        made.behind()
        assert seen.item() == number


def test_a_prepared_extend_waits_for_what_came_before_and_primes_what_follows() -> None:
    tokens, heads, kv_heads, dim = 24, 8, 2, 64
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    pages = list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + pages_for(tokens)))
    cache = PagedKVCache(1, pages[-1] + 1, kv_heads, dim, dtype, device)
    needs = Needs(heads, kv_heads, dim, dim, dtype)
    plan = (
        choose_attention("triton", needs, device)
        .make(cache)
        .static_plan(ShapeKey("prefill", tokens, requests=1, context=tokens))
    )
    plan.update(to_device(build_batch([RequestRows([0] * tokens, 0, pages)]), device))
    spec = LayerSpec(0, dim**-0.5)
    q, k, v = (torch.zeros(tokens, n, dim, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    out = torch.empty_like(q)
    weights = torch.randn(4096, 4096, device=device) / 64
    with torch.inference_mode():
        plan.run(q, k, v, spec, None, out)
        launches = plan.prepared(q, k, v, spec, None, out)
        assert launches is not None
        again = Launches(launches, 0)
        assert again.primes
        for _ in range(30):
            slow = weights
            for _ in range(4):
                slow = slow @ weights  # what the launches must wait for
            for x in (q, k, v):
                x.copy_(torch.randn(x.shape, device=device) + slow[0, 0])
            again()
            found = out.clone()
            assert torch.equal(found, plan.run(q, k, v, spec, None, torch.empty_like(out)))
            heads_of_q = [x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v)]
            expected = F.scaled_dot_product_attention(q.transpose(0, 1), *heads_of_q, is_causal=True).transpose(0, 1)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_graphs_worth_it_are_primed_and_an_environment_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_primed(count: int) -> bool:
        lane = Lane(get_device("cuda:0"))
        backend = make_backend("full", lane)
        x = torch.ones(4, device="cuda")

        def forward() -> torch.Tensor:
            for _ in range(count):
                x.mul_(2)
            return x

        with torch.inference_mode(), lane.exclusive(), lane.capture_pass():
            made = backend.record(ShapeKey("call", 1), forward, backend.trace(forward)[1])
            assert isinstance(made, GraphReplay)
            x.fill_(1)
            made.replay()
            assert x.tolist() == [2.0**count] * 4
            (segment,) = made.recording.segments
        found = segment.primer(is_first=True) is not None
        made.close()
        lane.close()
        return found

    assert not is_primed(PRIME_FROM - 1) and is_primed(PRIME_FROM)
    monkeypatch.setenv("SEGUE_PRIME", "0")
    assert not is_primed(PRIME_FROM)
