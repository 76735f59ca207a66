"""The types that ONNX's schemas ask for."""

from __future__ import annotations

import functools

import onnx

__all__ = ["alike"]


@functools.cache
def alike(op_type: str, opset: int, index: int, count: int) -> tuple[int, ...]:
    """Return the operands, of so many, that an operator wants to have the type of one of them."""
    inputs = onnx.defs.get_schema(op_type, opset, "").inputs
    types = [inputs[min(i, len(inputs) - 1)].type_str for i in range(count)]
    return tuple(i for i in range(count) if types[i] == types[index])
