"""How a pool begins: never larger than without trying, smaller where a piece helps, and the recordings are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner_support import Settings, ToyRunner
from segue.backends import make_backend
from segue.backends.base import GraphReplay
from segue.device.cpu import CpuDevice
from segue.memory.lane import Lane
from segue.runners.fitting import record_fitted
from segue.shapes.key import ShapeKey
from tests_support import replay

MIB = 1 << 20
Forward = Callable[[], torch.Tensor]


def of_layers(x: torch.Tensor, widths: list[int], lives: list[int], layers: int) -> Forward:
    """Blocks of so many bytes, each dropped after so many later ones; all take part in the result. As a network's layers do
    it, over and over."""

    def forward() -> torch.Tensor:
        result = torch.zeros((), device=x.device)
        held: list[tuple[int, torch.Tensor]] = []
        at = 0
        for _ in range(layers):
            for width, life in zip(widths, lives, strict=True):
                held = [(end, block) for end, block in held if end > at]
                block = x.expand(width // 4).clone()
                held.append((at + life, block))
                result = result + block[-1] * at
                del block
                at += 1
        return result

    return forward


def fitted(lane: Lane, forward: Forward) -> tuple[GraphReplay, int]:
    """The recording, and what the pool held without trying."""
    backend = make_backend("full", lane)
    plain: list[int] = []
    with torch.no_grad(), lane.exclusive():
        _, trace = backend.trace(forward)

        def record() -> Any:
            with lane.device.measure_peak(lane.pool) as peak:
                graph = backend.record(ShapeKey("call", 1), forward, trace)
            graph.record.peak_bytes = peak.nbytes
            plain.append(lane.reserved_bytes)
            return graph

        made = record_fitted(lane, record)
        assert len(plain) <= 4
    assert isinstance(made, GraphReplay)
    return made, plain[0]


def check(lane: Lane, forward: Forward) -> tuple[int, int, int]:
    """Peak of the recording, bytes of the pool without trying, and with; after a look at values and at the ledger."""
    x_result = forward()
    before = lane.device.open_pool(lane.stream).state().reserved_bytes
    made, plain = fitted(lane, forward)
    for _ in range(2):
        assert torch.equal(replay(lane, made), x_result)
    assert made.record.pool_bytes == lane.reserved_bytes - before <= plain - before
    peak = made.record.peak_bytes
    made.close()
    return peak, plain, lane.reserved_bytes


def test_a_pool_that_wastes_much_begins_with_a_piece(lane: Lane) -> None:
    """The last block does not fit where any of the others was, but where all of them were."""
    x = torch.ones(1, device=lane.device.device)
    peak, plain, now = check(lane, of_layers(x, [12 * MIB, 12 * MIB, 12 * MIB, 40 * MIB], [3, 2, 1, 1], 2))
    assert plain >= 76 * MIB and now <= peak + 6 * MIB <= 60 * MIB


def test_a_pool_that_a_piece_would_not_help_is_as_it_was(lane: Lane) -> None:
    """The second block cuts the piece where the third one should have fitted."""
    x = torch.ones(1, device=lane.device.device)
    peak, plain, now = check(lane, of_layers(x, [20 * MIB, 30 * MIB, 44 * MIB], [2, 2, 2], 1))
    assert peak + 20 * MIB < now == plain


def test_a_pool_that_wastes_little_is_recorded_once(lane: Lane) -> None:
    x = torch.ones(1, device=lane.device.device)
    backend, number = make_backend("full", lane), 0
    forward = of_layers(x, [4 * MIB] * 6, [6] * 6, 1)
    with torch.no_grad(), lane.exclusive():
        _, trace = backend.trace(forward)

        def record() -> Any:
            nonlocal number
            number += 1
            return backend.record(ShapeKey("call", 1), forward, trace)

        graph = record()
        again = record_fitted(lane, record)
    assert number == 2, "another recording lives in the pool"
    graph.close()
    again.close()


SIZES = st.one_of(st.integers(1, 64), st.integers(1, 11 * 1024), st.integers(1024, 24 * 1024)).map(lambda kib: kib << 10)


@given(blocks=st.lists(st.tuples(SIZES, st.integers(1, 8)), min_size=2, max_size=9), layers=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_no_pool_is_larger_for_having_been_tried(blocks: list[tuple[int, int]], layers: int) -> None:
    lane = Lane(CpuDevice())
    widths, lives = [width for width, _ in blocks], [life for _, life in blocks]
    peak, plain, now = check(lane, of_layers(torch.ones(1), widths, lives, layers))
    assert peak <= now <= plain
    lane.close()


def test_whole_ladders_are_never_larger_and_often_smaller() -> None:
    saved = []
    for seed in range(8):
        draw = random.Random(seed)
        widths = [int(2 ** draw.uniform(12, 22)) for _ in range(8)]
        lives = [draw.choice((1, 1, 2, 3, 8)) for _ in widths]
        held = []
        for tries in (False, True):
            lane = Lane(CpuDevice())
            for tokens in (16, 12, 8, 4, 2, 1):
                forward = of_layers(torch.ones(1), [width * tokens for width in widths], lives, 2)
                if tries or tokens < 16:
                    fitted(lane, forward)
                else:
                    with torch.no_grad(), lane.exclusive():
                        backend = make_backend("full", lane)
                        backend.record(ShapeKey("call", 1), forward, backend.trace(forward)[1])
            held.append(lane.reserved_bytes)
            lane.close()
        saved.append(1 - held[1] / held[0])
    assert min(saved) >= 0 and sum(saved) / len(saved) > 0.02


@pytest.mark.parametrize("room", [0, 8 * MIB])
def test_no_memory_for_a_piece_is_no_failure(room: int) -> None:
    """Where only the requests as they come fit, they are recorded as they come."""
    forward = of_layers(torch.ones(1), [20 * MIB, 30 * MIB, 44 * MIB], [2, 2, 2], 1)
    lane = Lane(CpuDevice())
    _, plain, _ = check(lane, forward)
    lane.close()
    lane = Lane(CpuDevice(capacity=plain + room))
    made, _ = fitted(lane, forward)
    assert torch.equal(replay(lane, made), forward()) and lane.reserved_bytes <= plain
    lane.close()


class Layered(ToyRunner):
    """A ladder whose largest shape wastes much."""

    def compute(self, x: torch.Tensor, rung: int) -> torch.Tensor:
        wide = of_layers(x[0, 0] * 0, [3 * MIB * rung] * 3 + [10 * MIB * rung], [3, 2, 1, 1], 1)()
        return ToyRunner.compute(self, x, rung) + wide


def test_a_runner_s_pool_is_fitted_and_its_ledger_adds_up(lane: Lane) -> None:
    runner = Layered(lane, Settings(phase="call"), (1, 2, 4))
    with torch.inference_mode():
        report = runner.capture()
        assert sum(record.pool_bytes for record in report.records) == lane.reserved_bytes - (
            lane.device.open_pool(lane.stream).state().reserved_bytes
        )
        assert lane.reserved_bytes <= max(record.peak_bytes for record in report.records) + 8 * MIB
    runner.close()
