"""The types that an operator takes, by ONNX's own definition."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

__all__ = ["Slots", "find_refusal"]

# Indices of operands, and of results.
Slots = tuple[tuple[int, ...], tuple[int, ...]]


def find_refusal(
    op_type: str, domain: str, low: Slots, wide: Slots, dtype: ir.DataType, opsets: Mapping[str, int]
) -> str | None:
    """Return why a node cannot compute in a small type, or None; operators that ONNX does not define can.

    Args:
        op_type: its operator.
        domain: the operator's domain, which onnx_ir calls "" if it is ai.onnx.
        low: the indices of the operands and of the results that would be of that type.
        wide: the indices of those that would stay float32.
        dtype: the type.
        opsets: the versions of the operator domains.
    """
    version = opsets.get(domain, opsets.get("ai.onnx", 1))
    return _refusal((op_type, domain, version), low, wide, dtype)


@functools.cache
def _refusal(operator: tuple[str, str, int], low: Slots, wide: Slots, dtype: ir.DataType) -> str | None:
    op_type, domain, version = operator
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
