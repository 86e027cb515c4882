"""How one shape is recorded and replayed: the contract in `base`, one file a backend, and the factory."""

from __future__ import annotations

from segue.backends.base import Backend, Forward, Replayable
from segue.backends.breakable import BreakableBackend
from segue.backends.debug import ForwardBackend, OperationsBackend
from segue.backends.eager import EagerBackend
from segue.backends.full import FullBackend
from segue.memory.lane import Lane

__all__ = ["Backend", "Forward", "Replayable", "make_backend"]

_ALL: tuple[type[Backend], ...] = (FullBackend, BreakableBackend, EagerBackend, ForwardBackend, OperationsBackend)
_BACKENDS: dict[str, type[Backend]] = {b.name: b for b in _ALL}


def make_backend(name: str, lane: Lane) -> Backend:
    """The backend called `name` (``full``, ``breakable``, ``disabled``; for debugging ``forward`` and ``ops``) for `lane`.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _BACKENDS:
        raise ValueError(f"no backend is called {name!r}: choose one of {', '.join(_BACKENDS)}")
    return _BACKENDS[name](lane)
