"""Before a replay: are the tensors that a recording reads still where they were?

A recording holds addresses. Copying *into* a weight simply works, but `load_state_dict(assign=True)`, `.data =`, `.to()`,
a new Parameter, a merged LoRA put the weight elsewhere, and the recording, which keeps the old memory alive, would go on
with old values. So every call compares what the callable reaches with what it reached at the capture.

The hard part is the price: 300 parameters must cost some 10 microseconds. So no loop runs in Python, and mostly nothing is
compared at all: `graph.words` reads where all tensors lie, and of each table and each module's attributes whether anything
changed them since, by two gathers. Where something did, or the interpreter does not say so, they are compared by loops of
C's: whole tables as dicts (identical values are told by identity, at once), that no hook was added by one `any`. Two tables
whose values differ fall through to `Tensor.__eq__`, which raises or says something; both mean *changed*, except for tensors
of one element and objects with an equality of their own, which are therefore compared by identity apart.

Not seen: another order of more than five dimensions over the same memory, and tensors that `graph.reach` does not find.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from operator import getitem, is_, itemgetter
from types import MappingProxyType
from typing import Any

import torch

from segue._compat import storage_handle
from segue.graph.reach import CODE, HOOKS, Reach, is_library, is_of_torch
from segue.graph.versions import dict_tag
from segue.graph.words import Watch, is_plain

_TABLES = ("_parameters", "_buffers", "_modules")
_training = itemgetter("training")
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_SIZES = (tuple, range, slice)
_HELD = (torch.Tensor, torch.nn.Module, *_SCALARS, *_SIZES, list, dict, set, frozenset, deque)
"""what other ways tell, or what says nothing"""
_OF_PYTHON = sys.stdlib_module_names - {"__main__"}
"""whose objects are values: a date, a path"""
_INDIFFERENT = frozenset(
    getattr(torch.nn, name)
    for name in (
        "Linear", "Embedding", "LayerNorm", "RMSNorm", "GroupNorm", "Conv1d", "Conv2d", "Conv3d", "Identity", "ReLU",
        "GELU", "SiLU", "Tanh", "Sigmoid", "Softmax", "ModuleList", "ModuleDict", "Sequential", "ParameterList",
    )
)  # fmt: skip
"""modules that compute the same whether they train or not"""


class Bindings:
    """What modules hold and where `tensors` lie: tables of parameters, buffers, children and hooks, the hooks of all
    modules, each module's own attributes by number, its own `forward` by identity, and whether it trains where that counts.
    An empty table stays empty, one that holds something is compared."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        spaces: list[dict[str, Any]],
        tensors: list[torch.Tensor],
        trained: Iterable[torch.nn.Module] = (),
        objects: Sequence[Any] = (),
        loose: Sequence[Loose] = (),
        *,
        compares_attributes: bool = False,
        at_once: bool = True,
    ) -> None:
        """`spaces` are attributes of modules and other objects, `trained` modules that compute otherwise while they train.
        `objects` stay of their class, as modules do; `loose` dicts count where dicts have versions.
        With `compares_attributes` what attributes hold counts too, but for numbers, texts and sizes, where that is free
        (where dicts have versions). Holds `modules` and `tensors` alive. Without `at_once` all is compared each time."""
        owned = [
            (name, vars(m)[name]) for m in modules for name in (*_TABLES, *HOOKS) if isinstance(vars(m).get(name), dict)
        ]
        owned += [(HOOKS[0], table) for table in global_hooks()]
        tables = [table for _, table in owned]
        attributes = [vars(m) for m in modules]
        self._flag_holders = [vars(m) for m in trained if "training" in vars(m)]
        dicts = {id(d): d for d in (*tables, *attributes, *spaces, *self._flag_holders)}
        tables_apart = [item.table for item in loose]
        # made before what it spares is read
        self._watch = Watch(tensors, list(dicts.values()), [*modules, *objects], tables_apart, at_once=at_once)
        self._loose = loose
        self._modules = modules
        self._attributes = [(space, dict(space)) for space in attributes]
        self._compares_attributes = compares_attributes
        self._ordered = [table for name, table in owned if name not in ("_parameters", "_buffers") and len(table) > 1]
        self._orders = list(map(list, self._ordered))
        self._moved = [table for name, table in owned if name == "_modules" and type(table) is OrderedDict]
        self._places = list(map(list, self._moved))
        self._tables = [table for table in tables if table]
        self._snapshots = [dict(table) for table in self._tables]
        self._empty = [table for table in tables if not table]
        self._by_identity = [(t, k, v) for t in self._tables for k, v in t.items() if not _is_told_by_equality(v)]
        self._spaces, self._sizes = spaces, list(map(len, spaces))
        self._replaced = [space for space in spaces if "forward" in space]
        self._forwards = [space["forward"] for space in self._replaced]
        self._flags = list(map(_training, self._flag_holders))

    def hold(self) -> bool:
        """Whether everything is where it was. Raises, as `Audit.holds` says, where two tables cannot be compared."""
        return self._watch.hold(self._are_equal, self._is_alike) and (  # `move_to_end` leaves a dict's version
            not self._moved or list(map(list, self._moved)) == self._places
        )

    def _is_alike(self, index: int) -> bool:
        return self._loose[index].holds()

    def _are_equal(self) -> bool:
        return (
            self._tables == self._snapshots  # identical values are told at once; others end in an error, or differ
            and not any(self._empty)
            and list(map(len, self._spaces)) == self._sizes
            and [space["forward"] for space in self._replaced] == self._forwards
            and all([table[name] is value for table, name, value in self._by_identity])
            and list(map(list, self._ordered)) == self._orders
            and list(map(_training, self._flag_holders)) == self._flags
            and (not self._watch.sees_dicts or self._are_attributes_alike())  # too dear otherwise
        )

    def _are_attributes_alike(self) -> bool:
        for space, before in self._attributes:
            if any([space.get(name) is not before.get(name) for name in (*_TABLES, *HOOKS)]):  # another table
                return False
            if space.keys() != before.keys():
                return False
            if self._compares_attributes and not all([_is_alike(space[name], value) for name, value in before.items()]):
                return False
        return True

    def change(self) -> str | None:
        """What a module holds otherwise than before, for people: an attribute, parameter, buffer or child by name."""
        tables = {id(table): before for table, before in zip(self._tables, self._snapshots, strict=True)}
        flags = {id(holder): flag for holder, flag in zip(self._flag_holders, self._flags, strict=True)}
        for module, (space, attributes) in zip(self._modules, self._attributes, strict=True):
            if space.get("training") is not flags.get(id(space), space.get("training")):
                return f"{type(module).__name__}.training"
            held = [space.get(name) for name in _TABLES]
            for now, before in [*[(t, tables.get(id(t), {})) for t in held if isinstance(t, dict)], (space, attributes)]:
                for name in dict.fromkeys((*before, *now)):
                    if (name in before) != (name in now) or not _is_alike(now[name], before[name]):
                        return f"{type(module).__name__}.{name}"
        return None


