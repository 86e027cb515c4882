"""Padding of `segue.graph` calls: which arguments grow to which rung, and cutting the outputs back.

A `Pad` is the user's claim that rows along a dimension are independent, so that rows of filling change no other row.
Arguments of one axis are padded together, to the same rung. An output whose size along that dimension is the rung is cut
to the live size; other outputs are left as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from segue.errors import ConfigError
from segue.graph.tree import flatten
from segue.observe.decision import Reason
from segue.runners.call_key import Scan, gaps, layout, stride_order
from segue.shapes import ladder as ladders
from segue.shapes.key import ShapeKey


@dataclass(frozen=True, kw_only=True)
class Pad:
    """How one parameter is padded: along `dim`, up to the next size of `ladder`, with `fill` in the new rows. Parameters
    with the same `axis` share their rung and their ladder; by default each has an axis of its own."""

    dim: int = 0
    ladder: Iterable[int] = ()
    axis: str | None = None
    fill: int | float | complex | bool = 0

    def __post_init__(self) -> None:
        given: Any = self.ladder
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(f"Pad: ladder is {given!r}; give sizes, such as [1, 2, 4, 8]")
        object.__setattr__(self, "ladder", ladders.custom(given))
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 0:
            raise ConfigError(f"Pad: dim is {self.dim!r}; give the number of a dimension, counted from 0")
        if self.axis is not None and not isinstance(self.axis, str):
            raise ConfigError(f"Pad: axis is {self.axis!r}; give a name, or None for an axis of its own")
        if not isinstance(self.fill, (int, float, complex)):
            raise ConfigError(f"Pad: fill is {self.fill!r}; give a number that the padded tensors can hold")


class AxisSize(NamedTuple):
    dim: int
    real: int
    rung: int


class Padded(NamedTuple):
    """What a call's padding comes to. `shapes` holds the padded shape of each tensor, None where it stays."""

    shapes: list[tuple[int, ...] | None]
    fills: list[Any]
    axes: tuple[AxisSize, ...]


class Padding:
    """The pads of one callable, bound to its parameters."""

    def __init__(self, pads: Mapping[str, Pad], function: Callable[..., Any]) -> None:
        self._pads = dict(pads)
        self._names, known = parameter_names(function)
        for name, pad in self._pads.items():
            if not isinstance(pad, Pad):
                raise ConfigError(f"pad[{name!r}] is {pad!r}; give a segue.Pad")
            if known is not None and name not in known:
                raise ConfigError(f"pad names {name!r}; the parameters are {', '.join(known)}")
        self._defaults = _tensor_defaults(function) & self._pads.keys()
        axes: dict[str, Any] = {}
        for name, pad in self._pads.items():
            if axes.setdefault(pad.axis or name, pad.ladder) != pad.ladder:
                raise ConfigError(f"pad: parameters of axis {pad.axis!r} have different ladders")

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Padded | Reason:
        """The padded shapes of a call whose tensors, in order of the arguments, are `tensors`."""
        owners = self._owners(args, kwargs)
        if self._defaults and not self._defaults.issubset(owners):  # a tensor that a call leaves out is not padded
            return Reason.NOT_UNIFORM
        sizes: dict[tuple[str, int], AxisSize] = {}
        live: dict[str, int] = {}
        shapes: list[tuple[int, ...] | None] = [None] * len(tensors)
        fills: list[Any] = [0] * len(tensors)
        for index, (name, tensor) in enumerate(zip(owners, tensors, strict=True)):
            pad = self._pads.get(name)
            if pad is None:
                continue
            if pad.dim >= tensor.dim() or not _holds(tensor.dtype, pad.fill):
                return Reason.NO_RUNG
            real = tensor.shape[pad.dim]
            rung = ladders.round_up(tuple(pad.ladder), real) if real else None
            if rung is None:
                return Reason.NO_RUNG
            axis = pad.axis or name
            if live.setdefault(axis, real) != real:
                return Reason.NOT_UNIFORM
            sizes[axis, pad.dim] = AxisSize(pad.dim, real, rung)
            shapes[index] = (*tensor.shape[: pad.dim], rung, *tensor.shape[pad.dim + 1 :])
            fills[index] = (pad.dim, pad.fill)
        found = tuple(dict.fromkeys(sizes.values()))
        for a in found:  # the rung alone tells which axis an output has
            if any(a.dim == b.dim and a.rung == b.rung and a.real != b.real for b in found):
                return Reason.NOT_UNIFORM
        return Padded(shapes, fills, found)

    def _owners(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The parameter of each tensor among the arguments."""
        names = self._names
        owners: list[str] = []
        for position, value in enumerate(args):
            owners += [names[position] if position < len(names) else ""] * _count(value)
        for name, value in kwargs.items():
            owners += [name] * _count(value)
        return owners


@functools.cache
def _holds(dtype: torch.dtype, fill: Any) -> bool:
    """Whether a tensor can be filled so; rounding is no loss, an integer that becomes another one is."""
    try:
        held = torch.empty(2, dtype=dtype, device="cpu").fill_(fill).tolist()[0]
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False
    return dtype.is_floating_point or dtype.is_complex or held == fill


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 1
    return sum(isinstance(leaf, torch.Tensor) for leaf in flatten(value)[0])


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None where the signature cannot be read."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def _tensor_defaults(function: Callable[..., Any]) -> set[str]:
    """Parameters whose default is a tensor."""
    return {p.name for p in _parameters(function) or () if isinstance(p.default, torch.Tensor)}


def parameter_names(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Names by position, and all names there are: None where any keyword is taken, or the signature cannot be read."""
    parameters = _parameters(function)
    if parameters is None:
        return (), None
    positional = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return positional, None
    return positional, tuple(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL)


def cut(tensor: torch.Tensor, axes: Iterable[AxisSize]) -> torch.Tensor:
    """The live rows of a padded tensor: a view."""
    shape = tensor.shape  # as it was recorded: a live size may be another axis' rung
    for axis in axes:
        if axis.real != axis.rung and axis.dim < len(shape) and shape[axis.dim] == axis.rung:
            tensor = tensor.narrow(axis.dim, 0, axis.real)
    return tensor


def padded_key(call: Scan, padded: Padded) -> Any:
    """The key with padded shapes in place of the live ones."""
    structure, parts, alias, device, modes = call.key
    replaced = list(parts)
    for tensor, place, shape in zip(call.tensors, call.places, padded.shapes, strict=True):
        if shape is not None:
            lying = layout(tensor)
            order = lying and (stride_order(tensor), gaps(tensor), lying[-1])
            replaced[place] = (shape, tensor.dtype, order, "padded")
    return structure, tuple(replaced), alias, device, modes


def shape_key(call: Scan, padded: Padded | None, number: int) -> ShapeKey:
    """A name for people: the shapes and the plain values; the number makes it unique."""
    shapes = [tuple(t.shape) for t in call.tensors]
    for i, shape in enumerate(padded.shapes if padded is not None else ()):
        shapes[i] = shapes[i] if shape is None else shape
    tokens = shapes[0][0] if shapes and shapes[0] else 1
    if padded is not None and padded.axes:
        tokens = padded.axes[0].rung
    plain = [leaf for i, leaf in enumerate(call.leaves) if i not in call.places and leaf is not None]
    text = ["x".join(map(str, s)) or "scalar" for s in shapes] + [repr(v)[:20] for v in plain]
    return ShapeKey("call", tokens, variant=f"#{number} {' '.join(text)}"[:100])
