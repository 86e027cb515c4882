"""Where the wrappers of an object's graphed methods are kept: in the object itself, in one entry of its `__dict__`.

A recording holds what its object holds, and that may lead back to the object. So only where the object owns its wrappers
can the collector free both together: a weak-keyed table elsewhere would keep such objects for good. The entry is made to
go unnoticed: it equals every other, a copy or a pickle of the object starts with an empty one, and wrappers are found by
the decorated function, so that a method and the one that it overrides have one each.
"""

from __future__ import annotations

from typing import Any


class Methods(dict[Any, Any]):
    """Wrappers by decorated function."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Methods)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, Methods)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return Methods, ()

    def __repr__(self) -> str:
        return f"<{len(self)} graphed methods>"


def methods_of(instance: Any) -> Methods | None:
    """The wrappers of an object or a class; None where it has no `__dict__`. A shallow copy, which brings its original's
    along, gets its own."""
    space = getattr(instance, "__dict__", None)
    if space is None:
        return None
    methods = space.get("_segue_methods")
    if methods is None or any(bound._function.__self__ is not instance for bound in list(methods.values())):
        methods = Methods()
        if isinstance(instance, type):
            type.__setattr__(instance, "_segue_methods", methods)
        else:
            space["_segue_methods"] = methods
    return methods  # type: ignore[no-any-return]
