"""The bookkeeping of a loss scale: values computed from its state, from constants and from flags alone.

What happens among these scalars (growing the scale, counting good steps, 1 / scale, a threshold times the scale) is no
part of the gradient path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.degrees import ZERO, Conflict, Degree, agree, combine
from graphscale.checks.linting.view import View, is_zero, number_of
from graphscale.graph.values import constant_tensor, is_scalar, reads_shape
from graphscale.operators import Kind, rule_of

__all__ = ["Scalars", "evaluate_powers"]

_POWERS = {"Sqrt": 0.5, "Reciprocal": -1.0, "ReduceL2": 1.0, "ReduceSumSquare": 2.0}


class Scalars:
    """The bookkeeping values of a graph.

    Attributes:
        symbol: the loss scale: a leaf, or a value computed from leaves.
        leaves: the state of the loss scale, scalars.
        constants: values that depend on no input.
        values: the bookkeeping values, the leaves among them.
        degrees: of those that are the scale to a power, times a constant, that power.
        multiples: those of a degree other than 0.
        bent: bookkeeping values that depend on the state of the loss scale in another way, such as the next scale.
    """

    def __init__(self, view: View, leaves: Iterable[ir.Value], symbol: ir.Value) -> None:
        self.view = view
        self.symbol = symbol
        self.leaves = {*leaves, *([symbol] if symbol.producer() is None else [])}
        self.constants: set[ir.Value] = set()
        self.values = set(self.leaves)
        self.degrees: dict[ir.Value, Degree] = {symbol: 1}
        self.bent = self.leaves - {symbol}
        for node in view.nodes:
            self._visit(node)
        self.multiples = {value for value, degree in self.degrees.items() if degree not in (0, ZERO)}

    def is_constant(self, value: ir.Value) -> bool:
        """Return whether a value depends on no input and on no state."""
        return value in self.constants or (constant_tensor(value) is not None and value not in self.values)

    def _visit(self, node: ir.Node) -> None:
        operands = [operand for operand in self.view.operands(node) if not self.is_constant(operand)]
        if self.symbol in node.outputs:
            self.values.update(node.outputs)
        elif not operands or reads_shape(node):
            self.constants.update(node.outputs)
        elif self.values.issuperset(operand for operand in operands if operand not in self.view.flags):
            # A cast or a selection of constants turns flags into numbers.
            if not self.values.isdisjoint(operands) or node.op_type in ("Cast", "Where"):
                self.values.update(node.outputs)
                self._spread(node, operands)

    def _spread(self, node: ir.Node, operands: Collection[ir.Value]) -> None:
        # An update rule selects one of two scales; a gradient, one of two tensors that begin with the scale.
        chooses = node.op_type == "Where" and all(v in self.degrees and _may_be_scalar(v) for v in node.inputs[1:])
        if chooses or not self.bent.isdisjoint(operands):
            self.bent.update(node.outputs)
            return
        degrees = [0 if value is None else self.degrees.get(value, 0) for value in node.inputs]
        if not any(degrees):
            return
        result = evaluate_powers(node, degrees)
        if isinstance(result, Conflict):
            self.bent.update(node.outputs)
        else:
            self.degrees.update((v, d) for v, d in zip(node.outputs, result, strict=True) if d != 0)


def _may_be_scalar(value: ir.Value) -> bool:
    """Return whether a value may hold one number, by its shape or else by the constants that it is computed from."""
    if value.shape is not None:
        return is_scalar(value)
    node = value.producer()
    constants = (constant_tensor(operand) for operand in (() if node is None else node.inputs))
    return all(constant is None or constant.size == 1 for constant in constants)


def evaluate_powers(node: ir.Node, degrees: Sequence[Degree]) -> Sequence[Degree] | Conflict:
    """Return the degree of each output of a node without subgraphs, by those of its inputs, or their conflict.

    Every power is allowed: a square has degree 2, its root degree 1, a reciprocal degree -1: a graph by hand may clip
    scaled gradients to a scaled threshold, and be right.
    """
    rule = rule_of(node)
    ignored = () if rule is None else rule.ignored
    operands = {i: d for i, d in enumerate(degrees) if node.inputs[i] is not None and i not in ignored}
    result: Degree | Conflict = 0
    if rule is None or rule.kind is Kind.NONLINEAR:
        result = _power(node, operands, unknown=rule is None)
    elif rule.kind not in (Kind.SHAPE, Kind.DEGREE_0):
        result = combine(node, rule, operands, None, is_zero)
    if isinstance(result, Conflict):
        return result
    return [result if rule is not None and rule.has_degree(i) else 0 for i in range(len(node.outputs))]


def _power(node: ir.Node, degrees: Mapping[int, Degree], unknown: bool) -> Degree | Conflict:
    """Apply the operators that raise to a power; all others that are not homogeneous take no scaled operand."""
    carrying = tuple(i for i, degree in degrees.items() if degree not in (0, ZERO))
    if not carrying:
        return 0
    if node.domain == "" and not unknown:
        exponent = number_of(node.inputs[1]) if node.op_type == "Pow" else _POWERS.get(node.op_type)
        if carrying == (0,) and exponent is not None:
            return (degrees[0] or 0) * exponent
        if node.op_type in ("SequenceConstruct", "SequenceInsert"):
            elements = [i for i in degrees if i != 2 or node.op_type != "SequenceInsert"]  # the third is a position
            return agree(node, elements, degrees, is_zero)
    degree = max((degrees[i] or 0 for i in carrying), key=abs)
    return Conflict(node, carrying, unknown=unknown, degree=degree)
