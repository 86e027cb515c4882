"""The configuration, and its resolution: one pure step at start-up, after which nothing changes.

`GraphConfig` is what a user asks for: per phase a backend, a ladder and limits, most of them "auto". `resolve` turns
it, with what the engine knows (`PhaseFacts`) and what the attention tolerates (`GraphSupport`), into a `ResolvedConfig`
that holds only plain values. Each decision made on the way is kept as a `Choice` with its reason: an "auto" that was
settled, a setting that was *downgraded*, a notice. `explain` prints them at start-up; in strict mode a downgrade
raises.

Everything is frozen, so a setting changed after resolution is an error of Python's, never silently ignored. Invalid
values are refused when they are written down (`ConfigError` naming field, value and what is allowed); contradictions
that need the engine's facts, when resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any, Literal, get_args

from segue.compilers import COMPILERS, default_compiler
from segue.errors import ConfigError, StrictModeError
from segue.memory.sizes import parse_bytes
from segue.observe.report import format_bytes
from segue.shapes import ladder as ladders
from segue.shapes.key import Phase

OnFailure = Literal["raise", "skip", "eager", "shrink"]
OnBudget = Literal["eager", "rebuild"]
Capture = Literal["startup", "lazy", "background", "manual"]
Debug = Literal["forward", "ops"]
Axis = Literal["tokens", "requests"]

PHASES: tuple[Phase, ...] = get_args(Phase)
BACKENDS = ("auto", "full", "breakable", "tc_piecewise", "disabled")
LADDERS = ("auto", *ladders.DECODE_PRESETS)
DEVICES = ("cuda", "cpu")
TOKENS_PER_REQUEST_SLOT = 512


class GraphSupport(IntEnum):
    """What an attention backend can do inside a full graph; the minimum over a model's layers counts."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseConfig:
    """What is asked for one phase.

    `ladder` is "auto", a preset's name or a list of sizes. `max_size` is the largest size to capture (None: the largest
    that can occur). It is a rung of every ladder: a list that stops short of it is extended, and sizes beyond it are
    dropped. To capture nothing beyond a list, set `max_size` to its last. `request_slots` bounds the requests of a full
    prefill. A shape of more than `max_padding` times the real tokens is not used. `on_failure` says what a failed capture
    does: raise, skip the shape, run the phase eagerly, or shrink the ladder. `compiler` is that of
    `tc_piecewise`: "inductor", or "eager", which compiles nothing.
    """

    backend: str = "auto"
    ladder: str | tuple[int, ...] = "auto"
    max_size: int | None = None
    request_slots: int | None = None
    max_padding: float = 2.0
    num_warmups: int = 1
    on_failure: OnFailure = "raise"
    compiler: str = "auto"

    def __post_init__(self) -> None:
        _check_choice("backend", self.backend, BACKENDS)
        if isinstance(self.ladder, str):
            _check_choice("ladder", self.ladder, (*LADDERS, "a list of sizes"))
        else:
            object.__setattr__(self, "ladder", ladders.custom(_sizes(self.ladder)))
        _check_at_least("max_size", self.max_size, 1)
        _check_at_least("request_slots", self.request_slots, 1)
        _check_at_least("num_warmups", self.num_warmups, 0)
        if isinstance(self.max_padding, bool) or not isinstance(self.max_padding, (int, float)) or not self.max_padding >= 1:
            raise ConfigError(f"max_padding is {self.max_padding!r}; it must be a number of at least 1.0")
        _check_choice("on_failure", self.on_failure, get_args(OnFailure))
        _check_choice("compiler", self.compiler, COMPILERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """What is asked of every phase, and of graphs as a whole. A backend's name stands for a `PhaseConfig` with it.

    `capture` says when shapes are recorded. `strict` raises where a call would run eagerly or a setting would be
    downgraded. `debug` runs the whole forward ("forward"), or every operation ("ops"), as eager breaks on the replay
    path. `memory_budget` bounds what graphs may cost: bytes, or text such as "2GiB". Shapes beyond it run eagerly;
    `on_budget` "rebuild" makes the lane anew without those that grew its pool too far, so that smaller ones fit. With
    `lend_pool` an engine's eager passes run in the pool that recordings leave idle (see `memory.loan`).
    """

    prefill: PhaseConfig | str = field(default_factory=PhaseConfig)
    decode: PhaseConfig | str = field(default_factory=PhaseConfig)
    target_verify: PhaseConfig | str = field(default_factory=PhaseConfig)
    draft_prefill: PhaseConfig | str = field(default_factory=PhaseConfig)
    draft_decode: PhaseConfig | str = field(default_factory=PhaseConfig)
    draft_extend: PhaseConfig | str = field(default_factory=PhaseConfig)
    denoise: PhaseConfig | str = field(default_factory=PhaseConfig)
    call: PhaseConfig | str = field(default_factory=PhaseConfig)
    capture: Capture = "startup"
    strict: bool = False
    debug: Debug | None = None
    memory_budget: int | str | None = None
    on_budget: OnBudget = "eager"
    lend_pool: bool = False

    def __post_init__(self) -> None:
        for phase in PHASES:
            object.__setattr__(self, phase, _phase_config(phase, getattr(self, phase)))
        _check_choice("capture", self.capture, get_args(Capture))
        _check_choice("strict", self.strict, (False, True))
        _check_choice("lend_pool", self.lend_pool, (False, True))
        _check_choice("debug", self.debug, (None, *get_args(Debug)))
        _check_choice("on_budget", self.on_budget, get_args(OnBudget))
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "memory_budget")

    @classmethod
    def off(cls) -> GraphConfig:
        """Every phase eager."""
        disabled: dict[str, Any] = dict.fromkeys(PHASES, "disabled")
        return cls(**disabled)

    def phase(self, phase: Phase) -> PhaseConfig:
        """What is asked for one phase."""
        found: PhaseConfig = getattr(self, phase)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseFacts:
    """What the engine knows about a phase it runs.

    `max_size` is the largest batch that can occur, counted along `axis`: requests for decode, tokens (the chunk size)
    for prefill, None for phases without a ladder. `width` is the tokens each request brings where batches are uniform.
    What is left at None follows from the phase.
    """

    max_size: int
    default_backend: str | None = None
    axis: Axis | None = None
    width: int = 1
    request_slots: int | None = None

    def __post_init__(self) -> None:
        _check_at_least("max_size", self.max_size, 1)
        _check_at_least("width", self.width, 1)
        _check_at_least("request_slots", self.request_slots, 1)
        _check_choice("default_backend", self.default_backend, (None, *BACKENDS[1:]))
        _check_choice("axis", self.axis, (None, *get_args(Axis)))


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of `resolve`: what was asked, what came of it, and why."""

    phase: Phase
    field: str
    asked: str
    got: str
    why: str
    kind: Literal["auto", "downgrade", "notice"] = "auto"

    @property
    def is_downgrade(self) -> bool:
        return self.kind == "downgrade"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedPhase:
    """What one phase does. `ladder` ascends; empty where the phase is disabled or captures exact shapes.

    `request_slots` is set for a full graph whose rungs count tokens, `compiler` for `tc_piecewise`, None elsewhere.
    """

    phase: Phase
    backend: str
    ladder: tuple[int, ...]
    request_slots: int | None
    max_padding: float
    num_warmups: int
    on_failure: OnFailure
    compiler: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """Plain values for every phase the engine runs; made by `resolve`, once."""

    phases: tuple[ResolvedPhase, ...]
    choices: tuple[Choice, ...] = field(default=(), compare=False)
    capture: Capture = "startup"
    strict: bool = False
    debug: Debug | None = None
    memory_budget_bytes: int | None = None
    on_budget: OnBudget = "eager"
    lend_pool: bool = False

    def phase(self, phase: Phase) -> ResolvedPhase:
        """What one phase does. Raises `ConfigError` for a phase that was not resolved."""
        for found in self.phases:
            if found.phase == phase:
                return found
        known = ", ".join(found.phase for found in self.phases)
        raise ConfigError(f"phase is {phase!r}; this engine runs {known or 'none'}")

    def explain(self) -> str:
        """One aligned line a phase, then one a choice: what start-up prints."""
        budget = "none" if self.memory_budget_bytes is None else format_bytes(self.memory_budget_bytes)
        head = f"graphs: capture {self.capture}, strict {self.strict}, debug {self.debug}, memory budget {budget}"
        head += ", pool lent to eager passes" if self.lend_pool else ""
        phases = _aligned(_phase_cells(phase) for phase in self.phases)
        choices = _aligned(
            (choice.kind, choice.phase, choice.field, f"{choice.asked} -> {choice.got}", choice.why)
            for choice in self.choices
        )
        return "\n".join((head, *phases, *choices))


def resolve(
    config: GraphConfig, *, phases: Mapping[Phase, PhaseFacts], device_type: str, support: GraphSupport
) -> ResolvedConfig:
    """Settle every "auto" for the phases an engine runs, on a device, for what its attention supports.

    Pure. Raises `ConfigError` where a full graph is required and the attention never supports one, and
    `StrictModeError` where strict mode is on and a setting had to be downgraded.
    """
    _check_choice("device_type", device_type, DEVICES)
    choices: list[Choice] = []
    resolved = tuple(
        _resolve_phase(_Question(phase, config.phase(phase), phases[phase], device_type, support), choices)
        for phase in PHASES
        if phase in phases
    )
    for phase in PHASES:
        asked = config.phase(phase)
        if phase not in phases and asked not in (PhaseConfig(), PhaseConfig(backend="disabled")):
            choices.append(Choice(phase, "backend", asked.backend, "unused", "there is no such phase here", "notice"))
    downgrades = [choice for choice in choices if choice.is_downgrade]
    if config.strict and downgrades:
        lines = "\n".join(f"  {c.phase}.{c.field}: {c.asked} -> {c.got}: {c.why}" for c in downgrades)
        raise StrictModeError(
            f"strict mode: settings would be downgraded; ask for what is possible, or set strict=False\n{lines}"
        )
    budget = config.memory_budget
    return ResolvedConfig(
        phases=resolved,
        choices=tuple(choices),
        capture=config.capture,
        strict=config.strict,
        debug=config.debug,
        memory_budget_bytes=None if budget is None else parse_bytes(budget, "memory_budget"),
        on_budget=config.on_budget,
        lend_pool=config.lend_pool,
    )


@dataclass(frozen=True, slots=True)
class _Question:
    """All that the decisions for one phase depend on."""

    phase: Phase
    config: PhaseConfig
    facts: PhaseFacts
    device_type: str
    support: GraphSupport

    @property
    def axis(self) -> Axis | None:
        if self.facts.axis is not None or self.phase in ("denoise", "call"):
            return self.facts.axis
        return "tokens" if self.phase in ("prefill", "draft_prefill") else "requests"

    @property
    def default_backend(self) -> str:
        return self.facts.default_backend or ("breakable" if self.axis == "tokens" else "full")

    @property
    def required_support(self) -> GraphSupport:
        """What a full graph of this phase asks of the attention. Phases without a ladder bring their own attention."""
        if self.axis is None:
            return GraphSupport.NEVER
        if self.axis == "tokens":
            return GraphSupport.ALWAYS
        return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if self.facts.width == 1 else GraphSupport.UNIFORM_BATCH

    def choice(
        self, name: str, asked: object, got: object, why: str, kind: Literal["auto", "downgrade", "notice"] = "auto"
    ) -> Choice:
        return Choice(self.phase, name, str(asked), str(got), why, kind)


def _resolve_phase(question: _Question, choices: list[Choice]) -> ResolvedPhase:
    config = question.config
    backend = _resolve_backend(question, choices)
    ladder: tuple[int, ...] = ()
    slots: int | None = None
    padding = float(config.max_padding)
    if backend != "disabled" and question.axis is not None:
        ladder = _resolve_ladder(question, choices)
        padding = _resolve_padding(question, ladder, choices)
        if backend == "full" and question.axis == "tokens":
            slots = _resolve_slots(question, choices)
    return ResolvedPhase(
        phase=question.phase,
        backend=backend,
        ladder=ladder,
        request_slots=slots,
        max_padding=padding,
        num_warmups=config.num_warmups,
        on_failure=config.on_failure,
        compiler=_resolve_compiler(question, choices) if backend == "tc_piecewise" else None,
    )


def _resolve_backend(question: _Question, choices: list[Choice]) -> str:
    asked, support = question.config.backend, question.support
    wanted = question.default_backend if asked == "auto" else asked
    if wanted == "full" and support < question.required_support:
        if asked == "full" and support is GraphSupport.NEVER:
            raise ConfigError(
                f"{question.phase}.backend is 'full', but the model's attention supports full graphs NEVER; choose "
                "'breakable', 'disabled' or 'auto', or another attention backend"
            )
        why = f"a full graph needs attention support {question.required_support.name}, this model has {support.name}"
        choices.append(question.choice("backend", asked, "breakable", why, "downgrade"))
        return "breakable"
    if asked == "auto":
        choices.append(question.choice("backend", asked, wanted, "the default of this phase"))
    elif asked == "full" and question.axis == "tokens":
        why = "full prefill graphs are experimental; the alternative is 'breakable', the default"
        choices.append(question.choice("backend", asked, wanted, why, "notice"))
    return wanted


def _resolve_compiler(question: _Question, choices: list[Choice]) -> str:
    asked = question.config.compiler
    if asked != "auto":
        return asked
    compiler = default_compiler(question.device_type)
    why = "it makes CUDA kernels" if compiler == "inductor" else f"no compiler's code is recorded on {question.device_type}"
    choices.append(question.choice("compiler", asked, compiler, why))
    return compiler


def _resolve_ladder(question: _Question, choices: list[Choice]) -> tuple[int, ...]:
    asked, ceiling = question.config.ladder, _ceiling(question, choices)
    if isinstance(asked, tuple):
        return _fit_custom(question, asked, ceiling, choices)
    if asked != "auto":
        presets = ladders.PREFILL_PRESETS if question.axis == "tokens" else ladders.DECODE_PRESETS
        return presets[asked](ceiling)
    if question.axis == "tokens":
        ladder = ladders.prefill_ladder(question.device_type, ceiling)
    else:
        ladder = ladders.decode_ladder(question.device_type, ceiling)
    why = f"the preset on {question.device_type}, up to {ceiling} {question.axis}"
    choices.append(question.choice("ladder", asked, _span(ladder), why))
    return ladder


def _ceiling(question: _Question, choices: list[Choice]) -> int:
    asked, most = question.config.max_size, question.facts.max_size
    if asked is None:
        return most
    if asked > most:
        why = f"this engine never runs more than {most} {question.axis}"
        choices.append(question.choice("max_size", asked, most, why, "notice"))
    return min(asked, most)


def _fit_custom(question: _Question, asked: tuple[int, ...], ceiling: int, choices: list[Choice]) -> tuple[int, ...]:
    fitted = ladders.custom((size for size in asked if size < ceiling), ceiling)
    if fitted != asked:
        why = f"rungs end at {ceiling} {question.axis}, the largest batch or max_size, which is always one"
        choices.append(question.choice("ladder", _span(asked), _span(fitted), why, "notice"))
    return fitted


def _resolve_padding(question: _Question, ladder: tuple[int, ...], choices: list[Choice]) -> float:
    """`max_padding`, raised to the widest step of an automatic ladder, or sizes just above a rung would run eagerly."""
    asked = question.config.max_padding
    step = max((high / (low + 1) for low, high in pairwise(ladder)), default=1.0)
    if question.config.ladder != "auto" or step <= asked:
        return float(asked)
    got = float(-(-step // 1))
    choices.append(question.choice("max_padding", asked, got, f"the automatic ladder's rungs lie up to {got:g}x apart"))
    return got


def _resolve_slots(question: _Question, choices: list[Choice]) -> int:
    asked = question.config.request_slots
    if asked is not None:
        return asked
    if question.facts.request_slots is not None:
        slots, why = question.facts.request_slots, "the engine's default"
    else:
        slots = max(question.facts.max_size // TOKENS_PER_REQUEST_SLOT, 1)
        why = f"one for every {TOKENS_PER_REQUEST_SLOT} of {question.facts.max_size} tokens"
    choices.append(question.choice("request_slots", "auto", slots, why))
    return slots


def _phase_config(phase: Phase, value: PhaseConfig | str) -> PhaseConfig:
    if isinstance(value, PhaseConfig):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{phase} is {value!r}; give a PhaseConfig or one of {', '.join(BACKENDS)}")
    try:
        return PhaseConfig(backend=value)
    except ConfigError as error:
        raise ConfigError(f"{phase}: {error}") from None


def _sizes(value: Any) -> Iterable[int]:
    if not isinstance(value, Iterable):
        raise ConfigError(f"ladder is {value!r}; give a list of sizes or one of {', '.join(LADDERS)}")
    return value


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(map(str, allowed))}")


def _check_at_least(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}")


def _phase_cells(phase: ResolvedPhase) -> tuple[str, ...]:
    if phase.backend == "disabled":
        return (phase.phase, "disabled", "runs eagerly")
    rungs = f"rungs {_span(phase.ladder)}" if phase.ladder else "exact shapes"
    slots = "" if phase.request_slots is None else f", {phase.request_slots} request slots"
    return (
        phase.phase,
        phase.backend if phase.compiler is None else f"{phase.backend} ({phase.compiler})",
        rungs + slots,
        f"padding up to {phase.max_padding:g}x, warm-ups {phase.num_warmups}, on failure {phase.on_failure}",
    )


def _span(ladder: tuple[int, ...]) -> str:
    if len(ladder) <= 4:
        return ",".join(map(str, ladder))
    return f"{ladder[0]},{ladder[1]}..{ladder[-1]} ({len(ladder)})"


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    columns = range(max(map(len, table), default=0))
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in columns]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
