"""A model's weights under graphs: where they lie, and how they are replaced in place.

A recording holds addresses. Writing *into* a parameter simply works, and every recording goes on; a parameter that was
bound anew (assigned, `.data =`, `.to`, `load_state_dict(assign=True)`) lies elsewhere, and recordings would go on with the
old values. So each step compares the model's tables of parameters and buffers, and their addresses, with those of the
capture, and whether a module has other hooks, or an attribute that was not there (a `forward` of its own): some microseconds
for 300 parameters (`graph.audit`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from segue.graph.audit import Bindings
from segue.llm.arguments import check_type


class WeightAddresses:
    """Where a model's parameters and buffers were when this was made. Holds them alive."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.layout is torch.strided and t.numel()}
        self._bindings = Bindings(modules, [vars(module) for module in modules], list(tensors.values()))

    def hold(self) -> bool:
        """Whether everything is where it was."""
        try:
            return self._bindings.hold()
        except (RuntimeError, LookupError, TypeError, ValueError):
            return False


def write_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies `weights` into the parameters and buffers of those names; all of them, or none where one does not fit.

    Raises:
        ValueError: a name is unknown, a value is no ordinary tensor, or a shape or kind of number is another.
    """
    check_type("weights", weights, Mapping)
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, value in weights.items():
        if name not in targets:
            raise ValueError(f"the model has no weight {name!r}; its names are those of model.state_dict()")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
            kind = f"a {value.layout} tensor on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"weight {name!r} is given as {kind}, and must be a dense tensor with data: nothing was changed"
            )
        if targets[name].shape != value.shape:
            raise ValueError(
                f"weight {name!r} has the shape {list(targets[name].shape)}, and the new one {list(value.shape)}: nothing "
                "was changed"
            )
        if targets[name].dtype.is_floating_point and not value.dtype.is_floating_point:
            raise ValueError(f"weight {name!r} is {targets[name].dtype}, and the new one {value.dtype}: nothing was changed")
    held = {t.untyped_storage().data_ptr() for t in targets.values()}
    given: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in weights.items():
        first, other = given.setdefault(targets[name].data_ptr() or id(targets[name]), (name, value))
        if other is not value and targets[first] is targets[name] and not torch.equal(other, value.to(other)):
            raise ValueError(f"weights {first!r} and {name!r} are one tensor, and the new ones differ: nothing was changed")
    with torch.no_grad():
        # what is read from the model itself, as in a swap, must be read before anything is written
        values = {n: v.clone() if v.untyped_storage().data_ptr() in held else v for n, v in weights.items()}
        for name, value in values.items():
            targets[name].copy_(value)
