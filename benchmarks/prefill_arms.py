"""The arms of `prefill_build`: each builds the same prefill shapes of one model in its own way, and replays them.

- `SegueBuild`, backend `full` or `breakable`: the largest rung is traced in full, the others like it; one capture pass.
- `PeerBuild`: `breakable-cuda-graphs` as its README has it. One warm-up a shape on a side stream, one pool for all,
  captures largest first. Its breaks may not return CUDA tensors, so attention writes into `out`, allocated inside the
  capture (hence in the pool); a `capture_stub` that does nothing stands in for the body, which here too is not run
  during capture. Its outputs go to one buffer for all shapes, made before memory is read.
- `EagerBuild`: the warm-ups alone, which is the floor of every build, and what they cost in workspaces and kernels.

All warm up and capture on one side stream each, so that library workspaces, which are keyed by stream, weigh the same.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from common import synchronize
from lean_llama import LeanLlama, Shape, attention, plain_attention

from segue._compat import pool_snapshot, tensor_at
from segue.backends import make_backend
from segue.backends.base import Forward, GraphReplay
from segue.device import DeviceGraph, get_device
from segue.graph import Trace
from segue.memory.lane import Lane
from segue.shapes.key import ShapeKey


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every arm does. `rungs` ascend; the replays of `timed` are measured, and the submission of `host`."""

    shape: Shape
    device: torch.device
    rungs: tuple[int, ...]
    timed: tuple[int, ...]
    host: int
    num_rounds: int
    num_replays: int
    num_eager: int
    num_host: int


@dataclass(frozen=True, kw_only=True)
class BuildSeconds:
    """Wall time of a build. `warmup` and `capture` are the host's; what is left of `total` is the wait for the device.
    `instantiate` None: not known apart from `capture`, which then includes it."""

    total: float
    warmup: float
    capture: float | None = None
    instantiate: float | None = None


class Build(Protocol):
    """One arm. `build` may be called again after `close`. Owns its recordings; used from one thread."""

    def build(self) -> BuildSeconds: ...

    def replayable(self, tokens: int) -> Callable[[], torch.Tensor]:
        """The hot path for one shape; call it inside `held`."""
        ...

    def held(self) -> AbstractContextManager[Any]: ...

    def describe(self) -> dict[str, Any]:
        """Counts, and bytes of the graph pool."""
        ...

    def pool_segments(self) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


class SegueBuild:
    def __init__(self, model: LeanLlama, plan: Plan, backend: str) -> None:
        self._model = model
        self._plan = plan
        self._backend = backend
        self._lane: Lane | None = None
        self._recorded: dict[int, GraphReplay] = {}

    @property
    def lane(self) -> Lane:
        assert self._lane is not None, "build() comes first"
        return self._lane

    def build(self) -> BuildSeconds:
        start = time.perf_counter()
        lane = self._lane = Lane(get_device(self._plan.device))
        backend = make_backend(self._backend, lane)
        largest_first = self._plan.rungs[::-1]
        forwards: dict[int, Forward] = {n: partial(self._model.forward, n, attention) for n in largest_first}
        largest: Trace | None = None
        warmup = 0.0
        with torch.inference_mode(), lane.exclusive(), lane.capture_pass():
            for tokens in largest_first:
                begun = time.perf_counter()
                _, trace = backend.trace(forwards[tokens], like=largest)
                warmup += time.perf_counter() - begun
                largest = largest or trace
                recorded = backend.record(ShapeKey("prefill", tokens), forwards[tokens], trace)
                assert isinstance(recorded, GraphReplay)
                self._recorded[tokens] = recorded
            synchronize(self._plan.device)
        end = time.perf_counter()
        records = [r.record for r in self._recorded.values()]
        instantiate = sum(r.instantiate_s for r in records)
        return BuildSeconds(
            total=end - start,
            warmup=warmup,
            capture=sum(r.capture_s for r in records) - instantiate,
            instantiate=instantiate,
        )

    def replayable(self, tokens: int) -> Callable[[], torch.Tensor]:
        return self._recorded[tokens].replay

    def segments_of(self, tokens: int) -> list[DeviceGraph]:
        return self._recorded[tokens].recording.segments

    def held(self) -> AbstractContextManager[Any]:
        return self.lane.exclusive()

    def describe(self) -> dict[str, Any]:
        records = [r.record for r in self._recorded.values()]
        nodes = [r.nodes for r in records if r.nodes is not None]
        return {
            "segments": sum(r.segments for r in records),
            "breaks": sum(r.breaks for r in records),
            "nodes": sum(nodes) if nodes else None,
            "pool_bytes": self.lane.reserved_bytes,
            "ledger_pool_bytes": sum(r.pool_bytes for r in records),
            "ledger_driver_bytes": sum(r.driver_bytes for r in records),
        }

    def pool_segments(self) -> list[tuple[int, int]]:
        return self.lane.pool.state().segments

    def close(self) -> None:
        for recorded in self._recorded.values():
            recorded.close()
        self._recorded.clear()
        self.lane.close()
        self._lane = None


