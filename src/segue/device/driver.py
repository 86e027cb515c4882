"""The CUDA driver by ctypes, for what torch does not offer: asking a capture how far it is, launching a kernel again without
looking it up, and priming a graph.

*Priming.* The driver runs graphs in one of two ways. After a kernel was launched with the attribute of programmatic stream
serialization (CUDA's programmatic dependent launch) and behind a kernel, the kernels of every graph that follows come 0.09
us behind one another; otherwise 0.42 us. What is inside the graph does not matter, nor the stream; seven ordinary launches
end it. cuBLAS' products that split their sum launch so, hence an eager pass may leave it on, and a program that only replays
never has it. So two kernels that do nothing are launched in front of a large graph, the second one with the attribute, and
that one alone in front of a graph behind a break, where a kernel came before (`benchmarks/priming.py`; H200, driver 580).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from segue._compat import current_raw_stream

PRIME_FROM = 96
"""nodes of a graph from which on the time that priming saves exceeds what its launches take"""
PRIME_BEHIND_FROM = 12
"""the same for a graph behind a break, whose last kernel stands for the first launch"""

_LEAST_CAPABILITY = (9, 0)
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_KERNELS = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry segue_before() { ret; }
.visible .entry segue_prime() { griddepcontrol.wait; ret; }
"""
"""`segue_prime` waits for all that came before on its stream, as an ordinary kernel does: so the stream's order stays."""


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class CaptureProbe:
    """Asks the driver how far the capture of one stream is (`cuStreamGetCaptureInfo_v2`, `cuGraphGetNodes` with no
    buffer). Asking before the end spares keeping the graph beside its executable."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        driver = _driver()
        self._info, self._nodes = driver.cuStreamGetCaptureInfo_v2, driver.cuGraphGetNodes
        self._status, identity, self._graph = ctypes.c_int(0), ctypes.c_uint64(0), ctypes.c_void_p(0)
        dependencies, self._count = ctypes.c_void_p(0), ctypes.c_size_t(0)
        self._cells = (identity, dependencies)  # the driver writes there: they must live as long as the references
        outs = (self._status, identity, self._graph, dependencies, self._count)
        self._arguments = (ctypes.c_void_p(stream.cuda_stream), *map(ctypes.byref, outs))

    def ask(self) -> tuple[str, int]:
        """``none``, ``active`` or ``invalidated``, and the number of nodes recorded so far."""
        self._count.value = 0
        if self._info(*self._arguments):
            return "invalidated", 0
        if self._status.value == 1:
            self._nodes(self._graph, None, self._arguments[-1])
        return ("none", "active", "invalidated")[self._status.value], self._count.value


def kernel_parameters(function: int) -> list[int] | None:
    """Bytes of each parameter of a kernel (`cuFuncGetParamInfo`); None where the driver cannot tell (before CUDA 12.4)."""
    ask = getattr(_driver(), "cuFuncGetParamInfo", None)
    if ask is None:
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def kernel_launch(
    function: int,
    device: int,
    grid: Sequence[int],
    threads: int,
    shared_bytes: int,
    values: Sequence[Any],
    owner: Any,
    *,
    more_rows: ctypes.c_int32 | None = None,
    is_serialized: bool = False,
    is_optional: bool = False,
) -> Callable[[], None]:
    """What launches a kernel on a device's current stream, with the same arguments each time (`cuLaunchKernelEx`): `values`
    are ctypes objects, one a parameter, read at each launch; `owner` unloads the kernel when it dies. The device must be the
    current one, and one thread at a time may launch. `more_rows` adds to the grid's second dimension what it holds then.
    `is_serialized`: with programmatic stream serialization; the kernel must wait itself. `is_optional`: that the driver
    refuses it is no error."""
    launch = _driver().cuLaunchKernelEx
    places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    attribute = _Attribute(id=_SERIALIZATION)
    attribute.value[0] = 1
    config = _Config(*grid, threads, 1, 1, shared_bytes, None, ctypes.pointer(attribute), int(is_serialized))
    before, after = ctypes.byref(config), (ctypes.c_void_p(function), places, None)

    def run(kept: tuple[Any, Any] = (values, owner)) -> None:
        config.stream = current_raw_stream(device)
        if more_rows is not None:
            config.grid_y = grid[1] + more_rows.value
        status = launch(before, *after)
        if status and not is_optional:
            raise RuntimeError(f"the driver refused to launch a kernel (CUDA error {status})")

    return run


class Primer(NamedTuple):
    """What primes the graph that is launched next on the current stream, for one thread at a time. `behind` a kernel it is
    one launch; `first` launches a kernel that does nothing before."""

    first: Callable[[], None]
    behind: Callable[[], None]


def can_serialize(device: int) -> bool:
    """Whether launches there may have the attribute. Not where the environment variable SEGUE_PRIME is 0."""
    return os.environ.get("SEGUE_PRIME") != "0" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def primer(device: int) -> Primer | None:
    """None where the hardware or the driver cannot."""
    functions = _functions(device) if can_serialize(device) else None
    if functions is None:
        return None
    before, prime = (
        kernel_launch(function, device, (1, 1, 1), 1, 0, (), None, is_serialized=is_serialized, is_optional=True)
        for function, is_serialized in zip(functions, (False, True))
    )

    def first() -> None:
        before()
        prime()

    return Primer(first, prime)


@functools.lru_cache
def _functions(device: int) -> tuple[int, int] | None:
    """The two kernels, loaded into the device's context for as long as the process lives."""
    driver, module, found = _driver(), ctypes.c_void_p(), (ctypes.c_void_p(), ctypes.c_void_p())
    with torch.cuda.device(device):
        if driver.cuModuleLoadData(ctypes.byref(module), _KERNELS):
            return None
        for function, name in zip(found, (b"segue_before", b"segue_prime")):
            if driver.cuModuleGetFunction(ctypes.byref(function), module, name):
                return None
    before, prime = (function.value for function in found)
    return None if before is None or prime is None else (before, prime)
