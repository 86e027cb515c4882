"""The small operations between the matrix products, each one launch: `torch.ops.segue.*`.

They are operations of torch's dispatcher, so that a trace sees what they read and write, whatever runs underneath:
`reference` on the CPU (and for shapes on the meta device), `triton_kernels` on CUDA where triton is installed. Both round
where transformers' code rounds, so results differ from it by the order of a sum at the most.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from segue.llm.kernels import reference
from segue.llm.kernels.launch import Prepared, prepared_launches

__all__ = ["ACTIVATIONS", "has_triton", "prepared_rotation"]

ACTIVATIONS = tuple(reference.ACTIVATIONS)

_SCHEMAS = {
    # x[T, H] -> [T, H]; `adds_one` multiplies by 1 + weight, before the rounding (Gemma)
    "rms_norm": "(Tensor x, Tensor weight, float eps, bool adds_one) -> Tensor",
    # x[T, 2F], gate and up side by side -> activation(gate) * up [T, F]
    "gated": "(Tensor x, str activation) -> Tensor",
    # linear(norm(x)): x[T, K], weight[N, K] -> [T, N]
    "norm_linear": "(Tensor x, Tensor norm_weight, float eps, bool adds_one, Tensor weight, Tensor? bias) -> Tensor",
    # gated(linear(norm(x))): weight[2F, K] -> [T, F]
    "norm_linear_gated": (
        "(Tensor x, Tensor norm_weight, float eps, bool adds_one, Tensor weight, Tensor? bias, str activation) -> Tensor"
    ),
    # hidden[T, N] += linear(x)
    "linear_add": "(Tensor(a!) hidden, Tensor x, Tensor weight, Tensor? bias) -> ()",
    # logits[R, V] -> [2, R] int64: the likeliest token, the first of equals; whether its logit is finite
    "greedy": "(Tensor logits) -> Tensor",
    # A router's choice: logits[T, E] -> weights[T, k] of `dtype`, index[T, k] int64. Scores are a softmax or sigmoids; a
    # `bias` joins them for the choice alone; the chosen ones are divided by their sum, or not, and multiplied by `scale`.
    "route": (
        "(Tensor logits, Tensor? bias, int top_k, bool is_softmax, bool normalizes, float scale, ScalarType dtype) "
        "-> (Tensor, Tensor)"
    ),
    # Pairs of a token and an expert, index[T, k] int64, sorted by expert: tokens[T * k], where each pair lies then,
    # places[T, k] (-1: it has no expert), and ends[E] of the experts' pairs, all int32. Rows from `num_tokens` on, and
    # indices that are no expert's, have none: they lie behind all others.
    "pairs_by_expert": "(Tensor index, int num_experts, Tensor? num_tokens) -> (Tensor, Tensor, Tensor)",
    # x[T, K], weight[E, 2F, K] -> activation(gate) * up [S, F], sorted by expert; unwritten beyond the last end
    "experts_up": "(Tensor x, Tensor tokens, Tensor ends, Tensor weight, str activation) -> Tensor",
    # x[S, F], sorted by expert, weight[E, N, F] -> [S, N]; unwritten beyond the last end
    "experts_down": "(Tensor x, Tensor ends, Tensor weight) -> Tensor",
    # rows[S, N], sorted by expert, places[T, k], weights[T, k] -> the weighted sum of each token's rows [T, N]
    "combine": "(Tensor rows, Tensor places, Tensor weights) -> Tensor",
    # As `experts_up`, each pair in its own place, nothing sorted: index[T, k], x[T, K], weight[E, 2F, K] -> [T * k, F],
    # unwritten for pairs without an expert
    "pairs_up": "(Tensor x, Tensor index, Tensor? num_tokens, Tensor weight, str activation) -> Tensor",
    # x[T * k, F], weight[E, N, F], weights[T, k] -> the weighted sum of each token's results [T, N]
    "pairs_down": "(Tensor x, Tensor index, Tensor? num_tokens, Tensor weight, Tensor weights) -> Tensor",
    # qkv[T, (heads + 2 kv_heads) * D], cos and sin [T, R] go to q[T, heads, D], K and V to their slots of the cache. The
    # first R of D dimensions are rotated.
    "rotate_into": (
        "(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, bool adds_one, "
        "Tensor slots, Tensor(a!) q, Tensor(b!) keys, Tensor(c!) values) -> ()"
    ),
}


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_library = torch.library.Library("segue", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    for _key in ("CPU", "Meta"):
        _library.impl(_name, getattr(reference, _name), _key)


def _on_cuda(name: str) -> None:
    """Imports triton at the first call: it takes a second, and most processes never need it."""

    found: Callable[..., object] | None = None

    def call(*args: object) -> object:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(f"{__name__}.{'triton_kernels' if has_triton() else 'reference'}"), name)
        return found(*args)

    _library.impl(name, call, "CUDA")


for _name in _SCHEMAS:
    _on_cuda(_name)


def prepared_rotation(qkv: torch.Tensor, *others: Any) -> list[Prepared] | None:
    """The launch of a `rotate_into` that has run, to be made again; None where that cannot be prepared."""
    if qkv.device.type != "cuda" or not has_triton():
        return None
    from segue.llm.kernels import triton_kernels

    return prepared_launches([triton_kernels.rotation(qkv, *others)])
