"""Fixtures for tests of the core: each runs on the cpu device, and on CUDA under the marker `gpu`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from segue.device import Device, get_device
from segue.memory.lane import Lane

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return get_device(request.param)


@pytest.fixture
def new(device: Device) -> Callable[..., torch.Tensor]:
    """Makes random tensors of the sizes that it is given, on the device."""
    return lambda *size: torch.randn(*size, device=device.device)


@pytest.fixture
def lane(device: Device) -> Iterator[Lane]:
    lane = Lane(device)
    yield lane
    gc.collect(1)  # what a test made is young
    lane.close()
