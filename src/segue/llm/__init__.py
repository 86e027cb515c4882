"""The LLM engine: Hugging Face checkpoints through captured graphs.

Reading order: `batch` (what flows), `attention` (plans), `runners` (how a batch meets its recording), `scheduler`,
`engine` (one step), `load` and `checkpoints` (where models come from).
"""

from segue.llm.config import EngineConfig
from segue.llm.engine import Engine, RequestOutput
from segue.llm.load import default_model
from segue.llm.sampler import SamplingParams

__all__ = ["Engine", "EngineConfig", "RequestOutput", "SamplingParams", "default_model"]
