"""One recorded operation as the cpu device replays it, at the captured addresses.

A step is (callable, arguments, keyword arguments). Operations that write in place are called as they are; functional
ones go through their `out=` overload where there is one, and are run and copied into the pool where there is none.
Steps hold views of the pool that own no block, and detached aliases of everything else, which keep it alive.

Which overload is the `out=` form: its non-out arguments have the functional one's names and types, and it has as many
outs as the other has returns. Losses with a reduction use `out` as scratch of another shape, batch norm adds to what is
there, and FFTs and linear algebra choose another layout inside, and so other last bits, with `out` than without: these are
run and copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from segue._compat import inference_guard
from segue.device.cpu_pool import CpuPool
from segue.device.operations import Operation, lazily_as
from segue.errors import ReplayError

_FACTORY_OPTIONS = {"dtype", "layout", "device", "pin_memory"}
_SCRATCH_OUT = {
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::huber_loss",
    "aten::soft_margin_loss",
    "aten::binary_cross_entropy",
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
}
_OTHER_LAYOUT_OUT = ("aten::linalg_", "aten::_linalg_", "aten::_fft_", "aten::geqrf", "aten::ormqr")
_COPY = torch.ops.aten.copy_.default._op


class Step(NamedTuple):
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _OutForm(NamedTuple):
    overload: OpOverload
    names: tuple[str, ...]
    dropped: frozenset[str]


@functools.cache
def _out_form(overload: OpOverload) -> _OutForm | None:
    schema = overload._schema
    if schema.name in _SCRATCH_OUT or schema.name.startswith(_OTHER_LAYOUT_OUT):
        return None
    if any(str(r.type) != "Tensor" for r in schema.returns):
        return None
    is_factory = not any("Tensor" in str(a.type) for a in schema.arguments)
    dropped = _FACTORY_OPTIONS if is_factory else set()
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in dropped]
    packet = overload.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        outs = [a.name for a in candidate._schema.arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        if len(outs) == len(schema.returns) and others == wanted:
            return _OutForm(candidate, tuple(outs), frozenset(dropped))
    return None


def functional_step(
    op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[torch.Tensor | None]
) -> Step:
    """`results` are the pool views that the replay writes, one a returned tensor (None where one is undefined)."""
    if op.name == "aten._to_copy.default":
        return Step(_COPY, (results[0], args[0]), {})
    form = _out_form(op.overload) if not op.writes_names else None
    if form is not None and all(r is not None and _is_dense(r) for r in results):
        options = {k: v for k, v in kwargs.items() if k not in form.dropped}
        options.update(zip(form.names, results, strict=True))
        return Step(form.overload._op, args, options)
    call = op.call

    def run_and_copy(*a: Any, **k: Any) -> None:
        for source, target in zip(fresh_results(op, call(*a, **k)), results, strict=True):
            if target is not None:
                if source.shape != target.shape:
                    raise ReplayError(
                        f"{op.name} returned shape {list(source.shape)}, and {list(target.shape)} when recorded: its "
                        "shape depends on data. Put it behind @segue.eager_on_graph, or tag it dynamic_output_shape"
                    )
                target.copy_(source)

    return Step(run_and_copy, args, kwargs)


def _is_dense(tensor: torch.Tensor) -> bool:
    """`out=` needs a tensor that does not overlap itself."""
    return all(stride > 0 or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def fresh_results(op: Operation, value: Any) -> list[Any]:
    """The returned tensors that the call made, in order, lists flattened: arguments handed back are left out."""
    returns = op.overload._schema.returns
    if len(returns) == 1:
        return list(value) if isinstance(value, (list, tuple)) else [value]
    return [v for r, v in zip(returns, value, strict=True) if r.alias_info is None or not r.alias_info.is_write]


class TapeArguments:
    """Turns live arguments into what a tape may hold."""

    def __init__(self, pool: CpuPool) -> None:
        self._pool = pool

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() == 0:  # it may be a view of a block, and must not keep it
                with inference_guard(False):
                    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            view = self._pool.view(value)
            return value.detach() if view is None else lazily_as(value, view)
        if isinstance(value, list):
            return [self.of(v) for v in value]
        if isinstance(value, tuple):
            return tuple(self.of(v) for v in value)
        return value


def rebuilt(op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> Any:
    """The schema's return structure around `results`; returns that are arguments come back as those arguments."""
    schema = op.overload._schema
    if len(schema.returns) == 1:
        return results if op.returns_list else results[0]
    written = iter(op.declared(args, kwargs))
    fresh = iter(results)
    return tuple(
        next(written) if r.alias_info is not None and r.alias_info.is_write else next(fresh) for r in schema.returns
    )
