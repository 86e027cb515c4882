"""On a GPU: the cache is sized from measurements, the ledger meets the driver, and memory that was lent comes back."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from segue import GraphConfig
from segue.config import PhaseConfig
from segue.errors import ConfigError
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.bench.models import random_model

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(100, 400)), [9] * 40]
SIZES: dict[str, Any] = {"max_requests": 16, "max_context": 1024, "chunk_size": 512}


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    pytest.importorskip("transformers")
    made = random_model("smollm2", torch.device("cuda"), torch.bfloat16, max_context=8192)
    yield made
    made.to("meta")
    gc.collect()
    torch.cuda.empty_cache()


def engine_of(model: Any, progress: Any = None, **changes: Any) -> Engine:
    graphs = changes.pop("graphs", GraphConfig(decode="full", prefill="breakable"))
    return Engine(model, EngineConfig(device="cuda", graphs=graphs, **(SIZES | changes)), progress=progress)


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def fraction_for(nbytes: int) -> float:
    """The memory fraction that leaves an engine some `nbytes` beyond what is in use now."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free + nbytes) / total


def test_the_cache_gets_what_weights_graphs_and_the_eager_peak_leave(model: Any) -> None:
    fraction = fraction_for(5 << 30)
    with engine_of(model, memory_fraction=fraction, max_requests=32, max_context=8192) as engine:
        assert engine.estimate is not None and engine.estimate.graph_bytes > 0 and engine.estimate.eager_peak_bytes > MIB
        engine.device.flush()
        reading = engine.device.memory()
        over = reading.driver_used + engine.estimate.eager_peak_bytes - fraction * reading.driver_total
        assert over <= 0.01 * reading.driver_total
        assert engine.sizes.num_pages > 3 and tokens(engine) == tokens(engine)


