"""A layer with a recurrence reads how many tokens are real: padded rows are not visited, and change nothing.

Gated linear attention, ``S[t] = gate[t] S[t-1] + k[t]^T v[t]``, ``out[t] = q[t] S[t]``, over the prompts of one prefill
step. The oracle is its parallel form, a matrix product under a mask of decays, for each request alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from segue import config as c
from segue.graph import calling, current
from segue.llm import Engine, EngineConfig
from segue.llm.batch import HostBatch, RequestRows, build_batch, pad_host
from segue.llm.pages import pages_for

pytest.importorskip("transformers")
from llm_support import SIZES, VOCABULARY, prompt_of, tiny_model

HIDDEN, DIM, SPARE = SIZES["hidden_size"], 8, VOCABULARY - 1
rows_visited: list[int] = []
_LIBRARY = torch.library.Library("segue_test", "DEF")
_LIBRARY.define("recurrence(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor num_tokens, Tensor query_start) -> Tensor")


def _recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    num_tokens: torch.Tensor,
    query_start: torch.Tensor,
) -> torch.Tensor:
    """Row by row up to the true count, as a kernel would: the count is read where the data lies, not on the host."""
    out, state, starts = torch.zeros_like(v), v.new_zeros(DIM, DIM), set(query_start.tolist())
    for row in range(int(num_tokens)):
        state = torch.outer(k[row], v[row]) + (0 if row in starts else gate[row] * state)
        out[row] = q[row] @ state
    rows_visited.append(int(num_tokens))
    return out


_LIBRARY.impl("recurrence", _recurrence, "CPU")
_LIBRARY.impl("recurrence", lambda q, k, v, *_: torch.empty_like(v), "Meta")


class GatedLinearAttention(nn.Module):
    """In the place of a layer's mlp: hidden states ``[1, T, hidden]`` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, 3 * DIM + 1, bias=False)
        self.out = nn.Linear(DIM, HIDDEN, bias=False)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, gate = self.project(x).split((DIM, DIM, DIM, 1), dim=-1)
        return q, k, v, gate[..., 0].sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = current().batch
        mixed = torch.ops.segue_test.recurrence(*self.parts(x[0]), batch.num_tokens, batch.query_start)
        return self.out(mixed)[None]

    def in_parallel(self, x: torch.Tensor) -> torch.Tensor:
        """Of one request's ``[T, hidden]``."""
        q, k, v, gate = self.parts(x)
        decays = gate.log().cumsum(0)
        mask = (decays[:, None] - decays[None]).exp().tril()
        return self.out((q @ k.T * mask) @ v)


def model_with_recurrence() -> Any:
    model = tiny_model()
    model.model.layers[1].mlp = GatedLinearAttention().eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[SPARE] = float("nan")
    return model


def batch_of(*lengths: int) -> HostBatch:
    rows, page = [], 2
    for number, count in enumerate(lengths):
        rows.append(RequestRows(prompt_of(count, number), 0, range(page, page + pages_for(count))))
        page += pages_for(count)
    return build_batch(rows)


@pytest.mark.parametrize("prefill", ["full", "breakable"])
def test_a_recurrence_over_a_padded_batch_visits_the_real_rows_alone(prefill: str) -> None:
    graphs = c.GraphConfig(prefill=c.PhaseConfig(backend=prefill, ladder=(32, 48), max_padding=8.0), decode="disabled")
    model = model_with_recurrence()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    config = EngineConfig(
        device="cpu", graphs=graphs, fuse=False, chunk_size=48, max_requests=4, max_context=64, num_pages=20
    )
    with Engine(model, config) as engine, torch.inference_mode():
        runner = engine.prefill
        for lengths in ((9, 3, 7), (30,), (1, 1), (16, 5, 20, 7)):
            host = batch_of(*lengths)
            key = runner.decide(host).key
            assert key is not None
            padded = pad_host(host, key.tokens, runner.slots(key.tokens), pages_for(64))
            ids = padded.arrays.input_ids.copy()
            ids[host.num_tokens :] = SPARE
            poisoned = replace(padded, arrays=padded.arrays._replace(input_ids=ids))
            handle = model.model.layers[1].mlp.register_forward_hook(
                lambda module, args, result: seen.append((args[0][0].clone(), result[0].clone()))
            )
            expected = runner.run_padded_eagerly(host, key).logits.clone()
            handle.remove()
            x, got = seen.pop()
            at = 0
            for count in lengths:
                alone = model.model.layers[1].mlp.in_parallel(x[at : at + count])
                torch.testing.assert_close(got[at : at + count], alone, atol=1e-5, rtol=1e-4)
                at += count
            assert not got[at:].any() and len(got) == key.tokens
            rows_visited.clear()
            decision = runner.decide(host)
            with runner.lane.exclusive(), calling(runner.load(poisoned, decision)):
                replayed = runner.store.get(key).replay().logits[: len(lengths)].clone()
            assert rows_visited == [sum(lengths)] and torch.equal(replayed, expected)
            torch.testing.assert_close(runner.run_eagerly(host).logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["Mamba2", "RecurrentGemma"])
def test_families_with_a_recurrent_state_are_refused_by_name(family: str) -> None:
    import transformers

    from segue.llm.facts import check_supported

    config = getattr(transformers, f"{family}Config")()
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with pytest.raises(c.ConfigError, match=f"{family}ForCausalLM cannot run under Segue"):
        check_supported(model_class, config)
