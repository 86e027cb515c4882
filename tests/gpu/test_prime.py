"""Priming: it changes no result, keeps the stream's order, and is there where it is worth it."""

from __future__ import annotations

import pytest
import torch

import segue
from segue.backends import make_backend
from segue.backends.base import GraphReplay
from segue.device import get_device
from segue.device.driver import PRIME_FROM, primer
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
