"""Switches of torch that decide which kernels run: part of a call's key, also where the body itself asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import segue
from call_support import same

C: Any = torch._C
MATMUL: Any = torch.backends.cuda.matmul
CUDNN: Any = torch.backends.cudnn


def _attribute(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


SWITCHES = {
    "cudnn.enabled": _attribute(CUDNN, "enabled"),
    "cudnn.allow_tf32": _attribute(CUDNN, "allow_tf32"),
    "cudnn.benchmark": _attribute(CUDNN, "benchmark"),
    "cudnn.deterministic": _attribute(CUDNN, "deterministic"),
    "matmul.allow_tf32": _attribute(MATMUL, "allow_tf32"),
    "matmul in fp16": _attribute(MATMUL, "allow_fp16_reduced_precision_reduction"),
    "matmul in bf16": _attribute(MATMUL, "allow_bf16_reduced_precision_reduction"),
    "mkldnn": (C._get_mkldnn_enabled, C._set_mkldnn_enabled),
    "autocast of another device": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda value: torch.set_autocast_enabled("cuda", value),
    ),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_part_of_the_key(name: str) -> None:
    get, put = SWITCHES[name]
    before = get()

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if get() else x

    step, x = segue.graph(body), torch.arange(4.0)
    try:
        for value in (before, not before, before):
            put(value)
            for _ in range(3):
                same(step(x), body(x))
    finally:
        put(before)
    assert step.report().captures == 2


def test_precisions_set_for_one_operation_alone_are_part_of_the_key() -> None:
    conv: Any = CUDNN.conv

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if conv.fp32_precision == "ieee" else x

    step, x, before = segue.graph(body), torch.arange(4.0), conv.fp32_precision
    try:
        for value in ("ieee", "tf32"):
            conv.fp32_precision = value
            for _ in range(3):
                same(step(x), body(x))
    finally:
        conv.fp32_precision = before
    assert step.report().captures == 2
