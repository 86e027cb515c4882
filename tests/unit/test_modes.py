"""Switches of torch that decide which kernels run: part of a call's key, also where the body itself asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import segue
from call_support import eager_reasons, same

C: Any = torch._C


def _switch(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return getattr(C, f"_get_{name}"), getattr(C, f"_set_{name}")


def _reduction(kind: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    get, put = _switch(f"cublas_allow_{kind}_reduced_precision_reduction")
    return lambda: get()[0], lambda value: put(value, True)


SWITCHES = {
    "cuDNN": _switch("cudnn_enabled"),
    "tf32 of cuDNN": _switch("cudnn_allow_tf32"),
    "trials of cuDNN": _switch("cudnn_benchmark"),
    "determinism of cuDNN": _switch("cudnn_deterministic"),
    "tf32 of cuBLAS": _switch("cublas_allow_tf32"),
    "fp16 sums of cuBLAS": _switch("cublas_allow_fp16_accumulation"),
    "oneDNN": _switch("mkldnn_enabled"),
    "fp16 reductions of cuBLAS": _reduction("fp16"),
    "bf16 reductions of cuBLAS": _reduction("bf16"),
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
    conv: Any = torch.backends.cudnn.conv

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


@pytest.mark.parametrize(
    "change",
    [lambda: torch.set_grad_enabled(True), lambda: torch.set_default_dtype(torch.float64)],
    ids=["grad mode", "default dtype"],
)
def test_a_body_that_leaves_a_mode_changed_runs_eagerly(change: Callable[[], Any]) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        change()
        return x * 2

    step = segue.graph(body)
    try:
        for _ in range(4):
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float32)
            step(torch.ones(4))
            assert torch.is_grad_enabled() or torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert step.report().replays == 0 and eager_reasons(step)["unsafe_effects"] == 3


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@pytest.mark.parametrize("is_recorded", [False, True])
def test_calls_run_eagerly_while_parametrized_weights_are_cached(is_recorded: bool) -> None:
    model = torch.nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Doubled())
    step, x = segue.graph(model), torch.ones(4)
    for _ in range(3 * is_recorded):
        step(x)
    with parametrize.cached():
        for _ in range(3):
            same(step(x), model(x))
            model.parametrizations.weight.original.add_(1)  # type: ignore[union-attr,operator]
    for _ in range(3):
        model.parametrizations.weight.original.add_(1)  # type: ignore[union-attr,operator]
        same(step(x), model(x))
    assert eager_reasons(step)["debug"] == 3 and step.report().captures == 1
