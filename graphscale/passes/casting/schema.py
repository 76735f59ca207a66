"""The types that ONNX's schemas give to operators."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from graphscale.passes.casting.precision_plan import Slots

__all__ = ["find_refusal"]


@functools.cache
def find_refusal(op_type: str, domain: str, version: int, low: Slots, wide: Slots, dtype: ir.DataType) -> str | None:
    """Return the reason why a version of an operator cannot compute in a small type; None for others and unknown ones.

    The slots are those of `Sides`: `low` would have that type, `wide` stay float32.
    """
    if not onnx.defs.has(op_type, version, domain):
        return None
    schema = onnx.defs.get_schema(op_type, version, domain)
    sides = (schema.inputs, schema.outputs)
    inputs, outputs = ([_parameter(side, i) for i in slots] for side, slots in zip(sides, low, strict=True))
    text = f"tensor({dtype.name.lower()})"
    if any(text not in parameter.types for parameter in (*inputs, *outputs)):
        return f"opset {version} does not define it for {dtype.name.lower()}"
    bound = {parameter.type_str for parameter in inputs}
    if any(parameter.type_str not in bound for parameter in outputs):
        return "the type of its result does not follow from its operands"
    for side, slots in zip(sides, wide, strict=True):
        if any(_parameter(side, i).type_str in bound for i in slots):
            return f"opset {version} has one type for all its operands, and some must stay float32"
    return None


def _parameter(side: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> onnx.defs.OpSchema.FormalParameter:
    return side[min(index, len(side) - 1)]
