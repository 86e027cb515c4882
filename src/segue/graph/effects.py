"""Host effects: what running a body changes in Python, and undoing it.

A capture runs the body once more, on memory that holds no data. What that run leaves in attributes, lists, dicts and
closure cells is undone: a caller must not find a counter that counted twice, nor a cache that holds a tensor of the pool.

And what it changed tells something: the run before it, the trace, was an ordinary call, so a cache that is filled once
was filled then. A value that changes *again* changes at every call, and no replay would change it: such a callable is
not safe to record, and the change is named.
"""

from __future__ import annotations

from typing import Any

import torch

from segue.graph.audit import global_hooks
from segue.graph.reach import HOOKS, Cell, Reach
from segue.graph.tree import same_value

_TABLES = ("_parameters", "_buffers", "_modules")
_MISSING = object()


class HostState:
    """Shallow copies of every container that a callable reaches."""

    def __init__(self, reach: Reach) -> None:
        self._copies: list[tuple[Any, Any, str]] = []
        self._entries: list[tuple[Any, Any, Any, str]] = []
        self._addresses: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        containers: dict[int, tuple[Any, str]] = {}
        for link in reach.links:
            if isinstance(link.container, Cell) or (isinstance(link.container, dict) and "__builtins__" in link.container):
                self._entries.append((link.container, link.key, link.value, link.label))
            elif _is_container(link.container):
                containers.setdefault(id(link.container), (link.container, link.label.rpartition(".")[0]))
            if _is_container(link.value):
                containers.setdefault(id(link.value), (link.value, link.label))
            if isinstance(link.value, torch.Tensor):
                self._note_address(link.value)
        for module in reach.modules:
            for name in _TABLES:
                table = vars(module).get(name)
                if table is None:  # TorchScript keeps them elsewhere
                    continue
                containers.setdefault(id(table), (table, type(module).__name__))
                for value in table.values():
                    if isinstance(value, torch.Tensor):
                        self._note_address(value)
            containers.setdefault(id(vars(module)), (vars(module), type(module).__name__))
        self._copies = [(container, _copy(container), label) for container, label in containers.values()]

    def _note_address(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            self._addresses[id(tensor)] = tensor, tensor.data_ptr(), tensor.data

    def restore(self) -> list[str]:
        """Puts everything back; returns the names of what had changed."""
        changed = []
        for container, key, value, label in self._entries:
            if not _is_same(_entry(container, key), value):
                container[key] = value
                changed.append(label)
        for container, copy, label in self._copies:
            changed += _restore(container, copy, label)
        for tensor, address, data in self._addresses.values():
            if tensor.data_ptr() != address:
                tensor.data = data
                changed.append("the .data of a tensor")
        return changed


def _is_container(value: Any) -> bool:
    """Lists, sets and dicts whose items are what they hold; subclasses may do as they please in their own methods."""
    return isinstance(value, (list, set)) or (isinstance(value, dict) and type(value).__getitem__ is dict.__getitem__)


def _copy(container: Any) -> Any:
    kind = next(kind for kind in (dict, list, set) if isinstance(container, kind))
    return kind(container)


def _restore(container: Any, copy: Any, label: str) -> list[str]:
    if isinstance(container, list):
        if len(container) == len(copy) and all(map(_is_same, container, copy)):
            return []
        container[:] = copy
        return [label]
    if isinstance(container, set):
        if container == copy:
            return []
        container.clear()
        container.update(copy)
        return [label]
    changed = []
    for key in [k for k in container if k not in copy]:
        del container[key]
        changed.append(f"{label}.{key}")
    for key, value in copy.items():
        if not _is_same(dict.get(container, key, _MISSING), value):
            container[key] = value
            changed.append(f"{label}.{key}")
    return changed


def _entry(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (LookupError, ValueError):
        return _MISSING


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (bool, int, float, complex, str, bytes)) and same_value(a, b))


def hooks(reach: Reach) -> list[str]:
    """Forward hooks: a replay does not run them."""
    tables = [(vars(m).get(name), type(m).__name__) for m in reach.modules for name in HOOKS]
    if reach.modules:
        tables += [(table, "every module") for table in global_hooks()]
    return list(
        dict.fromkeys(f"a forward hook of {owner} runs at capture, not at replay" for table, owner in tables if table)
    )
