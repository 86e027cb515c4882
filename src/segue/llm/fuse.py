"""Structural fusion of transformers' decoder layers, each part checked against the original's numbers at load.

A part is recognised by its structure (the kinds and sizes of its submodules), replaced on the instance, and run on the
inputs that the original just saw. Where the results differ, or the structure is another one, the original stays, with the
reason. So a family that Segue has never met is fused as far as it computes the same, and no further.

- *norm*: an RMSNorm is one launch.
- *mlp*: gate and up are one matrix product, the activation and the product one launch.
- *attention*: q, k and v are one matrix product; norms of the heads, rotation and the write to the cache one launch.
- *layer*: where a layer is norm, attention, add, norm, mlp, add, the two additions happen inside the output products.
- *rotary*: cosines and sines are looked up in a table that the original made.

Merged weights are one tensor, and the original parameters become views of it: a checkpoint loaded in place reaches both.
Outside an engine's calls, and with arguments that an engine does not use, the original code runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from segue.graph import Call, calling, current, is_calling
from segue.llm.attention import LayerSpec, Plan, make_attention, paged_attention
from segue.llm.batch import RequestRows, build_batch, to_device
from segue.llm.facts import ModelFacts
from segue.llm.kernels.reference import ACTIVATIONS
from segue.llm.kv_cache import PagedKVCache

_CHECK_TOKENS = 8
_PAGE = 2
"""of the check's cache: the first that is not reserved"""
_RESIDUAL_SCALE = 2.0**-8
"""a layer is checked on inputs this much smaller, so that what it adds stands out from what it passes on"""
_TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""of the largest absolute value of the original's result"""
_KINDS = ("norm", "mlp", "attention", "layer", "rotary")


@dataclass(slots=True)
class FusionReport:
    """How many parts of each kind were fused; for the others the reason, and for how many it holds."""

    fused: Counter[str] = field(default_factory=Counter)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """One line a kind, in a fixed order."""
        found = []
        for kind in _KINDS:
            reasons = [f"{count} not: {why}" for (of, why), count in self.left.items() if of == kind]
            if self.fused[kind] or reasons:
                found.append("; ".join([f"{kind}: {self.fused[kind]} fused", *reasons]))
        return found


class _Seen(NamedTuple):
    """What a module was called with in the check pass, and what it answered."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _NotingPlan:
    """Another plan's attention, and what each layer asks of it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.cache = plan.cache
        self.asked: dict[int, tuple[LayerSpec, torch.Tensor | None]] = {}

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.asked[spec.layer] = spec, sinks
        return self._plan.run(q, k, v, spec, sinks)


def fuse(model: nn.Module, facts: ModelFacts, max_positions: int) -> FusionReport:
    """Replaces what can be fused of a model that `load_model` prepared; positions stay below `max_positions`.

    The model stays changed. Needs memory for the merged weights of one layer beyond the model's own.
    """
    unfuse(model)
    report = FusionReport()
    layers = next((list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == facts.num_layers), [])
    plan, call = _check_call(model, facts)
    with torch.inference_mode(), calling(call):
        seen = _watch(model, plan)
        norms = {m: n for m in model.modules() if (n := _Norm.of(m)) and _is_checked("norm", m, n, seen, report)}
        for module, norm in norms.items():
            _replace(module, norm)
        parts: dict[nn.Module, Any] = {}
        for module in {child: None for layer in layers for child in layer.children()}:
            for kind, made in (("mlp", _Mlp.of(module)), ("attention", _Attention.of(module, norms, plan.asked))):
                if made is not None and _is_checked(kind, module, made, seen, report):
                    made.merge()
                    parts[module] = made
                    _replace(module, made)
        for layer in layers:
            whole = _Layer.of(layer, norms, parts)
            if isinstance(whole, str):
                report.left["layer", whole] += 1
            elif _is_checked("layer", layer, whole, seen, report, scale=_RESIDUAL_SCALE):
                _replace(layer, whole)
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding") and module in seen:
                _fuse_rotary(module, max_positions, seen[module], report)
    return report


# -- the check ----------------------------------------------------------------------------------------------------------


def _check_call(model: nn.Module, facts: ModelFacts) -> tuple[_NotingPlan, Call]:
    """A live call over one request of a few tokens, with a small cache of its own."""
    device = next(model.parameters()).device
    cache = PagedKVCache(
        facts.num_layers, _PAGE + 1, facts.num_kv_heads, facts.head_dim, facts.dtype, device,
        value_head_dim=facts.value_head_dim,
    )  # fmt: skip
    batch = to_device(build_batch([RequestRows(range(_CHECK_TOKENS), 0, (_PAGE,))]), device)
    plan = _NotingPlan(make_attention("torch_sdpa", cache).plan_live(batch))
    return plan, Call(batch=batch.planned(plan))


