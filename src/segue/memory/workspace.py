"""Scratch memory that is sized in warm-up and then stays where it is.

A scratch buffer that grows on demand is a trap under graphs: a recording goes on using the old memory while eager code
moves to the new one. A `Workspace` grows freely until it is locked, by hand or by the first recording that asks it for
memory. From then on a larger request is an error that names the caller and both sizes, instead of a silent move.

The memory lies outside every graph pool and belongs to the workspace; recordings that read it keep it alive as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from segue._compat import inference_guard
from segue.device.watch import describe_line, user_line
from segue.errors import WorkspaceError
from segue.graph.guard import is_capturing

_ALIGNMENT = 512


class Workspace:
    """One buffer on one device. Its contents mean nothing between two calls of `get`; callers that need two pieces at
    once ask for them as one shape, or use two workspaces. Thread-safe as far as sizes go.

    Args:
        name: what errors call it.
        device: where it lies.
        nbytes: what it holds at the start.
    """

    def __init__(self, name: str, device: torch.device | str = "cuda", nbytes: int = 0) -> None:
        if nbytes < 0:
            raise ValueError(f"workspace {name}: nbytes is {nbytes}; it must be at least 0")
        self.name = name
        self.device = torch.device(device)
        self._locked_by: str | None = None
        self._lock = threading.Lock()
        self._buffer = self._allocate(nbytes)

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    @property
    def is_locked(self) -> bool:
        return self._locked_by is not None

    def lock(self, why: str = "lock() was called") -> None:
        """From now on the workspace does not grow."""
        self._locked_by = self._locked_by or why

    def get(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A contiguous view of the buffer's start, uninitialised. Grows the buffer if it must and may.

        Raises:
            WorkspaceError: the request is larger than the locked buffer, or a recording made it first.
        """
        wanted = math.prod(shape) * dtype.itemsize
        with self._lock:
            if is_capturing():
                self.lock("a recording uses it")
            if wanted > self.nbytes:
                self._refuse_if_locked(shape, dtype, wanted)
                self._buffer = self._allocate(wanted)
            view: torch.Tensor = self._buffer[:wanted].view(dtype).view(tuple(shape))
        return view

    def _refuse_if_locked(self, shape: Sequence[int], dtype: torch.dtype, wanted: int) -> None:
        if self._locked_by is None:
            return
        caller = describe_line(user_line()) or "an unknown caller"
        raise WorkspaceError(
            f"workspace {self.name} holds {self.nbytes} bytes and is locked because {self._locked_by}; {caller} asked for "
            f"{wanted} bytes ({list(shape)} of {str(dtype).removeprefix('torch.')}). Warm up with the largest shape before "
            f"the first capture, or make it with nbytes={-(-wanted // _ALIGNMENT) * _ALIGNMENT}."
        )

    def _allocate(self, nbytes: int) -> torch.Tensor:
        with inference_guard(False):
            return torch.empty(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=self.device)
