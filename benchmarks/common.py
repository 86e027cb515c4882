"""What the benchmarks share: the machine's description, memory read by one protocol, progress, and aligned tables."""

from __future__ import annotations

import gc
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_START = time.perf_counter()


def progress(message: str) -> None:
    """One line on standard error, with the seconds since this process began measuring."""
    print(f"[{time.perf_counter() - _START:6.1f} s] {message}", file=sys.stderr, flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MemoryReading(NamedTuple):
    """Bytes: reserved by torch's allocator, and used on the whole device as the driver sees it. Zero on cpu."""

    reserved: int
    driver_used: int

    def growth_since(self, before: MemoryReading) -> MemoryReading:
        return MemoryReading(self.reserved - before.reserved, self.driver_used - before.driver_used)


def read_memory(device: torch.device) -> MemoryReading:
    """Collects garbage, waits for the device and empties the cache, then reads."""
    gc.collect()
    if device.type != "cuda":
        return MemoryReading(0, 0)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryReading(torch.cuda.memory_reserved(device), total - free)


def churn(device: torch.device, dtype: torch.dtype, max_elements: int) -> None:
    """Allocates and frees memory full of NaN, so that whoever reads memory that nothing keeps shows it."""
    sizes = [n for n in (1, 64, 1024, 16_384, 262_144, 1 << 22, 1 << 25) if n <= max_elements]
    held = [torch.full((n,), float("nan"), dtype=dtype, device=device) for n in sizes]
    del held


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware and software versions, for the report."""
    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": "cpu",
    }
    if device.type == "cuda":
        described |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "driver": _driver_version(),
            "cudnn": torch.backends.cudnn.version(),
        }
    return described


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as lines:
            words = lines.readline().split()
    except OSError:
        return None
    return next((w for w in words if w[:1].isdigit() and "." in w), None)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned text: the first column to the left, figures to the right, the unit (last column) to the left."""
    cells = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *middle, row[-1]]).rstrip())
    return "\n".join(lines)


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
