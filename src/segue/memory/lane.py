"""A lane: recordings that never overlap in time, and what they share for that: one pool, one capture stream, one lock.

Because two replays of a lane never run at once, every recording of it may use the same memory, outputs included. The
lane enforces the premise: its lock serialises capture and replay across threads, a replay inside a replay of the same
lane is an error, and work on another stream than the last replay's is ordered behind it. In the steady state, one
stream, ordering costs one comparison.

`capture_pass` is what building many recordings has in common: room is made once, and the collector is frozen. A pool
that a failed capture retired is kept for the graphs that live in it, and the next capture opens another.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from segue.device import Device, Pool
from segue.errors import ReplayError

_this_thread = threading.get_ident


class Lane:
    """Owns its pools and its stream until `close`, after which its recordings must not be replayed. Thread-safe.

    The stream is its own as long as torch has one that no open lane holds (32 on a CUDA device). A lane beyond those shares
    one, and so the workspaces of libraries: two such lanes must not replay at the same time on different streams. A lane
    that is dropped without `close` gives its stream back as well, though without waiting for a replay under way.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.take_stream()
        self.generation = 0
        """counts captures and replays; a lease is valid for one generation"""
        self._pools: list[Pool] = []
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._last_stream: Any = None
        self._last_key: int | None = None
        self._passes = 0
        self._give_stream_back = weakref.finalize(self, device.give_stream_back, self.stream)
        self._give_stream_back.atexit = False

    @property
    def pool(self) -> Pool:
        """The pool that new captures use; opened on first use, and again after one was retired."""
        if not self._pools or self._pools[-1].is_retired:
            self._pools = [pool for pool in self._pools if pool.state().reserved_bytes]
            self._pools.append(self.device.open_pool(self.stream))
        return self._pools[-1]

    @property
    def reserved_bytes(self) -> int:
        """Asked from anywhere; waits for a capture or replay of another thread."""
        if self.is_entered:
            return sum(pool.state().reserved_bytes for pool in self._pools)
        with self._lock:
            return sum(pool.state().reserved_bytes for pool in self._pools)

    @property
    def num_graphs(self) -> int:
        """Segments that live in its pools."""
        return sum(pool.num_graphs for pool in self._pools)

    def enter(self) -> None:
        """Takes the lane for one capture or replay on the current stream; pair it with `leave`.

        Raises:
            ReplayError: this thread is already inside this lane.
        """
        me = _this_thread()
        if self._owner == me:
            raise ReplayError(
                "a recording was captured or replayed inside another one of the same lane; give the inner callable a "
                "lane of its own, or call it where its caller is recorded as well"
            )
        self._lock.acquire()
        self._owner = me
        self.generation += 1
        key = self.device.stream_key()
        if key != self._last_key:
            stream = self.device.current_stream()
            if self._last_stream is not None:
                self.device.order(self._last_stream, stream)
            self._last_stream, self._last_key = stream, key

    def leave(self) -> None:
        self._owner = None
        self._lock.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @property
    def is_entered(self) -> bool:
        """Whether this thread holds the lane."""
        return self._owner == _this_thread()

    @contextmanager
    def capture_pass(self) -> Iterator[None]:
        """Room is made once for all captures inside, and the garbage collector is off and frozen meanwhile.

        Memory is flushed only where it is short, since that waits for the device: otherwise the warm-ups that were
        queued before go on while the host records."""
        self._passes += 1
        if self._passes > 1:  # nested passes share the outer one
            try:
                yield
            finally:
                self._passes -= 1
            return
        was_enabled = gc.isenabled()
        self.device.make_room()
        gc.disable()
        gc.freeze()
        try:
            yield
        finally:
            self._passes -= 1
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def release(self) -> None:
        """Gives the pools back; hold the lane, and have no recording left. The next capture opens a new one."""
        assert self.is_entered
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    def close(self) -> None:
        """Gives pools and stream back. A second call does nothing."""
        with self.exclusive():
            self.release()
            if self._give_stream_back.alive:
                self.device.order(self._last_stream, self.stream)  # a replay under way may use the stream's workspaces
                self._give_stream_back()
