"""What tests of `segue.graph` share: the same calls beside eager, results and arguments compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from segue.graph.tree import flatten
from segue.runners.callable import GraphedCallable
from tests_support import churn


def same(got: Any, expected: Any) -> None:
    """Equal structure, plain values and bits; nan equals nan."""
    leaves, spec = flatten(got)
    expected_leaves, expected_spec = flatten(expected)
    assert spec == expected_spec
    for a, b in zip(leaves, expected_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert type(a) is type(b) and a == b


def check_calls(
    step: GraphedCallable, eager: Callable[..., Any], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[Any]:
    """Runs each call through both, on copies of its arguments; what both did to their arguments must agree, and no result
    may change later."""
    kept: list[tuple[Any, Any]] = []
    for args, kwargs in calls:
        ours, theirs = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
        expected = eager(*theirs[0], **theirs[1])
        got = step(*ours[0], **ours[1])
        same(got, expected)
        same(ours, theirs)
        kept.append((got, copy.deepcopy(expected)))
        for site in step._dispatch.sites.values():
            churn(site.lane.device, collect=False)
            fill = getattr(site.lane.pool, "fill_free_memory", None)
            if fill is not None:
                fill(0xFF)
    for got, expected in kept:
        same(got, expected)
    return [got for got, _ in kept]


def eager_reasons(step: GraphedCallable) -> dict[str, int]:
    return dict(step.report().eager)
