"""What a callable can reach without being called: the modules, containers and tensors that its code may read.

Two readers. The *audit* (`graph.audit`) asks, before a replay, whether the tensors that a recording reads are still where
they were. The *host state* (`graph.effects`) undoes what running the body once more for a capture changed.

The search starts at the callable: a module's tree, the object of a method, closure cells, defaults, the globals that the
code names (also as `module.name`, functions of torch's too), and from there through lists, dicts, tuples and plain objects.
It is bounded: what lies behind other paths is not seen (docs/safety.md).
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, product
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_MAX_DEPTH = 12
_MAX_CODE_DEPTH = 4
"""how far functions, and the classes of objects, are followed to the globals that they name"""
_MAX_MODULE_DEPTH = 3
"""how many modules a name may go through"""
_MAX_LINKS = 200_000
_MAX_ITEMS = 4096
"""longer containers hold data, not structure"""
_TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_INTERNAL = frozenset(vars(torch.nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_VALUES = (type, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, enum.Enum)
_OPAQUE = (ModuleType, CodeType, *_VALUES)
_BUILTINS = (BuiltinFunctionType, MethodWrapperType)
_METHODS = (
    FunctionType, property, staticmethod, classmethod, functools.cached_property, MemberDescriptorType,
    GetSetDescriptorType, ModuleType, enum.Enum,
)  # fmt: skip
"""what a class has that is followed elsewhere, or says nothing"""
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
CODE = (type(None), FunctionType, MethodType, functools.partial, *_BUILTINS, *_VALUES)
"""what says which way code takes, told by identity"""
_STRUCTURE = (torch.Tensor, torch.nn.Module, *CODE)
_IMPLIED = frozenset({"forward", "__call__"})
"""methods that a call of the object runs; special ones may run at any time, but for those that build it"""
_BUILDERS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__", "__init_subclass__", "__deepcopy__"})
_SETTERS = frozenset({"setattr", "__setattr__", "__dict__", "vars"})
_WRAPPER = "segue.runners.callable"
_BREAKS = "segue.graph.breaks"
_LIBRARIES = frozenset({
    "torch", "builtins", "segue", "threading", "logging", "collections", "functools", "numpy", "_pytest", "hypothesis",
})  # fmt: skip
"""packages whose code names nothing of the user's"""
_TORCH = frozenset({"torch"})
_HOLDERS = frozenset({
    "torch.distributions", "torch.optim", "torch.nn", "torch.utils.data", "collections", "functools",
})  # fmt: skip
"""among them those whose objects hold what is the user's"""


class Cell:
    """A closure cell with the manners of a dict of one entry."""

    __slots__ = ("_cell",)

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self._cell.cell_contents = value


