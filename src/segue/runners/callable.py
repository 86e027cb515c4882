"""`segue.graph`: any callable, recorded once for each kind of call and replayed from then on.

This is what the user holds: it looks like what it wraps (a function's signature, a module's attributes, a method of each
object), and it can be asked what it does and what it costs. The way of a call stands in `call_dispatch`
and `call_runner`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from segue._compat import never_compiled
from segue.errors import CaptureError, CaptureNotAllowed
from segue.runners.call_dispatch import CallDispatch, disabled
from segue.runners.call_methods import methods_of
from segue.runners.call_options import Options
from segue.runners.call_report import CallCaptureReport, CallDecision, CallReport, GraphRow
from segue.runners.call_runner import CallRunner
from segue.runners.call_store import Entry


class GraphedCallable:
    """A callable with its recordings; made by `segue.graph`. Owns them, its lanes and their memory until `close`."""

    _function: Any
    _runner: CallRunner
    _dispatch: CallDispatch
    _unbound: GraphedCallable | None = None
    """what the class holds, where this is the wrapper of one object's method"""

    def __init__(self, function: Callable[..., Any], options: Options, unbound: GraphedCallable | None = None) -> None:
        dispatch = CallDispatch(function, getattr(function, "__qualname__", None) or type(function).__qualname__, options)
        self.__dict__.update(_function=function, _dispatch=dispatch, _runner=CallRunner(dispatch))
        if unbound is not None:
            self._unbound = unbound
        if not isinstance(function, torch.nn.Module):
            functools.update_wrapper(self, function, updated=())
            if getattr(function, "__isabstractmethod__", False):
                vars(self)["__isabstractmethod__"] = True

    @never_compiled
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._runner.call(args, kwargs)

    def eager(self, /, *args: Any, **kwargs: Any) -> Any:
        """The plain function, whatever was recorded. Counts nothing."""
        return self._runner.run_eagerly(args, kwargs)

    def explain(self, /, *args: Any, **kwargs: Any) -> CallDecision:
        """What `step(*args, **kwargs)` would do now, and why. Runs nothing and counts nothing.

        Raises:
            TypeError: the callable does not take these arguments.
        """
        with contextlib.suppress(ValueError):  # no signature that can be read
            inspect.signature(self._function, follow_wrapped=False).bind(*args, **kwargs)
        found = self._dispatch.find(args, kwargs)
        axes = found.padded.axes if found.padded is not None else ()
        real, rung = sum(a.real for a in axes), sum(a.rung for a in axes)
        why = self._dispatch.refusal(found)
        if why is not None:
            return CallDecision(None, "disabled", why[0], real, real, why[1])
        assert found.entry is not None
        return CallDecision(
            found.entry.shape, self._dispatch.options.recorder, None, real, rung, "; ".join(found.entry.effects)
        )

    def capture(self, /, *args: Any, **kwargs: Any) -> CallCaptureReport:
        """One real call, recorded now if it can be; `.output` is its answer.

        Raises:
            CaptureNotAllowed: after `freeze`.
        """
        if self._dispatch.is_frozen:
            raise CaptureNotAllowed(f"{self._dispatch.name} was to be captured although step.freeze() was called")
        entry = self._dispatch.find(args, kwargs).entry
        before = None if entry is None else entry.graph
        if entry is not None and entry.graph is None:
            entry.hurry(self._dispatch.options.min_hits)
        report = CallCaptureReport(output=self(*args, **kwargs))
        report.decision = self.explain(*args, **kwargs)
        entry = entry and self._dispatch.find(args, kwargs).entry
        if entry is not None and entry.graph is not None and entry.graph is not before:
            record = entry.graph.record
            report.records.append(record)
            report.seconds = record.warmup_s + record.capture_s
        elif entry is not None and entry.graph is None:
            report.failures.append((entry.shape, CaptureError(f"{entry.reason}: {entry.detail}")))
        return report

    def report(self) -> CallReport:
        """What every recording costs, how calls were answered, and which keys run eagerly and why."""
        runner = self._runner
        entries: list[Entry] = []
        pool_bytes = used_bytes = 0
        evictions, replays = self._dispatch.past_evictions, self._dispatch.past_replays
        for site in list(self._dispatch.sites.values()):
            pool_bytes += site.lane.reserved_bytes
            used_bytes += site.store.used_bytes
            evictions += site.store.evictions
            replays += site.store.replays
            entries += list(site.store.entries.values())
        rows = [row for row in map(_row, entries) if row is not None]
        refused = [(str(e.shape), str(e.reason), e.detail) for e in entries if e.graph is None and e.detail]
        return CallReport(
            name=self._dispatch.name,
            backend=self._dispatch.options.backend,
            rows=tuple(rows),
            replays=replays,
            captures=runner.captures,
            evictions=evictions,
            eager={str(reason): count for reason, count in runner.eager.items()},
            refused=tuple(refused),
            pool_bytes=pool_bytes,
            used_bytes=used_bytes,
            budget_bytes=self._dispatch.options.budget_bytes,
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        if self._dispatch.options.capture == "background":
            for device, site in list(self._dispatch.sites.items()):
                why = site.lane.device.why_not_beside_others()
                if why:
                    yield f"capture='background' is lazy on {device}: {why}"

    def freeze(self) -> None:
        """From now on nothing is recorded: calls without a recording run eagerly (`not_captured`)."""
        self._dispatch.is_frozen = True

    def close(self) -> None:
        """Closes every recording and gives their memory back, that of leased outputs too: read no view of one afterwards.
        Later calls run eagerly (`disabled`)."""
        self._runner.stop()
        self._dispatch.close()

    def __enter__(self) -> GraphedCallable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- being what it wraps ------------------------------------------------------------------------------------------

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module.

        Raises:
            AttributeError: a function is wrapped.
        """
        if not isinstance(self._function, torch.nn.Module):
            raise AttributeError("a function is wrapped")
        return self._function

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__" and isinstance(self.__dict__.get("_function"), torch.nn.Module):
            return inspect.signature(self.module)
        if name.startswith("__") or "_function" not in self.__dict__:
            raise AttributeError(name)
        if name == "module":
            raise AttributeError(f"{self._dispatch.name} wraps a function, not a module")
        return getattr(self.__dict__["_function"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_function", "_dispatch", "_runner"):
            raise AttributeError(f"{name} is an attribute of the wrapper: set that of what it wraps on that itself")
        if self._keeps(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._function, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._function, name)

    def _keeps(self, name: str) -> bool:
        """Whether an attribute that is set is the wrapper's own: a function's are, an object's are not."""
        return name.startswith("__") or isinstance(self._function, (FunctionType, MethodType, BuiltinFunctionType))

    def __get__(self, instance: Any, owner: type | None = None) -> GraphedCallable:
        """A method's own wrapper, one an object, kept with that object (`call_methods`)."""
        if instance is None:
            return self
        try:
            bound: GraphedCallable = instance.__dict__["_segue_methods"][self]
            if bound._function.__self__ is instance:
                return bound
        except (AttributeError, KeyError):
            pass
        return self._bind(instance)

    def _bind(self, instance: Any) -> GraphedCallable:
        if isinstance(self._function, MethodType) or not hasattr(type(self._function), "__get__"):
            return self  # what the class would not bind by itself
        method = MethodType(self._function, instance)
        methods = methods_of(instance)
        if methods is None:
            bound = GraphedCallable(method, replace(self._dispatch.options, backend="disabled"), self)
            bound._dispatch.why_disabled = f"a {type(instance).__name__} has no __dict__ in which to keep recordings"
            return bound
        kept: GraphedCallable = methods.setdefault(self, GraphedCallable(method, self._dispatch.options, self))
        return kept

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedCallable:
        """A wrapper of the copied callable, with no recordings; itself, where its name leads to it, as a function does."""
        if self._is_known_by_name():
            return self
        if self._unbound is not None:
            return self._unbound.__get__(copy.deepcopy(self._function.__self__, memo))
        return _make(copy.deepcopy(self._function, memo), self._dispatch.options)

    def __reduce__(self) -> Any:
        """By its name, where that leads here; otherwise what it wraps, without recordings."""
        if self._unbound is not None:
            return getattr, (self._function.__self__, self._function.__name__)
        return self._dispatch.name if self._is_known_by_name() else (_make, (self._function, self._dispatch.options))

    def _is_known_by_name(self) -> bool:
        try:
            return attrgetter(self._dispatch.name)(sys.modules[self._function.__module__]) is self
        except (AttributeError, KeyError):
            return False

    def __repr__(self) -> str:
        return f"segue.graph({self._dispatch.name}, backend={self._dispatch.options.backend!r})"


class GraphedModule(GraphedCallable, torch.nn.Module):
    """A module with its recordings: in every way but its call and its type it is the module that it wraps. Kept in an
    attribute of another module it is a child of that, with the wrapped module's parameters under their own names."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The module's, so that `isinstance` says what it is."""
        return type(self.__dict__["_function"])

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.module.training

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self

    def _keeps(self, name: str) -> bool:
        return False

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """What `torch.jit.script` takes in its place."""
        return self.module

    def __dir__(self) -> list[str]:
        return sorted({*dir(GraphedCallable), *dir(self.module)})


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: GraphedModule, /, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        result = getattr(module, name)(*args, **kwargs)
        return self if result is module else result

    return method


for _name, _value in vars(torch.nn.Module).items():
    if callable(_value) and not _name.startswith("__"):  # the module's own class may override any of them
        setattr(GraphedModule, _name, _delegate(_name))

_OPERATORS = (
    "bool", "len", "iter", "reversed", "contains", "getitem", "setitem", "delitem", "int", "float", "index",
    "add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "matmul", "rmatmul", "neg",
)  # fmt: skip


@functools.cache
def _with_operators(operators: tuple[str, ...]) -> type[GraphedModule]:
    """Python looks these up in types, so those that a module has are given to a type."""
    return type("GraphedModule", (GraphedModule,), {"__module__": __name__, **{name: _delegate(name) for name in operators}})


def _make(function: Callable[..., Any], options: Options) -> GraphedCallable:
    if not isinstance(function, torch.nn.Module):
        return GraphedCallable(function, options)
    found = tuple([f"__{name}__" for name in _OPERATORS if hasattr(type(function), f"__{name}__")])
    return (_with_operators(found) if found else GraphedModule)(function, options)


_RUN_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _row(entry: Entry) -> GraphRow | None:
    graph = entry.graph
    if graph is None:
        return None
    difference = "" if graph.difference is None else f"{graph.difference.traced} -> {graph.difference.captured}"
    return GraphRow(graph.record, entry.replays, entry.effects, entry.verified, entry.unverified, difference)


def graph(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Wraps a callable or module so that its device work is recorded and replayed. Also a decorator, bare or with options,
    on functions and methods. See `Options` for what can be given.

    Raises:
        TypeError, ConfigError: an option is unknown or invalid; what is given is no plain callable.
    """
    known = [field.name for field in fields(Options)]
    for name in options:
        if name not in known:
            raise TypeError(f"segue.graph has no option {name!r}: there are {', '.join(known)}")
    checked = Options(**options)
    if function is None:
        return lambda f: graph(f, **options)
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(graph(function.__func__, **options))
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise TypeError(f"segue.graph wraps modules, not their classes: give an object of {function.__qualname__}")
    if not callable(function):
        raise TypeError(f"segue.graph wraps callables, not {type(function).__name__}")
    body = function.forward if isinstance(function, torch.nn.Module) else function
    if any(runs_later(body) for runs_later in _RUN_LATER):
        raise TypeError(
            f"{getattr(body, '__qualname__', body)} is a coroutine or generator, its body runs after its call has returned: "
            "give segue.graph the function that does the device work"
        )
    return _make(function, checked)


__all__ = ["GraphedCallable", "disabled", "graph"]
