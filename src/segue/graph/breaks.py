"""Eager breaks: functions that run as ordinary Python between two segments, at every replay.

`@eager_on_graph` marks a function or method. The mark speaks to recordings that are segmented; elsewhere it is a plain
call: outside capture, under `full` (whose recording holds the body), and inside another break. So a model carries its
marks for good and every backend sees the same model.

Who is listening stands in a context variable, never in a global: a *handler* is set while a forward pass is traced or
recorded, and it is unset while a break's body runs. With none set, the mark costs one context look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from segue._compat import never_compiled, read_while_compiling
from segue.graph.context import setting

P = ParamSpec("P")
R = TypeVar("R")


class Shelf:
    """What compilers are given, as attributes: their guards must find it again where they found it first."""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """One marked function. `static` names arguments that are constants; `writes` names arguments that the body writes;
    `fake` gives the result's shapes to compilers."""

    function: Callable[..., Any]
    name: str
    static: frozenset[str]
    writes: frozenset[str]
    fake: Callable[..., Any] | None
    out_position: int | None
    """where the parameter ``out`` stands, None where there is none"""
    prepare: Callable[..., Callable[[], object] | None] | None = None
    """answers what replays call in its place"""
    stand_ins: Shelf = field(default_factory=Shelf)
    """functions that take its place while a compiler reads a forward pass, one for each call in it"""

    def can_take_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the function has a parameter ``out`` that this call leaves free."""
        return self.out_position is not None and "out" not in kwargs and len(args) <= self.out_position


class BreakHandler(Protocol):
    """What a trace or a recording does where it meets a break."""

    def on_break(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


_handler: ContextVar[BreakHandler | None] = ContextVar("segue_break_handler", default=None)


around_bodies: ContextVar[Callable[[Mark, list[Any]], AbstractContextManager[Any]] | None] = ContextVar(
    "segue_around_bodies", default=None
)
"""entered around each body in a trace, told the leaves of its arguments"""


class Splitter(Protocol):
    """What stands for breaks while a compiler reads a forward pass. `call` is the attribute of `calls` that `current()`
    answers with."""

    call: str

    def stand_in(self, mark: Mark) -> str:
        """The attribute of the mark's `stand_ins` that takes its next call."""
        ...


_splitter: ContextVar[Splitter | None] = ContextVar("segue_splitter", default=None)


@read_while_compiling
def is_splitting() -> bool:
    """Whether a compiler reads this for `splitting`; false when the function runs."""
    return _splitter.get() is not None


def splitting(splitter: Splitter | None) -> AbstractContextManager[None]:
    """What is compiled inside meets `splitter` where it calls marked functions; with None it meets the functions."""
    return setting(_splitter, splitter)


