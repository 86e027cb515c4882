"""Split points: how a compiler sees the breaks of a forward pass, and how the program it makes comes back to them.

While Dynamo reads a forward pass, a call of a marked function is replaced by a *stand-in*, a few lines of Python made for
this very break: they take its arguments apart, call `split_point` with the tensors and numbers among them, and build the
result. `split_point` is opaque: one node of the graph, whose results the compiler knows by a fake implementation alone.
Structure, constants and objects never enter the graph, so a break may take and return what it may under `breakable`.

The fake is the user's (``fake=``) or is derived from what an eager run showed: a size of the result that some argument
has as well, where it depends on the shape, is that argument's; every other number is a constant. That is a guess, so it
is compared with what the break really returns, for every shape, before that shape is recorded: exact or refused.

When the program runs, each node is the call of the marked function that it stands for, so whoever handles breaks
(`graph.breaks`) meets the same calls as in the forward pass itself.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from segue._compat import data_address, tracing_attempt, without_modes
from segue.device.watch import HostReads, describe_line
from segue.errors import CaptureError, TraceMismatchError
from segue.graph.breaks import Mark, met
from segue.graph.bridge import Argument, Constant, External, Leaf, Repeated
from segue.graph.guard import is_capturing
from segue.graph.trace import BreakNote
from segue.graph.tree import Spec, flatten, same_value, unflatten

_NUMBERS_AND_NAMES = (int, float, bool, str, type(None))
_ADVICE = "or record this phase with backend='breakable'"

Split = Callable[..., tuple[Any, ...]]


class OutdatedError(Exception):
    """A forward pass is compiled anew, and what is known of its breaks comes from another shape."""


class SplitPoints:
    """The breaks of one forward pass in their order, learnt from a run of it; for one program. A `Splitter`, of which
    `call` is a part. Where `is_aliasing_seen` is false, the compiler takes every result for memory of its own.

    Raises:
        CaptureError: a break cannot be a split point; it is named.
    """

    def __init__(self, breaks: Sequence[BreakNote], device: torch.device, call: str, *, is_aliasing_seen: bool) -> None:
        self._sites = [_Site(number, note, device) for number, note in enumerate(breaks)]
        self._attempt: Any = None
        self._next = 0
        self.call = call
        self.is_used = False
        """whether a program was made with them; another one, for a shape that this does not fit, needs its own"""
        self.failure: Exception | None = None
        """what went wrong inside the compiler, which would wrap it in an error of its own"""
        if not is_aliasing_seen:
            for site in self._sites:
                site.refuse_shared_results()

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def has_objects(self) -> bool:
        """Whether a break takes arguments that do not pass through the program; `renew` them for every shape."""
        return any(site.objects for site in self._sites)

    def renew(self, breaks: Sequence[BreakNote]) -> None:
        """Takes such arguments over from another run."""
        for site, note in zip(self._sites, breaks, strict=False):
            site.renew(note)

    def stand_in(self, mark: Mark) -> str:
        if self.is_used:
            self.failure = OutdatedError()
            raise self.failure
        attempt = tracing_attempt()
        if attempt is not self._attempt:
            self._attempt, self._next = attempt, 0
        number, self._next = self._next, self._next + 1
        site = self._sites[number] if number < len(self._sites) else None
        if site is None or site.mark is not mark:
            expected = "no further break" if site is None else site.mark.name
            self.failure = TraceMismatchError(
                f"break {number} that the compiler met is {mark.name}, where the eager run met {expected}: the order of "
                "eager breaks must not depend on whether the pass is compiled",
                operation=mark.name,
            )
            raise self.failure
        return site.stand_in

    def fake(self, number: int, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the compiler takes the results of a break for."""
        try:
            return self._sites[number].fake(leaves)
        except CaptureError as error:
            self.failure = error
            raise

    def calling(self, number: int) -> Split:
        """What the program calls for the node `number`."""
        return self._sites[number].call


reading: ContextVar[SplitPoints | None] = ContextVar("segue_split_points", default=None)
"""whose split points a compiler meets"""


def split_point(number: int, *leaves: Any) -> tuple[Any, ...]:
    """The opaque operator. It runs with fake tensors alone: in a program that runs, another function stands for it."""
    points = reading.get()
    assert points is not None, "a split point runs outside the program that it is a part of"
    return points.fake(number, leaves)


