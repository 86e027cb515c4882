"""The paged KV cache: one K and one V tensor a layer, addressed by slot.

The tensors are allocated once and never move, because recordings hold their addresses. They are normal tensors (made
under ``inference_mode(False)``), so that they can be written in and outside inference mode, and `write` uses recordable
operations alone: no host read, no shape that depends on data.

Which page belongs to whom is the scheduler's business (`PagePool`); the cache never looks at a block table.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from segue.llm.pages import NUM_RESERVED_PAGES, PAGE_SIZE, PagePool

__all__ = ["PagePool", "PagedKVCache"]


class PagedKVCache:
    """K and V of every layer, zero at the start: ``keys[layer]`` is ``[num_pages * page_size, kv_heads, head_dim]``.

    It owns its memory until `close`. Writes are ordered by the stream that they are issued on; a caller that uses
    several streams orders them. `value_head_dim` differs from `head_dim` in models with a smaller V.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        page_size: int = PAGE_SIZE,
        value_head_dim: int | None = None,
    ) -> None:
        if num_pages <= NUM_RESERVED_PAGES:
            raise ValueError(f"num_pages is {num_pages}; two pages are reserved, so it must be >= 3")
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        slots = num_pages * page_size
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        with torch.inference_mode(False):
            self.keys = tuple(
                torch.zeros(slots, num_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(num_layers)
            )
            self.values = tuple(
                torch.zeros(slots, num_kv_heads, value_head_dim, dtype=dtype, device=device) for _ in range(num_layers)
            )

    @staticmethod
    def bytes_per_page(
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        page_size: int = PAGE_SIZE,
        value_head_dim: int | None = None,
    ) -> int:
        """What one page costs over all layers, K and V: for choosing `num_pages` from a memory budget."""
        width = head_dim + (head_dim if value_head_dim is None else value_head_dim)
        return num_layers * page_size * num_kv_heads * width * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V tensors."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def write(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k` and `v` (``[T, kv_heads, dim]``, any stride) into the slots ``slot_mapping[T]`` of `layer`.

        int64 slots are used as they are; int32 ones are converted, one more operation a layer. Two tokens of one slot
        (padding, on the scrap page) leave either's values there.
        """
        with torch.no_grad():
            index = slot_mapping if slot_mapping.dtype == torch.int64 else slot_mapping.to(torch.int64)
            self.keys[layer].index_copy_(0, index, k)
            self.values[layer].index_copy_(0, index, v)

    def checksum(self, exclude_slots: Iterable[int] = ()) -> tuple[int, ...]:
        """One integer a layer over the exact bits of all slots but `exclude_slots`: equal where nothing else changed.

        Reads everything; meant for tests. NaN compares by its bits.
        """
        sums = []
        excluded = torch.tensor(sorted(set(exclude_slots)), dtype=torch.int64)
        with torch.no_grad():
            for key, value in zip(self.keys, self.values, strict=True):
                sums.append(_bit_sum(key, excluded) * 31 + _bit_sum(value, excluded))
        return tuple(sums)

    def close(self) -> None:
        """Let go of the memory. Recordings that read the cache must be closed before."""
        self.keys = ()
        self.values = ()


def _bit_sum(tensor: torch.Tensor, excluded: torch.Tensor) -> int:
    """A position-dependent sum of the tensor's bytes, rows of `excluded` left out."""
    rows = tensor.detach().cpu().contiguous().view(torch.uint8).reshape(tensor.shape[0], -1).to(torch.int64)
    rows[excluded] = 0
    places = torch.arange(1, rows.numel() + 1, dtype=torch.int64).view_as(rows)
    return int((rows * (places * 2654435761 % 1000003)).sum())
