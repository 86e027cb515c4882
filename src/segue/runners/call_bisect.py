"""`segue.bisect`: which operation of a call is the first whose replay differs from eager.

A recording with a graph for each operation is replayed one operation at a time beside an eager run of the same inputs
(`graph.bisect`). A callable made with ``debug="ops"`` holds such recordings already, so that a value which was frozen when
one was made, and has changed since, shows. For any other a recording is made for the purpose and closed again: it shows
what eager and recorded code do otherwise from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from segue.backends import make_backend
from segue.backends.base import GraphReplay
from segue.device import get_device
from segue.errors import CaptureError
from segue.graph import Call, Recording, calling
from segue.graph.bisect import Culprit, first_difference
from segue.graph.effects import HostState
from segue.graph.reach import Reach
from segue.graph.state import unchanged, undoing_writes
from segue.memory.lane import Lane
from segue.runners.call_dispatch import Found, Inlined
from segue.runners.call_graph import StaticCall
from segue.runners.callable import GraphedCallable, graph


def bisect(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Culprit | None:
    """The first operation whose replay differs from eager in `step(*args, **kwargs)`, or None where all agree, bit for bit.

    `step` is a `segue.graph`, or any callable. It runs some times; arguments, tensors that it writes, random generators, and
    the attributes and containers that it reaches, are afterwards as before; but not what bodies of breaks write elsewhere
    than in their arguments. Copies of every intermediate result are held meanwhile: use small inputs.

    Raises:
        CaptureError: the call cannot be recorded, or runs eagerly for another reason.
    """
    wrapped = step if isinstance(step, GraphedCallable) else graph(step)
    found: Culprit | None = wrapped._runner.gated(lambda args, kwargs: _bisect(wrapped, args, kwargs), args, kwargs)
    return found


def _bisect(wrapped: GraphedCallable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Culprit | None:
    found = wrapped._dispatch.find(args, kwargs)
    if found.entry is None:
        raise CaptureError(f"segue.bisect compares replays, and this call runs eagerly ({found.reason}): {found.detail}")
    state = HostState(Reach(wrapped._function))
    has_grad = torch.is_grad_enabled() and not wrapped._dispatch.options.inference
    try:
        with Inlined(), torch.set_grad_enabled(has_grad):
            with calling(Call(args, kwargs)), _recorded(wrapped, found) as (recording, static, lane):
                return _compare(wrapped, recording, static, lane, found)
    finally:
        state.restore()


def _compare(wrapped: GraphedCallable, recording: Recording, static: StaticCall, lane: Lane, found: Found) -> Culprit | None:
    assert found.scan is not None
    static.load(found.scan.tensors)
    with unchanged(recording.memory, lane.device.device, recording.generators):
        return first_difference(
            recording, lambda: wrapped._runner.run(*static.args, **static.kwargs), lane.device, segmented=True
        )


@contextmanager
def _recorded(wrapped: GraphedCallable, found: Found) -> Iterator[tuple[Recording, StaticCall, Lane]]:
    """A recording with its operations one by one, its inputs and its lane, which is held."""
    assert found.scan is not None and found.entry is not None and found.site is not None
    if wrapped._dispatch.options.debug == "ops" and found.entry.graph is not None:
        with found.site.lane.exclusive():
            graph = found.entry.graph
            if graph is not None:
                yield graph.recording, graph.static, found.site.lane
                return
    lane = Lane(get_device(found.scan.key[3]))
    static = StaticCall(found.scan, found.padded)

    def forward() -> Any:
        return wrapped._runner.run(*static.args, **static.kwargs)

    try:
        with lane.exclusive():
            made = _record(wrapped, forward, static, lane, found)
            try:
                yield made.recording, static, lane
            finally:
                made.close()
    finally:
        lane.close()


def _record(
    wrapped: GraphedCallable, forward: Callable[[], Any], static: StaticCall, lane: Lane, found: Found
) -> GraphReplay:
    assert found.scan is not None and found.entry is not None
    backend = make_backend("ops", lane)
    static.load(found.scan.tensors)
    with undoing_writes(lane.device.device):
        trace = backend.trace(forward)[1]
    state = HostState(Reach(wrapped._function))  # with the caches that the first run of all filled
    try:
        with lane.capture_pass():
            made = backend.record(found.entry.shape, forward, trace)
    finally:
        state.restore()
    assert isinstance(made, GraphReplay)
    return made
