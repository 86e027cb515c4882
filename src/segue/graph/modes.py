"""The modes in which a break's body runs.

A replay runs its bodies under the modes of whoever replays. But a forward pass may switch modes itself (`no_grad` inside
the model, autocast around one layer), and no Python of the pass runs at replay. So a break that was met under other
modes than its recording was started with carries them along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch

from segue._compat import (
    adds_in_fp16,
    allows_cudnn,
    allows_flash,
    allows_math,
    allows_memory_efficient,
    cudnn_allows_tf32,
    cudnn_is_deterministic,
    cudnn_tries,
    fp32_precision,
    has_function_modes,
    inference_guard,
    is_any_autocast_enabled,
    is_deterministic,
    matmul_precision,
    reduces_in_bf16,
    reduces_in_fp16,
    uses_cudnn,
    uses_mkldnn,
)

T = TypeVar("T")


class Autocast(NamedTuple):
    device_type: str
    is_enabled: bool
    dtype: torch.dtype


class Modes(NamedTuple):
    """What eager PyTorch's kernels and results depend on at a call, as far as `with` blocks set it."""

    is_grad_enabled: bool
    is_inference: bool
    autocast: tuple[Autocast, ...]


def current_modes(device_type: str) -> Modes:
    """The modes of this moment in this thread; autocast of `device_type` and of the CPU."""
    autocast = tuple(
        Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in (("cpu",) if device_type == "cpu" else ("cpu", device_type))
    )
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


SETTINGS = (
    "a default dtype", "deterministic algorithms", "a precision of matrix products", "TF32 in convolutions",
    "flash attention", "memory-efficient attention", "attention's plain code", "cuDNN's attention", "cuDNN",
    "cuDNN's benchmark", "cuDNN's determinism", "sums in fp16", "sums in bf16", "accumulation in fp16", "oneDNN",
    "the fast path of transformer layers",
)  # fmt: skip
"""what `kernel_settings` says"""


def kernel_modes(device_type: str) -> tuple[Any, ...]:
    """What selects kernels and result types at a call, beside the arguments: part of a call's key."""
    return (
        _is_inference(),
        _is_grad_enabled(),
        _autocast(device_type) if is_any_autocast_enabled() else None,
        torch.get_default_device() if has_function_modes() else None,
        kernel_settings(),
    )


def kernel_settings() -> tuple[Any, ...]:
    """Those of them that hold for the whole process. Runs no operation."""
    try:
        precision, convolves_in_tf32 = matmul_precision(), cudnn_allows_tf32()
    except RuntimeError:  # set for each operation by itself, which these do not answer for
        precision, convolves_in_tf32 = None, tuple([fp32_precision(*part) for part in _PRECISIONS])
    return (
        _default_dtype(),
        is_deterministic(),
        precision,
        convolves_in_tf32,
        allows_flash(),
        allows_memory_efficient(),
        allows_math(),
        allows_cudnn(),
        uses_cudnn(),
        cudnn_tries(),
        cudnn_is_deterministic(),
        reduces_in_fp16(),
        reduces_in_bf16(),
        adds_in_fp16(),
        uses_mkldnn(),
        _takes_fast_path(),
    )


_takes_fast_path = torch.backends.mha.get_fastpath_enabled
_is_inference, _is_grad_enabled = torch.is_inference_mode_enabled, torch.is_grad_enabled
_default_dtype = torch.get_default_dtype
_PRECISIONS = [(kind, name) for kind in ("cuda", "mkldnn") for name in ("matmul", "conv", "rnn")]


def _autocast(device_type: str) -> tuple[Any, ...]:
    """Of each kind of device."""
    kinds = dict.fromkeys((device_type, "cpu", "cuda", "mps", "xpu"))
    return tuple([torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in kinds])


def under(modes: Modes, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Calls `function` under `modes`, and puts the present ones back."""
    dtypes = [(kind, torch.get_autocast_dtype(kind)) for kind, _, _ in modes.autocast]
    try:
        with inference_guard(modes.is_inference):  # puts grad mode and what autocast casts back as well
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(modes.is_grad_enabled))
                for kind, is_enabled, dtype in modes.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
                return function(*args, **kwargs)
    finally:
        for kind, dtype in dtypes:
            torch.set_autocast_dtype(kind, dtype)


def bound(function: Callable[..., Any], modes: Modes) -> Callable[..., Any]:
    """`function`, always under `modes`."""

    return functools.partial(under, modes, function)
