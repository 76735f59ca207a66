"""The way a file keeps its carried state: as inputs that are fed, or as initializers."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE, Factors, same_type
from graphscale.graph.values import is_known_zero, is_scalar

__all__ = ["may_store_state"]


def may_store_state(topology: Topology, gradients: Collection[ir.Value]) -> bool:
    """Return whether initializers may be state: not where no weight has a value.

    An exporter keeps all states in one way. A weight is read by the loss, and a gradient has its type; a tensor that is
    filled with one number is a constant of a normalization, if no other tensor is a weight.

    Args:
        topology: of the graph, for its loss.
        gradients: the gradients of the loss.
    """
    factors = Factors()
    read = (value for value in topology.forward if value.producer() is None and not is_scalar(value))
    read = (value for value in read if not (factors[value] or is_known_zero(value)))
    weights = {value for value in read if any(same_type(gradient, value) for gradient in gradients)}
    held = (topology.coefficients(output).items() for output in topology.graph.outputs)
    updated = {value for each in held for value, c in each if c >= NEXT_STATE and value in weights}
    weights = updated or weights  # others are frozen
    return not weights or any(map(ir.Value.is_initializer, weights))
