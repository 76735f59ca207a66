"""Constants that a small type cannot hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphscale.analysis.values import constant_tensor

__all__ = ["misfit"]

# Larger ones are read only if they are in memory already: weights are never loaded to be looked at.
_LOOK = 2**16


def misfit(value: ir.Value, dtype: ir.DataType) -> str | None:
    """Why a constant must not be rounded to a small type, or None: infinities are exact, and stay.

    Args:
        value: any value; only a constant is looked at.
        dtype: float16 or bfloat16.
    """
    tensor = constant_tensor(value)
    if tensor is None or (isinstance(tensor, ir.ExternalTensor) and tensor.size > _LOOK):
        return None
    array = tensor.numpy()
    kind = np.float16 if dtype is ir.DataType.FLOAT16 else ml_dtypes.bfloat16
    with np.errstate(over="ignore", under="ignore"):
        rounded = array.astype(kind).astype(np.float32)
    lost = np.isfinite(array) & ((np.isinf(rounded)) | ((rounded == 0) & (array != 0)))
    if not lost.any():
        return None
    number = float(array[lost].flat[0])
    return f"the constant {value.name!r} holds {number:g}, which {dtype.name.lower()} cannot hold"
