"""Continuous batching: which requests run which tokens at each step, and who owns which pages. Host code, no torch.

One step is either a prefill (prompt tokens of several requests, cut into chunks) or a decode (one token of every
running request). Prefill goes first: it is bounded by `max_running`, so decodes are delayed and never starved.

A request's *known tokens* are its prompt and what it has generated; it has run when all but the newest of them are
cached. That one view covers everything: a new request has all its tokens to run, a decoding one has one, and a
preempted one has them all again. Preemption therefore needs no special case, and does not change the text.

Pages: a request is admitted only when pages for all its known tokens are free, plus one for every request that runs
(so that admission does not at once push somebody out). While decoding it takes one page at a time; where none is free,
the latest arrival gives up its pages and waits again. The earliest arrival always gets on, since `add` refuses what
could not fit into an empty pool; so every request finishes. Waiting requests are served strictly in order of arrival.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from segue.llm.pages import PAGE_SIZE, PagePool, pages_for
from segue.llm.sampling_params import SamplingParams, draw_seed

FinishReason = Literal["stop", "length", "abort"]


class RequestState(Enum):
    """Where a request is: without pages, with pages, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One request and all that the host knows of it. The scheduler that it was added to changes it, nobody else.

    `pages` is an int32 array, so that batches copy it without a loop. `num_cached` counts the tokens whose K and V are
    in the cache. `arrival` is given by the scheduler. `seed` is that of `params`, or one drawn here.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    generated_ids: list[int] = field(default_factory=list)
    pages: array[int] = field(default_factory=lambda: array("i"))
    num_cached: int = 0
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    arrival: int = -1
    num_preemptions: int = 0
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = draw_seed() if self.params.seed is None else self.params.seed

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def num_uncached(self) -> int:
        return self.num_tokens - self.num_cached

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest generated token is still to run."""
        return bool(self.generated_ids) and self.num_uncached == 1

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def tokens_to_run(self, count: int) -> Sequence[int]:
        """The next `count` known tokens after the cached ones."""
        prompt, start, end = len(self.prompt_ids), self.num_cached, self.num_cached + count
        if start >= prompt:
            return self.generated_ids[start - prompt : end - prompt]
        return [*self.prompt_ids[start:end], *self.generated_ids[: max(end - prompt, 0)]]


class ScheduledRow(NamedTuple):
    """A request and how many of its tokens run in a step."""

    request: Request
    num_tokens: int

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens to run; valid until the step is completed."""
        return self.request.tokens_to_run(self.num_tokens)

    @property
    def is_last(self) -> bool:
        """Whether the row reaches the end of the known tokens, so that the model's next token counts."""
        return self.num_tokens == self.request.num_uncached


