"""How much memory a device has left, as far as the system says: for refusing sizes that could only end in a kill."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUPS = (  # limit and use, of version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_of_machine(), *(_of_cgroup(*files) for files in _CGROUPS)]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def _of_machine() -> int | None:
    for line in _text("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _of_cgroup(limit_file: str, use_file: str) -> int | None:
    limit, use = _text(limit_file).strip(), _text(use_file).strip()
    return max(int(limit) - int(use), 0) if limit.isdigit() and use.isdigit() else None


def _text(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""
