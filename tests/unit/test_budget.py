"""A byte budget: what does not fit runs eagerly, evicting gives back what it said, and nothing creeps upwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from runner_support import Settings, Toy, ToyRunner, batch, captured, check
from segue.device import Device, get_device
from segue.errors import ReplayError
from segue.memory.budget import Budget
from segue.memory.lane import Lane
from segue.observe.decision import Reason
from segue.runners import Runner, capture_all
from segue.shapes.key import Phase, ShapeKey
from tests_support import churn

MIB = 1 << 20
COLUMNS = 1 << 20
"""of the temporary: 4 MiB a row"""


class WideRunner(ToyRunner):
    """As `ToyRunner`, with a matrix product (and so a library's workspace) and a temporary of 4 MiB a row, which takes part
    in the result."""

    def __init__(self, lane: Lane, ladder: Sequence[int], phase: Phase = "call", columns: int = COLUMNS) -> None:
        super().__init__(lane, Settings(phase=phase), ladder)
        self.columns = columns
        self.weight = torch.eye(8, device=lane.device.device)

    def keys(self) -> list[ShapeKey]:
        return [ShapeKey(self.phase, tokens=key.tokens) for key in ToyRunner.keys(self)]

    def compute(self, x: torch.Tensor, rung: int) -> torch.Tensor:
        wide = (x[:, :1] * 0).repeat(1, self.columns)
        return ((x @ self.weight) ** 2 + 1).sum(dim=-1) + wide.sum(dim=-1)


def with_budget(runners: Sequence[WideRunner], limit: int, *, may_rebuild: bool = False) -> Budget:
    budget = Budget(runners[0].lane, limit, may_rebuild=may_rebuild)
    for runner in runners:
        runner.budget = budget
        budget.count(runner.store.records)
    return budget


@pytest.fixture
def wide(lane: Lane) -> Iterator[WideRunner]:
    runner = WideRunner(lane, (1, 2, 4, 8))
    with torch.inference_mode():
        yield runner
    runner.close()


def test_shapes_beyond_the_budget_run_eagerly_for_that_reason(wide: WideRunner) -> None:
    budget = with_budget([wide], 28 * MIB)
    report = capture_all([wide], budget)["call"]
    assert captured(wide) == [1, 2, 4] and [record.key.tokens for record in report.records] == [4, 2, 1]
    assert budget.used_bytes <= budget.limit
    check(wide, 8, None, Reason.OVER_BUDGET)
    check(wide, 3, 4)


def test_a_budget_that_holds_nothing_leaves_nothing(wide: WideRunner) -> None:
    capture_all([wide], with_budget([wide], MIB // 2))
    assert captured(wide) == [] and wide.lane.reserved_bytes == 0
    check(wide, 1, None, Reason.OVER_BUDGET)


def test_a_budget_that_is_never_reached_changes_nothing(wide: WideRunner) -> None:
    capture_all([wide], with_budget([wide], 1 << 30, may_rebuild=True))
    assert captured(wide) == [1, 2, 4, 8]


@pytest.mark.parametrize(("may_rebuild", "kept"), [(False, []), (True, [1, 2, 4])])
def test_a_pool_that_a_second_phase_grew_too_far_is_made_anew_where_that_is_asked_for(
    lane: Lane, may_rebuild: bool, kept: list[int]
) -> None:
    small, large = WideRunner(lane, (1, 2), "decode"), WideRunner(lane, (1, 2, 4, 8), "prefill")
    budget = with_budget([small, large], 40 * MIB, may_rebuild=may_rebuild)
    with torch.inference_mode():
        reports = capture_all([small, large], budget)
        assert captured(small) == [1, 2] and captured(large) == kept
        assert [record.key.tokens for record in reports["prefill"].records] == kept[::-1]
        assert (budget.used_bytes <= budget.limit) == may_rebuild, "a pool is not given back while others live in it"
        check(small, 2, 2)
        check(large, 8, None, Reason.OVER_BUDGET)
        for size in range(1, 5):
            check(large, size, *((size if size != 3 else 4, None) if kept else (None, Reason.OVER_BUDGET)))
    small.close()
    large.close()


def test_evicting_frees_what_it_said_and_leaves_the_pool(wide: WideRunner) -> None:
    wide.capture()
    reserved = wide.lane.reserved_bytes
    key = wide.keys()[-1]
    record = wide.store.get(key).record
    assert wide.evict(key) == record.freed_if_evicted == record.driver_bytes + record.static_bytes
    assert wide.evict(key) == 0 and wide.lane.reserved_bytes == reserved
    check(wide, 8, None, Reason.EVICTED)
    check(wide, 4, 4)


def test_a_hundred_rounds_of_capture_and_eviction_keep_survivors_right_and_memory_flat(device: Device) -> None:
    lane = Lane(device)
    runner = WideRunner(lane, range(1, 9), columns=1 << 16)
    with torch.inference_mode():
        capture_all([runner], with_budget([runner], 1 << 30))
        keys, rng = runner.keys(), random.Random(0)
        lives = [batch(runner, key.tokens) for key in keys]
        expected = [runner.execute(live).clone() for live in lives]
        held = []
        for _ in range(100):
            gone = rng.sample(keys, 3)
            closed = [runner.store.get(key) for key in gone if key in runner.store]
            for key in gone:
                runner.evict(key)
            churn(device, collect=False)
            _check_survivors(runner, lives, expected)
            for graph in closed:
                with pytest.raises(ReplayError, match="closed"), lane.exclusive():
                    graph.replay()
            runner.capture(rng.sample(gone, 2))
            _check_survivors(runner, lives, expected)
            held.append((lane.reserved_bytes, device.memory()))
        assert len({reserved for reserved, _ in held[10:]}) == 1, "the pool neither grows nor shrinks"
        device.flush()
        assert device.memory().driver_used - held[4][1].driver_used <= 16 * MIB
    runner.close()
    lane.close()


def _check_survivors(runner: Runner[Toy], lives: list[Toy], expected: list[torch.Tensor]) -> None:
    for key, live, right in zip(runner.keys(), lives, expected, strict=True):
        if key in runner.store:
            decision = runner.decide(live)
            assert decision.key == key
            assert torch.equal(runner.execute(live), right)


@pytest.mark.gpu
def test_on_a_gpu_what_eviction_freed_is_there_for_the_next_graphs() -> None:
    """The driver may keep it in the process. Large graphs, so that the driver's own granularity does not hide them."""
    lane = Lane(get_device("cuda"))

    class Deep(WideRunner):
        def compute(self, x: torch.Tensor, rung: int) -> torch.Tensor:
            for _ in range(4000):
                x = x + 1
            return x.sum(dim=-1)

    runner = Deep(lane, (1, 2, 3, 4, 5, 6, 7, 8))
    with torch.inference_mode():
        runner.capture()
        said = sum(record.freed_if_evicted for record in runner.store.records())
        before = lane.device.memory().driver_used
        assert said > 32 * MIB
        freed = sum(map(runner.evict, runner.keys()))
        torch.cuda.synchronize()
        assert freed == said
        runner.capture(runner.keys())
        assert len(captured(runner)) == 8
        assert lane.device.memory().driver_used - before <= said // 8
    runner.close()
    lane.close()