def test_the_ledger_reconciles_with_the_driver_and_the_estimate_is_near(model: Any) -> None:
    with engine_of(model) as engine:
        ledger, estimate = engine.ledger(), engine.estimate
        assert ledger.balance is not None and estimate is not None
        assert abs(ledger.balance.unexplained) <= max(16 * MIB, ledger.balance.driver // 50), str(ledger)
        assert abs(estimate.graph_bytes - ledger.budget_bytes) <= max(0.1 * ledger.budget_bytes, 16 * MIB), str(ledger)
        assert max(map(len, str(ledger).splitlines())) <= 120


def test_a_measurement_leaves_no_trace(model: Any) -> None:
    with engine_of(model, num_pages=200) as engine:
        expected = tokens(engine)
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        engine.device.flush()
        before, memory = engine.stats(), engine.device.memory()
        engine.measure()
        assert engine.stats() == before and torch.equal(torch.cuda.get_rng_state(), state)
        after = engine.device.memory()
        assert after.allocated - memory.allocated <= 64 * MIB, "workspaces of libraries may stay"
        assert engine.lane.reserved_bytes == before["graph_pool_bytes"] and tokens(engine) == expected


def test_memory_that_went_away_after_the_estimate_makes_the_cache_smaller(model: Any) -> None:
    hogs: list[torch.Tensor] = []
    fraction = fraction_for(5 << 30)

    def take(key: Any, what: str) -> None:
        if not hogs:  # as another process would, between the estimate and the capture
            total = torch.cuda.mem_get_info()[1]
            hogs.append(torch.empty(total // 100 + (512 << 20), dtype=torch.uint8, device="cuda"))

    sizes = {"max_requests": 32, "max_context": 8192, "memory_fraction": fraction}
    with engine_of(model, **sizes) as engine:
        pages, expected = engine.sizes.num_pages, tokens(engine)
    with engine_of(model, take, **sizes) as engine:
        assert engine.sizes.num_pages < pages and tokens(engine) == expected


def test_a_fraction_that_holds_nothing_is_refused_in_one_line(model: Any) -> None:
    with pytest.raises(ConfigError, match="are left for it"):
        engine_of(model, memory_fraction=fraction_for(16 * MIB))


def test_sleep_gives_memory_back_and_wake_restores_the_text(model: Any) -> None:
    with engine_of(model, num_pages=20_000) as engine:
        before = tokens(engine)
        cache, graphs = engine.cache.nbytes, engine.ledger().pool_bytes
        assert engine.sleep() >= cache + graphs - 4 * MIB
        engine.wake()
        assert tokens(engine) == before
        for _ in range(3):
            engine.sleep()
            asleep = engine.device.memory()
            engine.wake()
        engine.sleep()
        assert abs(engine.device.memory().driver_used - asleep.driver_used) <= 16 * MIB, "nothing creeps upwards"


def test_text_is_the_same_within_a_budget(model: Any) -> None:
    with engine_of(model, num_pages=500) as engine:
        expected, whole = tokens(engine), engine.ledger().budget_bytes
    for on_budget in ("eager", "rebuild"):
        graphs = GraphConfig(decode="full", prefill="breakable", memory_budget=whole // 2, on_budget=on_budget)  # type: ignore[arg-type]
        with engine_of(model, num_pages=500, graphs=graphs) as engine:
            got = tokens(engine)
            assert [ids[0] for ids in got] == [ids[0] for ids in expected]
            if on_budget == "rebuild":
                assert engine.ledger().budget_bytes <= whole // 2


def wide_model() -> Any:
    """Two layers of Llama-3-8B's width: an eager prefill of 2,048 tokens holds some 200 MiB at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=1024, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def test_eager_prefills_in_the_lent_pool_take_no_memory_beside_it() -> None:
    model, prompts = wide_model(), [[t % 997 for t in range(2000)], [5, 6, 7]]
    held, texts = [], []
    for lend_pool in (False, True):
        graphs = GraphConfig(prefill=PhaseConfig(backend="breakable", max_size=128), lend_pool=lend_pool)
        sizes = {"max_requests": 4, "max_context": 2304, "chunk_size": 2048, "num_pages": 400}
        with engine_of(model, graphs=graphs, **sizes) as engine:

            def text(engine: Engine = engine) -> list[tuple[int, ...]]:
                return [output.token_ids for output in engine.generate(prompts, GREEDY)]

            texts += [text(), text()]
            pool = engine.lane.reserved_bytes
            engine.device.flush()
            with engine.device.measure_peak() as peak:
                texts.append(text())
            held.append(peak.held_bytes)
            assert engine.stats()["phases"]["prefill"]["eager"]["no_rung"] >= 3
            assert engine.lane.reserved_bytes == pool and engine.lane.borrowed_bytes == 0
    assert all(found == texts[0] for found in texts), texts
    assert held[0] > 150 * MIB, held
    assert held[1] < 64 * MIB, held


def bench_memory(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process that has not used CUDA, which its children could not use then."""
    command = (sys.executable, "-m", "segue.cli", "bench", "memory", "--device", "cuda", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | environment)


def test_each_ceiling_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    readings = {}
    for name, ceilings in {"all": "64,256,512", "last": "512"}.items():
        file = tmp_path / f"{name}.json"
        sizes = ("--chunk-size", "512", "--max-requests", "2", "--ceilings", ceilings)
        done = bench_memory("--shape", "smollm2", *sizes, "--json", str(file))
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 130
        readings[name] = {reading["ceiling"]: reading for reading in json.loads(file.read_text())["prefill"]}
    drivers = [reading["driver"] for reading in readings["all"].values()]
    assert drivers == sorted(drivers) and drivers[0] == 0 < drivers[-1]
    for part in ("driver", "pool", "resident", "reserved", "held"):
        assert abs(readings["all"][512][part] - readings["last"][512][part]) <= 2 * MIB, part
    for reading in readings["all"].values():
        assert reading["reserved"] + reading["held"] >= reading["resident"] + reading["peak"], reading
        assert reading["mixed"] is not None


def test_a_process_that_fails_is_one_line_and_status_1() -> None:
    done = bench_memory("--shape", "tiny", "--attention", "nonsense")
    assert done.returncode == 1 and "nonsense" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    done = bench_memory("--shape", "tiny", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "no CUDA GPU" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
