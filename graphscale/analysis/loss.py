"""Which value is the loss."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphscale.analysis.updates import own_coefficients
from graphscale.analysis.values import describe, is_float, is_scalar
from graphscale.errors import LossError

__all__ = ["loss_candidates", "named_loss"]


def named_loss(values: Mapping[str, ir.Value], name: str) -> ir.Value:
    """The value that the user named as the loss.

    Raises:
        LossError: it does not exist, is not scalar, or not floating point.
    """
    value = values.get(name)
    if value is None:
        raise LossError(f"--loss {name}: the graph has no value of this name")
    if value.producer() is None:
        raise LossError(f"--loss {name}: {describe(value)} is an input, not something that the graph computes")
    if value.dtype is not None and not value.dtype.is_floating_point():
        raise LossError(f"--loss {name}: {describe(value)} is not floating point, and a loss must be")
    if value.shape is not None and not is_scalar(value):
        raise LossError(f"--loss {name}: {describe(value)} is not a scalar; name the mean or sum of it")
    return value


def loss_candidates(graph: ir.Graph, others: set[ir.Value]) -> list[ir.Value]:
    """The graph outputs that could be the loss: scalar, floating point, and not the next value of a scalar input."""
    inputs = {value for value in graph.inputs if is_scalar(value)}
    return [
        value
        for value in graph.outputs
        if value not in others
        and value.producer() is not None
        and value.dtype is not None
        and is_float(value)
        and is_scalar(value)
        and not any(c >= 0.5 for c in own_coefficients(value, inputs).values())
    ]
