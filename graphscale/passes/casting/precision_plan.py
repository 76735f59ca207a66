"""The nodes that compute on float32 numbers, and the choice of those that run in float16."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import onnx_ir as ir

from graphscale.graph.cones import nodes_above
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import all_nodes, constant_tensor, operands_of
from graphscale.operators import OPERATORS, CastRule, Colour, Kind
from graphscale.passes.casting.settings import Settings
from graphscale.step.training_step import Step

__all__ = ["PrecisionPlan", "Sides", "Slots", "begin_plan", "takes_any_type"]

# Indices of operands, and of results.
Slots = tuple[tuple[int, ...], tuple[int, ...]]

_SHAPE_READERS = frozenset(k for k, row in OPERATORS.items() if row.rule.kind is Kind.SHAPE and row.dtype is not None)
_UNKNOWN_RULE = CastRule(Colour.DENY, "the operator is unknown")


class Sides(NamedTuple):
    """The float32 operands and results of a node.

    Attributes:
        operands: the operands that become float16 with the node.
        outputs: the results that become float16 with the node.
        low: the indices of these operands, and of these results.
        wide: the indices of the other float32 operands and results.
    """

    operands: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    low: Slots
    wide: Slots


@dataclasses.dataclass
class PrecisionPlan:
    """The choice of the nodes that run in float16.

    Attributes:
        operators: all nodes on float32 numbers, in order, bodies included, with domain and operator.
        rules: the treatment of each node.
        floats: the float32 values.
        constants: the constants among them, with their tensors.
        typed: the known dtypes of results.
        untyped: the operands of unknown dtype.
        forward: the nodes of the main graph that the loss depends on.
        sides: the float32 operands and results of each node.
        low: the nodes that run in float16.
        reasons: the reason for each other node.
    """

    operators: dict[ir.Node, tuple[str, str]]
    rules: dict[ir.Node, CastRule]
    floats: set[ir.Value]
    constants: dict[ir.Value, ir.TensorProtocol]
    typed: Mapping[ir.Value, ir.DataType]
    untyped: set[ir.Value]
    forward: set[ir.Node]
    sides: dict[ir.Node, Sides]
    low: set[ir.Node] = dataclasses.field(default_factory=set)
    reasons: dict[ir.Node, str] = dataclasses.field(default_factory=dict)

    def nodes_on(self, colour: Colour) -> set[ir.Node]:
        """Return the nodes on a list."""
        return {node for node, rule in self.rules.items() if rule.colour is colour}

    def reads_low(self, node: ir.Node, index: int) -> bool:
        """Return whether a node reads an operand in the small type."""
        return node in self.low and index in self.sides[node].low[0]


def _sides(node: ir.Node, rule: CastRule, floats: set[ir.Value]) -> Sides:
    inputs = [i for i, value in enumerate(node.inputs) if value in floats]
    outputs = [i for i, value in enumerate(node.outputs) if value in floats and value.name]
    wide: Slots = ((), ())
    if rule.wide_inputs or rule.wide_outputs:
        wide = tuple(i for i in inputs if i in rule.wide_inputs), tuple(i for i in outputs if i in rule.wide_outputs)
        inputs, outputs = [i for i in inputs if i not in wide[0]], [i for i in outputs if i not in wide[1]]
    operands = tuple([value for i in inputs if (value := node.inputs[i]) is not None])
    return Sides(operands, tuple([node.outputs[i] for i in outputs]), (tuple(inputs), tuple(outputs)), wide)


def begin_plan(step: Step, settings: Settings) -> PrecisionPlan:
    """Return a plan without chosen nodes."""
    everything = list(all_nodes(step.graph))
    typed = dtypes_of(everything)
    read: set[ir.Value | None] = set()
    for node in everything:
        read.update(node.inputs)
    given = {value for value in read.difference(typed) if value is not None}
    floats = {value for value, dtype in typed.items() if dtype is ir.DataType.FLOAT}
    floats.update(value for value in given if value.dtype is ir.DataType.FLOAT)
    touching = (n for n in everything if not (floats.isdisjoint(operands_of(n)) and floats.isdisjoint(n.outputs)))
    operators = {node: kind for node in touching if (kind := (node.domain, node.op_type)) not in _SHAPE_READERS}
    rules = {node: settings.rules.get(kind, _UNKNOWN_RULE) for node, kind in operators.items()}
    made = (node.outputs[0] for node, (_, op_type) in operators.items() if op_type == "Constant")
    tensors = ((value, constant_tensor(value)) for value in (*floats.difference(typed), *made))
    constants = {value: tensor for value, tensor in tensors if tensor is not None}
    untyped = {value for value in given if value.dtype is None and value.const_value is None}
    sides = {node: _sides(node, rule, floats) for node, rule in rules.items()}
    return PrecisionPlan(operators, rules, floats, constants, typed, untyped, nodes_above(step.loss), sides)


def takes_any_type(node: ir.Node) -> bool:
    """Return whether a node reads only the shape of its operand."""
    return (node.domain, node.op_type) in _SHAPE_READERS
