"""Mixtures of experts: padded tokens join no expert.

A router sends every row of a padded batch to its likeliest experts, and an expert multiplies all its rows at once. So a
padded row would lengthen the groups that real rows are in, and matrix kernels round by the number of rows: what lies in
the padding would move real logits in the last bits (3e-8 in float32, measured with mixtral and gpt_oss), and be work
for nothing. Before each experts module runs, rows from `num_tokens` on are therefore sent to the sentinel
``num_experts``, which transformers' kernels skip; segue's own (`OURS`) take the count themselves. It is a tensor of the
batch, so a recording follows it.

Experts modules are found by structure: a `num_experts` and a `forward` whose second parameter is the routing index.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from segue.graph import current
from segue.llm.batch import in_engine

OURS = ("segue", "by_rows")
"""implementations of experts that are `segue.llm.moe`'s"""
_INDEX_NAMES = ("top_k_index", "router_indices", "selected_experts")


def experts_modules(model: torch.nn.Module) -> list[Any]:
    """The experts modules of `model`."""
    return [module for module in model.modules() if _index_parameter(module) is not None]


def guard_experts(model: torch.nn.Module) -> int:
    """Keeps padding out of every experts module of `model`; returns how many there are. A second call adds nothing."""
    found = experts_modules(model)
    for experts in found:
        if not getattr(experts, "segue_guards_experts", False):
            experts.segue_guards_experts = True
            experts.register_forward_pre_hook(_Guard(str(_index_parameter(experts))), with_kwargs=True)
            # transformers masks what its grouped kernel leaves unwritten for sentinels only where it expects some.
            experts._is_expert_parallel = True
    return len(found)


def _index_parameter(module: torch.nn.Module) -> str | None:
    """The name of the routing index among the arguments of an experts module; None for any other module."""
    if not isinstance(getattr(module, "num_experts", None), int):
        return None
    names = list(inspect.signature(type(module).forward).parameters)  # self, hidden states, routing index, ..
    return names[2] if len(names) > 3 and names[2] in _INDEX_NAMES else None


class _Guard:
    """A forward pre-hook. Recordable: which rows are real is decided on the device."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not in_engine(module) or getattr(module.config, "_experts_implementation", None) in OURS:
            return None
        index: torch.Tensor = kwargs[self._name] if self._name in kwargs else args[1]
        rows = torch.arange(index.shape[0], device=index.device)
        index = torch.where((rows < current().batch.num_tokens)[:, None], index, module.num_experts)
        if self._name in kwargs:
            return args, kwargs | {self._name: index}
        return (args[0], index, *args[2:]), kwargs