@dataclass(frozen=True, slots=True)
class Step:
    """What to run now. The rows' pages are allocated."""

    kind: Literal["prefill", "decode"]
    rows: tuple[ScheduledRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class NewToken(NamedTuple):
    """A token that a step added to a request; whether that finished it stands in the request."""

    request: Request
    token_id: int


class Scheduler:
    """Decides step by step; one thread at a time. It owns the pages that its requests hold.

    `schedule` and `complete` (or `cancel`) alternate; `add`, `abort` and `finish` may come between any two calls. While a
    step is in flight, `schedule_ahead` gives the one after it, whose tokens only the device knows; `complete` takes them in
    order.
    `max_context` bounds prompt and output together. `eos_token_ids` end a request unless it ignores them.
    """

    def __init__(
        self,
        page_pool: PagePool,
        max_running: int,
        chunk_size: int,
        max_context: int,
        *,
        max_prefill_requests: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        page_size: int = PAGE_SIZE,
    ) -> None:
        max_prefill_requests = max_running if max_prefill_requests is None else max_prefill_requests
        limits = {
            "max_running": max_running,
            "chunk_size": chunk_size,
            "max_context": max_context,
            "max_prefill_requests": max_prefill_requests,
        }
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be >= 1")
        self._pool = page_pool
        self._max_running = max_running
        self._chunk_size = chunk_size
        self._max_context = max_context
        self._max_prefill_requests = max_prefill_requests
        self._eos_token_ids = eos_token_ids
        self._page_size = page_size
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # both lists in order of arrival
        self._running: list[Request] = []
        self._num_arrived = 0
        self._step: Step | None = None
        self._ahead: Step | None = None
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue `request`. Raises ValueError where it is no new request, or could never fit even alone."""
        self._check_addable(request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request for reason "abort"; False where no such request is alive."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request from outside, as on a stop string; False where no such request is alive.

        Between `schedule` and `complete` the step in flight may still run the row (build its batch before this call):
        the row's token is dropped in `complete`, and its pages are handed out at the next `schedule` at the earliest.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason)
        return True

    def schedule(self) -> Step | None:
        """The next step, or None where no request is alive."""
        if self._step is not None:
            raise RuntimeError("schedule() was called twice; hand the last step's tokens to complete() first")
        rows = self._prefill_rows()
        kind: Literal["prefill", "decode"] = "prefill" if rows else "decode"
        rows = rows or self._decode_rows()
        if not rows:
            return None
        self._step = Step(kind, tuple(rows))
        return self._step

    def schedule_ahead(self) -> Step | None:
        """The step after the one in flight, before its tokens are known: the same requests, one token further.

        None where that is not certain to be the next step: the step in flight is no decode, one of its requests has ended or
        ends with it by length, another could be admitted, or pages are short. A request that turns out to end with the step
        in flight (an end token) has run in vain: its token is dropped.
        """
        step = self._step
        if step is None or self._ahead is not None or step.kind != "decode" or self._may_admit():
            return None
        requests = [row.request for row in step.rows]
        if len(requests) != len(self._running) or not all(map(self._goes_on, requests)):
            return None
        short = [r for r in requests if pages_for(r.num_tokens + 1, self._page_size) > len(r.pages)]
        pages = self._pool.allocate(len(short))
        if pages is None:
            return None
        for request, page in zip(short, pages, strict=True):
            request.pages.append(page)
        self._ahead = Step("decode", step.rows)
        return self._ahead

    def _goes_on(self, request: Request) -> bool:
        """Whether a running request goes on after its next token, unless that token ends it."""
        is_running = request.state is RequestState.RUNNING and request.is_decoding
        return (
            is_running
            and request.num_tokens + 1 < self._max_context
            and len(request.generated_ids) + 1 < request.params.max_tokens
        )

    def complete(self, step: Step, token_ids: Sequence[int]) -> list[NewToken]:
        """Record that `step` has run and chose `token_ids`, one a row; rows that end inside a prompt ignore theirs.

        Returns the tokens that were added, in the order of the rows. Requests that these finish have given their
        pages back and carry their `finish_reason`.
        """
        if step is not self._step:
            raise ValueError("complete() got a step that is not in flight; pass what schedule() returned last, once")
        if len(token_ids) != len(step.rows):
            raise ValueError(f"the step has {len(step.rows)} rows but {len(token_ids)} tokens came; pass one a row")
        self._step, self._ahead = self._ahead, None
        added = []
        for row, token_id in zip(step.rows, token_ids, strict=True):
            request = row.request
            if request.is_finished:
                continue
            is_last = row.is_last
            request.num_cached += row.num_tokens
            if is_last:
                request.generated_ids.append(token_id)
                added.append(NewToken(request, token_id))
                reason = self._finish_reason(request, token_id)
                if reason is not None:
                    self._end(request, reason)
        return added

    def cancel(self, step: Step) -> None:
        """Take back a step that did not run, or not to its end: its requests stay where they were, with their pages. A step
        that was scheduled ahead goes with the one before it, and may be taken back alone.

        What the step wrote to the cache is written again, since no token counts as cached before `complete`.
        """
        if step is self._ahead and step is not None:
            self._ahead = None
            return
        if step is not self._step:
            raise ValueError("cancel() got a step that is not in flight; pass what schedule() returned last, once")
        self._step = self._ahead = None

    def cancel_any(self) -> None:
        """Takes back what an exception of a signal's handler left in flight between two lines of whoever ran it."""
        self._step = self._ahead = None

    def preempt_all(self) -> None:
        """Takes the pages of every running request back: each is waiting again, in order, and will be computed anew."""
        for request in reversed(list(self._running)):
            self._preempt(request)

    def _check_addable(self, request: Request) -> None:
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in use; give each live request an id of its own")
        if request.state is not RequestState.WAITING or request.arrival >= 0:
            raise ValueError(f"request {request.id!r} was added before; make a new Request")
        if len(request.prompt_ids) == 0:
            raise ValueError(f"request {request.id!r} has an empty prompt; it needs at least one token")
        length = len(request.prompt_ids)
        if length >= self._max_context:
            raise ValueError(
                f"request {request.id!r} has a prompt of {length} tokens, which leaves no room for output in a context "
                f"of {self._max_context}; shorten the prompt"
            )
        # The last token is never fed back, so it needs no slot.
        pages = pages_for(min(length + request.params.max_tokens, self._max_context) - 1, self._page_size)
        if pages > self._pool.capacity:
            raise ValueError(
                f"request {request.id!r} may need {pages} pages ({length} prompt tokens, max_tokens "
                f"{request.params.max_tokens}), but the KV cache has {self._pool.capacity}; lower max_tokens, shorten "
                "the prompt, or give the cache more pages"
            )

    def _prefill_rows(self) -> list[ScheduledRow]:
        budget = self._chunk_size
        rows: list[ScheduledRow] = []
        unfinished = [request for request in self._running if not request.is_decoding]
        while budget > 0 and len(rows) < self._max_prefill_requests:
            request = unfinished.pop(0) if unfinished else self._admit()
            if request is None:
                break
            rows.append(ScheduledRow(request, min(request.num_uncached, budget)))
            budget -= rows[-1].num_tokens
        return rows

    def _decode_rows(self) -> list[ScheduledRow]:
        for request in list(self._running):
            if request.state is RequestState.RUNNING:
                self._extend_pages(request)
        return [ScheduledRow(request, 1) for request in self._running]

    def _admit(self) -> Request | None:
        """Move the first waiting request to the running ones, with all the pages that its known tokens need."""
        if not self._may_admit():
            return None
        request = self._waiting[0]
        pages = self._pool.allocate(pages_for(request.num_tokens, self._page_size))
        assert pages is not None
        self._waiting.pop(0)
        # All running requests arrived before all waiting ones, so appending keeps the order of arrival.
        self._running.append(request)
        request.state = RequestState.RUNNING
        request.pages = array("i", pages)
        return request

    def _may_admit(self) -> bool:
        if not self._waiting or len(self._running) >= self._max_running:
            return False
        return pages_for(self._waiting[0].num_tokens, self._page_size) + len(self._running) <= self._pool.num_free

    def _extend_pages(self, request: Request) -> None:
        """Give `request` the page of its next token, taking pages from the latest arrivals (maybe from itself)."""
        while pages_for(request.num_tokens, self._page_size) > len(request.pages):
            page = self._pool.allocate(1)
            if page is not None:
                request.pages.extend(page)
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.state = RequestState.WAITING
        request.num_cached = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.insert(0, request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        (self._running if request.state is RequestState.RUNNING else self._waiting).remove(request)
        self._release(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self._requests[request.id]

    def _release(self, request: Request) -> None:
        self._pool.free(request.pages)
        request.pages = array("i")

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        if token_id in self._eos_token_ids and not request.params.ignore_eos:
            return "stop"
        if token_id in request.params.stop_token_ids:
            return "stop"
        is_full = request.num_tokens >= self._max_context
        return "length" if is_full or len(request.generated_ids) >= request.params.max_tokens else None
