"""What of an engine comes and goes: cache, runners and recordings; sizing them, giving them back, making them again.

They go together, because recordings hold the cache's addresses: a cache of another size, or made again after sleep,
means new runners and a new capture. Requests outlive all of it: they hold tokens on the host, and pages that are given
back before the cache goes.

Start-up on CUDA measures first (`llm.sizing`), sizes the cache from what it found, captures, and looks again: where the
estimate was wrong, or the capture ran out of memory, the cache is made smaller and everything captured once more, before
the first request.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from segue._compat import without_autocast
from segue.config import ResolvedConfig
from segue.device import Device, MemoryReading
from segue.errors import CaptureOutOfMemory, SegueError
from segue.llm import sizing
from segue.llm.arguments import check_type
from segue.llm.attention import AttentionChoice
from segue.llm.attention_switch import switch_attention
from segue.llm.config import Sizes, bytes_per_page, check_pages, resized, settle_sizes, used_fraction
from segue.llm.engine_config import EngineConfig
from segue.llm.facts import ModelFacts
from segue.llm.fuse import FusionReport, fuse, is_fused
from segue.llm.interrupts import uninterrupted
from segue.llm.kv_cache import PagedKVCache
from segue.llm.pages import MIN_PAGES, PagePool
from segue.llm.readback import Readback
from segue.llm.runners import BatchRunner, DecodeRunner, PrefillRunner
from segue.llm.scheduler import Scheduler
from segue.llm.weights import WeightAddresses, write_weights
from segue.memory.budget import Budget
from segue.memory.estimate import Estimate
from segue.memory.lane import Lane
from segue.memory.ledger import Ledger, ledger_of
from segue.memory.sizes import parse_bytes
from segue.observe.decision import Decisions
from segue.runners import CaptureReport, Progress, capture_all

_open_engines: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


class Lifecycle(ABC):
    """The part of `Engine` that owns device memory besides the weights. The engine's lock guards all of it."""

    config: EngineConfig
    device: Device
    facts: ModelFacts
    attention: AttentionChoice
    cache: PagedKVCache
    lane: Lane
    sizes: Sizes
    resolved: ResolvedConfig
    prefill: PrefillRunner
    decode: DecodeRunner
    _model: Any
    _scheduler: Scheduler
    _pages: PagePool
    _lock: threading.RLock

    def __init__(self) -> None:
        self.fusion: FusionReport | None = None
        """what of the model is fused; None where nothing was tried"""
        self._fused_at: WeightAddresses | None = None
        self.estimate: Estimate | None = None
        """what start-up measured before it sized the cache; None where the size was given, and on cpu"""
        self.capture_reports: dict[str, CaptureReport] = {}
        self.num_recaptures = 0
        """captures after start-up: after a wake, a resize, or weights that moved"""
        self._is_asleep = self._is_closed = False
        self._step: uninterrupted | None = None
        """the last one, which may be under way"""
        self._decisions: dict[str, Decisions] = {}
        """counted over all runners that a phase has had"""
        self._readings: tuple[MemoryReading, MemoryReading] | None = None
        self._budget: Budget | None = None
        self._weights: WeightAddresses | None = None
        self._is_behind = False
        """whether recordings were given up for weights that moved, and none could be made since"""

    @property
    def model(self) -> Any:
        """The model that runs, as transformers knows it."""
        return self._model

    @property
    @abstractmethod
    def runners(self) -> tuple[BatchRunner, ...]: ...

    @abstractmethod
    def _make_runners(self) -> tuple[ResolvedConfig, PrefillRunner, DecodeRunner]:
        """For the cache, the lane and the sizes as they are now."""

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise SegueError("this engine is closed: make a new one")

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._is_asleep:
            raise SegueError("this engine sleeps, without cache and graphs: call wake() first")

    def _check_not_inside(self) -> None:
        """Hold the lock: so it is this thread's own stack that tells."""
        if self._step is not None and self._step.is_around(sys._getframe()):
            raise SegueError(
                "this engine is in the middle of a step, in which a hook, a break or a tokenizer called it: wait for its end"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an Engine owns graphs and device memory, and can be neither copied nor pickled: make another one")

    @abstractmethod
    def _land(self) -> None: ...

    # -- the model -----------------------------------------------------------------------------------------------------

    def _prepare_model(self) -> None:
        """Fuses what is fused, from the weights as they are now. A model that several engines run is fused for all of them,
        once one of them wants it, by whoever first sees that it must be; the others find that done."""
        switch_attention(self._model)  # parts of it may be new
        sharing = [engine for engine in _open_engines if engine is not self and engine._model is self._model]
        done = next((engine for engine in sharing if engine._fused_at is not None and engine._fused_at.hold()), None)
        wants = self.config.fuse is True or (self.config.fuse == "auto" and self.device.kind == "cuda")
        if done is not None:
            self.fusion = done.fusion
        elif wants or is_fused(self._model):
            self.fusion = fuse(self._model, self.facts, max(engine._longest for engine in (self, *sharing)))
            self._fused_at = WeightAddresses(self._model)
        _open_engines.add(self)

    @property
    def _longest(self) -> int:
        asked = self.config.max_context
        return self.facts.max_context if asked == "auto" else min(asked, self.facts.max_context)

    def _leave_model(self) -> None:
        _open_engines.discard(self)
        self._fused_at = None

    # -- start-up ------------------------------------------------------------------------------------------------------

    def _settle(self) -> Sizes:
        """The sizes to start with; measured on CUDA, unless the pages are given."""
        self.device.flush()  # what an engine before this one left in torch's cache is free
        device, is_gathered = self.device.device, self.attention.is_gathered
        self.sizes = settle_sizes(self.config, self.facts, device, is_gathered=is_gathered)
        if sizing.is_measured(self.config, device):
            self.estimate = self._measure(self.lane)
            budget = self.config.graphs.memory_budget
            reserve = self.estimate.within(None if budget is None else parse_bytes(budget, "memory_budget"))
            self.sizes = settle_sizes(self.config, self.facts, device, is_gathered=is_gathered, reserve_bytes=reserve)
        return self.sizes

    def measure(self) -> Estimate:
        """Makes a few recordings of each phase over a small cache, in a lane of their own, and throws them away again.
        Nothing of the engine changes."""
        with self._lock:
            self._check_open()
            lane = Lane(self.device)
            try:
                return self._measure(lane)
            finally:
                lane.close()

    def _measure(self, lane: Lane) -> Estimate:
        """In a lane without recordings, which is given back empty. At start-up it is the engine's own, so that workspaces of
        libraries, which are kept by stream, are made once."""
        kept: dict[str, Any] = {name: vars(self)[name] for name in ("cache", "lane") if name in vars(self)}
        self.lane = lane
        self.cache = make_cache(self.facts, sizing.FEW_PAGES, self.device.device)
        runners: tuple[BatchRunner, ...] = ()
        try:
            runners = self._make_runners()[1:]
            estimate = sizing.measure(runners, self.sizes, self.facts.vocab_size, lane)
            self.device.flush()
            before = self.device.memory()
        finally:
            for runner in runners:
                runner.close()
            with lane.exclusive(is_upkeep=True):
                lane.release()
            self.cache.close()
            vars(self).update(kept)
            self.device.flush()
        return estimate.once_closed(before, self.device.memory())

    def _open(self, sizes: Sizes) -> None:
        """Cache, runners, pages and scheduler of these sizes; nothing is recorded yet."""
        self.sizes = sizes
        self._open_cache()
        self._readback = Readback(max(sizes.max_requests, sizes.prefill_slots), self.device.device)
        self._pages = PagePool(sizes.num_pages)
        self._scheduler = Scheduler(
            self._pages,
            sizes.max_requests,
            sizes.chunk_size,
            sizes.max_context,
            max_prefill_requests=sizes.prefill_slots,
            eos_token_ids=self.facts.eos_token_ids,
        )

    def _open_cache(self) -> None:
        self.cache = make_cache(self.facts, self.sizes.num_pages, self.device.device)
        self.resolved, self.prefill, self.decode = self._make_runners()
        for runner in self.runners:
            runner.decisions = self._decisions.setdefault(runner.phase, runner.decisions)
        limit = self.resolved.memory_budget_bytes
        self._budget = None
        if limit is not None:
            self._budget = Budget(self.lane, limit, may_rebuild=self.resolved.on_budget == "rebuild")
            for runner in self.runners:
                runner.budget = self._budget
                self._budget.count(runner.store.records)

    def _start(self, progress: Progress | None) -> None:
        """Captures; where memory turns out short, with a smaller cache."""
        if self.estimate is None:
            self.capture(progress)
            return
        for attempt in range(1, sizing.MAX_ATTEMPTS + 1):
            missing = 0
            try:
                self.capture(progress)
            except CaptureOutOfMemory:
                if attempt == sizing.MAX_ATTEMPTS:
                    raise
            else:
                self.device.flush()
                missing = sizing.missing_bytes(self.device.memory(), used_fraction(self.config), self.estimate)
                if not missing or attempt == sizing.MAX_ATTEMPTS:
                    return
            self._resize(sizing.fewer_pages(self.sizes.num_pages, missing, bytes_per_page(self.facts)))

    def capture(self, progress: Progress | None = None) -> dict[str, CaptureReport]:
        """Records every phase's shapes and closes the guards. Called by start-up unless ``capture="manual"``.

        Raises:
            CaptureNotAllowed: it was done before.
            CaptureError: a shape failed, and its phase is configured to raise; the guards stay open.
        """
        with self._lock, torch.inference_mode(), without_autocast():
            self._check_open()
            before = self.device.memory()
            self.capture_reports |= capture_all(self.runners, self._budget, progress)
            self._readings = before, self.device.memory()
            for runner in self.runners:
                runner.guard.close()
                runner.prepare_to_lend()
            self._weights, self._is_behind = WeightAddresses(self._model), False
        return self.capture_reports

    # -- later ---------------------------------------------------------------------------------------------------------

    def resize_cache(self, num_pages: int, progress: Progress | None = None) -> None:
        """Gives the cache another number of pages (two of them reserved), and captures again. Where that fails the engine
        sleeps, with the size it had.

        Raises:
            SegueError: requests are in flight.
            ConfigError: so many pages need more memory than there is; nothing has changed.
            ValueError: so few pages cannot be.
        """
        check_type("num_pages", num_pages, int)
        with self._lock:
            self._check_not_inside()
            self._land()
            self._check_open()
            if self._scheduler.has_work:
                raise SegueError(self._in_flight("the cache cannot be resized"))
            PagePool(min(num_pages, MIN_PAGES))  # refuses what cannot be, before anything is given up
            check_pages(num_pages, self.cache.nbytes, self.facts, self.device.device)
            kept = {name: vars(self)[name] for name in ("sizes", "_pages", "_scheduler", "_readback")}
            try:
                self._resize(num_pages)
                self._recapture(progress)
            except BaseException:
                vars(self).update(kept)
                self._fall_asleep()
                raise

    def sleep(self, *, preempt: bool = False) -> int:
        """Gives the memory of graphs and cache back to the device and returns how many bytes; weights stay. Until `wake`,
        the engine refuses prompts and steps.

        With `preempt`, requests in flight keep their tokens, lose their place in the cache, and are computed again after
        `wake`, to the same text.

        Raises:
            SegueError: requests are in flight, and `preempt` was not asked for.
        """
        with self._lock:
            self._check_not_inside()
            self._land()
            if self._is_asleep:
                return 0
            self._check_open()
            if self._scheduler.has_work and not preempt:
                raise SegueError(self._in_flight("the engine cannot sleep") + ", or sleep(preempt=True)")
            self._scheduler.preempt_all()
            self.device.flush()
            before = self._held_bytes()
            self._fall_asleep()
            return before - self._held_bytes()

    def wake(self, progress: Progress | None = None) -> None:
        """Makes cache and graphs again. Where that fails the engine sleeps on, and `wake` can be tried again.

        Raises:
            CaptureError: a shape could not be recorded, and its phase is configured to raise.
        """
        with self._lock:
            self._check_not_inside()
            self._check_not_closed()
            if not self._is_asleep:
                return
            self._is_asleep = False
            try:
                self._open_cache()
                self._recapture(progress)
            except BaseException:
                self._fall_asleep()
                raise

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes new values into parameters and buffers, by the names of the model's `state_dict`, some or all of them.
        Every graph stays. What requests in flight have cached comes from the old weights.

        Raises:
            ValueError: a name is unknown, or a shape or kind of number is another; nothing was changed.
            SegueError: the engine is closed.
        """
        with self._lock, self.lane.exclusive(is_upkeep=True):
            self._check_not_closed()
            self._land()
            write_weights(self._model, weights)

    def _weights_hold(self) -> bool:
        return not self._is_behind and (self._weights is None or self._weights.hold())

    def _follow_weights(self) -> None:
        """Captures again where a parameter or a buffer was bound anew since the last capture, and at the next step once more
        where that fails. No step may be under way."""
        if self._weights_hold():
            return
        found = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), self.facts.dtype)
        if found != self.facts.dtype:
            raise SegueError(
                f"the model's weights are {found} now, and this engine was made for {self.facts.dtype}: convert them back, "
                "or make a new engine"
            )
        self._is_behind = True
        for runner in self.runners:
            runner.close_recordings()
            runner.guard.reopen()
        with self.lane.exclusive(is_upkeep=True):
            self.lane.release()
        self._prepare_model()
        self._recapture(None)

    def ledger(self) -> Ledger:
        """What every graph costs, with the balance of the last capture against the driver, and the estimates beside it."""
        with self._lock:
            records = [record for runner in self.runners for record in runner.store.records()]
            static: dict[str, int] = {runner.phase: runner.static_bytes for runner in self.runners}
            found = ledger_of(self.lane, records, static=static, readings=self._readings)
            return found if self.estimate is None else found.with_notes(*self.estimate.compared(found))

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _resize(self, num_pages: int) -> None:
        self._release()
        self._open(resized(self.config, self.facts, self.device.device, num_pages))

    def _recapture(self, progress: Progress | None) -> None:
        if self.capture_reports:  # by hand, it may never have been captured
            self.capture(progress)
            self.num_recaptures += 1

    def _fall_asleep(self) -> None:
        self._release()
        self._is_asleep = True

    def _release(self) -> None:
        """Recordings first, then the pool they lie in, then the cache they read."""
        self._weights, self._is_behind = None, False
        for runner in self.runners:
            runner.close()
        with self.lane.exclusive(is_upkeep=True):
            self.lane.release()
        self.cache.close()
        self.device.flush()

    def _held_bytes(self) -> int:
        return self.device.memory().driver_used + (self.cache.nbytes if self.device.kind == "cpu" else 0)

    def _in_flight(self, what: str) -> str:
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        return f"{what}: {running} requests are running and {waiting} waiting; finish or abort them first"


def make_cache(facts: ModelFacts, num_pages: int, device: torch.device) -> PagedKVCache:
    """The cache of a model."""
    return PagedKVCache(
        facts.num_layers,
        num_pages,
        facts.num_kv_heads,
        facts.head_dim,
        facts.dtype,
        device,
        value_head_dim=facts.value_head_dim,
    )
