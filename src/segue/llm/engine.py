"""The engine: checkpoint to text, with continuous batching, every step by replay where a recording fits.

One step, in one direction: the scheduler says which tokens run, they become a batch on the host, the runner of the
phase answers with logits, the sampler chooses, the scheduler takes the tokens. Start-up does everything that is slow:
it loads, settles the configuration, sizes the cache, captures, and closes the runners' guards (`llm.lifecycle`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from segue._compat import without_autocast
from segue.backends import make_backend
from segue.config import PhaseFacts, ResolvedConfig, resolve
from segue.errors import SegueError
from segue.llm.arguments import Prompt, check_type, many_prompts, params_of_each
from segue.llm.attention import choose_attention, needs_of, register
from segue.llm.batch import ForwardBatch, RequestRows, build_batch
from segue.llm.config import recording_device, torch_device
from segue.llm.engine_config import EngineConfig
from segue.llm.fuse import unfuse
from segue.llm.interrupts import uninterrupted
from segue.llm.lifecycle import Lifecycle
from segue.llm.load import load_model
from segue.llm.outputs import Live, RequestOutput, TokenLogprob
from segue.llm.parts import Parts
from segue.llm.prompts import chat_ids, encode
from segue.llm.readback import Pending
from segue.llm.runners import BatchRunner, DecodeRunner, Limits, PrefillRunner, StepOutput
from segue.llm.sampler import Logprobs, SamplingParams, sample
from segue.llm.scheduler import Request, Step
from segue.llm.stats import phase_stats
from segue.llm.step_sampling import chosen, step_sampling, variant_of
from segue.llm.text import IncrementalDetokenizer
from segue.memory.lane import Lane
from segue.runners import Progress

__all__ = ["Engine", "Prompt", "RequestOutput", "TokenLogprob"]


class _Flight(NamedTuple):
    """A step that the device has been given. `tokens` are what it chose, where the next step could start from them."""

    step: Step
    pending: Pending
    tokens: torch.Tensor | None
    logprobs: Logprobs | None


class Engine(Lifecycle):
    """Serves one model. Owns its memory until `close`; also a context manager.

    A first Ctrl-C in the main thread waits for the end of a step, so that the engine can be used afterwards.

    Calls may come from several threads; they take turns. `stream` may be interleaved with other calls, its request then
    runs in one batch with theirs.

    A step that raises (the model's own exception arrives unchanged) has changed nothing: every request stays where it
    was, and the next step runs the same tokens again. (What a tokenizer raises comes behind the step: its tokens are taken,
    and a request that it fails has the text that could be made.) Who called decides: `generate`, `stream` and `chat` end
    their own requests and pass the exception on, and requests of other callers go on; after `step`, `abort` ends one.

    Args:
        source: a checkpoint folder, a GGUF file, a hub id, or a transformers model in memory. A model in memory is
            changed, and stays so: moved to the device, put into eval mode, its experts replaced, its configuration a copy.
            Called outside an engine it answers as before.
        config: see `EngineConfig`.
        tokenizer: overrides the source's.
        progress: told before each step of the start-up's capture.

    Raises:
        ConfigError: the source cannot be loaded or run, or settings contradict each other.
        TypeError: an argument is of another kind than it must be.
        MissingExtraError: the extra ``llm`` is not installed.
        CaptureError: a shape could not be recorded, and its phase is configured to raise.
    """

    def __init__(
        self,
        source: str | Path | Any,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.config = EngineConfig() if config is None else config
        check_type("config", self.config, EngineConfig)
        device = torch_device(self.config.device)
        self.device = recording_device(self.config.device)
        register()
        if isinstance(source, torch.nn.Module):
            unfuse(source)
        loaded = load_model(source, device=device, dtype=self.config.dtype, tokenizer=tokenizer, experts=self.config.experts)
        self.facts, self.experts = loaded.facts, loaded.experts
        self.tokenizer = loaded.tokenizer
        self._model = loaded.model
        self.parts = Parts(self._model)
        self._prepare_model()
        self.attention = choose_attention(self.config.attention, needs_of(loaded.facts), device)
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._live: dict[str, Live] = {}
        self._finished: dict[str, RequestOutput] = {}
        self._num_steps = {"prefill": 0, "decode": 0}
        self._num_generated = 0
        self._flight: _Flight | None = None
        self._overlaps = self.config.overlap is True or (self.config.overlap == "auto" and self.device.kind == "cuda")
        self.lane = Lane(self.device)
        self._open(self._settle())
        if self.config.graphs.capture == "startup":
            try:
                self._start(progress)
            except BaseException:
                self.close()
                raise

    # -- start-up ------------------------------------------------------------------------------------------------------

    def _make_runners(self) -> tuple[ResolvedConfig, PrefillRunner, DecodeRunner]:
        sizes, strict = self.sizes, self.config.graphs.strict
        attention = self.attention.make(self.cache)
        resolved = resolve(
            self.config.graphs,
            phases={
                "prefill": PhaseFacts(max_size=sizes.chunk_size, request_slots=sizes.prefill_slots),
                "decode": PhaseFacts(max_size=sizes.max_requests),
            },
            device_type=self.device.kind,
            support=attention.support,
        )
        prefill, decode = resolved.phase("prefill"), resolved.phase("decode")
        slots = prefill.request_slots or sizes.prefill_slots
        return (
            resolved,
            PrefillRunner(
                prefill,
                make_backend(resolved.debug or prefill.backend, self.lane, compiler=prefill.compiler or "auto"),
                self._run_model,
                attention,
                Limits(prefill.ladder, slots, sizes.max_context, sizes.chunk_size),
                parts=self.parts,
                strict=strict,
                lends=resolved.lend_pool,
            ),
            DecodeRunner(
                decode,
                make_backend(resolved.debug or decode.backend, self.lane, compiler=decode.compiler or "auto"),
                self._run_model,
                attention,
                Limits(decode.ladder, sizes.max_requests, sizes.max_context, sizes.max_requests),
                variants=self.config.sampling_graphs,
                parts=self.parts,
                strict=strict,
                lends=resolved.lend_pool,
            ),
        )

    @property
    def runners(self) -> tuple[BatchRunner, ...]:
        return self.prefill, self.decode

    def _run_model(self, batch: ForwardBatch) -> StepOutput:
        output = self._model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.last_index,
        )
        logits: torch.Tensor = output.logits[0]
        return StepOutput(logits, chosen(logits, batch.sampling))

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queues a request and returns its id. `step` runs it.

        Raises:
            ValueError: the prompt is empty or too long, holds ids outside the vocabulary, or the id is in use.
        """
        params = SamplingParams() if params is None else params
        check_type("params", params, SamplingParams)
        check_type("request_id", "" if request_id is None else request_id, str)
        ids = self.encode(prompt)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, params.stop_strings)
        elif params.stop_strings:
            raise ValueError("stop strings need a tokenizer, and this model came without one")
        with uninterrupted(), self._lock:
            self._check_open()
            name = self._new_id() if request_id is None else request_id
            if name in self._live:  # alive, or finished and not taken
                raise ValueError(f"request id {name!r} is in use: take its output first, or choose another")
            request = Request(name, ids, params)
            self._scheduler.add(request)
            self._live[name] = Live(request, detokenizer)
        return name

    def _new_id(self) -> str:
        return next(name for name in (f"request-{i}" for i in self._ids) if name not in self._live)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ValueError where there are none, or some are outside the vocabulary."""
        return encode(prompt, self.tokenizer, self.facts.vocab_size, self.sizes.max_context, self.facts.max_context)

    def step(self) -> bool:
        """Runs one batch; False where nothing is left to run. An exception of the model's leaves every request as it was."""
        return self._advance(runs_ahead=self.config.overlap is True)

    def _advance(self, *, runs_ahead: bool) -> bool:
        """`step`. With `runs_ahead` the device is given the next step, if it is certain, before this one is waited for, so
        that it never idles while the host takes tokens and builds batches."""
        with uninterrupted() as block, self._lock:
            self._check_open()
            self._check_not_inside()
            self._step = block
            flight, self._flight = self._flight, None
            self.lane.let_go()  # if an exception of a signal's handler left it held
            if flight is None:
                self._scheduler.cancel_any()
                self._follow_weights()
                step = self._scheduler.schedule()
                if step is None:
                    return False
                flight = self._launch(step, None)
            try:
                if runs_ahead and flight.tokens is not None and self._weights_hold():
                    following = self._scheduler.schedule_ahead()
                    if following is not None:
                        self._flight = self._launch(following, flight.tokens)
                token_ids = _checked(flight.pending.wait())
            except BaseException:
                self._flight = None
                self._scheduler.cancel(flight.step)
                raise
            places = {row.request.id: place for place, row in enumerate(flight.step.rows)}
            failures: list[Exception] = []
            for new in self._scheduler.complete(flight.step, token_ids):
                self._num_generated += 1
                try:
                    self._take(new.request, new.token_id, flight.logprobs, places[new.request.id])
                except Exception as error:  # of the tokenizer: the other requests' tokens are taken all the same
                    failures.append(error)
                    if new.request.is_finished:
                        self._finished[new.request.id] = self._live[new.request.id].output(is_settled=True)
            if failures:
                raise failures[0]
            return True

    def _launch(self, step: Step, device_ids: torch.Tensor | None) -> _Flight:
        """Gives `step` to the device. `device_ids` are the tokens of its rows where the step before is still under way."""
        runner: BatchRunner = self.prefill if step.kind == "prefill" else self.decode
        requests = [row.request for row in step.rows]
        variant = variant_of(requests)
        try:
            if device_ids is None:
                rows = [RequestRows(row.token_ids, row.request.num_cached, row.request.pages) for row in step.rows]
            else:
                rows = [RequestRows((0,), request.num_cached + 1, request.pages) for request in requests]
            ahead = int(device_ids is not None)
            sampling = step_sampling(requests, variant or "", self.facts.vocab_size, ahead=ahead)
            with torch.inference_mode(), without_autocast():
                host = replace(build_batch(rows), device_ids=device_ids, sampling=sampling)
                output: StepOutput = runner.execute(host)
                if variant is not None:
                    pending = self._readback.start(output.chosen)
                    flight = _Flight(step, pending, output.chosen[0] if step.kind == "decode" else None, None)
                else:
                    sampled = sample(output.logits, requests)
                    pending = self._readback.start(torch.stack((sampled.token_ids, output.chosen[1])))
                    flight = _Flight(step, pending, None, sampled.logprobs)
        except BaseException:
            self._scheduler.cancel(step)
            raise
        self._num_steps[step.kind] += 1
        return flight

    def _land(self) -> None:
        """Takes back a step that the device was given ahead."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._scheduler.cancel(flight.step)

    def _take(self, request: Request, token_id: int, logprobs: Any, place: int) -> None:
        live = self._live[request.id]
        if live.take(token_id, logprobs, place):
            self._scheduler.finish(request.id, "stop")
        if request.is_finished:
            self._finished[request.id] = live.output()

    def abort(self, request_id: str) -> bool:
        """Ends a request; what it generated so far is its output. False where no such request is alive."""
        check_type("request_id", request_id, str)
        with uninterrupted(), self._lock:
            if not self._scheduler.abort(request_id):
                return False
            self._finished[request_id] = self._live[request_id].output()
            return True

    def take_output(self, request_id: str) -> RequestOutput | None:
        """The output of a finished request, once; None while it runs. Raises KeyError for an unknown id."""
        with uninterrupted(), self._lock:
            output = self._finished.pop(request_id, None)
            if output is not None:
                del self._live[request_id]
                return output
            if request_id not in self._live:
                self._check_open()
                raise KeyError(f"no request is called {request_id!r}")
            return None

    # -- whole generations ---------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completes prompts (text, or token ids), batched; outputs in the order of the prompts.

        Raises:
            ValueError: a prompt or the number of `params` is invalid; then no request is left behind.
            TypeError: a prompt or `params` is of another kind than it must be; likewise.
            SegueError: the engine is closed, or was closed meanwhile; or the model's logits are not finite.
        """
        many = many_prompts(prompts)
        each = params_of_each(params, len(many))
        names: list[str] = []
        try:
            for prompt, param in zip(many, each, strict=True):
                names.append(self._new_id())  # known before it is added, whatever comes between
                self.add_request(prompt, param, names[-1])
            outputs: dict[str, RequestOutput] = {}
            while len(outputs) < len(names):
                self._collect(names, outputs)
                if len(outputs) < len(names) and not self._advance(runs_ahead=self._overlaps):
                    self._collect(names, outputs)
                    self._check_under_way([name for name in names if name not in outputs])
        finally:
            self._discard(names)
        return [outputs[name] for name in names]

    def _collect(self, names: Sequence[str], outputs: dict[str, RequestOutput]) -> None:
        for name in names:
            if name not in outputs:
                output = self.take_output(name)
                if output is not None:
                    outputs[name] = output

    def _check_under_way(self, names: Sequence[str]) -> None:
        """Nothing was left to run: of these requests none may be waited for."""
        with self._lock:
            if any(name not in self._finished for name in names) and not self._scheduler.has_work:
                raise SegueError("a request ended without its output, since an earlier step raised: ask again")

    def _discard(self, names: Sequence[str]) -> None:
        """Leaves nothing behind of requests that the caller no longer waits for."""
        with uninterrupted(), self._lock:
            self._land()
            for name in names:
                self._scheduler.abort(name)
                self._live.pop(name, None)
                self._finished.pop(name, None)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields text as it is made. The request is queued at once, and aborted if the iterator is closed early.

        Raises:
            ValueError: as `add_request`, or the model has no tokenizer to make text with.
        """
        if self.tokenizer is None:
            raise ValueError("this model came without a tokenizer, so there is no text to stream: use generate()")
        name = self._new_id()
        try:
            pieces = self._stream(self.add_request(prompt, params, name))
        except BaseException:
            self._discard([name])
            raise
        next(pieces)
        return pieces

    def _stream(self, name: str) -> Iterator[str]:
        try:
            yield ""  # for `stream`: closing a generator that never started would not abort its request
            yield from self.pieces(name)
        finally:
            self._discard([name])

    def pieces(self, request_id: str) -> Iterator[str]:
        """Runs a queued request to its end and yields its text as it is made; `take_output` then has the whole. Raises
        KeyError for an unknown id."""
        is_done = False
        while not is_done:
            with self._lock:
                self._check_open()
                is_done = request_id in self._finished
                if request_id not in self._live:
                    raise KeyError(f"no request is called {request_id!r}")
                live = self._live[request_id]
                piece, live.new_text = live.new_text, ""
            if piece:
                yield piece
            if not is_done and not self.step():
                self._check_under_way([request_id])

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's turn.

        Raises:
            ValueError: there are no messages, the tokenizer has no chat template, or the template refuses them.
        """
        return chat_ids(messages, self.tokenizer)

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None) -> RequestOutput:
        """Answers a conversation: dicts with ``role`` and ``content``."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    # -- what it did ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts and bytes since start-up; plain values, ready for JSON."""
        with self._lock:
            return {
                "steps": dict(self._num_steps),
                "generated_tokens": self._num_generated,
                "waiting": self._scheduler.num_waiting,
                "running": self._scheduler.num_running,
                "preemptions": self._scheduler.num_preemptions,
                "attention": self.attention.name,
                "experts": None if self.experts is None else self.experts.name,
                "fusion": None if self.fusion is None else self.fusion.to_dict(),
                "pages": self._pages.capacity,
                "free_pages": self._pages.num_free,
                "cache_bytes": self.cache.nbytes,
                "graph_pool_bytes": self.lane.reserved_bytes,
                "memory": self.ledger().to_dict(),
                "recaptures": self.num_recaptures,
                "phases": {
                    runner.phase: phase_stats(runner, self.capture_reports.get(runner.phase)) for runner in self.runners
                },
            }

    def close(self) -> None:
        """Ends all requests and gives recordings, cache and pools back. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._check_not_inside()
            self._is_closed = True
            self._leave_model()
            self._discard(list(self._live))
            for runner in self.runners:
                runner.close()
            self.lane.close()
            self.cache.close()

    def __enter__(self) -> Engine:
        self._check_not_closed()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None) -> None:
        self.close()


def _checked(chosen: list[list[int]]) -> list[int]:
    """The tokens of a step. Raises SegueError where a row's logits have NaN or infinity, or nothing but minus infinity: any
    token would be arbitrary."""
    token_ids, is_finite = chosen
    if not all(is_finite):
        raise SegueError(
            f"the model's logits are not finite in {is_finite.count(0)} of {len(token_ids)} rows (NaN or infinity): its "
            "weights are damaged, or its activations overflow; try dtype=torch.float32"
        )
    return token_ids
