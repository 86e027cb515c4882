"""Context variables of a call: set for the length of a block, and put back where a signal's handler interrupted the block.

Such a handler may raise between any two steps of the interpreter, also between a value and the block that is to reset it.
So whoever begins a call keeps its context (`contextvars.copy_context`, which copies nothing), and where the call ends by
an exception each variable of the package gets the value back that it had there. They are told by their names.
"""

from __future__ import annotations

from contextvars import Context, ContextVar, Token, copy_context
from typing import Generic, TypeVar

T = TypeVar("T")


class setting(Generic[T]):
    """`variable` is `value` inside. A class: a generator that was kept from ending would end, and reset it, at some later
    time, when the exception's traceback is forgotten."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token: Token[T] = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def put_back(before: Context) -> None:
    """The package's variables are what they were in `before`; those that were not set there, None."""
    for variable, value in copy_context().items():
        if variable.name.startswith("segue_"):
            old = before.get(variable)
            if old is not value:
                variable.set(old)
