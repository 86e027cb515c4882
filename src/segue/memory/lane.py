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
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from segue.device import Device, Pool
from segue.errors import ReplayError
from segue.forks import at_fork
from segue.graph.guard import lent
from segue.memory.loan import Loan
from segue.observe.report import format_bytes

PATIENCE_S = 5e-3
"""how long a body of the thread that holds the lane is waited for"""
STUCK_S = 10.0
"""how long a call that is being recorded is waited for"""


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
        self._lock = threading.RLock()
        """alone knows who holds the lane: what stood beside it would be wrong where a signal's handler raises in between"""
        self._is_mine: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._last_stream: Any = None
        self._last_key: int | None = None
        self._collected: bool | None = None
        """in a capture pass: whether the garbage collector was on before"""
        self.num_aside = 0
        """bodies that its holder runs now: they may wait for another thread, which must not wait for the lane then"""
        self.is_recording = False
        """its holder runs the callable itself, once to trace it and once to capture it"""
        self.num_passed = 0
        """calls that were let pass by what is being recorded"""
        self._borrowed: Loan | None = None
        """the last loan, where something of it was still alive"""
        self._local = threading.local()
        self._give_stream_back = weakref.finalize(self, device.give_stream_back, self.stream)
        self._give_stream_back.atexit = False
        at_fork(self, Lane._begin_anew)

    @property
    def pool(self) -> Pool:
        """The pool that new captures use; opened on first use, and again after one was retired."""
        if not self._pools or self._pools[-1].is_retired:
            self._pools = [pool for pool in self._pools if pool.state().reserved_bytes]
            self._pools.append(self.device.open_pool(self.stream))
        return self._pools[-1]

    @property
    def reserved_bytes(self) -> int:
        """Asked from anywhere; waits for a capture or replay of another thread, but not for a break's body."""
        is_inner = self._is_mine()
        try:
            if not is_inner:
                self._wait(may_pass=True)
            return sum(pool.state().reserved_bytes for pool in self._pools)
        finally:
            if not is_inner:
                self.let_go()

    @property
    def num_graphs(self) -> int:
        """Segments that live in its pools."""
        return sum(pool.num_graphs for pool in self._pools)

    def enter(self, *, is_upkeep: bool = False, may_pass: bool = False) -> bool:
        """Takes the lane for one capture or replay on the current stream; pair it with `leave`. `is_upkeep`: neither
        happens, and nothing is written into the pool. `may_pass`: where its holder may be waiting for this thread, or is
        this thread, the lane is not taken, and the answer False.

        Raises:
            ReplayError: this thread is already inside this lane; or tensors of it are borrowed (see `lend`).
        """
        if self._is_mine():
            if may_pass:
                return False
            raise ReplayError(
                "a recording was captured or replayed inside another one of the same lane; give the inner callable a "
                "lane of its own, or call it where its caller is recorded as well"
            )
        if not self._lock.acquire(False) and not self._wait(may_pass):
            return False
        try:
            if self._borrowed is not None and not is_upkeep:
                self._refuse_if_borrowed()
            self.generation += 1
            key = self.device.stream_key()
            if key != self._last_key:
                stream = self.device.current_stream()
                if self._last_stream is not None:
                    self.device.order(self._last_stream, stream)
                self._last_stream, self._last_key = stream, key
            return True
        except BaseException:
            self.let_go()
            raise

    def _wait(self, may_pass: bool) -> bool:
        if not may_pass:
            return self._lock.acquire()
        deadline = time.monotonic() + STUCK_S
        while not self._lock.acquire(timeout=PATIENCE_S):
            if self.num_aside:
                return False
            if self.is_recording and time.monotonic() > deadline:
                self.num_passed += 1
                return False
        return True

    def leave(self) -> None:
        try:
            self._lock.release()
        except BaseException:  # a handler's, before the release or after it
            self.let_go()
            raise

    def let_go(self) -> None:
        """Leaves the lane if this thread holds it: for who was interrupted and does not know."""
        while self._is_mine():
            self.settle()
            self.leave()

    def settle(self) -> None:
        """What its holder ran is over: no body, no recording, no capture pass. Anything that was interrupted may be settled,
        settling too."""
        self.num_aside = 0
        self.is_recording = False
        self.end_pass()

    def exclusive(self, *, is_upkeep: bool = False) -> AbstractContextManager[None]:
        """Enters and leaves; raises as `enter` does."""
        return _Exclusive(self, is_upkeep)

    def _begin_anew(self) -> None:
        """In a forked child: of who held the lane in another thread nothing is left."""
        if not self._is_mine():
            self._lock = threading.RLock()
            self._is_mine = self._lock._is_owned  # type: ignore[attr-defined]
            self.settle()

    @property
    def is_entered(self) -> bool:
        """Whether this thread holds the lane."""
        return self._is_mine()

    def capture_pass(self) -> AbstractContextManager[None]:
        """Room is made once for all captures inside, and the garbage collector is off and frozen meanwhile. Nested passes
        share the outer one.

        Memory is flushed only where it is short, since that waits for the device: otherwise the warm-ups that were
        queued before go on while the host records."""
        return _CapturePass(self)

    def begin_pass(self) -> bool:
        """Whether a capture pass has begun: there was none."""
        if self._collected is not None:
            return False
        self.device.make_room()
        self._collected = gc.isenabled()
        gc.disable()
        gc.freeze()
        return True

    def end_pass(self) -> None:
        """Ends the capture pass, if there is one."""
        if self._collected is not None:
            gc.unfreeze()
            if self._collected:
                gc.enable()
            self._collected = None

    @contextmanager
    def lend(self) -> Iterator[Loan]:
        """Holds the lane and lends its pool to eager work of this thread, which runs on the lane's stream, ordered as a
        replay is. Outputs of earlier replays hold nothing any more. Take results out with `Loan.keep`; until what else was
        made is gone, replays and captures are refused (see `memory.loan`).

        Raises:
            ReplayError: as `enter`.
        """
        device = self.device
        with self.exclusive():
            caller = device.current_stream()
            with device.on_stream(self.stream):
                if not vars(self._local).get("has_workspaces"):
                    device.make_workspaces()
                    self._local.has_workspaces = True
                loan = Loan(device, self.pool, caller)
                try:
                    with lent():
                        loan.begin()
                        yield loan
                finally:
                    loan.end()
                    if loan.left():
                        gc.collect()  # a block that hangs in a reference cycle only looks borrowed
                        self._borrowed = loan if loan.left() else None

    @property
    def borrowed_bytes(self) -> int:
        """Of tensors that were made while the pool was lent, and are alive: until they are gone, nothing can be replayed."""
        if self._borrowed is None:
            return 0
        if self.is_entered:
            return self._count_borrowed()
        with self._lock:
            return self._count_borrowed()

    def _count_borrowed(self) -> int:
        left = {} if self._borrowed is None else self._borrowed.left()
        if not left:
            self._borrowed = None
        return sum(left.values())

    def _refuse_if_borrowed(self) -> None:
        nbytes = self._count_borrowed()
        if nbytes:
            raise ReplayError(
                f"{format_bytes(nbytes)} of this lane's pool are still borrowed: tensors that were made while it was lent "
                "are alive, and a replay or a capture would overwrite them. Drop them (a kept exception holds its frames' "
                "tensors), copy what is needed with Loan.keep(), and let what is made once and kept be made by a pass "
                "without a loan."
            )

    def release(self) -> None:
        """Gives the pools back; hold the lane, and have no recording left. The next capture opens a new one."""
        assert self.is_entered
        for pool in self._pools:
            pool.close()
        self._pools.clear()
        self._borrowed = None

    def close(self) -> None:
        """Gives pools and stream back. A second call does nothing."""
        with self.exclusive(is_upkeep=True):
            self.release()
            if self._give_stream_back.alive:
                self.device.order(self._last_stream, self.stream)  # a replay under way may use the stream's workspaces
                self._give_stream_back()


class _Exclusive:
    """A class, as a pass is: a generator that a signal's handler kept from ending would leave the lane some time later."""

    __slots__ = ("_is_upkeep", "_lane")

    def __init__(self, lane: Lane, is_upkeep: bool) -> None:
        self._lane = lane
        self._is_upkeep = is_upkeep

    def __enter__(self) -> None:
        is_inner = self._lane.is_entered  # and refused
        try:
            self._lane.enter(is_upkeep=self._is_upkeep)
        except BaseException:
            if not is_inner:
                self._lane.let_go()
            raise

    def __exit__(self, *_: object) -> None:
        self._lane.let_go()


class _CapturePass:
    __slots__ = ("_is_outer", "_lane")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def __enter__(self) -> None:
        self._is_outer = self._lane.begin_pass()

    def __exit__(self, *_: object) -> None:
        if self._is_outer:
            self._lane.end_pass()
