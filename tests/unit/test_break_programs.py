"""Random programs with breaks against eager: operations, views, in-place updates, breaks that return arguments, views,
fresh tensors and caches, on both backends, with several recordings in one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import segue
from segue.device import get_device
from segue.memory.lane import Lane
from tests_support import check_against_eager, record

N = 4

# Each takes the live tensors (all N x N) and picks from them; what it returns joins them.
Step = Callable[[list[torch.Tensor], int, int], Any]


@segue.eager_on_graph
def fresh(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * 0.5 + b


@segue.eager_on_graph
def transposed(a: torch.Tensor) -> torch.Tensor:
    return (a + 1).t()


@segue.eager_on_graph
def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.copy_(a * 0.5 + b.clone())


@segue.eager_on_graph
def view(a: torch.Tensor) -> torch.Tensor:
    return a.t()


@segue.eager_on_graph
def two_views(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.cat([a, a * 2])
    return base[:N], base[2 : N + 2]


@segue.eager_on_graph
def mixed(given: dict[str, Any]) -> dict[str, Any]:
    return {"kept": given["a"], "fresh": [given["b"] - 1, None], "turned": given["a"].t()}


@segue.eager_on_graph
def nothing(a: torch.Tensor) -> None:
    a.mul_(0.5)


def _mixed(t: list[torch.Tensor], i: int, j: int) -> list[torch.Tensor]:
    out = mixed({"a": t[i], "b": t[j]})
    return [out["kept"], out["fresh"][0], out["turned"]]


STEPS: dict[str, Step] = {
    "add": lambda t, i, j: t[i] * 0.5 + t[j],
    "product": lambda t, i, j: (t[i] @ t[j]).tanh(),
    "sin": lambda t, i, j: t[i].sin(),
    "turn": lambda t, i, j: t[i].t(),
    "rows": lambda t, i, j: t[i][:1].expand(N, N),
    "in place": lambda t, i, j: (t[i][1:].mul_(0.5), None)[1],
    "cat": lambda t, i, j: torch.cat([t[i][:2], t[j][2:]]),
    "sort": lambda t, i, j: t[i].sort(dim=1).values,
    "norm": lambda t, i, j: torch.nn.functional.layer_norm(t[i], (N,)),
    "fresh": lambda t, i, j: fresh(t[i], t[j]),
    "transposed": lambda t, i, j: transposed(t[i]),
    "same": lambda t, i, j: same(t[i], t[j]),
    "view": lambda t, i, j: view(t[i]),
    "two views": lambda t, i, j: list(two_views(t[i])),
    "mixed": _mixed,
    "nothing": lambda t, i, j: nothing(t[i]),
    "break": lambda t, i, j: segue.break_graph(),
}
WRITES = {"in place", "same", "nothing"}

PROGRAM = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=14)


def run(program: list[tuple[str, int, int]], state: list[torch.Tensor], cache: Callable[..., Any]) -> list[torch.Tensor]:
    tensors = list(state)
    for name, i, j in program:
        i, j = i % len(tensors), j % len(tensors)
        if name in WRITES and any(s == 0 for s in tensors[i].stride()):  # nothing can be written into expanded rows
            continue
        made = STEPS[name](tensors, i, j)
        tensors += [t for t in (made if isinstance(made, list) else [made]) if t is not None]
        if name == "break":
            tensors.append(cache(tensors[i]))
    return [t * 1 for t in tensors[-6:]]


def check(programs: list[list[tuple[str, int, int]]], backend: str) -> None:
    """All programs in one pool, captured in order, replayed in order and backwards."""
    lane = Lane(get_device("cpu"))
    state = [torch.randn(N, N), torch.randn(N, N)]
    kept = torch.randn(N, N)

    @segue.eager_on_graph
    def cache(a: torch.Tensor) -> torch.Tensor:
        kept.copy_(kept * 0.5 + a)
        return kept

    forwards = [lambda p=p: run(p, state, cache) for p in programs]
    recorded = [record(lane, forward, backend) for forward in forwards]
    for index in [*range(len(programs)), *reversed(range(len(programs)))]:
        check_against_eager(lane, recorded[index], forwards[index], [*state, kept], rounds=1)
    lane.close()


HEALTH = (HealthCheck.too_slow,)


@pytest.mark.parametrize("backend", ["full", "breakable"])
@given(programs=st.lists(PROGRAM, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=HEALTH)
def test_programs_with_breaks_replay_as_eager(backend: str, programs: list[list[tuple[str, int, int]]]) -> None:
    check(programs, backend)


@given(programs=st.lists(PROGRAM, min_size=1, max_size=2))
@settings(max_examples=8, deadline=None, suppress_health_check=HEALTH)
def test_programs_with_breaks_replay_as_eager_when_they_are_compiled(programs: list[list[tuple[str, int, int]]]) -> None:
    check(programs, "tc_piecewise")


@pytest.mark.slow
@given(programs=st.lists(PROGRAM, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None, suppress_health_check=HEALTH)
def test_many_programs_with_breaks_replay_as_eager_when_they_are_compiled(
    programs: list[list[tuple[str, int, int]]],
) -> None:
    check(programs, "tc_piecewise")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["full", "breakable"])
@given(programs=st.lists(PROGRAM, min_size=1, max_size=4))
@settings(max_examples=1500, deadline=None, suppress_health_check=HEALTH)
def test_many_programs_with_breaks_replay_as_eager(backend: str, programs: list[list[tuple[str, int, int]]]) -> None:
    check(programs, backend)
