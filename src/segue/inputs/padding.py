"""What happens to the rows between the real batch and the captured size.

A recording always computes on the whole rung. What the padded tail of each static input holds is a decision per slot,
never an accident: an earlier, larger batch has left its rows there, and a stale index or length read by a kernel
changes live state.
"""

from __future__ import annotations

from enum import Enum


class Padding(Enum):
    """The policy for a slot's tail ``[real, rung)`` at every load. The head is always copied from the source."""

    KEEP_PAD = "keep_pad"
    """The tail is left as it is; the slot states in `why` that nothing ever reads it."""
    FILL_SENTINEL = "fill_sentinel"
    """The tail is set to the slot's `sentinel` before the copy."""
    ZERO = "zero"
    """The tail is set to zero before the copy."""
    FOREACH_COPY = "foreach_copy"
    """The head is copied in the grouped copy and the tail is left: what is there may be read, and does no harm."""
    FILL_ONCE = "fill_once"
    """The whole buffer is set to `sentinel` at allocation and the tail is never touched again: rows above every
    batch so far hold the sentinel, rows of an earlier, larger batch keep what it brought."""
