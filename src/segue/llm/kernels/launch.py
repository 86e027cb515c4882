"""Launching a Triton kernel without asking Triton again which binary it is.

Triton looks up the binary at every launch by the types of all arguments, in Python, which takes longer than the launch.
Here a launch is found by its whole numbers, its constants, and dtype and alignment of its tensors, all that Triton tells
binaries apart by; a first one goes through Triton, which compiles. A launch that will be made again with the same tensors
can be prepared: then nothing is looked up at all. Whole numbers that differ from launch to launch are cells (`c_int32`),
which are read when a launch is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from ctypes import c_float, c_int32, c_int64, c_void_p, sizeof
from functools import cache
from typing import Any, NamedTuple

import torch

from segue._compat import current_device
from segue.device.driver import can_serialize, kernel_launch, kernel_parameters

_ALIGNMENT = 16  # bytes that Triton specialises addresses on
_TYPES: dict[str, Any] = {"*": c_void_p, "i32": c_int32, "i64": c_int64, "fp32": c_float}
_NEEDS = ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")
_NOTHING = nullcontext()
_MOST = 4096  # launches that are remembered; whole numbers vary with the batch


class Prepared(NamedTuple):
    """A launch to be made again. `is_serialized`: with the attribute that primes (`device.driver`)."""

    run: Callable[[], None]
    arguments: tuple[Any, ...]
    is_serialized: bool


class Launcher:
    """Decorates a kernel: `kernel(grid, *arguments, **constants_and_options)`."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._found: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        key = _key(arguments, constants)
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

    def prepared(self, launch: Launch) -> Prepared | None:
        """A launch of this kernel that was made before, with the same arguments, which it holds. None where Triton has not
        compiled it (the interpreter never does). A kernel whose constant `IS_DEPENDENT` says that it waits by itself is
        launched serialized.
        """
        arguments = launch.arguments
        found = self._found.get(_key(launch.numbers, launch.constants))
        if found is None:
            return None
        compiled, rest = found
        values = [*[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments], *rest]
        is_dependent = launch.constants.get("IS_DEPENDENT", False)
        holds = all([p.do_not_specialize for p, a in zip(self._kernel.params, arguments) if isinstance(a, c_int32)])
        run = _by_the_driver(compiled, launch, values, is_serialized=is_dependent) if holds else None
        return Prepared(launch.run if run is None else run, arguments, run is not None and is_dependent)


def _by_the_driver(
    compiled: Any, launch: Launch, values: Sequence[Any], *, is_serialized: bool
) -> Callable[[], None] | None:
    """The launch without Triton's way to the driver, which takes as long again. None where the kernel needs more than its
    arguments, or takes others than Triton's signature says (the driver is asked)."""
    told = compiled.metadata
    if told.num_ctas != 1 or any([getattr(told, name, None) for name in _NEEDS]):
        return None
    pairs = [(kind, v) for kind, v in zip(compiled.src.signature.values(), values, strict=True) if kind != "constexpr"]
    types: list[Any] = [_TYPES.get("*" if kind.startswith("*") else kind) for kind, _ in pairs]
    sizes = kernel_parameters(compiled.function)
    if None in types or sizes is None:
        return None
    cells = [value if isinstance(value, c_int32) else kind(value) for kind, (_, value) in zip(types, pairs, strict=True)]
    cells += [c_void_p() for _ in sizes[len(cells) :]]  # scratch memory, of which it needs none
    if [sizeof(cell) for cell in cells] != sizes:
        return None
    threads = told.num_warps * told.target.warp_size
    return kernel_launch(
        compiled.function, launch.arguments[0].device.index, (*launch.grid, 1, 1)[:3], threads, told.shared, cells, compiled,
        more_rows=launch.more_rows, is_serialized=is_serialized,
    )  # fmt: skip


def _key(arguments: Sequence[Any], constants: dict[str, Any]) -> tuple[Any, ...]:
    told = [(a.dtype, a.data_ptr() % _ALIGNMENT) if isinstance(a, torch.Tensor) else a for a in arguments]
    return (*told, *constants.values(), arguments[0].device)


class Launch(NamedTuple):
    """One launch, to be made: what `more_rows` holds adds to the grid's second dimension. Cells come with it alone."""

    kernel: Launcher
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    more_rows: c_int32 | None = None

    @property
    def numbers(self) -> list[Any]:
        """The arguments, with what their cells hold now."""
        return [a.value if isinstance(a, c_int32) else a for a in self.arguments]

    def run(self) -> None:
        if self.more_rows is None:
            self.kernel(self.grid, *self.arguments, **self.constants)
        else:
            columns, rows, *others = self.grid
            self.kernel((columns, rows + self.more_rows.value, *others), *self.numbers, **self.constants)

    def prepared(self) -> Prepared | None:
        return self.kernel.prepared(self)


@cache
def can_depend(device: torch.device) -> bool:
    """Whether kernels there can wait by themselves for what came before them (programmatic dependent launch)."""
    return device.type == "cuda" and can_serialize(device.index)


def prepared_launches(launches: Sequence[Launch]) -> list[Prepared] | None:
    """All of them, or None where one cannot be prepared."""
    found = [launch.prepared() for launch in launches]
    return None if None in found else [prepared for prepared in found if prepared is not None]


class Launches:
    """Prepared launches, made in turn. `primes`: the last one, behind another, leaves the graph that follows primed."""

    def __init__(self, prepared: Sequence[Prepared], device: int) -> None:
        self._launches = [launch.run for launch in prepared]
        self._arguments = [launch.arguments for launch in prepared]
        self._device = device
        self.primes = len(prepared) > 1 and prepared[-1].is_serialized

    def __call__(self) -> None:
        with _NOTHING if current_device() == self._device else torch.cuda.device(self._device):
            for launch in self._launches:
                launch()
