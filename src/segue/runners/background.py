"""Captures in idle moments, in a thread of their own.

A capture runs the callable's Python once more. Were that to happen while a caller runs it too, one could read what the
other has just put into an attribute, and a recording would hold it for good. So the two never overlap: the *gate* lets
any number of calls through, or one capture. A call that arrives during a capture asks it to stop; the capture ends at its
next operation, everything is put back as after a failure, and it is tried again later. Where calls leave no idle moment,
or where captures were interrupted too often, one is carried through and the calls that arrive meanwhile wait for it: one
call a recording.

The thread lives while something waits to be captured. It ends with `stop`, when its owner is collected, and before the
interpreter does.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context, copy_context
from typing import Any

import torch

from segue.forks import at_fork
from segue.graph.guard import CaptureInterrupted, interruptible
from segue.graph.modes import current_modes, under

IDLE_S = 1e-3
"""no call for this long is an idle moment"""
PATIENCE_S = 0.25
"""how long an idle moment is waited for"""
LOOK_S = 50e-3
"""how often it is looked whether the calls under way have ended, which say so themselves unless they were interrupted"""
STUCK_S = 1.0
"""how long a call waits for a capture that cannot begin"""
MAX_INTERRUPTIONS = 3


class Gate:
    """Calls, any number at once, or one capture. A thread inside a call passes again freely.

    Calls may be interrupted anywhere by a signal's handler. So their state is told by thread, where leaving twice is leaving
    once, and guarded by a lock that such a handler may take as well; a `threading.Condition` may then stay locked. Who waits
    sleeps on a lock of its own, and wakes now and then by itself.
    """

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}
        self._waiting: dict[int, threading.Lock] = {}
        self._last_call = 0.0
        self._is_stopped = False
        self._be_open()

    def _be_open(self) -> None:
        self._lock = threading.RLock()
        self._changed = _asleep()
        """what the capture sleeps on"""
        self._is_capturing = self._is_carried_through = False

    def begin_anew(self) -> None:
        """In a forked child: nobody else calls, nobody captures."""
        me = threading.get_ident()
        self._inside = {me: self._inside[me]} if me in self._inside else {}
        self._waiting = {}
        self._be_open()

    def depth(self) -> int:
        """How many calls this thread is inside."""
        return self._inside.get(threading.get_ident(), 0)

    def enter(self) -> None:
        me = threading.get_ident()
        is_stuck = False
        try:
            while True:
                sleep = self._pass(me, is_stuck)
                if sleep is None:
                    return
                is_stuck = not sleep.acquire(timeout=STUCK_S)
        finally:
            self._waiting.pop(me, None)

    def _pass(self, me: int, is_stuck: bool) -> threading.Lock | None:
        """What to sleep on where the thread does not pass. Where that took long a call under way, which the capture waits
        for, may be waiting for this one."""
        with self._lock:
            is_held_up = self._is_carried_through and not self._is_stopped and not is_stuck
            if me in self._inside or not (self._is_capturing or is_held_up):
                self._inside[me] = self._inside.get(me, 0) + 1
                return None
            sleep = self._waiting[me] = _asleep()
            return sleep

    def leave(self, depth: int) -> None:
        """This thread is inside `depth` calls, as before it entered."""
        me = threading.get_ident()
        with self._lock:
            if depth:
                self._inside[me] = depth
            elif self._inside.pop(me, 0):
                self._last_call = time.perf_counter()
                if self._is_carried_through:
                    _wake(self._changed)

    def should_stop(self) -> bool:
        """Whether the capture under way is to end at its next operation."""
        return self._is_stopped or (bool(self._waiting) and not self._is_carried_through)

    @contextmanager
    def capture(self, *, is_patient: bool) -> Iterator[bool]:
        """Waits for an idle moment, or, without patience, for the calls under way. False where the gate was stopped."""
        while self._waiting and not self._is_stopped:  # whom the capture before kept waiting goes first
            self._changed.acquire(timeout=IDLE_S)
        deadline = time.perf_counter() + (PATIENCE_S if is_patient else 0.0)
        while not self._begin(deadline):
            self._changed.acquire(timeout=LOOK_S if self._is_carried_through else IDLE_S)
        try:
            yield self._is_capturing
        finally:
            with self._lock:
                self._is_capturing = self._is_carried_through = False
                self._wake_calls()

    def _begin(self, deadline: float) -> bool:
        with self._lock:
            if self._is_stopped:
                return True
            now = time.perf_counter()
            self._is_carried_through = now >= deadline
            idle_at = self._last_call + (0.0 if self._is_carried_through else IDLE_S)
            if not self._inside and now >= idle_at and (self._is_carried_through or not self._waiting):
                self._is_capturing = True
            return self._is_capturing

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            _wake(self._changed)
            self._wake_calls()

    def _wake_calls(self) -> None:
        for sleep in list(self._waiting.values()):
            _wake(sleep)


def _asleep() -> threading.Lock:
    """A lock on which a thread sleeps until it is woken."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _wake(sleeping: threading.Lock) -> None:
    """Hold the gate's lock: nobody else wakes it."""
    if sleeping.locked():
        sleeping.release()


class Background:
    """A queue of captures and the thread that does them. Thread-safe; what is queued keeps its owner alive, nothing else."""

    def __init__(self, owner: Any) -> None:
        self.gate = Gate()
        self._jobs: deque[tuple[Context, Callable[[], None]]] = deque()
        self._under_way: tuple[Context, Callable[[], None]] | None = None
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        at_fork(self, Background._begin_anew)
        self._finalizer = weakref.finalize(owner, _stop, self.gate, self._threads)  # runs at exit too

    def add(self, job: Callable[[], None], device: torch.device) -> None:
        """`job` is run at an idle moment, in another thread but under the present modes and context variables; it is run
        again where it is interrupted. It must not raise."""
        modes = current_modes(device.type)

        def under_modes() -> None:
            on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
            with on_device, interruptible(self.gate.should_stop):
                under(modes, job)

        with self._lock:
            self._jobs.append((copy_context(), under_modes))
            if self._thread is None or not self._thread.is_alive():  # its start was interrupted
                self._thread = threading.Thread(target=self._run, name="segue-capture", daemon=True)
                self._thread.start()

    def _begin_anew(self) -> None:
        """In a forked child, which has no such thread: the next call that adds something starts one."""
        self._lock = threading.RLock()
        self.gate.begin_anew()
        if self._under_way is not None:
            self._jobs.appendleft(self._under_way)
            self._under_way = None

    def stop(self) -> None:
        """Interrupts what is under way, forgets what waits, and returns when the thread has ended."""
        self._finalizer()

    def _threads(self) -> threading.Thread | None:
        with self._lock:
            self._jobs.clear()
            return self._thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():  # another one took its place before it began
                    return
                if not self._jobs:
                    self._thread = None
                    return
                context, job = self._under_way = self._jobs.popleft()
            interruptions = 0
            while not self._is_done(context, job, interruptions):
                interruptions += 1
            self._under_way = None
            del context, job

    def _is_done(self, context: Context, job: Callable[[], None], interruptions: int) -> bool:
        with self.gate.capture(is_patient=interruptions < MAX_INTERRUPTIONS) as is_open:
            if is_open:
                try:
                    context.copy().run(job)  # a forked child may run again what was being run
                except CaptureInterrupted:
                    return False
        return True


def _stop(gate: Gate, threads: Callable[[], threading.Thread | None]) -> None:
    gate.stop()
    thread = threads()
    if thread is not None and thread is not threading.current_thread():
        thread.join()
