"""Launching a Triton kernel without asking Triton again which binary it is.

Triton looks up the binary at every launch by the types of all arguments, in Python, which takes longer than the launch.
Here a launch is found by its whole numbers, its constants, and dtype and alignment of its tensors, all that Triton tells
binaries apart by; a first one goes through Triton, which compiles.
"""

from __future__ import annotations

from typing import Any

import torch

_ALIGNMENT = 16  # bytes that Triton specialises addresses on
_MOST = 4096  # launches that are remembered; whole numbers vary with the batch


class Launcher:
    """Decorates a kernel: `kernel(grid, *arguments, **constants_and_options)`."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._found: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        key = (
            *[(a.dtype, a.data_ptr() % _ALIGNMENT) if isinstance(a, torch.Tensor) else a for a in arguments],
            *constants.values(), arguments[0].device,
        )  # fmt: skip
        found = self._found.get(key)
        if found is None:
            compiled = self._kernel[grid](*arguments, **constants)
            if compiled is not None:  # as the interpreter answers
                if len(self._found) >= _MOST:
                    self._found.clear()
                names = self._kernel.arg_names[len(arguments) :]
                self._found[key] = compiled, tuple(constants[name] for name in names)
        else:
            compiled, rest = found
            compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
