"""Host effects: what running a body changes in Python, and undoing it.

A capture runs the body once more, on memory that holds no data. What that run leaves in attributes, lists, dicts and
closure cells is undone: a caller must not find a counter that counted twice, nor a cache that holds a tensor of the pool.

And what it changed tells something: the run before it, the trace, was an ordinary call, so a cache that is filled once
was filled then. A value that changes *again* changes at every call, and no replay would change it: such a callable is
not safe to record, and the change is named. A weight that the trace did not bind anew, and that does not lie in the pool,
another thread has bound meanwhile: it stays, and the recording, which may have seen either, is thrown away.
"""

from __future__ import annotations

import io
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from segue.graph.audit import global_hooks
from segue.graph.breaks import Mark
from segue.graph.reach import HOOKS, Attributes, Cell, ClassSpace, Reach, Slots, makes_items
from segue.graph.tree import same_value

_TABLES = ("_parameters", "_buffers", "_modules")
_CONSTANTS = (
    torch.Tensor, type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, slice, range,
)  # fmt: skip
_MISSING = object()


class HostState:
    """Shallow copies of every container that a callable reaches."""

    def __init__(self, reach: Reach) -> None:
        self._copies: list[tuple[Any, Any, str, bool]] = []
        self._entries: list[tuple[Any, Any, Any, str]] = []
        self._attributes = {*map(id, reach.spaces), *[id(vars(item)) for item in reach.objects]}
        self.others: list[str] = []
        self._layouts: dict[int, tuple[torch.Tensor, Any, torch.Tensor]] = {}
        containers: dict[int, tuple[Any, str]] = {}
        tables: set[int] = set()
        for link in reach.links:
            if type(link.container) in (Cell, Attributes, ClassSpace, Slots) or (
                isinstance(link.container, dict) and "__builtins__" in link.container
            ):
                self._entries.append((link.container, link.key, link.value, link.label))
            elif _is_container(link.container):
                containers.setdefault(id(link.container), (link.container, link.label.rpartition(".")[0]))
            if _is_container(link.value):
                containers.setdefault(id(link.value), (link.value, link.label))
            if isinstance(link.value, torch.Tensor):
                self._note_layout(link.value)
        for module in reach.modules:
            for name in _TABLES:
                table: Any = vars(module).get(name)
                if not _is_container(table):  # TorchScript keeps them elsewhere
                    continue
                containers.setdefault(id(table), (table, type(module).__name__))
                tables.add(id(table))
                for value in table.values():
                    if isinstance(value, torch.Tensor):
                        self._note_layout(value)
            containers.setdefault(id(vars(module)), (vars(module), type(module).__name__))
        self._copies = [(c, _copy(c), label, id(c) in tables) for c, label in containers.values()]

    def _note_layout(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            self._layouts[id(tensor)] = tensor, _layout(tensor), tensor.data

    def changed(self) -> list[str]:
        """The names of what is not as it was."""
        return [change.label for change in self.changes()]

    def restore(
        self, is_own: Callable[[str, Any], bool] | None = None, sets: Callable[[str], bool] | None = None
    ) -> list[str]:
        """Puts back what changed, and returns its names. A weight, a buffer or a child that `is_own` (told the name and the
        new value) denies is another thread's doing: it stays, and is named in `others`. So does another attribute of a
        module or an object that the body does not set, where `sets` tells."""
        changed, self.others = [], []
        for change in list(self._differences()):
            if change.is_equal:
                change.undo()
            elif is_own is None or is_own(change.label, change.value) or not self._may_be_others(change, sets):
                change.undo()
                changed.append(change.label)
            else:
                self.others.append(change.label)
        return changed

    @staticmethod
    def _may_be_others(change: _Change, sets: Callable[[str], bool] | None) -> bool:
        is_unset = sets is not None and change.is_attribute and not sets(change.label.rpartition(".")[2])
        return change.is_binding or is_unset

    def changes(self) -> Iterator[_Change]:
        """What is not as it was."""
        return (change for change in self._differences() if not change.is_equal)

    def _differences(self) -> Iterator[_Change]:
        for container, key, value, label in self._entries:
            now = _entry(container, key)
            if now is not value:
                undo = partial(operator.setitem, container, key, value)
                yield _Change(label, now, undo, is_equal=_is_same(now, value))
        for container, copy, label, is_table in self._copies:
            for change in _changes_of(container, copy, label):
                yield change._replace(is_binding=is_table, is_attribute=id(container) in self._attributes)
        for tensor, layout, data in self._layouts.values():
            if _layout(tensor) != layout:
                yield _Change(_DATA, tensor, partial(setattr, tensor, "data", data), is_binding=True)


class _Change(NamedTuple):
    label: str
    value: Any
    undo: Callable[[], Any]
    is_binding: bool = False
    """whether a module holds it as its parameter, buffer or child, or it is where a tensor lies"""
    is_attribute: bool = False
    """whether it is an attribute of a module or an object"""
    is_equal: bool = False
    """whether another object took its place, and says the same"""


_DATA = "the .data, the sizes or the strides of a tensor"


class BodyEffects:
    """What the bodies of breaks change, in a trace, of what recorded code may read: `changed` names it, break by break. And
    what the pass had changed where it met them, and a replay has not: `held` names what it put back since."""

    def __init__(self, reach: Reach, state: HostState) -> None:
        self._reach, self._state = reach, state
        self.changed: dict[str, list[str]] = {}
        self._met: dict[tuple[str, str, Any], Any] = {}

    @contextmanager
    def around(self, mark: Mark, leaves: list[Any]) -> Iterator[None]:
        local = [leaf for leaf in leaves if not isinstance(leaf, _CONSTANTS) and not self._reach.holds(leaf)]
        states = [self._state]
        with suppress(Exception):  # what cannot be read makes no error of the call's
            states += [HostState(Reach(None, [tuple(local)], follows_breaks=False))] if local else []
        with suppress(Exception):
            self._met |= {(mark.name, change.label, _look(change.value)): change.value for change in self._state.changes()}
        before, contents = _labels(states), list(map(_content, local))
        yield
        found = [label for label in _labels(states) if label not in before]
        found += [f"a {type(x).__name__}" for x, content in zip(local, contents, strict=True) if _content(x) != content]
        if found:
            self.changed.setdefault(mark.name, []).extend(found)

    def held(self) -> dict[str, list[str]]:
        """At the end of the pass."""
        try:
            now = {(change.label, _look(change.value)) for change in self._state.changes()}
        except Exception:
            return {}
        found: dict[str, list[str]] = {}
        for name, label, look in self._met:
            if (label, look) not in now:
                found.setdefault(name, []).append(label)
        return found


def _content(value: Any) -> Any:
    """What an object holds that is no container; of one that is used up by being read, something else each time."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, bytearray):
        return bytes(value)
    if hasattr(type(value), "__next__") or isinstance(value, io.IOBase):
        return object()
    numpy = sys.modules.get("numpy")
    return value.tobytes() if numpy is not None and isinstance(value, numpy.ndarray) else None


def _look(value: Any) -> Any:
    """Tells a value from another that took its place, and from itself with other items."""
    return (id(value), *map(id, value)) if isinstance(value, (list, set, deque)) else id(value)


def _labels(states: list[HostState]) -> list[str]:
    try:
        return [label for state in states for label in state.changed()]
    except Exception as error:
        return [f"what cannot be compared ({type(error).__name__})"]


def _layout(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _is_container(value: Any) -> bool:
    """Lists, sets and dicts whose items are what they hold; subclasses may do as they please in their own methods."""
    return isinstance(value, (list, set, deque)) or (isinstance(value, dict) and not makes_items(value))


def _copy(container: Any) -> Any:
    kind = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
    return list(container) if kind is deque else kind(container)


def _changes_of(container: Any, copy: Any, label: str) -> Iterator[_Change]:
    if isinstance(container, (list, deque)):
        if len(container) != len(copy) or not all(map(_is_same, container, copy)):
            yield _Change(label, container, partial(_replace, container, copy))
    elif isinstance(container, set):
        if container != copy:
            yield _Change(label, container, partial(_refill, container, copy))
    elif dict.keys(container) != copy.keys() or not all(map(operator.is_, dict.values(container), copy.values())):
        for key in [k for k in container if k not in copy]:
            yield _Change(f"{label}.{key}", dict.get(container, key), partial(container.__delitem__, key))
        for key, value in copy.items():
            now = dict.get(container, key, _MISSING)
            if now is not value:
                undo = partial(operator.setitem, container, key, value)
                yield _Change(f"{label}.{key}", now, undo, is_equal=_is_same(now, value))


def _replace(container: list[Any] | deque[Any], copy: list[Any]) -> None:
    container.clear()
    container.extend(copy)


def _refill(container: set[Any], copy: set[Any]) -> None:
    container.clear()
    container.update(copy)


def _entry(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (LookupError, ValueError):
        return _MISSING


def _is_same(a: Any, b: Any) -> bool:
    """Whether one took the other's place without a change: the object itself, or an equal one that cannot change."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, frozenset)):
        pairs = zip(a, b) if isinstance(a, tuple) else zip(sorted(map(repr, a)), sorted(map(repr, b)))
        return len(a) == len(b) and not getattr(a, "__dict__", None) and all(_is_same(x, y) for x, y in pairs)
    return isinstance(a, _UNCHANGING) and same_value(a, b)


_UNCHANGING = (bool, int, float, complex, str, bytes, torch.device, torch.dtype, slice, range)


def hooks(reach: Reach) -> list[str]:
    """Forward hooks: a replay does not run them."""
    tables = [(vars(m).get(name), type(m).__name__) for m in reach.modules for name in HOOKS]
    if reach.modules:
        tables += [(table, "every module") for table in global_hooks()]
    return list(
        dict.fromkeys(f"a forward hook of {owner} runs at capture, not at replay" for table, owner in tables if table)
    )
