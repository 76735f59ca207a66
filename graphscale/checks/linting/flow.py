"""The flow of the loss scale through a graph: every value's degree, and the nodes with conflicting degrees.

The analysis continues behind every fault, with the degree of the larger operand, so that its consequences are not
reported again. The bookkeeping of the loss scale (growth of the scale, the count of good steps, 1 / scale, a threshold
times the scale) is no part of the gradient path.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Container, Iterable, Sequence

import onnx_ir as ir

from graphscale.checks.linting.view import View, is_zero
from graphscale.checks.patterns import input_at
from graphscale.flow.degree import ZERO, Conflict, Degree, degrees_through
from graphscale.graph.values import constant_tensor, is_float, is_scalar, reads_shape, subgraphs
from graphscale.operators import Kind, rule_of

__all__ = ["Event", "Fault", "Flow", "Scalars"]

# Rounds through the body of a Loop or Scan until its carried values have a degree.
_ROUNDS = 4


class Fault(enum.Enum):
    """The kinds of faults in degrees."""

    MIXED = "operands of different degrees"
    TWICE = "multiplied by the scale again"
    NEGATIVE_AGAIN = "divided by the scale again"
    NEVER_SCALED = "divided by the scale without being multiplied by it"
    OTHER_SCALE = "multiplied or divided by another value of the loss scale's state"
    NONLINEAR = "an operator that is not homogeneous"
    UNKNOWN = "an operator without a rule"
    OUTPUT = "an output of another degree than 0"


@dataclasses.dataclass(eq=False)
class Event:
    """A place with a wrong degree.

    Attributes:
        fault: the kind of fault.
        node: the node, also one in a subgraph; None for an output of the graph.
        scaled: the operands that carry the scale.
        others: the other operands, where they matter.
        degree: the degree of the scaled operands, or of the result.
        certain: False for a doubtful fault, which becomes certain if its result has a wrong degree.
    """

    fault: Fault
    node: ir.Node | None
    scaled: tuple[ir.Value, ...]
    others: tuple[ir.Value, ...] = ()
    degree: Degree = 0
    certain: bool = True


class Flow:
    """The degrees of all values.

    Attributes:
        degrees: the degrees other than 0 of values that are no bookkeeping, subgraphs included.
        touched: the values with an effect of the loss scale, or a past one, before the division.
        unscaled: the gradients, as the values where the scale comes out, each with its node.
        events: the defects.
    """

    def __init__(self, view: View, scalars: Scalars, exempt: Container[ir.Value]) -> None:
        self.view = view
        self.scalars = scalars
        self.degrees: dict[ir.Value, Degree] = {}
        self.touched: set[ir.Value] = set()
        self.unscaled: dict[ir.Value, ir.Node] = {}
        self._taint: dict[ir.Value, Event] = {}
        self._events: dict[tuple[Fault, ir.Node | ir.Value], Event] = {}
        for node in view.nodes:
            self._visit(node)
        for value in view.graph.outputs:
            degree = self.degree(value)
            if value in self._taint and degree not in (0, ZERO) and value not in exempt:
                self._taint[value].certain = True
            elif degree not in (0, ZERO) and value not in exempt:
                self._events[Fault.OUTPUT, value] = Event(Fault.OUTPUT, None, (value,), degree=degree)

    @property
    def events(self) -> list[Event]:
        """The certain faults, in graph order."""
        return [event for event in self._events.values() if event.certain]

    def degree(self, value: ir.Value | None) -> Degree:
        """Return the degree of a value."""
        if value is None:
            return 0
        if value in self.scalars.values:
            return self.scalars.degrees.get(value, 0)
        return self.degrees.get(value, 0)

    def _visit(self, node: ir.Node) -> None:
        if any(value in self.scalars.values or value in self.scalars.constants for value in node.outputs):
            return
        operands = self.view.operands(node)
        if any(operand in self.touched or operand in self.scalars.multiples for operand in operands):
            self.touched.update(() if reads_shape(node) else node.outputs)
        elif not any(operand in self.scalars.bent for operand in operands):
            return
        if any(subgraphs(node)):
            self._evaluate_bodies(node)
        else:
            self._evaluate(node)

    def _evaluate(self, node: ir.Node) -> None:
        degrees = [self.degree(value) for value in node.inputs]
        event = self._other_scale(node, degrees)
        result = degrees_through(node, degrees)
        if isinstance(result, Conflict):
            event = self._conflict(node, result) or event
            result = [result.degree if is_float(value) else 0 for value in node.outputs]
        elif event is None:
            event = self._by_scale(node, degrees, result)
        if event is not None:
            event = self._events.setdefault((event.fault, node), event)
        taint = event or next((self._taint[v] for v in node.inputs if v in self._taint), None)
        for value, degree in zip(node.outputs, result, strict=True):
            if degree != 0:
                self.degrees[value] = degree
            # A doubtful fault ends where the scale has come out again.
            if taint is not None and (degree != 0 or event is not None):
                self._taint[value] = taint
        if any(degrees) and self._by(node) is not None and self.degree(node.outputs[0]) == 0:
            self.unscaled[node.outputs[0]] = node

    def _by(self, node: ir.Node) -> int | None:
        """Return the index of the scale, or its reciprocal, among the operands of a product or quotient."""
        scales = (i for i, value in enumerate(node.inputs) if value in self.scalars.multiples)
        return next(scales, None) if _multiplies(node) else None

    def _by_scale(self, node: ir.Node, degrees: Sequence[Degree], result: Sequence[Degree]) -> Event | None:
        """Return the event of a product or quotient with the scale that leads away from degrees 0 and 1."""
        rule, index, degree = rule_of(node), self._by(node), result[0]
        if rule is None or index is None or degree is None:
            return None
        operands = {i: v for i, v in enumerate(node.inputs) if i != index and v is not None}
        data, others = tuple(operands.values()), [degrees[i] or 0 for i in operands]
        if not data or all(self.scalars.is_constant(v) or v in self.scalars.values for v in data):
            return None
        # The scale as a numerator does not divide.
        own = degrees[index] or 0
        if degree > 1 and degree > max(others) and (max(others) >= 1 or own > 1):
            return Event(Fault.TWICE, node, data, degree=degree, certain=False)
        divides = degree < min(others) and not (rule.kind is Kind.QUOTIENT and index == 0)
        if degree < 0 and divides:
            fault = Fault.NEGATIVE_AGAIN if any(v in self.touched for v in data) else Fault.NEVER_SCALED
            return Event(fault, node, data, degree=degree, certain=False)
        return None

    def _other_scale(self, node: ir.Node, degrees: Sequence[Degree]) -> Event | None:
        bent = tuple(v for v in node.inputs if v is not None and v in self.scalars.bent)
        data = tuple(v for v, d in zip(node.inputs, degrees, strict=True) if v is not None and d not in (0, ZERO))
        return Event(Fault.OTHER_SCALE, node, data, bent) if bent and data and _multiplies(node) else None

    def _conflict(self, node: ir.Node, conflict: Conflict) -> Event | None:
        scaled = tuple(v for i in conflict.operands if (v := node.inputs[i]) is not None)
        others = tuple(v for i in conflict.others if (v := node.inputs[i]) is not None)
        is_known = bool(scaled) and all(value in self._taint for value in scaled)
        # It may also be an unscaled branch with a needless division.
        for value in scaled if is_known else others:
            if value in self._taint:
                self._taint[value].certain = True
        if is_known:
            return None
        fault = Fault.UNKNOWN if conflict.unknown else Fault.MIXED if others else Fault.NONLINEAR
        return Event(fault, node, scaled, others, conflict.degree)

    # --- subgraphs --------------------------------------------------------------------------------------------------

    def _evaluate_bodies(self, node: ir.Node) -> None:
        leaving: list[list[Degree]] = []
        # A Loop's body has the iteration and the condition before the carried values, and the condition as its first
        # output.
        first, given = (2, 1) if node.op_type == "Loop" else (0, 0)
        for body in subgraphs(node):
            for i, value in enumerate(body.inputs[first:], first):
                first_value = input_at(node, i)
                start = self.degree(first_value)
                if start == 0 and is_zero(first_value):
                    self.degrees[value] = ZERO
                elif start != 0:
                    self.degrees[value] = start
                    self.touched.add(value)
            self._evaluate_body(body, body.inputs[first:] if node.op_type != "If" else [], given)
            leaving.append([self.degree(value) for value in body.outputs][given:])
        for i, value in enumerate(node.outputs):
            degree = max((column[i] or 0 for column in leaving if i < len(column)), key=abs, default=0)
            if degree != 0:
                self.degrees[value] = degree

    def _evaluate_body(self, body: ir.Graph, carried: Sequence[ir.Value], given: int) -> None:
        for _ in range(_ROUNDS):
            for inner in body:
                if any(subgraphs(inner)):
                    self._evaluate_bodies(inner)
                else:
                    self._evaluate(inner)
            after = zip(carried, [self.degree(value) for value in body.outputs][given:], strict=False)
            # The first round that adds to zeros decides their degree.
            changed = {v: d for v, d in after if d not in (ZERO, self.degree(v)) and (d or self.degree(v) is ZERO)}
            if not changed:
                return
            self.degrees.update(changed)


def _multiplies(node: ir.Node) -> bool:
    rule = rule_of(node)
    return rule is not None and rule.kind in (Kind.PRODUCT, Kind.QUOTIENT)


# --- bookkeeping ----------------------------------------------------------------------------------------------------


class Scalars:
    """The bookkeeping of a loss scale: values computed only from its state, constants and flags.

    Attributes:
        symbol: the loss scale: a leaf, or a value computed from leaves.
        leaves: the state of the loss scale, scalars.
        constants: values that depend on no input.
        values: the bookkeeping values, including the leaves.
        degrees: for constants times a power of the scale, that power.
        multiples: the values of a degree other than 0.
        bent: bookkeeping values that depend on the state of the loss scale otherwise, such as the next scale.
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
        result = degrees_through(node, degrees)
        if isinstance(result, Conflict):
            self.bent.update(node.outputs)
        else:
            self.degrees.update((v, d) for v, d in zip(node.outputs, result, strict=True) if d != 0)


def _may_be_scalar(value: ir.Value) -> bool:
    """Return whether a value may be one number, by its shape, else by its constant operands."""
    if value.shape is not None:
        return is_scalar(value)
    node = value.producer()
    constants = (constant_tensor(operand) for operand in (() if node is None else node.inputs))
    return all(constant is None or constant.size == 1 for constant in constants)
