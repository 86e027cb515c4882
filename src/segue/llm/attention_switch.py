"""Which attention a transformers model runs: Segue's inside an engine's call, its own everywhere else.

transformers asks the model's configuration for it, once to build a mask and once in every layer. So the configuration
answers by what is under way: its class becomes one of ours, with that one answer changed, and everything else stays the
model's own. It is Segue's in a pass of an engine whose model the configuration belongs to (`parts`). A thread that calls the
model plainly while an engine runs it gets the plain model, and so does a hook in the pass that calls another one.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from segue.graph import current, is_splitting
from segue.llm.batch import in_engine
from segue.llm.parts import ATTENTION, configs_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ATTENTION", "own_config", "switch_attention"]


def switch_attention(model: PreTrainedModel) -> None:
    """From now on the model attends by `ATTENTION` inside an engine's calls. Raises ValueError where it cannot."""
    configs = list({id(config): config for config in configs_of(model)}.values())
    if all(hasattr(config, "segue_own_class") for config in configs):
        return
    own = [config._attn_implementation_internal for config in configs]
    model.set_attn_implementation(ATTENTION)  # refuses models that cannot have another
    for config, name in zip(configs, own):
        config._attn_implementation_internal = name if name != ATTENTION else "sdpa"
        if not hasattr(config, "segue_own_class"):
            kind: Any = type(config)
            config.__class__ = _switching(kind)


def own_config(model: PreTrainedModel) -> None:
    """Gives the model a configuration of its own, in the place of one that other models may hold as well. Once."""
    if vars(model).get("segue_config") is model.config:
        return
    copies: dict[int, Any] = {}
    own = copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, held in list(vars(module).items()):
            if hasattr(held, "sub_configs") and id(held) in copies:
                vars(module)[name] = copies[id(held)]
    vars(model)["segue_config"] = own  # so it is of a copy of the model, whose configuration is copied with it


@functools.lru_cache
def _switching(kind: Any) -> Any:
    own = kind._attn_implementation

    def answer(config: Any) -> Any:
        if not in_engine(config):
            return own.fget(config)
        return ATTENTION if is_splitting() else current().batch.parts.attention

    def equals(config: Any, other: Any) -> Any:
        return kind.__eq__(_as(kind, config), _as(kind, other) if isinstance(other, kind) else other)

    def copied(config: Any, memo: dict[int, Any]) -> Any:  # a part of a model may be a copy of another one
        return _as(type(config), config, copy.deepcopy(vars(config), memo))

    def reduced(config: Any, protocol: Any) -> Any:  # a pickle is a plain one's
        return _as, (kind, None, vars(config))

    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__init__": kind.__init__,
        "__eq__": equals,
        "__hash__": kind.__hash__,
        "__copy__": lambda config: _as(type(config), config),
        "__deepcopy__": copied,
        "__reduce_ex__": reduced,
        "_attn_implementation": property(answer, own.fset),
        "segue_own_class": kind,
    }
    return type(kind.__name__, (kind,), names)


def _as(kind: Any, config: Any, state: dict[str, Any] | None = None) -> Any:
    """A configuration of the class `kind` with the state given, else with that of `config`."""
    made = kind.__new__(kind)
    vars(made).update(vars(config) if state is None else state)
    return made
