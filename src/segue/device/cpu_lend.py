"""The cpu device's pool lent to eager work: what an operation makes is moved into the pool as soon as it is made.

The kernel itself runs as ever, in ordinary memory, so results are eager's bit for bit; what stays between operations
lies in the pool, as on CUDA, where the allocator itself serves from there.
"""

from __future__ import annotations

from typing import Any

import torch

from segue.device.cpu_pool import CpuPool
from segue.device.cpu_tape import fresh_results, rebuilt
from segue.device.operations import Operation
from segue.device.watch import OperationMode


class LentMode(OperationMode):
    """Inside, fresh results of this thread's operations are blocks of `pool`."""

    def __init__(self, pool: CpuPool) -> None:
        super().__init__("cpu")
        self._pool = pool

    def handle(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op.overload(*args, **kwargs)
        if op.is_view or not op.returns_fresh or not op.returns_tensors:
            return result
        moved = [self._moved(made, is_empty=op.allocates) for made in fresh_results(op, result)]
        return rebuilt(op, args, kwargs, moved)

    def _moved(self, made: Any, *, is_empty: bool) -> Any:
        if not isinstance(made, torch.Tensor) or made.layout is not torch.strided or not made.is_cpu:
            return made
        if not made.numel() or made.is_conj() or made.is_neg():
            return made
        block = self._pool.allocate(made.dtype, tuple(made.shape), made.stride())
        return block if is_empty else block.copy_(made)
