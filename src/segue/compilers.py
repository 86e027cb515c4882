"""What may compile the pieces of `tc_piecewise`: names alone, so that settings are checked without torch."""

from __future__ import annotations

COMPILERS = ("auto", "inductor", "eager")


def default_compiler(device_type: str) -> str:
    """Of a device: inductor's code is recorded on CUDA alone, and on a CPU needs a C++ compiler."""
    return "inductor" if device_type == "cuda" else "eager"
