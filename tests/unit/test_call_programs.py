"""Random programs through `segue.graph` beside eager: operations, views, in-place updates, aliased and nested arguments,
breaks, state that is written and rebound, shapes, modes, order of calls, evictions, churn. None differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import segue
from call_support import same
from tests_support import churn, poison

WIDTH = 4
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a * 0.5 + b,
    "product": lambda a, b: (a @ b.t()).tanh() @ b if a.shape == b.shape else a.sin(),
    "sin": lambda a, b: a.sin(),
    "rows": lambda a, b: a[1:],
    "flip": lambda a, b: a.flip(0),
    "turn": lambda a, b: a.t().exp().t(),
    "softmax": lambda a, b: a.softmax(1),
    "expand": lambda a, b: a[:1].expand(a.shape[0], WIDTH),
    "in place": lambda a, b: a.mul_(0.5).add_(0.25),
    "part in place": lambda a, b: a[:1].copy_(b[:1]),
    "out": lambda a, b: torch.add(a, 1.0, out=torch.empty_like(a)),
    "random": lambda a, b: a + torch.rand_like(a),
    "where": lambda a, b: torch.where(a > 0, a, b if a.shape == b.shape else a),
    "fresh break": lambda a, b: _fresh(a, b),
    "view break": lambda a, b: _view(a),
    "writing break": lambda a, b: _writing(a),
    "host read": lambda a, b: a * float(a.sum() > 0),
}
WRITES = {"in place", "part in place", "writing break"}
RARE = {"host read"}


@segue.eager_on_graph
def _fresh(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b[:1]


@segue.eager_on_graph
def _view(a: torch.Tensor) -> torch.Tensor:
    return a.t()[1:].t()


@segue.eager_on_graph
def _writing(a: torch.Tensor) -> None:
    a.mul_(0.5)


class Program(torch.nn.Module):
    """Runs steps on its arguments, a buffer, a weight and a tensor in a list; returns the last tensors, nested."""

    def __init__(self, steps: list[tuple[str, int, int]], device: str) -> None:
        super().__init__()
        self.steps = steps
        self.weight = torch.nn.Parameter(torch.ones(2, WIDTH))
        self.register_buffer("state", torch.zeros(2, WIDTH))
        self.held = [torch.full((3, WIDTH), 0.5, device=device)]
        self.to(device)

    def forward(self, first: torch.Tensor, *rest: torch.Tensor, more: dict[str, Any] | None = None) -> Any:
        found = [first, *rest, *((more or {}).get("t") or ()), self.get_buffer("state"), self.held[0], self.weight * 1]
        for name, i, j in self.steps:
            a, b = found[i % len(found)], found[j % len(found)]
            if name in WRITES and (0 in a.stride() or a is self.weight):
                continue
            if a.shape[1] != WIDTH or b.shape[1] != WIDTH or not a.shape[0] or not b.shape[0]:
                continue
            if name in ("add", "part in place") and a.shape != b.shape:
                continue
            made = STEPS[name](a, b)
            if made is not None:
                found.append(made)
        return {"last": found[-1], "all": (found[-2], [found[-3], len(found)]), "sum": found[-1].sum()}


ARGUMENTS: list[Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]] = [
    lambda d: ((torch.randn(2, WIDTH, device=d),), {}),
    lambda d: ((torch.randn(3, WIDTH, device=d),), {}),
    lambda d: ((torch.randn(2, WIDTH, device=d), torch.randn(2, WIDTH, device=d)), {}),
    lambda d: ((torch.randn(2, WIDTH, device=d),) * 2, {}),
    lambda d: (tuple(_overlapping(d)), {}),
    lambda d: ((torch.randn(WIDTH, 2, device=d).t(),), {"more": {"t": [torch.randn(3, WIDTH, device=d)]}}),
    lambda d: ((torch.randn(2, WIDTH, device=d),), {"more": {"t": [torch.randn(3, WIDTH, device=d)], "n": 2}}),
    lambda d: ((torch.randn(4, WIDTH, device=d)[::2],), {}),
]
MODES = (torch.no_grad, torch.inference_mode)
CHANGES = ("nothing",) * 6 + ("weight", "data", "held", "disabled", "in place")
PROGRAM = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)
CALLS = st.lists(
    st.tuples(st.integers(0, len(ARGUMENTS) - 1), st.booleans(), st.sampled_from(CHANGES)), min_size=4, max_size=14
)
OPTIONS = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["full", "breakable"]),
        "max_graphs": st.integers(1, 3),
        "min_hits": st.integers(1, 2),
        "verify": st.sampled_from([None, None, "first", "every:2"]),
    }
)


def _overlapping(device: str) -> list[torch.Tensor]:
    base = torch.randn(3, WIDTH, device=device)
    return [base[:2], base[1:]]


def _change(model: Program, change: str) -> None:
    with torch.no_grad():
        if change == "weight":
            model.weight = torch.nn.Parameter(torch.full_like(model.weight, 0.75))
        elif change == "data":
            model.get_buffer("state").data = torch.full_like(model.weight, 0.1)
        elif change == "held":
            model.held[0] = torch.full_like(model.held[0], 0.3)
        elif change == "in place":
            model.weight.mul_(0.5)


def _copies(args: Any, kwargs: Any) -> list[Any]:
    """Copies that share memory as the arguments do."""
    import copy

    return [copy.deepcopy((args, kwargs)) for _ in range(2)]


def check(
    steps: list[tuple[str, int, int]], calls: list[tuple[int, bool, str]], options: dict[str, Any], device: str = "cpu"
) -> None:
    ours, theirs = Program(steps, device), Program(steps, device)
    step = segue.graph(ours, inference=True, **options)
    kept = []
    for index, (kind, is_inference, change) in enumerate(calls):
        for model in (ours, theirs):
            _change(model, change)
        with MODES[is_inference](), segue.disabled() if change == "disabled" else contextlib.nullcontext():
            (args, kwargs), (their_args, their_kwargs) = _copies(*ARGUMENTS[kind](device))
            torch.manual_seed(index)
            try:
                expected, error = theirs(*their_args, **their_kwargs), None
            except RuntimeError as raised:
                expected, error = None, raised
            their_state = _random_state(device)
            torch.manual_seed(index)
            if error is not None:
                with pytest.raises(RuntimeError):
                    step(*args, **kwargs)
                return
            got = step(*args, **kwargs)
            same(got, expected)
            same((args, kwargs), (their_args, their_kwargs))
            same([ours.state, ours.held, ours.weight.detach()], [theirs.state, theirs.held, theirs.weight.detach()])
            assert torch.equal(_random_state(device), their_state)
            written = [*args, ours.state, ours.held[0]]
            if not any(_shares(leaf, written) for leaf in _tensors(got)):
                kept.append((got, [t.clone() for t in _tensors(got)]))
        for site in step._dispatch.sites.values():
            churn(site.lane.device, collect=False)
            poison(site.lane)
    for got, values in kept:
        same(_tensors(got), values)
    report = step.report()
    assert report.replays + sum(report.eager.values()) >= len(calls)
    assert set(report.eager) <= {
        "first_seen",
        "disabled",
        "rebound",
        "data_dependent",
        "aliased_inputs",
        "over_budget",
        "evicted",
    }
    step.close()


def _random_state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value["last"], value["all"][0], value["all"][1][0], value["sum"]]


def _shares(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return any(tensor.untyped_storage().data_ptr() == o.untyped_storage().data_ptr() for o in others)


HEALTH = (HealthCheck.too_slow,)


@given(steps=PROGRAM, calls=CALLS, options=OPTIONS)
@settings(max_examples=200, deadline=None, suppress_health_check=HEALTH)
def test_programs_through_segue_graph_are_eagers(
    steps: list[tuple[str, int, int]], calls: list[tuple[int, bool, str]], options: dict[str, Any]
) -> None:
    check(steps, calls, options)


@pytest.mark.slow
@given(steps=PROGRAM, calls=CALLS, options=OPTIONS)
@settings(max_examples=2000, deadline=None, suppress_health_check=HEALTH)
def test_many_programs_through_segue_graph_are_eagers(
    steps: list[tuple[str, int, int]], calls: list[tuple[int, bool, str]], options: dict[str, Any]
) -> None:
    check(steps, calls, options)


_ON_A_GPU = st.tuples(st.sampled_from(sorted(set(STEPS) - {"product"})), st.integers(0, 9), st.integers(0, 9))
"""without matrix products, whose kernels may depend on how arguments are aligned"""


@pytest.mark.gpu
@given(steps=st.lists(_ON_A_GPU, min_size=1, max_size=8), calls=CALLS, options=OPTIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=HEALTH)
def test_programs_on_a_gpu_are_eagers(
    steps: list[tuple[str, int, int]], calls: list[tuple[int, bool, str]], options: dict[str, Any]
) -> None:
    check(steps, calls, options, "cuda")