class Loose:
    """A dict further down, of items or of an object's attributes: which functions, types, flags, Nones and objects it holds;
    of attributes also how many they are."""

    def __init__(self, table: dict[Any, Any], size: int | None = None) -> None:
        self.table, self.size = table, size
        self.items: list[tuple[Any, Any]] = []

    def holds(self) -> bool:
        is_as_long = self.size is None or len(self.table) == self.size
        return is_as_long and all([self.table[key] is value for key, value in self.items])


def _loose(reach: Reach) -> list[Loose]:
    spaces = set(map(id, reach.spaces))
    found: dict[int, Loose] = {}
    for item in reach.objects:
        attributes = vars(item)
        if id(attributes) not in spaces and is_plain(attributes):
            found[id(attributes)] = Loose(attributes, len(attributes))
    for link in reach.links:
        table: Any = link.container
        if not link.is_near and _decides(link.value) and is_plain(table) and id(table) not in spaces:
            found.setdefault(id(table), Loose(table)).items.append((link.key, link.value))
    return list(found.values())


class Audit:
    """What was reached when a recording was made. `holds` is the check of every call; it changes nothing."""

    def __init__(
        self, reach: Reach, externals: dict[int, torch.Tensor], held: Iterable[torch.Tensor] = (), *, at_once: bool = True
    ) -> None:
        """`externals` are the outside tensors that the recording reads, by storage handle; `held` are its own, of which a
        body might change where they lie; `at_once` as in `Bindings`."""
        tables = [vars(m)[name] for m in reach.modules for name in _TABLES if isinstance(vars(m).get(name), dict)]
        tensors = {id(t): t for table in tables for t in table.values() if isinstance(t, torch.Tensor)}
        wanted = {i for parent in reach.module_parents for i in reach.path(parent)}
        scalars = []
        for index, link in enumerate(reach.links):
            if isinstance(link.value, torch.Tensor):
                wanted.update(reach.path(index))
                tensors[id(link.value)] = link.value
            elif link.is_near and isinstance(link.value, _SCALARS):
                scalars.append(index)
            elif link.is_near and not isinstance(link.value, torch.nn.Module):
                wanted.update(reach.path(index))  # a function, a tuple of numbers, an enum: by identity
            elif link.value is not None and _decides(link.value) and _has_no_versions(link.container):
                wanted.update(reach.path(index))
        links = [tuple(reach.links[i][:3]) for i in sorted(wanted)]
        self._named = [(*reach.links[i][:3], reach.links[i].label) for i in sorted(wanted.union(scalars))]
        self._containers, self._keys, self._values = _columns(links)
        self._scalar_holders, self._scalar_keys, values = _columns([reach.links[i][:3] for i in scalars])
        self._scalars = list(map(repr, values))  # 1, 1.0 and True differ, and so do the two zeros
        tensors |= {id(t): t for t in held}
        placed = [t for t in tensors.values() if _is_placed(t)]  # what is not read may tell its shape
        # what requires grad by now made no backward: the pass disables grad, or the result does not depend on it so
        self._read = [t for t in placed if storage_handle(t) in externals and not t.requires_grad]
        trained = [m for m in reach.modules if type(m) not in _INDIFFERENT or any([vars(m).get(name) for name in HOOKS])]
        self._own, self._outlines = reach.own, list(map(_outline, reach.own))
        self._items = list(map(list, reach.own))  # held, so that no other gets the id of one
        labels = {id(link.value): link.label for link in reach.links} if reach.own else {}
        self._own_labels = [labels.get(id(held), f"a {type(held).__name__}") for held in reach.own]
        self._bindings = Bindings(
            reach.modules,
            reach.spaces,
            placed,
            trained,
            reach.objects,
            _loose(reach),
            compares_attributes=True,
            at_once=at_once,
        )

    def holds(self) -> bool:
        """Whether everything is where it was."""
        try:
            return (
                self._bindings.hold()
                and (not self._keys or all(map(is_, map(getitem, self._containers, self._keys), self._values)))
                and (not self._scalars or self._are_scalars_equal())
                and (not self._own or list(map(_outline, self._own)) == self._outlines)
            )
        except (RuntimeError, LookupError, TypeError, ValueError):  # an entry is gone, or two tensors could not be compared
            return False

    def change(self) -> str:
        """What does not hold, for people."""
        for container, key, value, label in self._named:
            try:
                now = container[key]
            except (LookupError, ValueError):
                return f"{label} (gone)"
            if now is not value and (not isinstance(value, _SCALARS) or repr(now) != repr(value)):
                return label
        for held, outline, label in zip(self._own, self._outlines, self._own_labels, strict=True):
            if _outline(held) != outline:
                return f"the items of {label}"
        return self._bindings.change() or "where a parameter, buffer or tensor lies, or a function that is called"

    def grows(self) -> bool:
        """Whether sets and dicts of the callable's own count, and are as they were."""
        return bool(self._own) and list(map(_outline, self._own)) == self._outlines

    def take_growth(self) -> None:
        """Another call of the callable's has run, and filled its caches."""
        self._outlines = [
            before if isinstance(held, (list, deque)) else _outline(held)
            for held, before in zip(self._own, self._outlines, strict=True)
        ]

    def _are_scalars_equal(self) -> bool:
        return list(map(repr, map(getitem, self._scalar_holders, self._scalar_keys))) == self._scalars

    def requires_grad(self) -> bool:
        """Whether a tensor that the recording reads requires grad now, and did not when it was made."""
        return any([t.requires_grad for t in self._read])


