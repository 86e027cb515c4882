"""A break of a recording: one eager call between two segments, bound to its captured arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from segue.device.operations import tensors
from segue.graph.breaks import Mark, break_graph, lane_holder, running_body
from segue.graph.bridge import Argument, Constant, Repeated
from segue.graph.modes import Modes, bound
from segue.graph.trace import BreakNote, has_flat_arguments
from segue.graph.tree import Spec, flatten, unflatten


class Break:
    """One eager call between two segments, bound to its captured arguments."""

    __slots__ = ("_args", "_deliver", "_function", "_kwargs", "_leaves", "_out", "_prepare", "_prepared", "_spec", "mark")

    def __init__(
        self,
        mark: Mark,
        modes: Modes | None,
        spec: Spec,
        leaves: list[Any],
        deliver: Callable[[Any], None],
        out: Any,
        *,
        may_prepare: bool,
    ) -> None:
        """`out` is memory that the body may write its result to. `may_prepare`: but for copying a result from elsewhere, a
        replay does nothing beyond the body."""
        self.mark = mark
        self._out = out
        self._prepare = mark.prepare if may_prepare else None
        self._prepared: Callable[[], object] | None = None
        self._function = mark.function if modes is None else bound(mark.function, modes)
        self._spec = spec
        self._leaves = leaves
        self._deliver = deliver
        args, kwargs = unflatten(spec, iter(leaves))
        if out is not None:
            kwargs["out"] = out
        self._args = args
        self._kwargs = kwargs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the body is called with."""
        return tensors(self._leaves)

    @property
    def is_bare(self) -> bool:
        """Whether there is no work in it: `segue.break_graph()`."""
        return self.mark.function is inspect.unwrap(break_graph)

    @property
    def tells_writes(self) -> bool:
        """Whether its mark says what the body writes, by names of tensors: what an object holds is not known."""
        named = self._named()
        leaves = [] if named is None else flatten([named.get(name) for name in self.mark.writes])[0]
        return bool(self.mark.writes) and all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)

    @property
    def written(self) -> list[torch.Tensor]:
        """Those of them that its mark says the body writes; all, where a name there tells no argument of this call."""
        names = self.mark.writes
        named = self._named() if names else {}
        if named is None or not names <= named.keys():
            return self.tensors
        return tensors([flatten(named[name])[0] for name in names])

    @property
    def primes(self) -> bool:
        """Whether what its replays launch primes the graph behind it."""
        return getattr(self._prepared, "primes", False)

    def _named(self) -> dict[str, Any] | None:
        """The arguments by parameter; None where the signature cannot be read."""
        try:
            return inspect.signature(self.mark.function).bind(*self._args, **self._kwargs).arguments
        except (TypeError, ValueError):
            return None

    def replay(self) -> None:
        if lane_holder.get() is None:  # as in an engine: nobody waits
            self._run()
        else:
            with running_body():
                self._run()

    def _run(self) -> None:
        if self._prepared is not None:
            self._prepared()
            return
        result = self._function(*self._args, **self._kwargs)
        self._deliver(result)
        if self._prepare is not None:
            prepared = None
            if result is self._out or self._out is None:
                prepared = self._call_prepare(self._prepare)
            if prepared is not None and not callable(prepared):
                raise TypeError(f"break {self.mark.name}: prepare returned {prepared!r}, which cannot be called")
            self._prepared, self._prepare = prepared, None

    def _call_prepare(self, prepare: Callable[..., Any]) -> Any:
        try:
            inspect.signature(prepare).bind(*self._args, **self._kwargs)
        except TypeError as error:
            raise TypeError(f"break {self.mark.name}: prepare does not take the body's arguments: {error}") from None
        except ValueError:  # it has no signature that can be read
            pass
        return prepare(*self._args, **self._kwargs)


class RebuiltBreak(Break):
    """A break with containers among its arguments: a body may change them, so each replay gets new ones."""

    __slots__ = ()

    def replay(self) -> None:
        args, kwargs = unflatten(self._spec, iter(self._leaves))
        with running_body():
            result = self._function(*args, **kwargs)
        self._deliver(result)


def break_step(
    mark: Mark,
    modes: Modes | None,
    spec: Spec,
    leaves: list[Any],
    deliver: Callable[[Any], None],
    out: Any,
    note: BreakNote,
) -> Break:
    """The step for a break that the trace noted so; `modes` where they are others than the recording's."""
    is_in_place = out is not None or all(map(_is_of_arguments, note.output.leaves))
    kind = Break if has_flat_arguments(spec) else RebuiltBreak
    may_prepare = modes is None and not note.joins and is_in_place
    return kind(mark, modes, spec, leaves, deliver, out, may_prepare=may_prepare)


def _is_of_arguments(leaf: Any) -> bool:
    """Whether a leaf of a break's result is an argument, or None."""
    return isinstance(leaf, (Argument, Repeated)) or (isinstance(leaf, Constant) and leaf.value is None)