class PeerBuild:
    def __init__(self, model: LeanLlama, plan: Plan, wheel: Path | None) -> None:
        self._model = model
        self._plan = plan
        self._peer = import_peer(wheel)
        self._output = torch.empty(plan.rungs[-1], plan.shape.hidden, dtype=plan.shape.dtype, device=plan.device)
        self._stream = torch.cuda.Stream(plan.device)
        self._graphs: dict[int, Any] = {}
        self._attention_into = self._peer.no_graph(capture_stub=_do_nothing)(_attention_into)

    @property
    def version(self) -> str:
        return str(self._peer.__version__)

    def build(self) -> BuildSeconds:
        peer, stream = self._peer, self._stream
        start = time.perf_counter()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                for tokens in self._plan.rungs[::-1]:
                    self._forward(tokens)
            torch.cuda.current_stream().wait_stream(stream)
            warmed = time.perf_counter()
            pool = None
            for tokens in self._plan.rungs[::-1]:
                graph = self._graphs[tokens] = peer.BreakableCUDAGraph(pool=pool)
                pool = graph.pool()
                with peer.breakable_graph(graph, stream=stream):
                    self._forward(tokens)
            synchronize(self._plan.device)
        end = time.perf_counter()
        return BuildSeconds(total=end - start, warmup=warmed - start, capture=end - warmed)

    def _forward(self, tokens: int) -> torch.Tensor:
        return self._output[:tokens].copy_(self._model.forward(tokens, self._attend))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        self._attention_into(q, k, v, out)
        return out

    def replayable(self, tokens: int) -> Callable[[], torch.Tensor]:
        graph, output = self._graphs[tokens], self._output[:tokens]

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def held(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def describe(self) -> dict[str, Any]:
        breaks = self._plan.shape.layers * len(self._graphs)
        return {
            "segments": breaks + len(self._graphs),
            "breaks": breaks,
            "nodes": None,
            "pool_bytes": sum(n for _, n in self.pool_segments()),
        }

    def pool_segments(self) -> list[tuple[int, int]]:
        pool = next(iter(self._graphs.values())).pool()
        return [(int(s["address"]), int(s["total_size"])) for s in pool_snapshot(pool)]

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()


class EagerBuild:
    def __init__(self, model: LeanLlama, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._device = get_device(plan.device)
        self._stream = self._device.take_stream()

    def build(self) -> BuildSeconds:
        start = time.perf_counter()
        with torch.inference_mode(), self._device.on_stream(self._stream):
            for tokens in self._plan.rungs[::-1]:
                self._model.forward(tokens, attention)
        synchronize(self._plan.device)
        total = time.perf_counter() - start
        return BuildSeconds(total=total, warmup=total)

    def replayable(self, tokens: int) -> Callable[[], torch.Tensor]:
        return partial(self._model.forward, tokens, attention)

    def held(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def describe(self) -> dict[str, Any]:
        return {"segments": 0, "breaks": 0, "nodes": None, "pool_bytes": 0}

    def pool_segments(self) -> list[tuple[int, int]]:
        return []

    def close(self) -> None:
        self._device.give_stream_back(self._stream)


class SegmentsAlone(EagerBuild):
    """No arm to build: the segments of a breakable recording submitted with nothing in between. What a replay of breaks
    cannot undercut, however little the breaks do."""

    def __init__(self, model: LeanLlama, plan: Plan, recorded: SegueBuild) -> None:
        super().__init__(model, plan)
        self._recorded = recorded

    def replayable(self, tokens: int) -> Callable[[], Any]:
        submissions = [segment.replay for segment in self._recorded.segments_of(tokens)]

        def submit() -> None:
            for submission in submissions:
                submission()

        return submit


def import_peer(wheel: Path | None) -> Any:
    """The peer as installed, or straight out of its wheel (it is one Python file).

    Raises:
        ModuleNotFoundError: neither is there.
    """
    if wheel is not None and wheel.is_file():
        sys.path.insert(0, str(wheel))
    return importlib.import_module("breakable_cuda_graphs")


def poison(build: Build, device: torch.device) -> None:
    """Fills the graph pool with ones in every bit: NaN as a float, -1 as an integer."""
    for address, nbytes in build.pool_segments():
        tensor_at(address, nbytes, torch.uint8, device, (nbytes,), (1,)).fill_(255)


@contextmanager
def all_held(builds: dict[str, Build]) -> Iterator[None]:
    with ExitStack() as stack:
        for build in builds.values():
            stack.enter_context(build.held())
        yield


def _attention_into(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(plain_attention(q, k, v))


def _do_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    return None
