"""What the table of operators claims: the only module of this folder that knows the table's interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from graphscale.analysis.degrees import ZERO, Conflict, Degree, Degrees, evaluate
from graphscale.operators import OPERATORS

__all__ = ["ZERO", "Claim", "Claimed", "Degree", "claim_degrees", "ruled_operators"]

# The degree of each output, or None where the table forbids such operands.
Claimed = tuple[Degree, ...] | None
Claim = Callable[[ir.Node, Mapping[str, Degree]], Claimed]


def claim_degrees(node: ir.Node, operands: Mapping[str, Degree]) -> Claimed:
    """Return the degrees that the table claims for a node's outputs.

    Args:
        node: the node, inside of a graph that imports an opset.
        operands: the degrees of inputs of the graph, by name; the others have degree 0.
    """
    assert isinstance(node.graph, ir.Graph)
    values = {value: operands[value.name] for value in node.graph.inputs if value.name in operands}
    result = evaluate(node, Degrees(values))
    return None if isinstance(result, Conflict) else tuple(result)


def ruled_operators() -> set[tuple[str, str]]:
    """Return domain and name of each operator with a rule."""
    return set(OPERATORS)