def _watch(model: nn.Module, plan: _NotingPlan) -> dict[nn.Module, _Seen]:
    """One pass of the original, with what each module saw and said."""
    seen: dict[nn.Module, _Seen] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kept = result.clone() if isinstance(result, torch.Tensor) else result
        seen.setdefault(module, _Seen(args, dict(kwargs), kept))

    batch = current().batch
    handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules() if not _has_hooks(m)]
    try:
        model(input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _is_checked(
    kind: str, module: nn.Module, fused: Any, seen: dict[nn.Module, _Seen], report: FusionReport, scale: float = 1.0
) -> bool:
    """Whether `fused` computes what `module` does; counts the answer."""
    reason = None
    if module not in seen:
        reason = "it has hooks, or the model does not call it"
    else:
        args, kwargs, result = seen[module]
        if scale != 1.0:
            args, kwargs = _scaled(args, scale), dict(zip(kwargs, _scaled(tuple(kwargs.values()), scale), strict=True))
            with torch.no_grad():
                result = _first(type(module).forward(module, *_copied(args), **kwargs)).clone()
        reason = _difference(lambda: _first(fused.fused(*_copied(args), **kwargs)), _first(result))
    if reason is None:
        report.fused[kind] += 1
    else:
        report.left[kind, f"{type(module).__name__}: {reason}"] += 1
    return reason is None


def _difference(fused: Callable[[], torch.Tensor], expected: torch.Tensor) -> str | None:
    """Why the fused result is not the original's; None where it is."""
    try:
        got = fused()
    except (RuntimeError, TypeError, ValueError):  # shapes or arguments that this structure has not elsewhere
        return "it is called or shaped in another way"
    tolerance, most = _TOLERANCE.get(expected.dtype, 0.0), float(expected.abs().max())
    is_same = got.shape == expected.shape and float((got.float() - expected.float()).abs().max()) <= tolerance * most
    return None if is_same else "it computes something else"


def _copied(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def _scaled(args: tuple[Any, ...], scale: float) -> tuple[Any, ...]:
    """Hidden states, which alone are floating-point tensors among the direct arguments of a layer, times `scale`."""
    return tuple(a * scale if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


def _first(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _replace(module: nn.Module, part: Any) -> None:
    """From now on `part` answers within an engine's call, where its arguments are an engine's."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_calling() and part.takes(args, kwargs):
            return part.fused(*args, **kwargs)
        return original(*args, **kwargs)

    _set_forward(module, forward)


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    forward.segue_original = module.__dict__.get("forward")  # type: ignore[attr-defined]
    module.forward = forward  # type: ignore[method-assign]


def unfuse(model: nn.Module) -> None:
    """Every module runs its own code again. Merged weights stay one tensor."""
    for module in model.modules():
        own: Any = vars(module).pop("forward", None)
        while hasattr(own, "segue_original"):
            own = own.segue_original
        if own is not None:
            vars(module)["forward"] = own


def _is_plain(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether `names` are linear layers of torch's own kind, with weights of one dtype and no hooks."""
    found = [getattr(module, name, None) for name in names]
    return all(type(m) is nn.Linear and not _has_hooks(m) for m in found)


_Linear = tuple[torch.Tensor, torch.Tensor | None]


def _merged(layers: Sequence[Any]) -> _Linear:
    """One weight and one bias for several linear layers with one input."""
    biases = [layer.bias for layer in layers]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases])


def _merge(layers: Sequence[Any]) -> _Linear:
    """The same, and the layers' own become views of it."""
    with torch.inference_mode(False), torch.no_grad():
        merged = _merged(layers)
        for name, whole in zip(("weight", "bias"), merged, strict=True):
            own = [] if whole is None else [getattr(layer, name) for layer in layers]
            for parameter, part in zip(own, () if whole is None else whole.split([p.shape[0] for p in own]), strict=True):
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


# -- the parts ----------------------------------------------------------------------------------------------------------


class _Norm:
    def __init__(self, module: Any, eps: float, adds_one: bool) -> None:
        self._module = module
        self.eps = eps
        self.adds_one = adds_one

    @classmethod
    def of(cls, module: Any) -> _Norm | None:
        """For a module that is called an RMSNorm and has one weight."""
        weight = getattr(module, "weight", None)
        eps = next(
            (getattr(module, n) for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)), None
        )
        if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or eps is None:
            return None
        if _has_hooks(module) or len(list(module.parameters())) != 1:
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


class _Mlp:
    def __init__(self, module: Any, activation: str) -> None:
        self._module = module
        self._activation = activation
        self._weight: _Linear | None = None

    @classmethod
    def of(cls, module: Any) -> _Mlp | None:
        """For gate, up and down projections with an activation between."""
        names = ("gate_proj", "up_proj", "down_proj")
        if not _is_plain(module, names) or len(list(module.parameters())) not in (3, 6):
            return None
        activation = _activation(module)
        return None if activation is None else cls(module, activation)

    def merge(self) -> None:
        self._weight = _merge((self._module.gate_proj, self._module.up_proj))

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return len(args) == 1 and not kwargs

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        down = self._module.down_proj
        return F.linear(self.gated(_flat(hidden), None), down.weight, down.bias).view(hidden.shape)

    def gated(self, x: torch.Tensor, norm: _Norm | None) -> torch.Tensor:
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


def _activation(module: Any) -> str | None:
    """The name of the activation that `act_fn` computes."""
    function = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    weight: torch.Tensor = module.gate_proj.weight
    if function is None:
        return None
    x = torch.linspace(-3, 3, 13, dtype=torch.float32, device=weight.device)
    for name, candidate in ACTIVATIONS.items():
        if torch.allclose(function(x), candidate(x), atol=1e-5):
            return name
    return None


class _Attention:
    def __init__(self, module: Any, norms: tuple[_Norm, _Norm] | None, spec: LayerSpec, sinks: torch.Tensor | None) -> None:
        self._module = module
        self._norms = norms
        self._spec = spec
        self._sinks = sinks
        self._weight: _Linear | None = None

    @classmethod
    def of(
        cls, module: Any, norms: dict[nn.Module, _Norm], asked: dict[int, tuple[LayerSpec, torch.Tensor | None]]
    ) -> _Attention | None:
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

    def projected(self, x: torch.Tensor, norm: _Norm | None) -> torch.Tensor:
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
        q = torch.ops.segue.rotate_into(
            qkv, cos[0], sin[0], None if pair is None else pair[0].weight, None if pair is None else pair[1].weight,
            0.0 if pair is None else pair[0].eps, pair is not None and pair[0].adds_one,
            batch.slot_mapping, cache.keys[spec.layer], cache.values[spec.layer],
        )  # fmt: skip
        return paged_attention(q, None, None, *spec, self._sinks).flatten(1)

    @property
    def output(self) -> Any:
        return self._module.o_proj


class _Layer:
    """norm, attention, add, norm, mlp, add. The additions are the accumulation of the output products."""

    def __init__(self, first: _Norm, attention: _Attention, second: _Norm, mlp: Any) -> None:
        self._first = first
        self._attention = attention
        self._second = second
        self._mlp = mlp

    @classmethod
    def of(cls, layer: Any, norms: dict[nn.Module, _Norm], parts: dict[nn.Module, Any]) -> _Layer | str:
        """The fused layer, or why there is none."""
        children = dict(layer.named_children())
        name = type(layer).__name__
        if set(children) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            return f"{name}: it has another structure"
        first, second = norms.get(children["input_layernorm"]), norms.get(children["post_attention_layernorm"])
        attention, mlp = parts.get(children["self_attn"]), children["mlp"]
        if first is None or second is None or attention is None or _has_hooks(layer) or _has_hooks(children["self_attn"]):
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
        if isinstance(mlp, _Mlp):
            ops.linear_add(hidden, mlp.gated(hidden, self._second), mlp.output.weight, mlp.output.bias)
        else:
            hidden += _flat(_first(mlp(self._second.fused(hidden).view(hidden_states.shape))))
        return hidden.view(hidden_states.shape)


def _fuse_rotary(module: Any, max_positions: int, seen: _Seen, report: FusionReport) -> None:
    """A table of the original's cosines and sines. One that is called with more than states and positions stays."""
    values = (*seen.args, *seen.kwargs.values())
    name = type(module).__name__
    if len(values) != 2 or not all(isinstance(v, torch.Tensor) for v in values) or not isinstance(seen.result, tuple):
        report.left["rotary", f"{name}: it takes more than positions"] += 1
        return
    original, states = module.forward, values[0]
    with torch.inference_mode(False), torch.no_grad():
        every = torch.arange(max_positions, device=states.device)[None]
        cos, sin = (part[0].clone() for part in original(states[:, :1].detach().clone(), every))
    size = cos.shape[-1]
    table = torch.cat((cos, sin), -1)

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if not is_calling() or position_ids.shape[0] != 1 or x.dtype != table.dtype:
            return original(x, position_ids)
        rows = F.embedding(position_ids[0], table)[None]
        return rows[..., :size], rows[..., size:]

    got = forward(*(v.clone() for v in values))
    if all(torch.equal(a, b) for a, b in zip(got, seen.result, strict=True)):
        _set_forward(module, forward)
        report.fused["rotary"] += 1
    else:
        report.left["rotary", f"{name}: its table differs"] += 1
