"""The fused parts of a decoder layer: how each is recognised, and what it computes.

A part has `of`, which reads its structure and answers None (or a reason) where that is another one; `takes`, whether a call
is an engine's; and `fused`, which computes what the module's own forward does, in the module's own conventions.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from segue.graph import current
from segue.llm.attention import LayerSpec, paged_attention, rotated_attention
from segue.llm.kernels.reference import activation_of
from segue.llm.kv_cache import PagedKVCache

__all__ = ["Attention", "Layer", "Mlp", "Norm", "Router", "first_of", "has_hooks", "is_near"]


_TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""of the largest absolute value of the original's result"""


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a fused result is the original's."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    most = float(expected.abs().max())
    return float((found.float() - expected.float()).abs().max()) <= _TOLERANCE.get(expected.dtype, 0.0) * most


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def first_of(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _is_plain(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether `names` are linear layers of torch's own kind, with weights of one dtype and no hooks."""
    found = [getattr(module, name, None) for name in names]
    return all(type(m) is nn.Linear and not has_hooks(m) for m in found)


_Linear = tuple[torch.Tensor, torch.Tensor | None]


def _merged(layers: Sequence[Any]) -> _Linear:
    """One weight and one bias for several linear layers with one input."""
    biases = [layer.bias for layer in layers]
    return _joined([layer.weight for layer in layers]), None if biases[0] is None else _joined(biases)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All `parts`, one below the other: the tensor that they are views of since an earlier merge, or a new one."""
    first = parts[0].detach()
    at = first.data_ptr()
    for part in parts:
        is_next = part.is_contiguous() and part.data_ptr() == at
        if not is_next or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat([p.detach() for p in parts])
        at += part.nbytes
    return first.as_strided((sum(p.shape[0] for p in parts), *first.shape[1:]), first.stride(), first.storage_offset())


def _merge(layers: Sequence[Any]) -> _Linear:
    """The same, and the layers' own become views of it."""
    with torch.inference_mode(False), torch.no_grad():
        merged = _merged(layers)
        for name, whole in zip(("weight", "bias"), merged, strict=True):
            own = [] if whole is None else [getattr(layer, name) for layer in layers]
            for parameter, part in zip(own, () if whole is None else whole.split([p.shape[0] for p in own]), strict=True):
                if parameter.data_ptr() != part.data_ptr():
                    parameter.data = part
    return merged


def _has_one_bias(layers: Sequence[Any]) -> bool:
    return len({layer.bias is None for layer in layers}) == 1


def _flat(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _takes_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is an engine's: one row of tokens, no mask and no cache of transformers'."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return (
        hidden is not None
        and hidden.dim() == 3
        and hidden.shape[0] == 1
        and kwargs.get("attention_mask") is None
        and kwargs.get("cache") is None
        and kwargs.get("past_key_values") is None
    )


class Norm:
    def __init__(self, module: Any, eps: float, adds_one: bool) -> None:
        self._module = module
        self.eps = eps
        self.adds_one = adds_one

    @classmethod
    def of(cls, module: Any) -> Norm | None:
        """For a module that is called an RMSNorm and has one weight."""
        weight = getattr(module, "weight", None)
        eps = next(
            (getattr(module, n) for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)), None
        )
        if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or eps is None:
            return None
        if has_hooks(module) or len(list(module.parameters())) != 1:
            return None
        return cls(module, eps, _adds_one(module))

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self._module.weight
        return weight

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return len(args) == 1 and not kwargs

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.segue.rms_norm(x, self._module.weight, self.eps, self.adds_one)
        return out


def _adds_one(module: Any) -> bool:
    """Whether the weight counts from zero (Gemma): then a constant row comes out as 1 + weight."""
    weight: torch.Tensor = module.weight
    out = module(torch.ones(1, weight.shape[0], dtype=weight.dtype, device=weight.device)).float()
    return bool((out - weight.float() - 1).abs().max() < (out - weight.float()).abs().max())


class Mlp:
    def __init__(self, module: Any, activation: str) -> None:
        self._module = module
        self._activation = activation
        self._weight: _Linear | None = None

    @classmethod
    def of(cls, module: Any) -> Mlp | None:
        """For gate, up and down projections with an activation between."""
        names = ("gate_proj", "up_proj", "down_proj")
        if not _is_plain(module, names) or len(list(module.parameters())) not in (3, 6):
            return None
        activation = activation_of(module, module.gate_proj.weight.device)
        return None if activation is None else cls(module, activation)

    def merge(self) -> None:
        self._weight = _merge((self._module.gate_proj, self._module.up_proj))

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return len(args) == 1 and not kwargs

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        down = self._module.down_proj
        return F.linear(self.gated(_flat(hidden), None), down.weight, down.bias).view(hidden.shape)

    def gated(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """What the output product reads, ``[T, F]``, of `x` as it is or first normed."""
        weight, bias = _merged((self._module.gate_proj, self._module.up_proj)) if self._weight is None else self._weight
        if norm is None:
            out: torch.Tensor = torch.ops.segue.gated(F.linear(x, weight, bias), self._activation)
        else:
            out = torch.ops.segue.norm_linear_gated(x, norm.weight, norm.eps, norm.adds_one, weight, bias, self._activation)
        return out

    @property
    def output(self) -> Any:
        return self._module.down_proj


class Router:
    """What chooses the experts of each token, recognised by what it computes."""

    def __init__(self, module: Any, **choice: Any) -> None:
        self._module = module
        self._choice = choice

    @classmethod
    def of(cls, module: Any) -> Router | str | None:
        """For a module that is called a router, has a weight ``[experts, hidden]``, and answers logits, weights and indices
        of `top_k` experts a token. A string is the reason why a router is not fused."""
        weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
        if (
            not type(module).__name__.endswith("Router")
            or not isinstance(top_k, int)
            or not isinstance(weight, torch.Tensor)
        ):
            return None
        if has_hooks(module) or weight.dim() != 2 or not 0 < top_k <= weight.shape[0]:
            return None
        probe = copy.copy(module)  # with other values, since a checkpoint's may hide a difference
        make = torch.Generator(weight.device).manual_seed(0)
        probe._parameters, probe._buffers = (
            {name: None if t is None else _like(t, make) for name, t in tensors.items()}
            for tensors in (module._parameters, module._buffers)
        )
        x = _like(weight[:1].expand(64, -1), make) * weight.shape[1] ** -0.5
        try:
            expected = type(module).forward(probe, x)
            for is_softmax, normalizes, is_wide in itertools.product((True, False), repeat=3):
                choice = {"is_softmax": is_softmax, "normalizes": normalizes, "is_wide": is_wide, "dtype": expected[1].dtype}
                if _is_choice(cls(probe, **choice).fused(x), expected):
                    return cls(module, **choice)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return "it is called or shaped in another way"
        return "it computes something else"

    def merge(self) -> None:
        """It has nothing to merge."""

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return len(args) == 1 and not kwargs

    def fused(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m, choice = self._module, self._choice
        logits = (_wide_linear if choice["is_wide"] else F.linear)(_flat(hidden), m.weight, getattr(m, "bias", None))
        weights, index = torch.ops.segue.route(
            logits, getattr(m, "e_score_correction_bias", None), m.top_k, choice["is_softmax"], choice["normalizes"],
            float(getattr(m, "routed_scaling_factor", 1.0)), choice["dtype"],
        )  # fmt: skip
        return logits, weights, index


def _like(tensor: torch.Tensor, make: torch.Generator) -> torch.Tensor:
    return torch.randn(tensor.shape, device=tensor.device, generator=make).to(tensor.dtype)


def _wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float32."""
    if x.is_cuda and bias is None and x.dtype is weight.dtype and x.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def _is_choice(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether two routers answer the same, whichever of equal logits they take, and in whatever order."""

    def parts(logits: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        return [logits, weights.sort(-1).values, logits.gather(1, index).sort(-1).values]

    return len(expected) == 3 and all(is_near(f, e) for f, e in zip(parts(*found), parts(*expected), strict=True))


class Attention:
    def __init__(self, module: Any, norms: tuple[Norm, Norm] | None, spec: LayerSpec, sinks: torch.Tensor | None) -> None:
        self._module = module
        self._norms = norms
        self._spec = spec
        self._sinks = sinks
        self._weight: _Linear | None = None

    @classmethod
    def of(
        cls, module: Any, norms: dict[nn.Module, Norm], asked: dict[int, tuple[LayerSpec, torch.Tensor | None]]
    ) -> Attention | None:
        """For q, k, v and output projections, with norms over each head or none."""
        if (
            not _is_plain(module, ("q_proj", "k_proj", "v_proj", "o_proj"))
            or getattr(module, "layer_idx", None) not in asked
        ):
            return None
        projections = (module.q_proj, module.k_proj, module.v_proj)
        others = [m for m in module.children() if m not in (*projections, module.o_proj)]
        q_norm, k_norm = (norms.get(getattr(module, name, module)) for name in ("q_norm", "k_norm"))
        pair = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        if not _has_one_bias(projections) or len(others) != (0 if pair is None else 2):
            return None
        if pair is not None and (pair[0].eps, pair[0].adds_one) != (pair[1].eps, pair[1].adds_one):
            return None
        return cls(module, pair, *asked[module.layer_idx])

    def merge(self) -> None:
        m = self._module
        self._weight = _merge((m.q_proj, m.k_proj, m.v_proj))

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return _takes_hidden(args, kwargs)

    def fused(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        output = self._module.o_proj
        inner = self.attended(self.projected(_flat(hidden_states), None), position_embeddings)
        return F.linear(inner, output.weight, output.bias).view(hidden_states.shape), None

    def projected(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """q, k and v side by side, of `x` as it is or first normed."""
        m = self._module
        weight, bias = _merged((m.q_proj, m.k_proj, m.v_proj)) if self._weight is None else self._weight
        if norm is None:
            return F.linear(x, weight, bias)
        out: torch.Tensor = torch.ops.segue.norm_linear(x, norm.weight, norm.eps, norm.adds_one, weight, bias)
        return out

    def attended(self, qkv: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        """What the output product reads, ``[T, heads * dim]``."""
        cos, sin = position_embeddings
        batch, spec, pair = current().batch, self._spec, self._norms
        cache: PagedKVCache = batch.plan.cache
        keys, values = cache.keys[spec.layer], cache.values[spec.layer]
        kv_heads, dim = keys.shape[1:]
        q = qkv.new_empty(qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads, dim)
        rotation = (
            qkv, cos[0], sin[0], None if pair is None else pair[0].weight, None if pair is None else pair[1].weight,
            0.0 if pair is None else pair[0].eps, pair is not None and pair[0].adds_one, batch.slot_mapping, q, keys, values,
        )  # fmt: skip
        if batch.plan.prepares:
            return rotated_attention(*rotation, *spec, self._sinks).flatten(1)
        torch.ops.segue.rotate_into(*rotation)
        return paged_attention(q, None, None, *spec, self._sinks).flatten(1)

    @property
    def output(self) -> Any:
        return self._module.o_proj


class Layer:
    """norm, attention, add, norm, mlp, add. The additions are the accumulation of the output products."""

    def __init__(self, first: Norm, attention: Attention, second: Norm, mlp: Any) -> None:
        self._first = first
        self._attention = attention
        self._second = second
        self._mlp = mlp

    @classmethod
    def of(cls, layer: Any, norms: dict[nn.Module, Norm], parts: dict[nn.Module, Any]) -> Layer | str:
        """The fused layer, or why there is none."""
        children = dict(layer.named_children())
        name = type(layer).__name__
        if set(children) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            return f"{name}: it has another structure"
        first, second = norms.get(children["input_layernorm"]), norms.get(children["post_attention_layernorm"])
        attention, mlp = parts.get(children["self_attn"]), children["mlp"]
        if first is None or second is None or attention is None or has_hooks(layer) or has_hooks(children["self_attn"]):
            return f"{name}: a part of it was not fused"
        return cls(first, attention, second, parts.get(mlp, mlp))

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return _takes_hidden(args, kwargs) and kwargs.get("position_embeddings") is not None

    def fused(self, hidden_states: torch.Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> torch.Tensor:
        """Writes over `hidden_states`, which nobody reads after the layer."""
        hidden, ops = _flat(hidden_states), torch.ops.segue
        attention, mlp = self._attention, self._mlp
        qkv = attention.projected(hidden, self._first)
        ops.linear_add(hidden, attention.attended(qkv, position_embeddings), attention.output.weight, attention.output.bias)
        if isinstance(mlp, Mlp):
            ops.linear_add(hidden, mlp.gated(hidden, self._second), mlp.output.weight, mlp.output.bias)
        else:
            hidden += _flat(first_of(mlp(self._second.fused(hidden).view(hidden_states.shape))))
        return hidden.view(hidden_states.shape)
