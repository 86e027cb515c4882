"""Pages of the KV cache as the host sees them: their size, the two reserved ones, and the free list.

A page holds `PAGE_SIZE` consecutive positions of one request, the same page number in every layer. Position ``p`` of a
request lies in slot ``pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE`` of each layer's K and V.

Two pages are never handed out. Page 0, *null*, is zeros and is never written: unused entries of a block table and
padded requests point there, so a kernel that reads too far reads something finite. Page 1, *scrap*, takes the writes of
padded tokens and of dummy batches, and no live block table names it. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PAGE_SIZE: Final = 16
NULL_PAGE: Final = 0
SCRAP_PAGE: Final = 1
NUM_RESERVED_PAGES: Final = 2
MIN_PAGES: Final = NUM_RESERVED_PAGES + 1


def pages_for(num_tokens: int, page_size: int = PAGE_SIZE) -> int:
    """How many pages hold `num_tokens` positions."""
    return -(-num_tokens // page_size)


class PagePool:
    """Hands out page numbers and takes them back; it holds no memory itself.

    One thread at a time: the scheduler that owns the pool is its only user. Pages freed last are handed out first, so
    that a small load touches little of the cache.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages <= NUM_RESERVED_PAGES:
            raise ValueError(
                f"num_pages is {num_pages}, but pages {NULL_PAGE} and {SCRAP_PAGE} are reserved, so at least "
                f"{NUM_RESERVED_PAGES + 1} are needed; give the KV cache more memory"
            )
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NUM_RESERVED_PAGES - 1, -1))
        self._is_used = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still hand out."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages there are besides the reserved ones."""
        return self.num_pages - NUM_RESERVED_PAGES

    def allocate(self, count: int) -> list[int] | None:
        """`count` distinct free pages, or None (and nothing taken) where fewer are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages; the count must be >= 0")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_used[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take `pages` back; all or none. A page that is reserved, unknown, named twice or free already is an error."""
        returned = list(pages)
        for page in returned:
            self._check_returnable(page)
        if len(set(returned)) != len(returned):
            raise ValueError(f"pages {returned} are freed twice in one call; each page has one owner")
        for page in returned:
            self._is_used[page] = 0
        self._free.extend(reversed(returned))

    def _check_returnable(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not of this pool of {self.num_pages} pages; it belongs to another cache")
        if page < NUM_RESERVED_PAGES:
            raise ValueError(f"page {page} is reserved (null or scrap) and was never handed out; do not free it")
        if not self._is_used[page]:
            raise ValueError(f"page {page} is free already: it was freed twice, or never allocated")
