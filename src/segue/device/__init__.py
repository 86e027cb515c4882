"""What can record device work and replay it: the contract in `base`, CUDA in `cuda`, ordinary memory in `cpu*`.

`get_device` picks the implementation for a torch device.
"""

from __future__ import annotations

import functools

import torch

from segue.device.base import (
    Capture,
    Device,
    DeviceGraph,
    MemoryReading,
    Observer,
    Peak,
    Pool,
    PoolState,
    ShapeMemo,
)

__all__ = [
    "Capture",
    "Device",
    "DeviceGraph",
    "MemoryReading",
    "Observer",
    "Peak",
    "Pool",
    "PoolState",
    "ShapeMemo",
    "get_device",
]


def get_device(device: torch.device | str) -> Device:
    """The recording device for `device` (``"cpu"``, ``"cuda"``, ``"cuda:1"``); one object a device.

    Raises:
        ValueError: segue records on cpu and cuda alone, or there is no CUDA device.
    """
    wanted = torch.device(device)
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for, and torch finds no CUDA GPU here: use device 'cpu'")
        return _cuda(torch.cuda.current_device() if wanted.index is None else wanted.index)
    if wanted.type != "cpu":
        raise ValueError(f"segue records on cpu and cuda, not on {wanted.type!r}")
    return _cpu()


@functools.cache
def _cuda(index: int) -> Device:
    from segue.device.cuda import CudaDevice

    return CudaDevice(index)


@functools.lru_cache(maxsize=1)
def _cpu() -> Device:
    from segue.device.cpu import CpuDevice

    return CpuDevice()
