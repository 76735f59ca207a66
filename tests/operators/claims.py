"""Claims of the table of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from graphscale.flow.degree import Degree, DegreeDomain, degree_of
from graphscale.flow.interpreter import Flow
from graphscale.operators import OPERATORS, Kind, rule_of

# The traits that `properties` compares with a runtime.
CHECKED_TRAITS = frozenset(
    {"RESHAPE", "CAST", "PERMUTE", "REPEAT", "SIGN", "PART", "MOVE", "BOUND", "ELEMENTWISE", "COMMUTATIVE"}
    | {"TOTAL", "TOTAL_BY_AXES", "TOTAL_BY_SHAPES", "RANDOM", "WRITES_INPUT"}
)

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
    domain = DegreeDomain()
    result = Flow(domain, values).evaluate(node)
    return None if domain.conflicts else tuple(map(degree_of, result))


def ruled_operators() -> set[tuple[str, str]]:
    """Return domain and name of each operator with a rule."""
    return set(OPERATORS)


def traits_of(operator: tuple[str, str]) -> frozenset[str]:
    """Return the names of the traits that the table gives to an operator."""
    row = OPERATORS.get(operator)
    return frozenset() if row is None else frozenset(str(trait.name) for trait in row.traits)


def keeps_degree(node: ir.Node) -> bool:
    """Return whether the rule of a node, with its attributes and types, keeps the degree of operands."""
    rule = rule_of(node)
    return rule is not None and rule.kind is Kind.LINEAR
