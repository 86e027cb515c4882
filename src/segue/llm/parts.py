"""What belongs to the model that an engine runs: its modules and their configurations.

Code inside a pass of an engine's is not always the engine's model's: a hook may call another model, a copy of this one with
all its parts, or one that another engine runs. Such a model is given its caller's tensors, so it must answer as it does
outside. Therefore whoever acts on an engine's behalf asks for itself (`batch.in_engine`): a fused module, a guard of
experts, a configuration that is asked for the attention.

A part that is exchanged belongs from then on, so what is unknown is looked for once more. One that two models hold belongs
to both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

ATTENTION = "segue"
"""the name under which `segue.llm.attention` registers with transformers"""


class Parts:
    """Those of one model, which it keeps alive. `attention` is what the model attends by in the passes that carry it."""

    def __init__(self, model: torch.nn.Module, attention: str = ATTENTION) -> None:
        self._model = model
        self.attention = attention
        self._known: dict[int, weakref.ref[Any]] = {}

    def has(self, part: object) -> bool:
        """Whether `part`, a module or a configuration, belongs to the model."""
        if not self._knows(part):
            self._known = {id(p): weakref.ref(p) for p in (*self._model.modules(), *configs_of(self._model))}
        return self._knows(part)

    def asking(self) -> tuple[int, ...]:
        """The identities of those that ask, for programs that are compiled."""
        modules = [m for m in self._model.modules() if "forward" in vars(m) or hasattr(m, "segue_guards_experts")]
        return tuple([id(part) for part in (*modules, *configs_of(self._model))])

    def _knows(self, part: object) -> bool:
        found = self._known.get(id(part))
        return found is not None and found() is part


def configs_of(model: torch.nn.Module) -> Iterator[Any]:
    """Those of the model and of models and layers inside it, and what these hold for their parts."""
    found: list[Any] = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "sub_configs")]
    for config in found:
        yield config
        found += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