class _Site:
    """One break. `objects` are the leaves of its arguments that do not pass through the program, by their place."""

    def __init__(self, number: int, note: BreakNote, device: torch.device) -> None:
        self.mark = note.mark
        self._number = number
        self._arguments = note.arguments
        self._output = note.output
        self._location = describe_line(note.location)
        self._device = device
        self._num_leaves = len(_paths(note.arguments, "x"))
        self.objects: dict[int, Any] = {}
        self.renew(note)
        self._through = [i for i in range(self._num_leaves) if i not in self.objects]
        self._results = [i for i, leaf in enumerate(note.output.leaves) if self._is_result(leaf)]
        self._recipes: list[_Recipe] | None = None
        self.stand_in = f"stand_in_{id(self)}"
        """the attribute of the mark's stand-ins that this break's is"""
        setattr(self.mark.stand_ins, self.stand_in, self._make_stand_in())
        weakref.finalize(self, delattr, self.mark.stand_ins, self.stand_in)

    def renew(self, note: BreakNote) -> None:
        self.objects = {i: v for i, v in note.scalars.items() if not isinstance(v, _NUMBERS_AND_NAMES)}

    def refuse_shared_results(self) -> None:
        leaves = self._output.leaves
        shared = len(self._output.fresh) > len(self._output.bridges)
        if shared or any(isinstance(leaves[i], (Argument, External)) for i in self._results):
            raise self._error(
                "returns memory that it shares with an argument, another result or a lasting tensor, which a compiler would "
                "take for memory of its own: return a copy"
            )

    @staticmethod
    def _is_result(leaf: Leaf) -> bool:
        """Whether the leaf comes out of the node: no constant, no earlier one, and none of the arguments as it is."""
        return not isinstance(leaf, (Constant, Repeated)) and not (isinstance(leaf, Argument) and leaf.is_whole)

    # -- inside the compiler -------------------------------------------------------------------------------------------

    def _make_stand_in(self) -> Callable[[Any, Any], Any]:
        try:
            paths = _paths(self._arguments, "args", "kwargs")
        except TypeError as error:
            raise self._error(str(error)) from None
        names: dict[str, Any] = {"split_point": split_point}
        given = "".join(f", {paths[i]}" for i in self._through)
        leaves: list[str] = []
        for i, leaf in enumerate(self._output.leaves):
            leaves.append(
                leaves[leaf.first] if isinstance(leaf, Repeated)
                else f"out[{self._results.index(i)}]" if i in self._results
                else paths[leaf.leaf] if isinstance(leaf, Argument)
                else _literal(leaf.value, names)  # type: ignore[union-attr]
            )  # fmt: skip
        try:
            result = _expression(self._output.spec, iter(leaves), names)
        except TypeError as error:
            raise self._error(str(error)) from None
        source = f"def stand_in(args, kwargs):\n    out = split_point({self._number}{given})\n    return {result}\n"
        exec(compile(source, f"<split point {self._number}: {self.mark.name}>", "exec"), names)
        made: Callable[[Any, Any], Any] = names["stand_in"]
        return made

    def fake(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.mark.fake is not None:
            args, kwargs = unflatten(self._arguments, iter(self._all(leaves)))
            results, spec = flatten(self.mark.fake(*args, **kwargs))
            if spec != self._output.spec:
                raise self._error(f"has a fake= that returns {spec!r}, and it returned {self._output.spec!r} itself")
            return tuple([results[i] for i in self._results])
        if self._recipes is None:
            notes = self._output.leaves
            self._recipes = [_Recipe.derived(notes[i], leaves) for i in self._results]
        return tuple([recipe.make(leaves, self._device) for recipe in self._recipes])

    # -- in the program ------------------------------------------------------------------------------------------------

    def call(self, *leaves: Any) -> tuple[Any, ...]:
        everything = self._all(leaves)
        args, kwargs = unflatten(self._arguments, iter(everything))
        results, spec = flatten(met(self.mark, args, kwargs))
        taken = [results[i] for i in self._results]
        if is_capturing():  # what a capture builds is what the trace of this shape saw
            return tuple(taken)
        self._check(results, spec, everything)
        return tuple([self._checked(t, e) for t, e in zip(taken, self._expected(leaves), strict=True)])

    def _check(self, results: list[Any], spec: Spec, everything: list[Any]) -> None:
        """What is no fresh tensor is as it was when the program was made."""
        if spec != self._output.spec:
            raise self._error(f"returned the structure {spec!r}, and {self._output.spec!r} when it was compiled")
        for result, note in zip(results, self._output.leaves, strict=True):
            if isinstance(note, Repeated) and result is not results[note.first]:
                raise self._error(f"returned two tensors, which were result {note.first} twice when it was compiled")
            if isinstance(note, Constant) and not same_value(result, note.value):
                raise self._error(f"returned {result!r}, and {note.value!r} when it was compiled")
            if isinstance(note, Argument) and note.is_whole and not _is_same(result, everything[note.leaf]):
                raise self._error("returned other memory than its argument, which it returned when it was compiled")

    def _all(self, leaves: tuple[Any, ...]) -> list[Any]:
        passed = iter(leaves)
        return [self.objects[i] if i in self.objects else next(passed) for i in range(self._num_leaves)]

    def _expected(self, leaves: tuple[Any, ...]) -> list[_Geometry]:
        if self.mark.fake is None:
            assert self._recipes is not None
            return [recipe.geometry(leaves) for recipe in self._recipes]
        from torch._subclasses.fake_tensor import FakeTensorMode

        with without_modes(HostReads), FakeTensorMode() as mode:
            fakes = tuple([mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in leaves])
            return [_Geometry(t.dtype, tuple(t.shape), t.stride()) for t in self.fake(fakes)]

    def _checked(self, result: Any, expected: _Geometry) -> torch.Tensor:
        if isinstance(result, torch.Tensor) and result.dtype == expected.dtype and tuple(result.shape) == expected.size:
            if _same_strides(result.stride(), expected):
                return result
            if 0 in result.stride() and _same_strides(_contiguous(expected.size), expected):
                return result.contiguous()  # an expanded result reaches later pieces as a copy
        got = _Geometry(result.dtype, tuple(result.shape), result.stride()) if isinstance(result, torch.Tensor) else result
        raise self._error(
            f"returned {got}, where its fake says {expected}: give @eager_on_graph a fake= that computes the result's shape "
            "from the arguments'"
        )

    def _error(self, what: str) -> CaptureError:
        where = "" if self._location is None else f" at {self._location}"
        return CaptureError(
            f"break {self.mark.name}{where} {what}, {_ADVICE}", operation=self.mark.name, location=self._location
        )


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (
        isinstance(a, torch.Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and (not a.numel() or data_address(a) == data_address(b))
    )


# -- shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Geometry:
    dtype: torch.dtype
    size: tuple[Any, ...]
    stride: tuple[Any, ...]

    def __str__(self) -> str:
        return f"a {str(self.dtype).removeprefix('torch.')} tensor of shape {list(self.size)} and strides {self.stride}"


_From = tuple[int, int | None]
"""a size taken from an argument: its place, and the dimension, None where the argument is the number itself"""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A result's geometry from the arguments'. `order` lists the dimensions from the outermost in memory to the innermost
    where the result is dense, None where its strides are constants."""

    dtype: torch.dtype
    size: tuple[int | _From, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...] | None

    @classmethod
    def derived(cls, note: Leaf, leaves: tuple[Any, ...]) -> _Recipe:
        """`leaves` are symbolic, their hints are those of the run that left `note`."""
        assert not isinstance(note, (Constant, Repeated))
        known = note.tensor if isinstance(note, External) else note.place
        size = tuple(known.size()) if isinstance(known, torch.Tensor) else known.size
        stride = known.stride() if isinstance(known, torch.Tensor) else known.stride
        order = sorted(range(len(size)), key=lambda d: (-stride[d], -size[d]))
        is_dense = _same_strides(_dense(size, order), _Geometry(known.dtype, size, stride))
        sizes = tuple([_origin(n, d, size, leaves) for d, n in enumerate(size)])
        return cls(known.dtype, sizes, tuple(stride), tuple(order) if is_dense else None)

    def geometry(self, leaves: tuple[Any, ...]) -> _Geometry:
        size = tuple([n if isinstance(n, int) else _size_of(leaves, n) for n in self.size])
        return _Geometry(self.dtype, size, self.stride if self.order is None else _dense(size, self.order))

    def make(self, leaves: tuple[Any, ...], device: torch.device) -> torch.Tensor:
        found = self.geometry(leaves)
        return torch.empty_strided(found.size, found.stride, dtype=found.dtype, device=device)


def _origin(n: int, dimension: int, size: tuple[int, ...], leaves: tuple[Any, ...]) -> int | _From:
    """Where a size of the result comes from: an argument of the whole shape, then one that agrees in this dimension, then
    any size that depends on the shape, then nowhere."""
    known = [(place, tuple(map(_value, leaf.shape))) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    alike = [place for place, shape in known if shape == size]
    alike += [place for place, shape in known if shape[dimension : dimension + 1] == (n,)]
    if alike:
        place = alike[0]
        return (place, dimension) if _depends(leaves[place].shape[dimension]) else n
    others = [(place, d) for place, shape in known for d in range(len(shape)) if shape[d] == n]
    found: list[_From] = [(place, d) for place, d in others if _depends(leaves[place].shape[d])]
    found += [(place, None) for place, leaf in enumerate(leaves) if _depends(leaf) and _value(leaf) == n]
    return found[0] if found else n


def _depends(size: Any) -> bool:
    """Whether a size is a symbol to the compiler."""
    return isinstance(size, torch.SymInt) and size.node.hint is not None


def _value(size: Any) -> int:
    return int(size.node.hint) if _depends(size) else int(size)


def _size_of(leaves: tuple[Any, ...], origin: _From) -> Any:
    place, dimension = origin
    return leaves[place] if dimension is None else leaves[place].shape[dimension]


def _dense(size: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    stride: list[Any] = [1] * len(size)
    step: Any = 1
    for dimension in reversed(order):
        stride[dimension] = step
        step = step * size[dimension]
    return tuple(stride)


def _contiguous(size: tuple[Any, ...]) -> tuple[Any, ...]:
    return _dense(size, range(len(size)))


def _same_strides(stride: tuple[int, ...], expected: _Geometry) -> bool:
    """Equal, but for dimensions in which there is one element at most."""
    if 0 in expected.size:
        return True
    return all(a == b or n == 1 for a, b, n in zip(stride, expected.stride, expected.size, strict=True))


# -- source text ------------------------------------------------------------------------------------------------------


def _paths(spec: Spec, *roots: str) -> list[str]:
    """An expression for each leaf. Two `roots` stand for the two children of `spec`."""
    if len(roots) > 1:
        return [path for root, child in zip(roots, spec.children, strict=True) for path in _paths(child, root)]
    (text,) = roots
    kind = spec.kind
    if kind is None:
        return [text]
    if kind is dict:
        if not all(isinstance(key, (str, int)) for key in spec.context):
            raise TypeError("takes a dictionary whose keys are neither text nor numbers")
        inner = [f"{text}[{key!r}]" for key in spec.context]
    elif kind is list or issubclass(kind, tuple):
        inner = [f"{text}[{i}]" for i in range(len(spec.children))]
    elif dataclasses.is_dataclass(kind):
        inner = [f"{text}.{name}" for name in spec.context]
    else:
        raise TypeError(f"takes a {kind.__name__}, which no compiler can take apart")
    return [path for child, part in zip(spec.children, inner, strict=True) for path in _paths(child, part)]


def _expression(spec: Spec, leaves: Iterator[str], names: dict[str, Any]) -> str:
    kind = spec.kind
    if kind is None:
        return next(leaves)
    children = [_expression(child, leaves, names) for child in spec.children]
    inner = ", ".join(children)
    if kind is tuple:
        return f"({inner},)" if children else "()"
    if kind is list:
        return f"[{inner}]"
    if kind is dict:
        pairs = zip(spec.context, children, strict=True)
        return "{" + ", ".join(f"{_literal(key, names)}: {child}" for key, child in pairs) + "}"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return f"{_literal(kind, names)}({inner})"
    if dataclasses.is_dataclass(kind) and not hasattr(kind, "__post_init__") and _has_fields_alone(kind, spec.context):
        pairs = zip(spec.context, children, strict=True)
        return f"{_literal(kind, names)}({', '.join(f'{name}={child}' for name, child in pairs)})"
    raise TypeError(f"returns a {kind.__name__}, which no compiler can build")


def _has_fields_alone(kind: Any, names: tuple[str, ...]) -> bool:
    return names == tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _literal(value: Any, names: dict[str, Any]) -> str:
    if value is None or type(value) in (int, bool, str):
        return repr(value)
    name = f"constant_{len(names)}"
    names[name] = value
    return name


__all__ = ["SplitPoints", "reading", "split_point"]
