"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from segue.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_bytes(value: int | str, name: str = "bytes") -> int:
    """A number of bytes: an integer, or text such as "2GiB", "1.5 GB", "512MiB" (B, kB..TB, KiB..TiB, any case)."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match and match[2] in _UNITS:
            amount = int(float(match[1]) * _UNITS[match[2]])
            if amount > 0:
                return amount
    raise ConfigError(f"{name} is {value!r}; give a positive number of bytes, or text such as '2GiB' or '500MB'")
