"""How one shape is recorded and replayed: the contract in `base`, one file a backend, and the factory."""

from __future__ import annotations

from segue.backends.base import Backend, Forward, Replayable
from segue.backends.breakable import BreakableBackend
from segue.backends.debug import ForwardBackend, OperationsBackend
from segue.backends.eager import EagerBackend
from segue.backends.full import FullBackend
from segue.backends.piecewise import PiecewiseBackend
from segue.memory.lane import Lane

__all__ = ["Backend", "Forward", "Replayable", "make_backend"]

_ALL: tuple[type[Backend], ...] = (
    FullBackend,
    BreakableBackend,
    PiecewiseBackend,
    EagerBackend,
    ForwardBackend,
    OperationsBackend,
)
_BACKENDS: dict[str, type[Backend]] = {b.name: b for b in _ALL}


def make_backend(name: str, lane: Lane, *, compiler: str = "auto") -> Backend:
    """The backend called `name` (``full``, ``breakable``, ``tc_piecewise``, ``disabled``; for debugging ``forward`` and
    ``ops``) for `lane`. `compiler` is that of ``tc_piecewise``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _BACKENDS:
        raise ValueError(f"no backend is called {name!r}: choose one of {', '.join(_BACKENDS)}")
    if name == PiecewiseBackend.name:
        return PiecewiseBackend(lane, compiler)
    return _BACKENDS[name](lane)
