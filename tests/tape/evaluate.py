"""Operators in ONNX's reference evaluator: evaluation while writing gives shapes and magnitudes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.ops import load_op

Array = np.ndarray[Any, Any]
_load = functools.cache(functools.partial(load_op, "", version=20))


def evaluate(op_type: str, arrays: Sequence[Array], attributes: Mapping[str, Any]) -> Array:
    """The result of one operator. Floats are float64 here; in the model they are float32."""
    if op_type == "Erf":
        return np.vectorize(math.erf)(arrays[0])  # the reference approximates it
    if op_type == "Cast":
        return arrays[0].astype({1: np.float64, 7: np.int64, 9: np.bool_}[attributes["to"]])
    given = dict(attributes)
    # Axes of a reduction: an input from opset 18 on.
    axes = [np.asarray(given.pop("axes"))] if "axes" in given else []
    with np.errstate(all="ignore"):
        result = np.asarray(_load(op_type).eval(*arrays, *axes, **given))
    return result.astype(np.float64) if result.dtype.kind == "f" else result
