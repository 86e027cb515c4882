"""What a user may set of an engine, checked when it is written down. Light: torch is imported where its types are given."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from segue.config import GraphConfig
from segue.errors import ConfigError
from segue.llm.sampling_params import VARIANTS

if TYPE_CHECKING:
    import torch

    from segue.device import Device

# Beyond these no machine has the memory, and it is a slip. A slot of the cache (16 a page) is numbered by 31 bits.
MOST_TOKENS = 1 << 20
"""of one prefill step"""
MOST_CONTEXT = 1 << 24
MOST_REQUESTS = 1 << 16
_DEVICES = "'auto', 'cpu', 'cuda' or 'cuda:N'"
_BOUNDS = {
    "chunk_size": (1, MOST_TOKENS),
    "max_requests": (1, MOST_REQUESTS),
    "max_context": (2, MOST_CONTEXT),
    "num_pages": (3, 1 << 27),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. Counts are in requests and tokens; "auto" follows from device and model.

    `chunk_size` bounds the tokens of one prefill step, `max_requests` the requests that run at once, `max_context` the
    prompt and output of one request together, `num_pages` the cache (16 tokens a page, two of them reserved).
    `memory_fraction` sizes the cache instead, on CUDA: how much of the device's memory may be in use once the engine has
    started, other processes and the largest eager pass included. `fuse` says whether the model's layers are fused
    (`segue.llm.fuse`); "auto" is on cuda. `sampling_graphs` names the ways of sampling that decode graphs are recorded with,
    besides taking the likeliest token: "drawn" (temperature, min-p), "sorted" (top-k, top-p as well). None by default: each
    makes as many graphs again (36 rungs of an 8B model: 1.7 s on an H200), and a step without is a replay with its sampling
    queued behind it, which runs ahead of the host as well. `device` may also be a recording device, such as a
    `segue.device.cpu.CpuDevice` that has only so much memory.
    """

    device: str | torch.device | Device = "auto"
    dtype: torch.dtype | Literal["auto"] = "auto"
    chunk_size: int | Literal["auto"] = "auto"
    max_requests: int | Literal["auto"] = "auto"
    max_context: int | Literal["auto"] = "auto"
    num_pages: int | Literal["auto"] = "auto"
    memory_fraction: float | Literal["auto"] = "auto"
    attention: str = "auto"
    experts: str = "auto"
    fuse: bool | Literal["auto"] = "auto"
    overlap: bool | Literal["auto"] = "auto"
    sampling_graphs: tuple[str, ...] = ()
    graphs: GraphConfig = field(default_factory=GraphConfig)

    def __post_init__(self) -> None:
        if isinstance(self.device, str) and not re.fullmatch(r"auto|cpu(:0)?|cuda(:\d+)?", self.device):
            raise ConfigError(f"device is {self.device!r}; it must be {_DEVICES}")
        if not isinstance(self.device, str) or self.dtype != "auto":
            self._check_torch_types()
        if not isinstance(self.attention, str):
            raise ConfigError(f"attention is {self.attention!r}; it must be 'auto' or the name of one")
        if not isinstance(self.experts, str):
            raise ConfigError(f"experts is {self.experts!r}; it must be 'auto' or the name of one")
        for name in ("fuse", "overlap"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True, False or 'auto'")
        ways = self.sampling_graphs
        if not isinstance(ways, tuple) or not all(way in VARIANTS for way in ways):
            raise ConfigError(f"sampling_graphs is {ways!r}; it must be a tuple of {', '.join(VARIANTS)}")
        if not isinstance(self.graphs, GraphConfig):
            raise ConfigError(f"graphs is {self.graphs!r}; it must be a GraphConfig, such as GraphConfig(decode='full')")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
                raise ConfigError(f"{name} is {value!r}; it must be 'auto' or an integer from {least} to {most}")
        self._check_memory_fraction()
        if self.graphs.capture not in ("startup", "manual"):
            raise ConfigError(
                f"graphs.capture is {self.graphs.capture!r}; the engine captures at 'startup', or when told to ('manual')"
            )

    def _check_memory_fraction(self) -> None:
        fraction = self.memory_fraction
        if fraction == "auto":
            return
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ConfigError(f"memory_fraction is {fraction!r}; it must be 'auto', or above 0 and at most 1")
        if self.num_pages != "auto":
            raise ConfigError(
                f"memory_fraction is {fraction} and num_pages is {self.num_pages}: both size the KV cache; set one of them"
            )

    def _check_torch_types(self) -> None:
        import torch

        from segue.device import Device

        if not isinstance(self.device, (str, torch.device, Device)):
            raise ConfigError(f"device is {self.device!r}; it must be {_DEVICES}")
        if self.dtype != "auto" and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be 'auto' or a floating-point torch.dtype")
