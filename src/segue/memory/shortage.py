"""What to say when memory runs out during a capture: the numbers, whose they are, and what helps, the likeliest first."""

from __future__ import annotations

from segue.device import MemoryReading
from segue.observe.report import format_bytes
from segue.shapes.key import ShapeKey

_MUCH = 0.25
"""of the device's memory: who holds that much is worth asking"""


def shortage_text(key: ShapeKey, backend: str, reading: MemoryReading, pool_bytes: int) -> str:
    """Numbers and a checklist for a shape that found no memory; `pool_bytes` is what the lane's pools reserve."""
    others = max(reading.unreserved, 0)
    tensors = max(reading.reserved - pool_bytes, 0)
    numbers = (
        f"of {format_bytes(reading.driver_total)} the graph pools hold {format_bytes(pool_bytes)}, tensors outside of them "
        f"{format_bytes(tensors)}, other processes and the driver {format_bytes(others)}; "
        f"{format_bytes(max(reading.driver_free, 0))} are free"
    )
    remedies = "; ".join(f"({n}) {text}" for n, text in enumerate(checklist(key, backend, reading, pool_bytes), 1))
    return f"{numbers}. What helps: {remedies}"


def checklist(key: ShapeKey, backend: str, reading: MemoryReading, pool_bytes: int) -> list[str]:
    """The remedies that fit, by who holds the most."""
    much = _MUCH * reading.driver_total
    smaller = (
        f"record smaller shapes of {key.phase}: max_size below {key.tokens} in its PhaseConfig, or on_failure='shrink', "
        "which finds the largest that fits"
    )
    asked = [
        (reading.reserved - pool_bytes, "leave the KV cache less: a smaller memory_fraction, or num_pages"),
        (reading.unreserved, "end what else runs on this device, or choose another one"),
    ]
    remedies = [text for nbytes, text in sorted(asked, key=lambda pair: -pair[0]) if nbytes > much]
    remedies.insert(0 if pool_bytes > much or not remedies else 1, smaller)
    if backend == "full":
        remedies.append(f"backend 'breakable' for {key.phase}, whose attention takes its temporaries outside of the pool")
    return remedies
