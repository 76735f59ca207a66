"""The way a file keeps its carried state: as inputs, with or without first values, or as initializers."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE, Factors, same_type
from graphscale.graph.values import is_known_zero, is_scalar

__all__ = ["is_stored", "keep_stored", "may_store_state"]

_STORED = "graphscale.stored"


def is_stored(value: ir.Value) -> bool:
    """Return whether a file has the value of an initializer, and takes no other."""
    return value.is_initializer() and (not value.is_graph_input() or bool(value.meta.get(_STORED)))


def keep_stored(value: ir.Value) -> None:
    """Mark an initializer as stored, though the analysis makes it an input."""
    value.meta[_STORED] = is_stored(value)


def may_store_state(topology: Topology, gradients: Collection[ir.Value]) -> bool:
    """Return whether initializers may be state: not where all weights are inputs.

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
    return not weights or any(map(is_stored, weights))