@overload
def eager_on_graph(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def eager_on_graph(
    *,
    static: Sequence[str] = (),
    writes: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    prepare: Callable[..., Callable[[], object] | None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def eager_on_graph(
    function: Callable[..., Any] | None = None,
    /,
    *,
    static: Sequence[str] = (),
    writes: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    prepare: Callable[..., Callable[[], object] | None] | None = None,
) -> Any:
    """Marks a function or method as an eager break. Bare, or with options.

    Arguments and results may be any nesting of tensors and plain values. The body runs once in each warm-up and once in
    each replay, never while a graph is captured; it gets the live tensors at their captured addresses, and its result
    is copied to where the next segment reads it (a function with a parameter ``out`` that returns it saves the copy,
    where it returns one tensor). What it returns must have the structure, shapes, dtypes and plain values of the
    warm-up, otherwise `BreakOutputError` is raised. Plain arguments are those of the capture: read live values from
    `current()`, or name constants in `static`.

    Args:
        static: names of parameters whose plain values never change.
        writes: names of parameters whose tensors the body writes (needed to verify replays).
        fake: takes the same arguments, returns tensors of the result's shape and dtype; for compilers.
        prepare: for a body that launches the same kernels on the same tensors at every replay. It is called once, behind
            the body's first run in a replay and with the same arguments (``out`` among them), and returns a function of no
            arguments that later replays call in the body's place, or None. It is asked only where the result needs no copy:
            written to ``out``, an argument, or None.

    Raises:
        ValueError: `static` or `writes` names no parameter of the function; `prepare` or `fake` cannot be called.
    """
    if function is None:
        return lambda f: _mark(f, static, writes, fake, prepare)
    return _mark(function, static, writes, fake, prepare)


def _mark(
    function: Callable[..., Any],
    static: Sequence[str],
    writes: Sequence[str],
    fake: Callable[..., Any] | None,
    prepare: Callable[..., Callable[[], object] | None] | None,
) -> Callable[..., Any]:
    if not callable(function) or isinstance(function, type):
        what = "classes" if callable(function) else type(function).__name__
        raise TypeError(f"eager_on_graph marks functions and methods, not {what}")
    names = _parameters(function)
    for option, called in (("prepare", prepare), ("fake", fake)):
        if called is not None and not callable(called):
            raise ValueError(f"@eager_on_graph({option}=...) is {called!r}, which cannot be called")
    for option, given in (("static", static), ("writes", writes)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            example = [given if isinstance(given, str) else "x"]
            raise ValueError(f"@eager_on_graph({option}=...) is {given!r}; give names of parameters, such as {example}")
        for name in given:
            if names is not None and name not in names:
                raise ValueError(
                    f"@eager_on_graph({option}=...) names {name!r}, and {_name(function)} has no such parameter"
                )
    out_position = names.index("out") if names is not None and "out" in names else None
    mark = Mark(function, _name(function), frozenset(static), frozenset(writes), fake, out_position, prepare)

    @read_while_compiling
    def name_of_stand_in() -> str:
        splitter = _splitter.get()
        return "" if splitter is None else splitter.stand_in(mark)

    stand_ins = mark.stand_ins

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_splitting():
            return getattr(stand_ins, name_of_stand_in())(args, kwargs)
        return met(mark, args, kwargs)

    return call


@never_compiled
def met(mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of the marked function, as calling it would be."""
    handler = _handler.get()
    return mark.function(*args, **kwargs) if handler is None else handler.on_break(mark, args, kwargs)


met._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor inlined into what a caller compiles: it splits there


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _parameters(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of the parameters; None where any keyword is taken or the signature cannot be read."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return tuple(parameters)


@eager_on_graph
def break_graph() -> None:
    """Splits a segmented recording here, with no work in between. A plain no-op elsewhere."""


def handling(handler: BreakHandler | None) -> AbstractContextManager[None]:
    """Breaks met inside go to `handler`; None makes them plain calls."""
    return setting(_handler, handler)


class LaneHolder(Protocol):
    """Whose lock is held while bodies run. `num_aside` counts those under way: their Python may wait for other threads."""

    num_aside: int


lane_holder: ContextVar[LaneHolder | None] = ContextVar("segue_lane_holder", default=None)


class running_body:
    """Inside, a break's body runs, or the callable itself, in a thread that holds a lane."""

    __slots__ = ("_holder",)

    def __enter__(self) -> None:
        self._holder = lane_holder.get()
        if self._holder is not None:
            self._holder.num_aside += 1

    def __exit__(self, *_: object) -> None:
        if self._holder is not None:
            self._holder.num_aside -= 1


# -- the live call ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """The live call, as a break's body sees it: `args` and `kwargs` of a wrapped callable, `batch` in an engine."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    batch: Any = None


_current: ContextVar[Call | None] = ContextVar("segue_current_call", default=None)


calls = Shelf()
"""the live call of each forward pass that is being compiled"""


@read_while_compiling
def _name_of_call() -> str:
    splitter = _splitter.get()
    return "" if splitter is None else splitter.call


def current() -> Call:
    """The live call that is being traced, recorded or replayed.

    Raises:
        LookupError: no call is under way.
    """
    call: Call | None = getattr(calls, _name_of_call()) if is_splitting() else _current.get()
    if call is None:
        raise LookupError("segue.current() was read outside a call that segue runs")
    return call


def is_calling() -> bool:
    """Whether `current()` has an answer."""
    return _is_compiled_call() if is_splitting() else _current.get() is not None


@read_while_compiling
def _is_compiled_call() -> bool:
    return _current.get() is not None


def calling(call: Call) -> AbstractContextManager[None]:
    """`current()` is `call` inside."""
    return setting(_current, call)
