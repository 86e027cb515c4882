"""Lending a lane's idle pool to eager work, so that what eager passes need and what recordings hold do not add up.

Between replays nothing in the pool means anything: a recording writes whatever it reads. So while the lane is held, and
nothing can be replayed or captured, eager work may have the memory: its allocations come from the pool, on the lane's
stream, to which the pool's blocks belong. Where it needs more than is free there the pool grows, and stays so.

What the work returns is copied out (`Loan.keep`), since the next replay overwrites the pool. A tensor that is kept without a
copy is *borrowed*: until it is gone, replays and captures of the lane are refused, because they would write into it.
That includes what a library or a module makes once and keeps: let it be made before, by a pass without a loan. Workspaces
of torch's matrix products are made by the loan itself, once a thread.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from segue._compat import data_address
from segue.device import Device, Pool
from segue.graph.tree import flatten, unflatten

T = TypeVar("T")


class Loan:
    """One loan, made by `Lane.lend`. Its thread's allocations come from the pool until `keep`, or its end."""

    def __init__(self, device: Device, pool: Pool, caller: Any) -> None:
        self._device = device
        self._pool = pool
        self._caller = caller
        self._before = pool.state().live
        self._routing = ExitStack()

    def begin(self) -> None:
        self._routing.enter_context(self._device.lend(self._pool))

    def end(self) -> None:
        self._routing.close()

    def keep(self, value: T) -> T:
        """`value` with every tensor in the pool (at any depth) copied, for the stream that was current when the loan was
        made. What is allocated from now on comes from elsewhere than the pool."""
        self.end()
        leaves, spec = flatten(value)
        segments = self._pool.state().segments
        with self._device.on_stream(self._caller):
            kept = [leaf.clone() if _is_inside(leaf, segments) else leaf for leaf in leaves]
        result: T = unflatten(spec, iter(kept))
        return result

    def left(self) -> dict[int, int]:
        """Blocks (address -> bytes) that were made in the loan and are still alive."""
        return {a: n for a, n in self._pool.state().live.items() if self._before.get(a) != n}


def _is_inside(value: Any, segments: list[tuple[int, int]]) -> bool:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return False
    address = data_address(value)
    return any(start <= address < start + nbytes for start, nbytes in segments)
