"""Shapes: what a recording was made for, which sizes are captured, and which captured shape answers a batch.

`key` describes one captured shape, `ladder` lists the sizes, `table` finds the shape for a live batch. The table is
imported as `segue.shapes.table`, not from here: it names the reasons of `segue.observe.decision`, which itself needs
`ShapeKey` from this package.
"""

from segue.shapes.key import Phase, ShapeKey
from segue.shapes.ladder import (
    custom,
    decode_ladder,
    geometric,
    powers_of_two,
    prefill_ladder,
    round_up,
    sglang_decode,
    sglang_prefill,
    vllm_decode,
)

__all__ = [
    "Phase",
    "ShapeKey",
    "custom",
    "decode_ladder",
    "geometric",
    "powers_of_two",
    "prefill_ladder",
    "round_up",
    "sglang_decode",
    "sglang_prefill",
    "vllm_decode",
]
