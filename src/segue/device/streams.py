"""Streams for lanes: each its own, and used again.

Libraries keep a workspace for every stream they ever ran on (cuBLAS 32 MiB on recent GPUs), and a recording keeps the
address of its stream's. So a stream that was given back is lent out again before a new one is made: nothing creeps up
as lanes come and go. And two open lanes must not share one: their recordings would share a workspace, and replays that
overlap in time would write into it at once.

torch's streams are few (32 of one priority on a device) and handed out in turn, whoever asks. While one of them is not
lent, it is found by asking on. When all are lent, the one with the fewest holders is lent once more; lanes that share a
stream must not replay at the same time on different streams. Streams that others got from torch are not seen.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from segue.forks import at_fork

S = TypeVar("S", bound=Hashable)

NUM_STREAMS = 32
"""of one priority on one device: kStreamsPerPool in c10/cuda/CUDAStream.cpp (torch 2.11)"""


class StreamPool(Generic[S]):
    """Lends what `make` makes, which may be the same stream again. Thread-safe."""

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._holders: dict[S, int] = {}
        """how often each stream is lent now; in the order in which they came back"""
        self._returned: deque[S] = deque()
        """not yet counted: a collection, in whatever thread and at whatever moment, may give one back"""
        at_fork(self, StreamPool._begin_anew)

    def take(self) -> S:
        """The stream that was given back last, else one that is not lent, else one of those with the fewest holders."""
        with self._lock:
            while self._returned:
                returned = self._returned.popleft()
                self._holders[returned] = self._holders.pop(returned) - 1
            stream = self._unused()
            if stream is None:
                stream = min(self._holders, key=self._holders.__getitem__)
            self._holders[stream] = self._holders.get(stream, 0) + 1
            return stream

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()

    def give_back(self, stream: S) -> None:
        """Ends one loan of `stream`. Takes no lock."""
        self._returned.append(stream)

    def _unused(self) -> S | None:
        for stream, holders in reversed(self._holders.items()):
            if not holders:
                return stream
        for _ in range(NUM_STREAMS):
            stream = self._make()
            if stream not in self._holders:
                return stream
        return None
