"""The options of `segue.graph`, checked when they are written down."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from segue.errors import ConfigError
from segue.memory.sizes import parse_bytes
from segue.runners.call_padding import Pad

BACKENDS = ("breakable", "full", "disabled")
CAPTURE = ("lazy", "background")
DEBUG = (None, "forward", "ops")


def _is_one(value: Any, choices: tuple[str | None, ...]) -> bool:
    """Without asking others than texts and None what they equal."""
    return (value is None or isinstance(value, str)) and value in choices


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What can be asked of one `segue.graph`.

    `backend`: ``"breakable"`` (functions marked `@segue.eager_on_graph` run as Python between segments; without marks it is
    one graph), ``"full"`` (always one graph) or ``"disabled"``. `pad`: a `Pad` for each parameter to be padded. `outputs`:
    ``"clone"`` (results are the caller's own), ``"view"`` (a `Lease` of static memory) or a function of the output, such
    as `copy_to(target)`, which is called before the next replay may run and must not keep it. `max_graphs` and
    `memory_budget` (bytes, or "2GiB") bound the recordings of one device. `min_hits`: which call of a kind is recorded.
    `verify`: ``"first"`` or ``"every:N"`` replays are compared with eager. `strict` raises where a call would run eagerly
    (first calls excepted). `inference` runs everything under `torch.no_grad()`, whatever requires grad.

    `capture`: ``"lazy"`` (the call that is due waits for its recording) or ``"background"`` (another thread records in idle
    moments, and calls run eagerly until it has). `debug`, for finding a fault: ``"forward"`` (each call is one eager break,
    on the same static inputs and by the same path as a graph) or ``"ops"`` (a graph for each operation; `segue.bisect`
    compares them one by one).
    """

    backend: str = "breakable"
    pad: Mapping[str, Pad] = field(default_factory=dict)
    outputs: Literal["clone", "view"] | Callable[[Any], Any] = "clone"
    max_graphs: int = 32
    memory_budget: int | str | None = None
    min_hits: int = 2
    verify: str | None = None
    strict: bool = False
    inference: bool = False
    capture: Literal["lazy", "background"] = "lazy"
    debug: Literal["forward", "ops"] | None = None

    def __post_init__(self) -> None:
        if not _is_one(self.backend, BACKENDS):
            raise ConfigError(f"backend is {self.backend!r}; choose one of {', '.join(BACKENDS)}")
        if not _is_one(self.capture, CAPTURE):
            raise ConfigError(f"capture is {self.capture!r}; choose 'lazy' or 'background'")
        if not _is_one(self.debug, DEBUG):
            raise ConfigError(f"debug is {self.debug!r}; choose None, 'forward' or 'ops'")
        if not _is_one(self.outputs, ("clone", "view")) and not callable(self.outputs):
            raise ConfigError(f"outputs is {self.outputs!r}; choose 'clone', 'view', or give a function of the output")
        for name in ("strict", "inference"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.pad, Mapping) or not all(isinstance(pad, Pad) for pad in self.pad.values()):
            raise ConfigError(f"pad is {self.pad!r}; give a Pad a parameter, such as pad={{'x': segue.Pad(ladder=[4, 8])}}")
        for name in ("max_graphs", "min_hits"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "memory_budget")
        if not _is_one(self.verify, (None, "first")) and not re.fullmatch(r"every:[1-9]\d*", str(self.verify)):
            raise ConfigError(f"verify is {self.verify!r}; choose None, 'first' or 'every:N'")

    @property
    def recorder(self) -> str:
        """The name of the backend that records."""
        return "ops" if self.debug == "ops" else "breakable" if self.debug == "forward" else self.backend

    @property
    def budget_bytes(self) -> int | None:
        return None if self.memory_budget is None else parse_bytes(self.memory_budget, "memory_budget")

    @property
    def verify_every(self) -> int:
        """0: never; -1: the first replay of each key; N: each N-th."""
        if self.verify is None:
            return 0
        return -1 if self.verify == "first" else int(self.verify.partition(":")[2])
