"""Whether anything changed a dict since it was last looked at, told by one word (CPython 3.10 - 3.13)."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from segue._compat import has_gil, words_at


@functools.lru_cache(maxsize=1)
def dict_tag() -> int | None:
    """At which byte a dict's object keeps its version (PEP 509): every change of the dict, made in whatever way, puts a
    number there that no dict had before. For `dict` and `OrderedDict` themselves; a changed order alone is no change.

    CPython 3.14 has it no more (PEP 699). It is found and tried out on dicts made for that; None where any change leaves it.
    """
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 14) or not has_gil():
        return None
    table = {"a": 0}
    before = words_at(id(table), dict.__basicsize__)
    table["a"] = 1  # of as many items, at the same place
    places = [8 * i for i, word in enumerate(words_at(id(table), dict.__basicsize__)) if word != before[i]]
    if len(places) != 1:
        return None
    tables: list[dict[Any, Any]] = [{}, OrderedDict()]
    trials = [(table, _change(table)) for table in tables]
    for kind in (_Few, _Many, torch.nn.Module):
        store = FunctionType(_store.__code__.replace(), globals())  # its own caches, which learn of one kind of object
        for _ in store(kind()):  # an object without a dict yet, as far as the interpreter has such
            pass
        item = kind()
        trials.append((vars(item), store(item)))
        trials.append((vars(item), _change(vars(item))))
    return places[0] if all([_is_other_each_time(id(table) + places[0], changes) for table, changes in trials]) else None


def _is_other_each_time(place: int, changes: Iterator[None]) -> bool:
    word = ctypes.c_int64.from_address(place)
    seen = {word.value}
    for count, _ in enumerate(changes, 2):
        seen.add(word.value)
        if len(seen) != count:
            return False
    return True


def _change(table: Any) -> Iterator[None]:
    """Changes a table in one way after the other; it is empty at the end."""
    for value in (1, 2, 1, 1.0):
        table["a"] = value
        yield
    for change in (
        lambda: table.update(b=1), lambda: table.update(b=2), lambda: table.update({"a": 3}),
        lambda: table.setdefault("c", 1), lambda: table.__ior__({"c": 2}), lambda: table.pop("c"),
        lambda: table.__delitem__("b"), table.popitem, lambda: table.__setitem__("d", 1), table.clear,
        lambda: table.update({"a": 1, "b": 2}), table.clear,
    ):  # fmt: skip
        change()
        yield


def _store(item: Any) -> Iterator[None]:
    """Changes an object's attributes often enough for the interpreter to have learnt how."""
    for _ in range(200):
        item.first = object()
        yield
    for _ in range(200):
        item.late = object()
        yield
        del item.late
        yield
    for change in (setattr, object.__setattr__):
        for value in (1, 2):
            change(item, "first", value)
            yield
    delattr(item, "first")
    yield


class _Few:
    def __init__(self) -> None:
        self.first: Any = None


class _Many:
    def __init__(self) -> None:
        self.first: Any = None
        for number in range(40):
            setattr(self, f"attribute_{number}", number)
