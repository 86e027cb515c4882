"""Ladders: the sizes that are captured. A live batch is padded up to the next rung.

Presets are pure functions that return ascending tuples. Whatever the preset, the true maximum is a rung: a ladder that
stops short of it sends exactly the largest batches, where graphs help memory most, to the eager path. The exact
numbers of the two well-known presets are SGLang's and vLLM's; a coarse one is for devices where capture is slow.
Nothing here knows which sizes occur: `planner` chooses rungs from evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from segue.errors import ConfigError

CPU_PREFILL_START = 16
CPU_PREFILL_FACTOR = 4


def sglang_decode(maximum: int) -> tuple[int, ...]:
    """SGLang's decode rungs: 1, 2, 4, 8, 12, 16..256 by 8, 272..<512 by 16, then by 32 (36 rungs at 256)."""
    return _up_to(maximum, (1, 2, 4, 8, 12), range(16, 257, 8), range(272, 512, 16), range(512, maximum + 1, 32))


def vllm_decode(maximum: int) -> tuple[int, ...]:
    """vLLM's rungs: 1, 2, 4, 8..<256 by 8, then by 16 (51 rungs at 512)."""
    return _up_to(maximum, (1, 2, 4), range(8, 256, 8), range(256, maximum + 1, 16))


def sglang_prefill(maximum: int) -> tuple[int, ...]:
    """SGLang's prefill token rungs (42 at 2,048).

    4..32 by 4, 48..256 by 16, 288..512 by 32, 576..1,024 by 64, 1,280..4,096 by 256, then by 512.
    """
    return _up_to(
        maximum,
        range(4, 33, 4),
        range(48, 257, 16),
        range(288, 513, 32),
        range(576, 1025, 64),
        range(1280, 4097, 256),
        range(4608, maximum + 1, 512),
    )


def powers_of_two(maximum: int, start: int = 1) -> tuple[int, ...]:
    """`start`, then twice as much each time, up to `maximum`."""
    return geometric(start, maximum, 2)


def geometric(start: int, maximum: int, factor: float) -> tuple[int, ...]:
    """`start`, then `factor` times as much each time (rounded up), up to `maximum`."""
    _check_size("start", start)
    if factor <= 1:
        raise ConfigError(f"factor is {factor!r}; a ladder that climbs needs a factor above 1")
    sizes = [start]
    while sizes[-1] < maximum:
        sizes.append(max(sizes[-1] + 1, -int(-sizes[-1] * factor // 1)))
    return _up_to(maximum, sizes)


def custom(sizes: Iterable[int], maximum: int | None = None) -> tuple[int, ...]:
    """A user's own list: positive integers, sorted and without repeats.

    With `maximum`, no size may exceed it and it is itself a rung. Raises `ConfigError` naming the offending value.
    """
    rungs = set()
    for size in sizes:
        _check_size("ladder rung", size)
        if maximum is not None and size > maximum:
            raise ConfigError(f"ladder rung is {size}; the largest possible batch is {maximum}")
        rungs.add(size)
    if maximum is not None:
        _check_size("maximum", maximum)
        rungs.add(maximum)
    if not rungs:
        raise ConfigError("ladder is empty; list at least one size, or set backend='disabled' to run eagerly")
    return tuple(sorted(rungs))


DECODE_PRESETS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "sglang": sglang_decode,
    "vllm": vllm_decode,
    "powers_of_two": powers_of_two,
}
PREFILL_PRESETS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "sglang": sglang_prefill,
    "vllm": vllm_decode,
    "powers_of_two": powers_of_two,
}


def decode_ladder(device_type: str, maximum: int, preset: str = "sglang") -> tuple[int, ...]:
    """What "auto" means for phases whose rungs count requests: powers of two on cpu, `preset` on cuda."""
    if preset not in DECODE_PRESETS:
        raise ConfigError(f"preset is {preset!r}; choose one of {', '.join(DECODE_PRESETS)}")
    return powers_of_two(maximum) if device_type == "cpu" else DECODE_PRESETS[preset](maximum)


def prefill_ladder(device_type: str, chunk_size: int) -> tuple[int, ...]:
    """What "auto" means for phases whose rungs count tokens: 16, 64, 256, .. on cpu, SGLang's on cuda."""
    if device_type == "cpu":
        return geometric(min(CPU_PREFILL_START, max(chunk_size, 1)), chunk_size, CPU_PREFILL_FACTOR)
    return sglang_prefill(chunk_size)


def round_up(ladder: tuple[int, ...], n: int) -> int | None:
    """The smallest rung that holds `n`, None where none does. `ladder` ascends."""
    return next((rung for rung in ladder if rung >= n), None)


def _up_to(maximum: int, *parts: Iterable[int]) -> tuple[int, ...]:
    _check_size("maximum", maximum)
    return (*(size for size in chain(*parts) if size < maximum), maximum)


def _check_size(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")
