"""Grouped copies into static inputs: one launch for many small tensors.

A decode step refreshes some ten tensors of a few hundred bytes each; copied one by one, the launches alone cost as much
as the replay they prepare. `torch._foreach_copy_` copies a whole list in one kernel where both sides are on one device
and of one dtype, so copies are grouped by that.

Sources in host memory are safe to overwrite as soon as the call returns. Between host and device the grouped call falls
back to `Tensor.copy_` for each pair, and with ``non_blocking=False`` torch copies on the current stream and waits for
that stream before it returns, for pinned and pageable memory alike. That wait is the price of a promise without
exceptions: an asynchronous copy out of pageable memory is only *usually* staged before the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_Group = tuple[list[torch.Tensor], list[torch.Tensor]]


def grouped_copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the destination at the same place, grouped by device and dtype; nothing broadcasts.

    Raises `ValueError` where the lists, or the shapes of a pair, differ; then nothing was copied.
    """
    if len(destinations) != len(sources):
        raise ValueError(f"{len(destinations)} destinations, but {len(sources)} sources")
    groups: dict[tuple[torch.device, torch.device, torch.dtype, torch.dtype], _Group] = {}
    for position, (destination, source) in enumerate(zip(destinations, sources)):
        if destination.shape != source.shape:
            raise ValueError(f"pair {position}: cannot copy {tuple(source.shape)} into {tuple(destination.shape)}")
        if destination.numel() == 0:
            continue
        pair = (destination.device, source.device, destination.dtype, source.dtype)
        into, out_of = groups.setdefault(pair, ([], []))
        into.append(destination)
        out_of.append(source)
    with torch.no_grad():
        for into, out_of in groups.values():
            torch._foreach_copy_(into, out_of, non_blocking=False)
