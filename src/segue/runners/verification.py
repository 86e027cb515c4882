"""Verification: a replay beside an eager run of the same call, bit for bit.

It needs all writes to be known: those of torch operations stand in the trace, those of a break's body in its `writes`.
Such a body runs twice in a call that is verified: what else it does (taking from an iterator, counting) it does twice.
What is written is saved with the random generators, the replay runs and is kept, everything is restored, and the call
runs eagerly. The caller gets eager's answer and eager's state. Where rows were padded, matrix kernels differ in the last
bits by row count, so results are compared within the dtype's tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.graph.lease import Cut
from segue.graph.state import generator_states, set_generator_states, whole_storage
from segue.graph.tree import flatten, same_value
from segue.runners.call_graph import CallGraph, Tensors
from segue.runners.call_key import without_overlap

MAX_BYTES = 256 << 20


def unverifiable(graph: CallGraph) -> str:
    """Why a recording's replays cannot be verified; empty where they can."""
    unnamed = [b.mark.name for b in graph.breaks if not b.tells_writes and not b.is_bare]
    if unnamed:
        return f"what the break {unnamed[0]} writes is unknown: name tensors in @segue.eager_on_graph(writes=...)"
    nbytes = sum(t.untyped_storage().nbytes() for t in graph.outside_written.values())
    if nbytes > MAX_BYTES:
        return f"it writes {nbytes} bytes of state, more than {MAX_BYTES}"
    return ""


def verify(
    graph: CallGraph,
    tensors: Tensors,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    eager: Callable[[], Any],
    cut: Cut | None,
) -> tuple[Any, str]:
    """Eager's answer, and how the replay differed: empty where it did not. Hold the lane."""
    state = [*map(whole_storage, graph.outside_written.values()), *(without_overlap(tensors[i]) for i in graph.written)]
    saved = [t.clone() for t in state]
    device = graph.static.device
    generators = generator_states(device, graph.recording.generators)
    result = graph.answer(tensors, args, kwargs, cut)
    replayed = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(result)[0]]
    after = [t.clone() for t in state]
    with torch.no_grad():
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
    set_generator_states(generators)
    answer = eager()
    is_exact = cut is None
    for index, (got, expected) in enumerate(zip(after, state, strict=True)):
        if not _is_equal(got, expected, is_exact):
            return answer, f"state {index} of shape {list(expected.shape)} differs after the replay"
    leaves = flatten(answer)[0]
    if len(leaves) != len(replayed):
        return answer, f"eager returned {len(leaves)} values, the replay {len(replayed)}"
    for index, (got, expected) in enumerate(zip(replayed, leaves, strict=True)):
        if not _is_equal(got, expected, is_exact):
            return answer, f"result {index} differs from eager's"
    return answer, ""


def _is_equal(got: Any, expected: Any, is_exact: bool) -> bool:
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return same_value(got, expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if is_exact or not got.dtype.is_floating_point:
        return bool(((got == expected) | ((got != got) & (expected != expected))).all())
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except AssertionError:
        return False
    return True
