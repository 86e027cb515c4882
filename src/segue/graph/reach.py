"""What a callable can reach without being called: the modules, containers and tensors that its code may read.

Two readers. The *audit* (`graph.audit`) asks, before a replay, whether the tensors that a recording reads are still where
they were. The *host state* (`graph.effects`) undoes what running the body once more for a capture changed.

The search starts at the callable: a module's tree, the object of a method, closure cells, defaults, the globals that the
code names, and from there through lists, dicts, tuples and plain objects. It is bounded, and follows neither classes nor
imported Python modules: what lies behind them is not seen (docs/safety.md).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

_MAX_DEPTH = 12
_MAX_CODE_DEPTH = 4
"""how far functions, and the classes of objects, are followed to the globals that they name"""
_MAX_LINKS = 200_000
_MAX_ITEMS = 4096
"""longer containers hold data, not structure"""
_TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_INTERNAL = frozenset(vars(torch.nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OPAQUE = (type, ModuleType, BuiltinFunctionType, CodeType, torch.dtype, torch.device)
_WRAPPER = "segue.runners.callable"
_LIBRARIES = ("torch", "builtins", "segue.", "threading", "logging", "collections", "functools")


class Cell:
    """A closure cell with the manners of a dict of one entry."""

    __slots__ = ("_cell",)

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self._cell.cell_contents = value


class Link(NamedTuple):
    """`container[key]` was `value`. `parent` is the link that led to the container, None at the callable itself."""

    container: Any
    key: Any
    value: Any
    parent: int | None
    label: str
    is_near: bool
    """whether the callable itself, or its object, holds it"""


class Reach:
    """Everything found, in a fixed order. Holds what it found alive: keep it no longer than needed."""

    def __init__(self, root: Any) -> None:
        self.modules: list[torch.nn.Module] = []
        self.module_parents: list[int | None] = []
        self.links: list[Link] = []
        self.spaces: list[dict[str, Any]] = []
        """the attributes of each module, and of the callable's own object"""
        self.lists: list[list[Any]] = []
        """lists of the callable's own that are empty, or hold tensors or modules: one more item is another model"""
        self.opaque: list[str] = []
        """modules that keep their weights where no change could be noticed (TorchScript)"""
        self._seen: set[int] = set()
        self._queue: deque[tuple[Any, int, int | None, str]] = deque([(root, 0, None, "")])
        while self._queue and len(self.links) < _MAX_LINKS:
            self._visit(*self._queue.popleft())

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor found: those of modules, and those that links lead to."""
        found = [t for m in self.modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        return found + [link.value for link in self.links if isinstance(link.value, torch.Tensor)]

    def path(self, index: int | None) -> Iterator[int]:
        """The links that lead to one, itself included."""
        while index is not None:
            yield index
            index = self.links[index].parent

    def _visit(self, value: Any, depth: int, parent: int | None, label: str) -> None:
        if isinstance(value, (torch.Tensor, *_PLAIN, *_OPAQUE)) or id(value) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(value))
        if type(value).__module__ == _WRAPPER:  # what another segue.graph wraps is recorded with its caller
            self._follow(vars(value)["_function"], depth, parent, label)
        elif isinstance(value, torch.nn.Module):
            self._visit_module(value, depth, parent, label)
        elif isinstance(value, FunctionType):
            self._visit_function(value, depth, parent)
        elif isinstance(value, MethodType):
            if isinstance(value.__self__, type):
                self._visit_class(value.__self__, depth, parent)
            self._follow(value.__self__, depth, parent, label)
            self._follow(value.__func__, depth, parent, label)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._follow(part, depth, parent, label)
        elif isinstance(value, dict) and type(value).__getitem__ is dict.__getitem__:  # others may make items when asked
            self._visit_items(value, value, depth, parent, label)
        elif isinstance(value, (list, tuple)):
            if depth == 1 and isinstance(value, list) and all(isinstance(v, (torch.Tensor, torch.nn.Module)) for v in value):
                self.lists.append(value)
            # a tuple's items cannot change, but the way to them can
            self._visit_items(value, dict(enumerate(value[:_MAX_ITEMS])), depth, parent, label)
        elif isinstance(value, (set, frozenset)):
            for item in tuple(value)[:_MAX_ITEMS]:
                self._follow(item, depth, parent, label)
        elif not type(value).__module__.startswith(_LIBRARIES):
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                if depth == 0:
                    self.spaces.append(attributes)
                self._visit_items(attributes, attributes, depth, parent, label or type(value).__name__)
            self._visit_class(type(value), depth, parent)

    def _visit_module(self, module: torch.nn.Module, depth: int, parent: int | None, label: str) -> None:
        self.modules.append(module)
        self.spaces.append(vars(module))
        self.module_parents.append(parent)
        name = label or type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            self.opaque.append(name)
        own = {k: v for k, v in vars(module).items() if k not in _INTERNAL}
        for child_name, child in module._modules.items():
            self._queue.append((child, 1, parent, f"{name}.{child_name}"))
        self._visit_items(vars(module), own, depth, parent, name)
        for table in HOOKS:
            for hook in vars(module).get(table, {}).values():
                self._follow(hook, 1, parent, f"a hook of {name}")
        self._visit_class(type(module), depth, parent)

    def _visit_class(self, kind: type, depth: int, parent: int | None) -> None:
        """What the methods of a user's class name, and tensors that are class attributes."""
        for base in kind.__mro__:
            if base.__module__.startswith(_LIBRARIES) or id(base) in self._seen or depth > _MAX_CODE_DEPTH:
                continue
            self._seen.add(id(base))
            for name, value in list(vars(base).items()):
                if isinstance(value, FunctionType):
                    self._follow(value, depth if name == "forward" else max(depth, 1), parent, name)
                elif isinstance(value, torch.Tensor):
                    self._link(vars(base), name, value, max(depth, 1), parent, f"{base.__name__}.{name}")

    def _visit_function(self, function: FunctionType, depth: int, parent: int | None) -> None:
        if depth > _MAX_CODE_DEPTH:
            return
        if function.__module__ is not None and function.__module__.startswith(_LIBRARIES):
            wrapped = getattr(function, "__wrapped__", None)  # a marked function's own wrapper is ours
            if wrapped is not None:
                self._follow(wrapped, depth, parent, "")
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if cell != _EMPTY_CELL:
                self._link(Cell(cell), None, cell.cell_contents, depth, parent, name)
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                self._link(function.__globals__, name, function.__globals__[name], depth, parent, name)
        for part in (function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None)):
            self._follow(part, depth, parent, function.__name__)

    def _visit_items(self, container: Any, items: dict[Any, Any], depth: int, parent: int | None, label: str) -> None:
        if len(items) <= _MAX_ITEMS:
            for key, value in list(items.items()):
                self._link(container, key, value, depth, parent, f"{label}.{key}" if label else str(key))

    def _link(self, container: Any, key: Any, value: Any, depth: int, parent: int | None, label: str) -> None:
        if isinstance(value, _OPAQUE):  # compared where it is near, and not followed
            if depth == 0:
                self.links.append(Link(container, key, value, parent, label, True))
            return
        self.links.append(Link(container, key, value, parent, label, depth == 0))
        self._queue.append((value, depth + 1, len(self.links) - 1, label))

    def _follow(self, value: Any, depth: int, parent: int | None, label: str) -> None:
        self._queue.append((value, depth, parent, label))


_EMPTY_CELL = CellType()


@functools.lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return tuple(names)