def _is_told_by_equality(value: Any) -> bool:
    """Whether another value is never equal, or cannot be compared: most modules and functions, tensors of several items."""
    if isinstance(value, torch.Tensor):
        return value.numel() != 1
    equality: Any = type(value).__eq__
    return value is None or equality is object.__eq__


def _is_alike(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and isinstance(before, (*_SCALARS, *_SIZES)))


def global_hooks() -> list[dict[int, Any]]:
    """Tables of hooks that run at every module."""
    return [getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS]


def _decides(value: Any) -> bool:
    """Whether a value says which way code takes by what it is: code, types, flags and Nones, and objects of the user's."""
    if isinstance(value, CODE):
        return True
    module = type(value).__module__
    return not (isinstance(value, _HELD) or is_library(module) or module.partition(".")[0] in _OF_PYTHON)


def _is_placed(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies somewhere; wrappers around other tensors do not."""
    try:
        return tensor.layout is torch.strided and tensor.data_ptr() >= 0
    except RuntimeError:
        return False


def _has_no_versions(container: Any) -> bool:
    if isinstance(container, dict):
        return not is_plain(container) or (dict_tag() is None and is_of_torch(container))
    return isinstance(container, (list, deque, MappingProxyType))


def _outline(container: Any) -> Any:
    """What of a container of the callable's own must stay: members, items by identity, or keys in their order."""
    if isinstance(container, (set, frozenset)):
        return set(container)
    return list(container) if isinstance(container, (dict, MappingProxyType)) else list(map(id, container))


def _columns(rows: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]
