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
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from segue._compat import without_autocast
from segue.graph import Call, calling, current
from segue.llm.attention import LayerSpec, Plan, make_attention
from segue.llm.batch import RequestRows, build_batch, in_engine, to_device
from segue.llm.facts import ModelFacts
from segue.llm.fused_parts import Attention, Layer, Mlp, Norm, Router, first_of, has_hooks, is_near
from segue.llm.kv_cache import PagedKVCache
from segue.llm.parts import Parts

_CHECK_TOKENS = 8
_PAGE = 2
"""of the check's cache: the first that is not reserved"""
_RESIDUAL_SCALE = 2.0**-8
"""a layer is checked on inputs this much smaller, so that what it adds stands out from what it passes on"""
_KINDS = ("norm", "mlp", "router", "attention", "layer", "rotary")


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        left = [{"kind": kind, "reason": why, "count": count} for (kind, why), count in self.left.items()]
        return {"fused": dict(self.fused), "left": left}


def explain_fusion(report: FusionReport | None) -> str:
    """What start-up prints: one line. None is an engine that does not fuse."""
    if report is None:
        return "fusion: off (on by default on cuda)"
    fused = ", ".join(f"{report.fused[kind]} {kind}" for kind in _KINDS if report.fused[kind]) or "nothing"
    left = report.left.total()
    return f"fusion: {fused}" + (f"; {left} parts as they were (why: segue doctor --model)" if left else "")


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
        self.prepares = plan.prepares
        self.asked: dict[int, tuple[LayerSpec, torch.Tensor | None]] = {}

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.asked[spec.layer] = spec, sinks
        return self._plan.run(q, k, v, spec, sinks, out)


def fuse(model: nn.Module, facts: ModelFacts, max_positions: int) -> FusionReport:
    """Replaces what can be fused of a model that `load_model` prepared; positions stay below `max_positions`.

    The model stays changed. Needs memory for the merged weights of one layer beyond the model's own.
    """
    unfuse(model)
    report = FusionReport()
    layers = next((list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == facts.num_layers), [])
    plan, call = _check_call(model, facts)
    with torch.inference_mode(), without_autocast(), calling(call):
        seen = _watch(model, plan)
        norms = {m: n for m in model.modules() if (n := Norm.of(m)) and _is_checked("norm", m, n, seen, report)}
        for module, norm in norms.items():
            _replace(module, norm)
        parts: dict[nn.Module, Any] = {}
        for module in {child: None for layer in layers for child in layer.modules()}:
            attention = Attention.of(module, norms, plan.asked)
            for kind, made in (("mlp", Mlp.of(module)), ("router", Router.of(module)), ("attention", attention)):
                if isinstance(made, str):
                    report.left[kind, f"{type(module).__name__}: {made}"] += 1
                elif made is not None and _is_checked(kind, module, made, seen, report):
                    made.merge()
                    parts[module] = made
                    _replace(module, made)
        for layer in layers:
            whole = Layer.of(layer, norms, parts)
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
    return plan, Call(batch=batch.planned(plan, Parts(model)))


def _watch(model: nn.Module, plan: _NotingPlan) -> dict[nn.Module, _Seen]:
    """One pass of the original, with what each module saw and said."""
    seen: dict[nn.Module, _Seen] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kept = result.clone() if isinstance(result, torch.Tensor) else result
        seen.setdefault(module, _Seen(args, dict(kwargs), kept))

    batch = current().batch
    handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules() if not has_hooks(m)]
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
                result = first_of(type(module).forward(module, *_copied(args), **kwargs)).clone()
        reason = _difference(lambda: first_of(fused.fused(*_copied(args), **kwargs)), first_of(result))
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
    return None if is_near(got, expected) else "it computes something else"


def _copied(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def _scaled(args: tuple[Any, ...], scale: float) -> tuple[Any, ...]:
    """Hidden states, which alone are floating-point tensors among the direct arguments of a layer, times `scale`."""
    return tuple(a * scale if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


def _replace(module: nn.Module, part: Any) -> None:
    """From now on `part` answers within an engine's call, where its arguments are an engine's."""
    original = _original(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is module and in_engine(module) and part.takes(args, kwargs):
            return part.fused(*args, **kwargs)
        return original(self, *args, **kwargs)

    _set_forward(module, forward)


def _original(module: nn.Module) -> Callable[..., Any]:
    """What the module, or a copy of it, runs by itself."""
    own = vars(module).get("forward")
    return type(module).forward if own is None else lambda self, *args, **kwargs: own(*args, **kwargs)


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """A method, so that of a copy of the module it is the copy's."""
    forward.segue_original = module.__dict__.get("forward")  # type: ignore[attr-defined]
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def unfuse(model: nn.Module) -> None:
    """Every module runs its own code again. Merged weights stay one tensor."""
    for module in model.modules():
        own: Any = vars(module).pop("forward", None)
        while hasattr(own, "segue_original"):
            own = own.segue_original
        if own is not None:
            vars(module)["forward"] = own


def is_fused(model: nn.Module) -> bool:
    return any(hasattr(vars(module).get("forward"), "segue_original") for module in model.modules())


def _fuse_rotary(module: Any, max_positions: int, seen: _Seen, report: FusionReport) -> None:
    """A table of the original's cosines and sines. One that is called with more than states and positions stays."""
    values = (*seen.args, *seen.kwargs.values())
    name = type(module).__name__
    if len(values) != 2 or not all(isinstance(v, torch.Tensor) for v in values) or not isinstance(seen.result, tuple):
        report.left["rotary", f"{name}: it takes more than positions"] += 1
        return
    original, states = _original(module), values[0]
    with torch.inference_mode(False), torch.no_grad():
        every = torch.arange(max_positions, device=states.device)[None]
        cos, sin = (part[0].clone() for part in original(module, states[:, :1].detach().clone(), every))
    size = cos.shape[-1]
    table = torch.cat((cos, sin), -1)

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if self is not module or not in_engine(module) or position_ids.shape[0] != 1 or x.dtype != table.dtype:
            return original(self, x, position_ids)
        rows = F.embedding(position_ids[0], table)[None]
        return rows[..., :size], rows[..., size:]

    got = forward(module, *(v.clone() for v in values))
    if all(torch.equal(a, b) for a, b in zip(got, seen.result, strict=True)):
        _set_forward(module, forward)
        report.fused["rotary"] += 1
    else:
        report.left["rotary", f"{name}: its table differs"] += 1
