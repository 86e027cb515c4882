"""The device tensors that a plan's kernels read, at fixed addresses.

A runner loads every batch of a shape into the same static memory, so a plan can bind those tensors once and has nothing
to copy before a replay. A caller without such memory may bring other tensors: they are copied into the bound ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from segue.llm.batch import ForwardBatch


class BoundBatch(NamedTuple):
    """See `BatchTensors` for the shapes."""

    table: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    num_tokens: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch) -> BoundBatch:
        return cls(batch.block_table, batch.seq_lens, batch.slot_mapping, batch.query_start, batch.num_tokens)

    def load(self, batch: ForwardBatch) -> None:
        """Takes over `batch`, which has the same shape; queued on the current stream."""
        for mine, new in zip(self, BoundBatch.of(batch), strict=True):
            if mine is not new and mine.data_ptr() != new.data_ptr():
                mine.copy_(new)
