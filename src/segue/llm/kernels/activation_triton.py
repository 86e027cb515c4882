"""The activations, for other Triton kernels to run on float32 values."""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        result = gate * tl.sigmoid(gate)
    elif ACTIVATION == 1:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        result = 0.5 * gate * (1.0 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    return result
