"""The engine's runners, one a phase: what they share in `base`."""

from segue.llm.runners.base import BatchRunner, Limits, StepOutput
from segue.llm.runners.decode import DecodeRunner
from segue.llm.runners.prefill import PrefillRunner

__all__ = ["BatchRunner", "DecodeRunner", "Limits", "PrefillRunner", "StepOutput"]
