"""An engine's memory: its ledger, its estimates and its budget, and what sleeping and resizing leave as it was."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from segue import GraphConfig
from segue.config import PhaseConfig
from segue.device import get_device
from segue.errors import ConfigError, EscapedTensorError, ReplayError, SegueError
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.runners import BatchRunner

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


def held_elsewhere() -> int:
    """What lanes of other tests hold, which nobody closed."""
    gc.collect()
    return get_device("cpu").memory().driver_used


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


# -- sleeping, resizing, weights ---------------------------------------------------------------------------------------


def test_text_after_a_wake_equals_text_before(model: Any) -> None:
    elsewhere = held_elsewhere()
    with engine_of(model) as engine:
        before = tokens(engine)
        counts = engine.stats()["phases"]["decode"]["replays"]
        held = engine.device.memory().driver_used - elsewhere + engine.cache.nbytes
        assert engine.sleep() == held > 0 and engine.device.memory().driver_used == elsewhere and engine.cache.nbytes == 0
        assert engine.stats()["graph_pool_bytes"] == 0 and engine.sleep() == 0
        for use in (lambda: engine.generate([[1]]), lambda: engine.step(), lambda: engine.add_request([1])):
            with pytest.raises(SegueError, match=r"sleeps.*call wake"):
                use()
        engine.wake()
        engine.wake()
        assert tokens(engine) == before
        phase = engine.stats()["phases"]["decode"]
        assert phase["replays"] == 2 * counts and phase["eager"] == {} and engine.stats()["recaptures"] == 1
        assert engine.ledger().balance is not None and engine.ledger().balance.unexplained == 0


def test_requests_in_flight_keep_an_engine_awake_unless_they_are_preempted(model: Any) -> None:
    with engine_of(model) as engine:
        expected = tokens(engine)
        names = [engine.add_request(prompt_of(n), GREEDY) for n in (9, 21, 3)]
        for _ in range(4):
            engine.step()
        with pytest.raises(SegueError, match=r"cannot sleep: 3 requests are running and 0 waiting.*preempt=True"):
            engine.sleep()
        with pytest.raises(SegueError, match="the cache cannot be resized"):
            engine.resize_cache(30)
        engine.sleep(preempt=True)
        engine.wake()
        while engine.step():
            pass
        outputs = [engine.take_output(name) for name in names]
        assert [output.token_ids for output in outputs if output is not None] == expected


def test_an_engine_captured_by_hand_sleeps_and_wakes_without_graphs(model: Any) -> None:
    with engine_of(model, graphs=GraphConfig(capture="manual")) as engine:
        before = tokens(engine)
        engine.sleep()
        engine.wake()
        assert tokens(engine) == before and engine.ledger().graphs == ()
        engine.sleep()
    assert engine.stats()["graph_pool_bytes"] == 0  # closed while it slept


def test_a_wake_that_fails_leaves_the_engine_asleep_and_can_be_tried_again(model: Any) -> None:
    elsewhere = held_elsewhere()
    with engine_of(model) as engine:
        before = tokens(engine)
        engine.sleep()

        def interrupt(key: Any, what: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.wake(interrupt)
        assert engine.device.memory().driver_used == elsewhere and engine.cache.nbytes == 0
        with pytest.raises(SegueError, match="sleeps"):
            engine.step()
        engine.wake()
        assert tokens(engine) == before


def test_a_cache_of_another_size_gives_the_same_text(model: Any) -> None:
    with engine_of(model) as engine:
        before = tokens(engine)
        engine.resize_cache(5)
        assert engine.sizes.num_pages == 5 and engine.sizes.max_requests == 3
        assert [engine.generate(prompt_of(n), GREEDY)[0].token_ids for n in (9, 21, 3)] == before
        with pytest.raises(ValueError, match="num_pages is 2"):
            engine.resize_cache(2)
        engine.resize_cache(40)
        assert tokens(engine) == before


@pytest.mark.parametrize("fuse", [False, True])
def test_weights_written_in_place_keep_every_graph(fuse: bool) -> None:
    ours, theirs = tiny_model(), tiny_model("Llama")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.7)
    with engine_of(theirs, fuse=fuse) as engine:
        expected = tokens(engine)
    with engine_of(ours, fuse=fuse) as engine:
        assert tokens(engine) != expected
        captured = [id(graph) for graph in engine.prefill.store.records()]
        engine.update_weights(theirs.state_dict())
        assert tokens(engine) == expected
        assert [id(graph) for graph in engine.prefill.store.records()] == captured and engine.num_recaptures == 0
        name = "model.layers.0.self_attn.q_proj.weight"
        with pytest.raises(ValueError, match="no weight 'nonsense'"):
            engine.update_weights({name: torch.zeros(32, 32), "nonsense": torch.zeros(1)})
        with pytest.raises(ValueError, match="nothing was changed"):
            engine.update_weights({name: torch.zeros(32, 32), "lm_head.weight": torch.zeros(3)})
        for bad in (torch.zeros(32, 32, device="meta"), torch.zeros(32, 32).to_sparse(), None, "text"):
            with pytest.raises(ValueError, match="must be a dense tensor with data: nothing was changed"):
                engine.update_weights({name: torch.zeros(32, 32), "model.layers.0.self_attn.o_proj.weight": bad})
        assert tokens(engine) == expected


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("way", ["data", "parameter", "assign", "to"])
def test_weights_that_were_bound_anew_are_captured_again(way: str, fuse: bool) -> None:
    ours, theirs = tiny_model(), tiny_model()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.7)
    with engine_of(theirs, fuse=fuse) as engine:
        expected = tokens(engine)
    with engine_of(ours, fuse=fuse) as engine:
        tokens(engine)
        if way == "data":
            for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                parameter.data = other.data.clone()
        elif way == "parameter":
            for name, other in theirs.named_parameters():
                owner, _, leaf = name.rpartition(".")
                setattr(ours.get_submodule(owner), leaf, torch.nn.Parameter(other.detach().clone()))
        elif way == "assign":
            ours.load_state_dict(theirs.state_dict(), assign=True)
        else:
            ours.load_state_dict(theirs.state_dict())
            ours.to(torch.float64).to(torch.float32)
        assert tokens(engine) == expected and engine.stats()["recaptures"] == 1
        assert tokens(engine) == expected and engine.stats()["recaptures"] == 1


def test_weights_bound_anew_under_steps_that_run_ahead_are_followed_after_the_step_under_way() -> None:
    ours = tiny_model()
    with engine_of(ours, overlap=True) as engine:
        name = engine.add_request(prompt_of(5), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        for _ in range(4):
            engine.step()
        for parameter in ours.parameters():
            parameter.data = parameter.data * 0.7
        engine.step()  # given to the device before
        assert engine.num_recaptures == 0
        engine.step()
        assert engine.num_recaptures == 1
        while engine.step():
            pass
        output = engine.take_output(name)
        assert output is not None and len(output.token_ids) == 12 and engine.num_recaptures == 1


def test_a_second_engine_over_a_model_fuses_it_afresh_and_keeps_no_other_weights(model: Any) -> None:
    fused = tiny_model()
    with engine_of(fused, fuse=True) as engine:
        expected = tokens(engine)
        assert engine.fusion is not None and engine.fusion.fused["attention"] == 2
        old = fused.model.layers[0].mlp.forward
    with engine_of(fused, fuse=True, max_context=48) as engine:
        assert tokens(engine) == expected
        assert engine.fusion is not None and engine.fusion.fused["attention"] == 2
        assert fused.model.layers[0].mlp.forward is not old
    with engine_of(fused, fuse=False) as engine, engine_of(model) as plain:
        assert tokens(engine) == expected == tokens(plain)
        assert not any("forward" in vars(module) for module in fused.modules())


# -- estimates ---------------------------------------------------------------------------------------------------------


def test_an_estimate_is_made_without_a_trace_and_meets_the_ledger(model: Any) -> None:
    with engine_of(model) as engine:
        tokens(engine)
        state = torch.get_rng_state()
        before, memory = engine.stats(), engine.device.memory()
        estimate = engine.measure()
        assert engine.stats() == before and engine.device.memory() == memory
        assert torch.equal(torch.get_rng_state(), state)
        actual = engine.ledger().budget_bytes
        assert estimate.pool_bytes == actual and estimate.graph_bytes == actual
        assert estimate.eager_peak_bytes >= 4 * 96 * 4 * 4 and estimate.static_bytes > 0
        assert {family.family: family.num_graphs for family in estimate.families} == {
            row.family: row.graphs for row in engine.ledger().families
        }
        total, prefill, decode = estimate.compared(engine.ledger())
        assert "(+0.0%)" in total and prefill.startswith("  prefill: took") and decode.startswith("  decode: took")
        assert sum(family.graph_bytes for family in estimate.families) == estimate.graph_bytes
        assert max(map(len, (total, prefill, decode))) <= 120


def test_what_is_missing_becomes_fewer_pages() -> None:
    from segue.device import MemoryReading
    from segue.llm.sizing import fewer_pages, missing_bytes
    from segue.memory.estimate import Estimate

    estimate = Estimate((), 0, 0, eager_peak_bytes=100)
    assert missing_bytes(MemoryReading(790, 1000, 0, 0), 0.9, estimate) == 0
    assert missing_bytes(MemoryReading(809, 1000, 0, 0), 0.9, estimate) == 0, "missed by less than a second capture is worth"
    assert missing_bytes(MemoryReading(850, 1000, 0, 0), 0.9, estimate) == 50
    assert missing_bytes(MemoryReading(901, 1000, 0, 0), 1.0, estimate) == 1
    assert fewer_pages(100, 50, 16) == 96 and fewer_pages(100, 0, 16) == 88
    with pytest.raises(ConfigError, match="no room for a KV cache"):
        fewer_pages(4, 32, 16)


BAD: dict[str, dict[str, Any]] = {
    "memory_fraction is 0;": {"memory_fraction": 0},
    "memory_fraction is 1.5;": {"memory_fraction": 1.5},
    "memory_fraction is True": {"memory_fraction": True},
    "set one of them": {"memory_fraction": 0.5, "num_pages": 20},
}


@pytest.mark.parametrize("message", list(BAD))
def test_a_memory_fraction_that_cannot_be_is_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**BAD[message])


def test_a_memory_fraction_on_cpu_is_refused_in_one_line(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"memory_fraction is 0\.5; it bounds the memory of a CUDA device"):
        Engine(model, EngineConfig(device="cpu", memory_fraction=0.5))


# -- the budget --------------------------------------------------------------------------------------------------------


def shapes(runner: BatchRunner) -> list[tuple[int, int | None]]:
    return sorted((key.tokens, key.context) for key in runner.store)


def test_what_a_budget_does_not_hold_runs_eagerly_to_the_same_text() -> None:
    """Decode reads up to 1,024 tokens of context for each request, so its largest shapes make the pool grow most."""
    model = tiny_model(max_position_embeddings=2048, num_key_value_heads=4, head_dim=32, num_attention_heads=4)
    sizes = {"max_context": 1024, "num_pages": 200, "max_requests": 8}
    with engine_of(model, **sizes) as engine:
        expected = tokens(engine)
        whole = engine.ledger().budget_bytes
        everything = set(shapes(engine.decode))
    for on_budget in ("eager", "rebuild"):
        graphs = GraphConfig(decode="full", memory_budget=whole - 1, on_budget=on_budget)  # type: ignore[arg-type]
        with engine_of(model, graphs=graphs, **sizes) as engine:
            assert tokens(engine) == expected
            memory, stats = engine.ledger(), engine.stats()["phases"]
            assert set(stats["decode"]["eager"]) <= {"over_budget"} and stats["prefill"]["eager"] == {}
            if on_budget == "rebuild":
                kept = shapes(engine.decode)
                assert set(kept) < everything and memory.budget_bytes < whole and memory.unowned_bytes == 0
                engine.sleep()
                engine.wake()
                assert shapes(engine.decode) == kept and tokens(engine) == expected


def test_a_budget_of_nothing_is_an_engine_without_graphs(model: Any) -> None:
    graphs = GraphConfig(memory_budget=1, on_budget="rebuild")
    with engine_of(model, graphs=graphs) as engine, engine_of(model) as other:
        assert tokens(engine) == tokens(other)
        assert engine.ledger().budget_bytes == 0
        for phase in engine.stats()["phases"].values():
            assert phase["replays"] == 0 and set(phase["eager"]) == {"over_budget"}


def test_a_device_that_is_too_small_is_an_error_that_helps_or_a_smaller_ladder() -> None:
    from segue.config import PhaseConfig
    from segue.device.cpu import CpuDevice
    from segue.errors import CaptureOutOfMemory

    model = tiny_model(max_position_embeddings=2048, num_key_value_heads=4, head_dim=32, num_attention_heads=4)
    sizes = {"max_context": 1024, "num_pages": 200, "max_requests": 8}
    with engine_of(model, **sizes) as engine:
        expected = tokens(engine)
        small = CpuDevice(capacity=engine.ledger().pool_bytes // 2)
    with pytest.raises(CaptureOutOfMemory, match=r"^decode\[\d tokens.*What helps: .*max_size below \d"):
        engine_of(model, **sizes, device=small)
    assert small.memory().driver_used == 0, "the engine that failed gave everything back"
    graphs = GraphConfig(prefill="breakable", decode=PhaseConfig(backend="full", on_failure="shrink"))
    with engine_of(model, graphs=graphs, **sizes, device=small) as engine:
        assert tokens(engine) == expected and len(shapes(engine.decode)) > 0
        assert set(engine.stats()["phases"]["decode"]["eager"]) <= {"capture_failed"}


def _negated(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    return -out


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("change", ["hook", "forward"])
def test_a_module_that_is_changed_after_start_up_is_recorded_anew(fuse: bool, change: str) -> None:
    changed, oracle = tiny_model(), tiny_model()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)

    def alter(model: Any) -> None:
        if change == "hook":
            model.model.norm.register_forward_hook(_negated)
        else:
            original = model.model.norm.forward
            model.model.norm.forward = lambda x: -original(x)

    with engine_of(changed, fuse=fuse) as engine:
        before = engine.generate([prompt_of(9)], params)[0]
        alter(changed)
        got = engine.generate([prompt_of(9)], params)[0]
        assert engine.stats()["recaptures"] == 1
    alter(oracle)
    with engine_of(oracle, fuse=False) as engine:
        expected = engine.generate([prompt_of(9)], params)[0]
    assert got.token_ids == expected.token_ids != before.token_ids


def test_a_capture_that_fails_after_start_up_is_tried_again_at_the_next_step() -> None:
    model, kept = tiny_model(), list[torch.Tensor]()
    with engine_of(model) as engine:
        expected = tokens(engine)
        hook = model.model.norm.register_forward_hook(lambda module, args, out: kept.append(out))
        for _ in range(2):
            with pytest.raises(EscapedTensorError):
                tokens(engine)
        hook.remove()
        kept.clear()
        before = engine.stats()["phases"]
        assert tokens(engine) == expected and engine.stats()["recaptures"] == 1
        after = engine.stats()["phases"]
        assert all(after[name]["eager"] == before[name]["eager"] for name in after)
        assert after["decode"]["replays"] > before["decode"]["replays"]


# -- lending the pool --------------------------------------------------------------------------------------------------


def lending(**changes: Any) -> GraphConfig:
    return GraphConfig(prefill=PhaseConfig(backend="breakable", max_size=8), lend_pool=True, **changes)


def test_eager_passes_in_the_lent_pool_give_the_same_text(model: Any) -> None:
    graphs = GraphConfig(prefill=PhaseConfig(backend="breakable", max_size=8))
    with engine_of(model, graphs=graphs) as engine:
        expected, counts = tokens(engine), engine.stats()["phases"]["prefill"]["eager"]
    with engine_of(model, graphs=lending()) as engine:
        assert "lent to eager passes" in engine.resolved.explain()
        before = engine.stats()["graph_pool_bytes"]
        assert tokens(engine) == expected and tokens(engine) == expected
        eager = engine.stats()["phases"]["prefill"]["eager"]
        assert eager == {reason: 2 * count for reason, count in counts.items()} and "no_rung" in eager
        assert engine.lane.borrowed_bytes == 0 and engine.stats()["graph_pool_bytes"] == before
        engine.sleep()
        engine.wake()
        assert tokens(engine) == expected


def test_sampled_text_and_running_ahead_are_the_same_with_a_lent_pool(model: Any) -> None:
    params = [SamplingParams(max_tokens=7, temperature=0.9, seed=seed, ignore_eos=True, logprobs=2) for seed in range(3)]
    prompts = [prompt_of(9), prompt_of(21), prompt_of(3)]
    answers = []
    for lend_pool in (False, True):
        # decode beyond two requests runs eagerly, between replays of both phases
        decode = PhaseConfig(backend="full", max_size=2)
        graphs = GraphConfig(prefill=PhaseConfig(backend="breakable", max_size=8), decode=decode, lend_pool=lend_pool)
        with engine_of(model, graphs=graphs, overlap=True) as engine:
            sampled = engine.generate(prompts, params)
            greedy = tokens(engine)
            answers.append(([(o.token_ids, o.logprobs) for o in sampled], greedy))
            assert engine.stats()["phases"]["decode"]["eager"]["no_rung"] > 0
    assert answers[0] == answers[1]


class Spy(torch.nn.Linear):
    """A head whose outputs a test may keep, or that may fail."""

    look: Callable[[torch.Tensor], None] | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        if self.look is not None:
            self.look(output)
        return output


@pytest.fixture
def spied() -> Any:
    model = tiny_model()
    head = Spy(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    head.weight, head.look = model.lm_head.weight, None
    model.lm_head = head
    return model


def test_a_borrowed_tensor_makes_steps_eager_until_it_is_gone(spied: Any) -> None:
    head = spied.lm_head
    with engine_of(spied, graphs=lending()) as engine:
        expected = tokens(engine)
        before = engine.stats()["phases"]["decode"]["replays"]
        kept: list[torch.Tensor] = []
        head.look = kept.append
        engine.add_request(prompt_of(21), GREEDY, "long")
        assert engine.step()  # a prefill beyond the ceiling
        head.look = None
        assert engine.lane.borrowed_bytes >= kept[0].nbytes
        value = kept[0].clone()
        assert tokens(engine) == expected and torch.equal(kept[0], value)
        phase = engine.stats()["phases"]["decode"]
        assert phase["eager"]["borrowed"] > 0 and phase["replays"] == before
        with pytest.raises(ReplayError, match="borrowed"), engine.lane.exclusive():
            pass
        kept.clear()
        assert tokens(engine) == expected and engine.lane.borrowed_bytes == 0
        assert engine.stats()["phases"]["decode"]["replays"] > before and engine.num_recaptures == 0


def test_sleeping_and_closing_over_a_borrowed_tensor_leave_it_whole(spied: Any) -> None:
    kept: list[torch.Tensor] = []
    with engine_of(spied, graphs=lending()) as engine:
        expected, one = tokens(engine), SamplingParams(max_tokens=1)
        for at in range(2):
            spied.lm_head.look = kept.append
            engine.generate([prompt_of(21)], one)
            spied.lm_head.look = None
            assert engine.lane.borrowed_bytes > 0
            values = [tensor.clone() for tensor in kept]
            if at == 0:
                engine.sleep()
                engine.wake()
                assert tokens(engine) == expected and engine.lane.borrowed_bytes == 0
                assert "borrowed" not in engine.stats()["phases"]["decode"]["eager"]
    assert len(kept) == 2 and all(torch.equal(tensor, value) for tensor, value in zip(kept, values, strict=True))


def test_a_pass_that_raises_in_the_lent_pool_is_tried_again(spied: Any) -> None:
    def fail(output: torch.Tensor) -> None:
        raise KeyError("mine")

    with engine_of(spied, graphs=lending()) as engine:
        expected = tokens(engine)
        spied.lm_head.look = fail
        with pytest.raises(KeyError):
            engine.generate([prompt_of(21)], GREEDY)
        spied.lm_head.look = None
        gc.collect()
        assert tokens(engine) == expected and engine.lane.borrowed_bytes == 0


def test_an_estimate_counts_what_the_pool_lends_once() -> None:
    from segue.memory.estimate import Estimate

    estimate = Estimate((), pool_bytes=50, static_bytes=7, eager_peak_bytes=40)
    assert estimate.total_bytes == 97 and replace(estimate, lent_bytes=30).total_bytes == 67
    assert replace(estimate, lent_bytes=30).within(20) == 20 + 7 + 40 - 20


def test_the_measured_eager_peak_is_lent_as_far_as_the_pool_reaches(model: Any) -> None:
    with engine_of(model, graphs=lending()) as engine:
        estimate = engine.measure()
        assert 0 <= estimate.lent_bytes <= min(estimate.pool_bytes, estimate.eager_peak_bytes)
        logits = engine.sizes.max_requests * engine.facts.vocab_size * 16  # sampling is outside of the loan
        assert estimate.eager_peak_bytes - estimate.lent_bytes >= logits and estimate.pool_bytes > 0
    with engine_of(model) as engine:
        assert engine.measure().lent_bytes == 0
