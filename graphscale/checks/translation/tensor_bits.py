"""The comparison of constants by type, shape and bits, in pieces, so that no weight is copied completely."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["tensor_difference"]

_PIECE = 2**24  # bytes per comparison


def tensor_difference(found: ir.TensorProtocol, expected: ir.TensorProtocol) -> str | None:
    """Return the difference between two tensors, in the words of a predicate; None between equal ones."""
    if found is expected:
        return None
    types = (found.dtype.name, [*found.shape]), (expected.dtype.name, [*expected.shape])
    if types[0] != types[1]:
        return f"is {types[0][0]}{types[0][1]}, and should be {types[1][0]}{types[1][1]}"
    if _location(found) is not None and _location(found) == _location(expected):
        return None
    one, other = found.numpy(), expected.numpy()
    if found.dtype is ir.DataType.STRING:
        return None if one.tolist() == other.tolist() else "holds other strings than it should"
    index = _first_difference(one, other)
    if index is None:
        return None
    place = f" at [{', '.join(map(str, np.unravel_index(index, one.shape)))}]" if one.size > 1 else ""
    return f"is {one.reshape(-1)[index]}{place}, and should be {other.reshape(-1)[index]}"


def _location(tensor: ir.TensorProtocol) -> tuple[str, int, int] | None:
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    file = os.path.realpath(os.path.join(tensor.base_dir, tensor.location))
    return file, tensor.offset or 0, tensor.nbytes


def _first_difference(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> int | None:
    """Return the flat index of the first element with different bits."""
    size = found.dtype.itemsize
    one, other = found.reshape(-1), expected.reshape(-1)
    for start in range(0, one.size, max(1, _PIECE // size)):
        part = slice(start, start + max(1, _PIECE // size))
        bits = [np.ascontiguousarray(array[part]).view(np.uint8).reshape(-1, size) for array in (one, other)]
        if not np.array_equal(bits[0], bits[1]):
            return start + int(np.flatnonzero((bits[0] != bits[1]).any(axis=1))[0])
    return None
