"""Taking nested arguments and results apart into leaves, and building them again.

Containers are tuples, named tuples, lists, dicts, dataclass instances and whatever is registered with torch's pytree
(transformers' outputs are). Dataclasses are why this is not torch's pytree alone: there they are leaves unless each
class is registered, which is global state of the user's process.

A `Spec` compares and hashes by structure: container types, dict keys in order, field names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from segue._compat import pytree_node

_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, torch.Size, int, float, bool, str, bytes, type(None)})
"""the commonest kinds of leaves, told at once"""
_VALUES = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


class Spec:
    """The structure around leaves. `is_leaf` for a bare leaf."""

    __slots__ = ("_hash", "children", "context", "kind", "objects")

    objects: tuple[Any, ...]
    """what is no leaf and not plainly a value either: keys of dicts, what a node registered with torch says of itself"""

    def __init__(self, kind: type | None, context: Any = None, children: tuple[Spec, ...] = ()) -> None:
        self.kind = kind
        self.context = context
        self.children = children
        self._hash = hash((kind, repr(context) if kind is not None else None, children))
        self.objects = _objects_in(context)
        for child in children:
            if child.objects:
                self.objects += child.objects

    @property
    def is_leaf(self) -> bool:
        return self.kind is None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Spec)
            and self._hash == other._hash
            and self.kind is other.kind
            and same_value(self.context, other.context)
            and self.children == other.children
        )

    def __repr__(self) -> str:
        if self.kind is None:
            return "*"
        inner = [repr(child) for child in self.children]
        if self.kind is dict or dataclasses.is_dataclass(self.kind):
            inner = [f"{name}={child}" for name, child in zip(self.context, inner, strict=True)]
        return f"{self.kind.__name__}({', '.join(inner)})"


def _objects_in(context: Any) -> tuple[Any, ...]:
    kind = type(context)
    if kind in _VALUES:
        return ()
    if kind is dict:
        context = (*context, *context.values())
    elif kind is not tuple and kind is not list:
        return (context,)
    for item in context:
        if type(item) is not str:
            return tuple([found for item in context for found in _objects_in(item)])
    return ()


LEAF = Spec(None)


_flat_specs: dict[tuple[type, int], Spec] = {}


def _flat_spec(kind: type, length: int) -> Spec:
    """The structure of most arguments, made once."""
    found = _flat_specs.get((kind, length))
    if found is None:
        found = _flat_specs[kind, length] = Spec(kind, length, (LEAF,) * length)
    return found


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """Leaves in a fixed order, and the structure around them. What holds itself is a leaf."""
    leaves: list[Any] = []
    try:
        return leaves, _flatten(value, leaves)
    except RecursionError:
        return [value], LEAF


def _flatten(value: Any, leaves: list[Any]) -> Spec:
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
        return LEAF
    if kind is tuple or kind is list:
        children = tuple([_flatten(v, leaves) for v in value])
        is_flat = all([child is LEAF for child in children])
        return _flat_spec(kind, len(children)) if is_flat else Spec(kind, len(children), children)
    if kind is dict:
        return Spec(kind, tuple(value), tuple([_flatten(v, leaves) for v in value.values()]))
    if isinstance(value, tuple) and hasattr(kind, "_fields") and not getattr(value, "__dict__", None):
        return Spec(kind, kind._fields, tuple([_flatten(v, leaves) for v in value]))
    node = pytree_node(kind)
    if node is not None:
        items, context = node[0](value)
        return Spec(kind, context, tuple([_flatten(v, leaves) for v in items]))
    if dataclasses.is_dataclass(kind):
        fields = [field.name for field in dataclasses.fields(kind)]
        names = tuple(dict.fromkeys([*(n for n in fields if hasattr(value, n)), *getattr(value, "__dict__", ())]))
        return Spec(kind, names, tuple([_flatten(getattr(value, n), leaves) for n in names]))
    leaves.append(value)
    return LEAF


def unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    """The structure of `spec` around `leaves`, taken in order."""
    kind = spec.kind
    if kind is None:
        return next(leaves)
    children = [unflatten(child, leaves) for child in spec.children]
    return _builder(kind)(children, spec.context)


def _builder(kind: type) -> Callable[[list[Any], Any], Any]:
    if kind is tuple or kind is list:
        return lambda children, _: kind(children)
    if kind is dict:
        return lambda children, keys: dict(zip(keys, children, strict=True))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return lambda children, _: tuple.__new__(kind, children)
    node = pytree_node(kind)
    if node is not None:
        return node[1]
    return lambda children, names: _build_dataclass(kind, names, children)


def _build_dataclass(kind: type, names: tuple[str, ...], children: list[Any]) -> Any:
    """Attributes are set as they were, past `__init__` and `__post_init__`, which may compute or refuse."""
    value: Any = object.__new__(kind)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(value, name, child)
    return value


def same_value(a: Any, b: Any) -> bool:
    """Equality by type and value, so that 1, True and 1.0 differ, 0.0 and -0.0 do, and nan equals nan. Objects that cannot
    say whether they are equal (arrays) are not, unless they are one."""
    if a is b:
        return True
    if type(a) is float or type(a) is complex:
        return type(a) is type(b) and repr(a) == repr(b)
    try:
        return type(a) is type(b) and bool(a == b or (a != a and b != b))
    except (RuntimeError, ValueError):
        return False
