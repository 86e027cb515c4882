"""An engine's memory: its ledger, its estimates and its budget, and what sleeping and resizing leave as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from segue import GraphConfig
from segue.llm import Engine, EngineConfig, SamplingParams

pytest.importorskip("transformers")
from llm_support import prompt_of, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {"device": "cpu", "chunk_size": 32, "max_requests": 4, "max_context": 64, "num_pages": 24}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def engine_of(model: Any, **changes: Any) -> Engine:
    graphs = changes.pop("graphs", GraphConfig(decode="full", prefill="breakable"))
    return Engine(model, EngineConfig(**(SIZES | changes), graphs=graphs))


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    outputs = engine.generate([prompt_of(9), prompt_of(21), prompt_of(3)], GREEDY)
    return [output.token_ids for output in outputs]


def test_the_ledger_explains_every_byte_of_an_engine_s_graphs(model: Any) -> None:
    with engine_of(model) as engine:
        ledger = engine.ledger()
        assert [row.family for row in ledger.families] == ["prefill", "decode"]
        assert ledger.balance is not None and ledger.balance.unexplained == 0 and ledger.unowned_bytes == 0
        assert ledger.pool_bytes == ledger.own_bytes == engine.stats()["graph_pool_bytes"] > 0
        assert all(row.peak_bytes > 0 and row.output_bytes > 0 for row in ledger.graphs)
        assert all(row.static_bytes > 0 for row in ledger.families)
        memory = engine.stats()["memory"]
        assert json.loads(json.dumps(memory)) == memory and len(memory["graphs"]) == len(ledger.graphs)
        assert max(map(len, str(ledger).splitlines())) <= 120