class Attributes:
    """Some attributes of an object, whose others do not count."""

    __slots__ = ("_attributes",)

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes

    def __getitem__(self, key: Any) -> Any:
        return self._attributes[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._attributes[key] = value


class Slots:
    """The attributes of an object that lie in slots."""

    __slots__ = ("_object",)

    def __init__(self, owner: Any) -> None:
        self._object = owner

    def __getitem__(self, key: Any) -> Any:
        return getattr(self._object, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        object.__setattr__(self._object, key, value)


class ClassSpace:
    """The attributes of a class."""

    __slots__ = ("_class",)

    def __init__(self, owner: type) -> None:
        self._class = owner

    def __getitem__(self, key: Any) -> Any:
        return vars(self._class)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        setattr(self._class, key, value)


class Members(Slots):
    """What an object of C's shows as attributes: often read-only, and made anew when asked."""

    __slots__ = ()


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

    def __init__(self, root: Any, others: Iterable[Any] = (), *, follows_breaks: bool = True) -> None:
        """From `root`, and from `others` as if each were the callable. Without `follows_breaks` the bodies of marked
        functions are left out: a segmented recording runs them as they are then."""
        self.modules: list[torch.nn.Module] = []
        self.module_parents: list[int | None] = []
        self.links: list[Link] = []
        self.spaces: list[dict[str, Any]] = []
        """the attributes of each module, and of the callable's own object"""
        self.objects: list[Any] = []
        """plain objects with attributes"""
        self.own: list[Any] = []
        """sets and dicts of the callable's own, and those of its lists that are empty or hold tensors, modules and code: one
        more item is another model"""
        self._code: list[tuple[str | None, _Names]] = []
        """what functions of the user's name; with the name of one that runs only where others name it"""
        self._methods: set[int] = set()
        """those of them that were found in a class, whoever calls them"""
        self.opaque: list[str] = []
        """what no change could be noticed in, and why"""
        self._follows_breaks = follows_breaks
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        """whose constants were found"""
        self._queue: deque[tuple[Any, int, int | None, str]] = deque([(root, 0, None, "")])
        for other in others:
            self._follow(other, 0, None, "an argument")
        while self._queue and len(self.links) < _MAX_LINKS:
            self._visit(*self._queue.popleft())

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor found: those of modules, and those that links lead to."""
        found = [t for m in self.modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        return found + [link.value for link in self.links if isinstance(link.value, torch.Tensor)]

    def pool_of(self, link: Link) -> str | None:
        """What the container is called that an item is linked from; None for what is no item: an attribute, a name."""
        if type(link.container) is tuple and id(link.container) not in self._seen:  # of a set, or a key
            return link.label
        return None if link.parent is None or id(link.container) not in self._seen else self.links[link.parent].label

    def generators(self) -> list[torch.Generator]:
        return list({id(link.value): link.value for link in self.links if isinstance(link.value, torch.Generator)}.values())

    def stores(self, name: str) -> bool:
        """Whether code that runs in a call may set an attribute of that name: some is found that does, in functions, or in
        methods that others name; or sets attributes by names that it computes."""
        ready = [names for function, names in self._code if function is None]
        waiting = [(function, names) for function, names in self._code if function is not None]
        named: set[str] = set()
        while ready:
            for names in ready:
                if name in names.stores or not _SETTERS.isdisjoint(names.all):
                    return True
                named.update(names.all)
            ready = [names for function, names in waiting if function in named]
            waiting = [(function, names) for function, names in waiting if function not in named]
        return False

    def holds(self, value: Any) -> bool:
        """Whether it was found."""
        return id(value) in self._seen or any([link.value is value for link in self.links])

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
        elif isinstance(value, threading.local):
            self.opaque.append(
                f"{label} is a threading.local, another one in each thread: pass what it holds as an argument"
            )
        elif isinstance(value, torch.ScriptObject):
            kind: Any = value._type()
            self.opaque.append(
                f"{label} is a {kind.name()}, an object of C++ that holds what no change is noticed in: record the model "
                "with plain weights, or put what uses it behind @segue.eager_on_graph"
            )
        elif isinstance(value, MethodType):
            if isinstance(value.__self__, type):
                self._visit_class(value.__self__, depth, parent)
            self._follow(value.__self__, depth, parent, label)
            self._follow(value.__func__, depth, parent, label)
        elif isinstance(value, _BUILTINS):
            self._follow(value.__self__, depth, parent, label)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._follow(part, depth, parent, label)
        elif isinstance(value, (set, frozenset)):
            if depth == 1:
                self.own.append(value)
            for item in tuple(value)[:_MAX_ITEMS]:
                self._follow(item, depth, parent, label)
        elif isinstance(value, _VIEWS):
            self._follow(value.mapping, depth, parent, label)
        elif isinstance(value, MappingProxyType) or (isinstance(value, dict) and not makes_items(value)):
            if depth <= 1:
                self.own.append(value)
            self._visit_items(value, value, depth, parent, label)
            for key in islice(value, _MAX_ITEMS):
                if isinstance(key, torch.Tensor):
                    self._follow(key, depth, parent, label)
        elif isinstance(value, (list, tuple, deque)):
            if depth == 1 and not isinstance(value, tuple) and all(isinstance(item, _STRUCTURE) for item in value):
                self.own.append(value)
            # a tuple's items cannot change, but the way to them can
            self._visit_items(value, dict(enumerate(islice(value, _MAX_ITEMS))), depth, parent, label)
        elif _is_array_of_objects(value):
            self._visit_items(value, {at: value[at] for at in product(*map(range, value.shape))}, depth, parent, label)
        elif is_library(type(value).__module__) and not is_library(type(value).__module__, _HOLDERS):
            self._visit_foreign(value, depth, parent, label or type(value).__name__)
        else:
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self.objects.append(value)
                if depth == 0:
                    self.spaces.append(attributes)
                self._visit_items(attributes, attributes, depth, parent, label or type(value).__name__)
            for kind in (Slots, Members):
                self._visit_items(kind(value), _in_slots(value, kind), depth, parent, label or type(value).__name__)
            self._visit_class(type(value), depth, parent)

    def _visit_module(self, module: torch.nn.Module, depth: int, parent: int | None, label: str) -> None:
        self.modules.append(module)
        self.spaces.append(vars(module))
        self.module_parents.append(parent)
        name = label or type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            why = "is TorchScript, whose weights lie where no change is noticed: wrap the module that it was made from"
            self.opaque.append(f"{name} {why}")
        own = {k: v for k, v in vars(module).items() if k not in _INTERNAL}
        for child_name, child in module._modules.items():
            self._queue.append((child, 1, parent, f"{name}.{child_name}"))
        self._visit_items(vars(module), own, depth, parent, name)
        for table in HOOKS:
            for hook in vars(module).get(table, {}).values():
                self._follow(hook, 1, parent, f"a hook of {name}")
        self._visit_class(type(module), depth, parent)

    def _visit_foreign(self, value: Any, depth: int, parent: int | None, label: str) -> None:
        """An object of a library's: what of its attributes leads to tensors. The others are the library's own business."""
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            found = {name: held for name, held in list(attributes.items()) if leads_to_tensors(held)}
            self._visit_items(Attributes(attributes), found, depth, parent, label)

    def _visit_class(self, kind: type, depth: int, parent: int | None) -> None:
        """What the methods of a user's class name, and its constants."""
        for base in kind.__mro__:
            if is_library(base.__module__) or id(base) in self._seen or depth > _MAX_CODE_DEPTH:
                continue
            self._seen.add(id(base))
            for name, value in list(vars(base).items()):
                value = _function_of(value)
                if isinstance(value, FunctionType):
                    if name not in _IMPLIED and (name in _BUILDERS or not name.startswith("__")):
                        self._methods.add(id(value))
                    self._follow(value, depth if name in ("forward", "__call__") else max(depth, 1), parent, name)
        self._visit_constants(kind, depth, parent)

    def _visit_constants(self, kind: type, depth: int, parent: int | None) -> None:
        """What a user's class holds beside its methods: tensors, containers, objects, and other classes."""
        for base in kind.__mro__:
            if not is_library(base.__module__) and base not in self._classes:
                self._classes.add(base)
                for name, value in list(vars(base).items()):
                    is_constant = not name.startswith("__") and not isinstance(value, (*_PLAIN, *_METHODS))
                    if isinstance(value, torch.Tensor) or is_constant:
                        self._link(ClassSpace(base), name, value, max(depth, 1), parent, f"{base.__name__}.{name}")

    def _visit_function(self, function: FunctionType, depth: int, parent: int | None) -> None:
        if depth > _MAX_CODE_DEPTH:
            return
        # where it was written: what `functools.wraps` made says it is from where the wrapped one is
        if is_marked(function) or is_library(function.__globals__.get("__name__", function.__module__)):
            if self._follows_breaks or not is_marked(function):
                self._follow(getattr(function, "__wrapped__", None), depth, parent, "")
                self._follow(vars(function).get("registry"), depth, parent, "")  # of functools.singledispatch
            return
        self._follow(getattr(function, "__wrapped__", None), depth, parent, function.__name__)  # before its cell leads there
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if cell != _EMPTY_CELL:
                self._link(Cell(cell), None, cell.cell_contents, depth, parent, name)
        found = _names(function.__code__)
        self._code.append((function.__name__ if id(function) in self._methods else None, found))
        self._visit_names(function.__globals__, found.globals, found.all, depth, parent, "")
        for part in (function.__defaults__, function.__kwdefaults__):
            self._follow(part, depth, parent, function.__name__)
        attributes = {name: value for name, value in vars(function).items() if not name.startswith("_")}
        self._visit_items(vars(function), attributes, depth, parent, function.__name__)

    def _visit_names(
        self,
        space: dict[str, Any],
        names: tuple[str, ...],
        inner: tuple[str, ...],
        depth: int,
        parent: int | None,
        path: str,
    ) -> None:
        """What code that names these reads of a module's globals, and by `inner` names of modules that it finds there."""
        for name in names:
            if name in space:
                value, found = space[name], f"{path}{name}"
                self._link(space, name, value, depth, parent, found)
                if isinstance(value, ModuleType) and path.count(".") < _MAX_MODULE_DEPTH:
                    if _is_searched(value):
                        self._visit_names(vars(value), inner, inner, depth, parent, f"{found}.")
                    elif is_of_torch(vars(value)):
                        self._visit_torch(vars(value), inner, depth, parent, f"{found}.")

    def _visit_torch(self, space: dict[str, Any], names: tuple[str, ...], depth: int, parent: int | None, path: str) -> None:
        """The functions of a module of torch's that user code names: people put others in their places."""
        for name in names:
            value = space.get(name)
            if isinstance(value, ModuleType):
                if path.count(".") < _MAX_MODULE_DEPTH and is_of_torch(vars(value)):
                    self._visit_torch(vars(value), names, depth, parent, f"{path}{name}.")
            elif value is not None and isinstance(value, CODE):
                self._link(space, name, value, max(depth, 1), parent, f"{path}{name}")

    def _visit_items(self, container: Any, items: Mapping[Any, Any], depth: int, parent: int | None, label: str) -> None:
        if len(items) <= _MAX_ITEMS:
            for key, value in list(items.items()):
                self._link(container, key, value, depth, parent, f"{label}.{key}" if label else str(key))

    def _link(self, container: Any, key: Any, value: Any, depth: int, parent: int | None, label: str) -> None:
        if depth and isinstance(value, ModuleType):
            return
        self.links.append(Link(container, key, value, parent, label, depth == 0))
        if isinstance(value, type):
            self._visit_constants(value, depth + 1, len(self.links) - 1)
        elif not isinstance(value, _OPAQUE):
            self._queue.append((value, depth + 1, len(self.links) - 1, label))

    def _follow(self, value: Any, depth: int, parent: int | None, label: str) -> None:
        if isinstance(value, torch.Tensor):
            self.links.append(Link((value,), 0, value, parent, label, depth == 0))
        else:
            self._queue.append((value, depth, parent, label))


def is_library(module: str | None, names: frozenset[str] = _LIBRARIES) -> bool:
    """Whether a Python module is one of `names`, or inside one."""
    parts = (module or "").split(".")
    return any(".".join(parts[:count]) in names for count in (1, 2, 3))


def _is_searched(module: ModuleType) -> bool:
    return not is_library(module.__name__) and module.__name__.partition(".")[0] not in sys.stdlib_module_names


def is_of_torch(space: dict[Any, Any]) -> bool:
    """Whether these are the globals of a Python module of torch's."""
    return "__builtins__" in space and is_library(space.get("__name__"), _TORCH)


def is_marked(function: Any) -> bool:
    """Whether it is what `@eager_on_graph` makes of a function."""
    return isinstance(function, FunctionType) and function.__globals__.get("__name__") == _BREAKS


def makes_items(value: dict[Any, Any]) -> bool:
    """Whether a dict may make its items when asked."""
    return type(value).__getitem__ is not dict.__getitem__


def leads_to_tensors(value: Any, depth: int = 4, budget: list[int] | None = None) -> bool:
    """Whether an attribute of a library's object is a tensor or a module, or holds some: in containers, or in other objects
    of libraries. It looks at some thousand objects at most."""
    budget = [_MAX_ITEMS] if budget is None else budget
    budget[0] -= 1
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return True
    if not depth or budget[0] < 0 or isinstance(value, (*_PLAIN, *_OPAQUE, FunctionType, *_BUILTINS)):
        return False
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        items: Iterable[Any] = list(value)
    elif isinstance(value, dict):
        items = [] if makes_items(value) else list(value.values())
    elif is_library(type(value).__module__) and not isinstance(value, threading.local):
        items = list(getattr(value, "__dict__", {}).values())
    else:
        return False
    return any(leads_to_tensors(item, depth - 1, budget) for item in items)


def _is_array_of_objects(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype == object and value.size <= _MAX_ITEMS


def _in_slots(value: Any, kind: type[Slots]) -> dict[str, Any]:
    bases = [base for base in type(value).__mro__ if ("__slots__" in vars(base)) == (kind is Slots)]
    names = [n for base in bases for n, v in vars(base).items() if isinstance(v, MemberDescriptorType)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _function_of(value: Any) -> Any:
    """What a property or a method of another kind calls."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.func if isinstance(value, functools.cached_property) else value


_EMPTY_CELL = CellType()


class _Names(NamedTuple):
    """What code names: globals, and attributes as well."""

    globals: tuple[str, ...]
    all: tuple[str, ...]
    stores: frozenset[str]
    """attributes that it sets"""


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> _Names:
    of_globals = {i.argval: None for i in dis.get_instructions(code) if i.opname in _GLOBAL_READS}
    of_all = dict.fromkeys(code.co_names)
    stores = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _names(constant)
            of_globals.update(dict.fromkeys(inner.globals))
            of_all.update(dict.fromkeys(inner.all))
            stores |= inner.stores
    return _Names(tuple(of_globals), tuple(of_all), frozenset(stores))
