"""Sizes and axes that are known before a run of the model."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.inference import measured_by
from graphscale.graph.values import constant_tensor

__all__ = ["Sizes", "known_numbers", "known_sizes", "sizes_of"]

# A number, a name, or None for each axis.
Sizes = tuple[int | str | None, ...]


def sizes_of(value: ir.Value) -> Sizes | None:
    """Return the sizes of a value's axes; None if their number is unknown."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def known_sizes(shape: ir.Value) -> Sizes | None:
    """Return the sizes in a vector: a constant, the shape of a value, or a known number of unknown sizes."""
    shape = _source_of(shape)
    if (numbers := known_numbers(shape)) is not None:
        return tuple(numbers)
    measured = measured_by(shape)
    if measured is not None and measured.shape is not None:
        return sizes_of(measured)
    length = sizes_of(shape)
    return (None,) * length[0] if length is not None and len(length) == 1 and isinstance(length[0], int) else None


def known_numbers(value: ir.Value | None) -> list[int] | None:
    """Return the integers of a constant, in order; None for other values."""
    tensor = None if value is None else constant_tensor(_source_of(value))
    return None if tensor is None else [int(number) for number in tensor.numpy().ravel()]


def _source_of(value: ir.Value) -> ir.Value:
    """Return the source of Identity nodes."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value
