"""Static inputs: declared slots, what their padded tails hold, and grouped copies into them."""

from segue._compat import mark_varying
from segue.inputs.copy import grouped_copy
from segue.inputs.packed import PackedInputs
from segue.inputs.padding import Padding
from segue.inputs.slots import Axis, Slot, StaticInputs

__all__ = ["Axis", "PackedInputs", "Padding", "Slot", "StaticInputs", "grouped_copy", "mark_varying"]
