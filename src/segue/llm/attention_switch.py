"""Which attention a transformers model runs: Segue's inside an engine's call, its own everywhere else.

transformers asks the model's configuration for it, once to build a mask and once in every layer. So the configuration
answers by who asks: its class becomes one of ours, with that one answer changed, and everything else stays the model's own.
A thread that calls the model plainly while an engine runs it gets the plain model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from segue.llm.batch import in_engine
from segue.llm.facts import PROBE_ATTENTION

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "segue"
"""the name under which `segue.llm.attention` registers with transformers"""


def switch_attention(model: PreTrainedModel) -> None:
    """From now on the model attends by `ATTENTION` inside an engine's calls. Raises ValueError where it cannot."""
    configs = list({id(config): config for config in _configs(model)}.values())
    if all(hasattr(config, "segue_own_class") for config in configs):
        return
    own = [config._attn_implementation_internal for config in configs]
    model.set_attn_implementation(ATTENTION)  # refuses models that cannot have another
    for config, name in zip(configs, own):
        config._attn_implementation_internal = name if name != ATTENTION else "sdpa"
        if not hasattr(config, "segue_own_class"):
            kind: Any = type(config)
            config.__class__ = _switching(kind)


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """Those of the model and of models inside it, and what these hold for their parts."""
    found: list[Any] = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "sub_configs")]
    for config in found:
        yield config
        found += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]


@functools.lru_cache
def _switching(kind: Any) -> Any:
    own = kind._attn_implementation

    def answer(config: Any) -> Any:
        name = own.fget(config)
        return ATTENTION if name != PROBE_ATTENTION and in_engine() else name

    def equals(config: Any, other: Any) -> Any:
        return kind.__eq__(_as(kind, config), _as(kind, other) if isinstance(other, kind) else other)

    def copied(config: Any, memo: dict[int, Any]) -> Any:  # a copied part of a model stays in its engine
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
