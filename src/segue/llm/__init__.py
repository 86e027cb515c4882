"""The LLM engine: Hugging Face checkpoints through captured graphs.

Reading order: `batch` (what flows), `attention` (plans), `runners` (how a batch meets its recording), `scheduler`,
`engine` (one step), `load` and `checkpoints` (where models come from). Names are imported when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segue.llm.checkpoints import default_model
    from segue.llm.engine import Engine
    from segue.llm.engine_config import EngineConfig
    from segue.llm.outputs import RequestOutput
    from segue.llm.sampling_params import SamplingParams

__all__ = ["Engine", "EngineConfig", "RequestOutput", "SamplingParams", "default_model"]

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "engine_config",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "default_model": "checkpoints",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
