"""Where a view lies in other memory, so that the same view can be made of memory elsewhere.

Sizes, strides and the offset do not say it all: a view may be of another dtype (the real part of a complex tensor), and it
may be conjugated or negated lazily, which is a bit of the tensor and not of its memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from segue._compat import data_address
from segue.device.operations import extent_bytes, lazily


class Place(NamedTuple):
    """`offset` is in bytes."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The view, from the first element of `memory` on, whatever the strides of that."""
        dtype, size, stride, offset, is_conj, is_neg = self
        memory = lazily(memory, memory.is_conj(), memory.is_neg())  # twice is not at all
        if memory.dtype != dtype:  # torch views as another dtype what has no gaps
            first, last = offset // memory.itemsize, -(-(offset + extent_bytes(dtype, size, stride)) // memory.itemsize)
            offset -= first * memory.itemsize
            memory = memory.as_strided((last - first,), (1,), memory.storage_offset() + first).view(dtype)
        view = memory.as_strided(size, stride, memory.storage_offset() + offset // dtype.itemsize)
        return lazily(view, is_conj, is_neg)


def place(tensor: torch.Tensor, start: int) -> Place:
    """Where a tensor lies in memory that begins at the address `start`."""
    offset = data_address(tensor) - start if tensor.numel() else 0
    return Place(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())
