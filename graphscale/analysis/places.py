"""The search for the places where the scale enters, from a certain cotangent up to its seed."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.analysis.edits import Place, Plan
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import find_held
from graphscale.graph.marks import is_rounding
from graphscale.graph.values import (
    Use,
    captured_values,
    constant_tensor,
    inputs_of,
    is_float,
    is_known_zero,
    is_scalar,
    is_tensor,
    operand_at,
    subgraphs,
    uses_of,
)
from graphscale.graph.walks import reach, source_of
from graphscale.operators import Kind, Rule, may_bend, rule_of

__all__ = ["find_cotangents", "find_held_numbers", "find_places"]


class _Grade(enum.IntEnum):
    """The certainty that a demand belongs to the place that it reached; the highest is the best."""

    NONE = 0  # nothing to scale: a forward value, a weight, or a layout of one
    NONLINEAR = 1  # the result of a non-linear operator: a residual rather than a cotangent
    PRODUCT = 2  # a product of forward values
    STRONG = 3  # a sum with a forward operand, a constant, or a scaled value


@dataclasses.dataclass(frozen=True)
class _Answer:
    grade: _Grade
    places: tuple[Place, ...] = ()


def find_cotangents(topology: Topology, node: ir.Node, rule: Rule) -> tuple[Use, ...]:
    """Find the inputs of a backward node that certainly carry a cotangent, as `(node, input index)`.

    For a gradient operator, the input is its cotangent. For a contraction, it is the operand that depends on the tail
    of the forward pass; among several, the one that depends on the deepest forward value. A node with contractions in
    its subgraphs is treated in the same way, with all values that enter it as operands.
    """
    uses = [Use(node, i) for i in rule.operands(len(node.inputs)) if node.inputs[i] is not None]
    if rule.gradient:
        return tuple(uses)
    uses += [use for value in captured_values(node) for use in topology.flat.uses_at(node, value)]
    candidates = [
        use for use in uses if topology.is_backward(operand_at(use)) and not _is_saved(topology, operand_at(use))
    ]
    # The cotangents of a linear loss are inputs and constants; that of a quadratic loss is the residual itself, a value
    # of the forward pass.
    group = (
        [use for use in candidates if operand_at(use) in topology.tail_dependent]
        or candidates
        or [use for use in uses if _is_constant(topology, operand_at(use)) and not is_scalar(operand_at(use))]
        or [use for use in uses if _is_residual(topology, _viewed(topology, operand_at(use)))]
    )
    return (max(group, key=lambda use: _rank(topology, operand_at(use))),) if group else ()


def find_places(
    topology: Topology, plan: Plan, value: ir.Value, use: Use | None = None, *, force: bool = False
) -> tuple[Place, ...]:
    """Return where the scale must enter so that a value gets degree 1.

    The search goes up through operators that keep the degree, through all operands of a sum, and through one operand of
    a product: the one that depends on the deepest forward value, a constant last. It stops where it can go no further.
    The result is empty for a scaled value, or if there is nothing to scale, without `force`.

    Args:
        topology: the graph.
        plan: the edits so far.
        value: the value.
        use: the reader that needs the degree; None for all readers.
        force: scale the value itself, at least for this reader, if there is nothing above to scale.
    """
    search = _Search(topology, plan)
    if search.is_constant(value):
        return (Place(value, use),)
    answer = search.run(value)
    if answer.grade is not _Grade.NONE:
        return answer.places
    if not force:
        return ()
    if topology.is_backward(value):
        return (Place(_unrounded(topology, value)),)
    # The cotangent is a forward value itself, as in the gradient of sum(y*y)/2: scale it for its backward readers.
    sides = topology.flat.sides(value)
    uses = (reader for each in sides for reader in uses_of(each))
    readers = (reader for reader in uses if reader.node in topology.backward and _keeps_degree(reader))
    exits = (output for each in sides for output in topology.flat.exits.get(each, ()))
    return (
        *(Place(value if reader is None else operand_at(reader), reader) for reader in dict.fromkeys((use, *readers))),
        *(Place(output) for output in exits if output in topology.flat.across and topology.is_backward(output)),
    )


class _Search:
    """One search upwards: the answers for all values above one, in execution order."""

    def __init__(self, topology: Topology, plan: Plan) -> None:
        self.topology = topology
        self.plan = plan
        self.known: dict[ir.Value, _Answer] = {}

    def run(self, value: ir.Value) -> _Answer:
        origins, number = self.topology.flat.origins, self.topology.number
        # The input of a body has the number of its origin, and comes behind it.
        for each in sorted(reach([value], self._above), key=lambda v: (number(v), v in origins)):
            self.known[each] = self._answer(each)
        return self.known[value]

    def is_constant(self, value: ir.Value) -> bool:
        """Return whether a value is a constant that can be scaled for a single reader."""
        return self.plan.degree(value) == 0 and _is_constant(self.topology, value)

    def _end(self, value: ir.Value) -> _Answer | None:
        """Return the answer for a value where the search ends; None for others."""
        if self.plan.degree(value) != 0 or is_known_zero(value):
            return _Answer(_Grade.STRONG)
        return None if self.topology.is_backward(value) and is_float(value) else _Answer(_Grade.NONE)

    def _above(self, value: ir.Value) -> Sequence[ir.Value]:
        node, flat = value.producer(), self.topology.flat
        if self._end(value) is not None:
            return ()
        if node is None:
            return [origin] if (origin := flat.origin(value)) is not value else ()
        return flat.above(value) if node in flat.entries else inputs_of(node)

    def _answer(self, value: ir.Value) -> _Answer:
        if (end := self._end(value)) is not None:
            return end
        node = value.producer()
        if node is None or node in self.topology.flat.entries:
            return self._across_border(value)
        # A sequence cannot be multiplied.
        nonlinear = _Answer(_Grade.NONLINEAR, (Place(value),)) if is_tensor(value) else _Answer(_Grade.NONE)
        rule = rule_of(node)
        if subgraphs(node) and any(self.plan.degree(operand) != 0 for operand in self.topology.operands(node)):
            return _Answer(_Grade.STRONG, nonlinear.places)  # the gradient is unscaled before the bodies
        if rule is None or rule.unscaled_first or not rule.has_degree(value.index() or 0):
            return nonlinear
        if rule.kind is Kind.LINEAR and may_bend(node):
            bounded = [v for v in inputs_of(node) if is_float(v) and not self.is_constant(v) and not is_known_zero(v)]
            answer = self.known[bounded[0]] if bounded else nonlinear
            if answer.places or answer.grade is _Grade.NONE:
                return answer
            # The gradient is unscaled before its bounds, and scaled again behind them.
            return _Answer(answer.grade, nonlinear.places)
        if rule.kind is Kind.LINEAR:
            return self._through_sum(value, node, rule)
        if rule.kind is Kind.PRODUCT:
            return self._through_product(value, node, rule)
        if rule.kind is Kind.QUOTIENT:
            answer = self._operand(node, 0)
            return answer if answer.grade is not _Grade.NONE else _Answer(_Grade.PRODUCT, (Place(value),))
        return nonlinear

    def _across_border(self, value: ir.Value) -> _Answer:
        """Go on at the operand that the input of a body is, or at the results of bodies."""
        if value.producer() is None:
            origin = self.topology.origin(value)
            return _Answer(_Grade.NONE) if origin is value else self.known[origin]
        results = self.topology.flat.above(value)
        if len(results) == 1 and not self.is_constant(results[0]):
            return self.known[results[0]]
        constant = _Answer(_Grade.NONE)
        return _sum(value, [constant if self.is_constant(each) else self.known[each] for each in results[-2:]])

    def _operand(self, node: ir.Node, index: int) -> _Answer:
        use = Use(node, index)
        value = operand_at(use)
        return _Answer(_Grade.STRONG, (Place(value, use),)) if self.is_constant(value) else self.known[value]

    def _through_sum(self, value: ir.Value, node: ir.Node, rule: Rule) -> _Answer:
        answers = [self._operand(node, i) for i in rule.operands(len(node.inputs)) if node.inputs[i] is not None]
        return answers[0] if len(answers) == 1 else _sum(value, answers)

    def _through_product(self, value: ir.Value, node: ir.Node, rule: Rule) -> _Answer:
        best = here = _Answer(_Grade.PRODUCT, (Place(value),))
        added = (node.inputs[i] for i in rule.addends if i < len(node.inputs))
        if any(addend is not None and not is_known_zero(addend) for addend in added):
            return here
        operands = [i for i in rule.operands(len(node.inputs)) if node.inputs[i] is not None]
        operands.sort(key=lambda i: _rank(self.topology, operand_at(Use(node, i))), reverse=True)
        dependent = [i for i in operands if node.inputs[i] in self.topology.activation_dependent]
        constant = [i for i in operands if (v := node.inputs[i]) is not None and self.is_constant(v)]
        others = [i for i in operands if i not in dependent and i not in constant]
        # The deepest first; if that is a residual after all, the operands of no activation; then the rest.
        for i in (*dependent[:1], *others, *constant, *dependent[1:]):
            answer = self._operand(node, i)
            if answer.grade is _Grade.STRONG:
                return answer
            if best is here and i in dependent and answer.grade is not _Grade.NONE:
                best = answer
        return best


def _sum(value: ir.Value, answers: Sequence[_Answer]) -> _Answer:
    """Return the answer for a sum, or a choice: all its terms have a place, or it is one itself."""
    if any(answer.grade is not _Grade.STRONG for answer in answers):
        return _Answer(_Grade.STRONG, (Place(value),))
    return _Answer(_Grade.STRONG, tuple(dict.fromkeys(place for answer in answers for place in answer.places)))


def _is_constant(topology: Topology, value: ir.Value) -> bool:
    """Return whether a value is a constant, but no weight, moment or zeros."""
    value = topology.origin(value)
    if not is_float(value) or value in topology.states:
        return False
    producer = value.producer()
    filled = producer is not None and producer.op_type == "ConstantOfShape"
    return (filled or constant_tensor(value) is not None) and not is_known_zero(value)


def _viewed(topology: Topology, value: ir.Value) -> ir.Value:
    """Return the source of a view or a cast of a backward value; the value itself if it is neither."""

    def viewed(node: ir.Node) -> ir.Value | None:
        rule = rule_of(node)
        if node not in topology.backward or rule is None or rule.kind is not Kind.LINEAR or rule.gradient:
            return None
        data = rule.operands(len(node.inputs))
        return node.inputs[data[0]] if len(data) == 1 else None

    return source_of(value, viewed, topology.flat.across)


def _unrounded(topology: Topology, value: ir.Value) -> ir.Value:
    """Return the value before mixed precision rounded it: its product with the scale is rounded, too."""

    def rounded(node: ir.Node) -> ir.Value | None:
        source = node.inputs[0] if is_rounding(node) else None
        return source if source is not None and topology.is_backward(source) else None

    return topology.origin(source_of(topology.origin(value), rounded))


def _is_saved(topology: Topology, value: ir.Value) -> bool:
    """Return whether a value is no cotangent but a forward value, a weight or an input, or a view or cast of one."""
    source = _viewed(topology, value)
    return source in topology.anew or (not topology.is_backward(source) and not _is_constant(topology, source))


def _is_residual(topology: Topology, value: ir.Value) -> bool:
    is_target = topology.origin(value) in topology.targets
    return is_target or (value in topology.tail and value in topology.activation_dependent)


def _keeps_degree(use: Use) -> bool:
    rule = rule_of(use.node)
    return rule is not None and rule.kind is Kind.LINEAR and rule.operands(len(use.node.inputs)) == (use.idx,)


def _rank(topology: Topology, value: ir.Value) -> tuple[bool, bool, bool, int, int]:
    return (
        value in topology.propagated,
        value in topology.tail_dependent,
        value in topology.activation_dependent,
        topology.depth(value),
        topology.late_inputs(value).bit_count(),
    )


def find_held_numbers(topology: Topology) -> set[ir.Value]:
    """Find the stored numbers in an output: they may be weights and moments."""
    numbers = {v for v in topology.graph.initializers.values() if is_scalar(v) and is_float(v)}
    return find_held(topology.graph.outputs, numbers, topology.factors)
