"""A supposed loss scale: its powers in the values of a training step, and the judgement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphscale.flow.degree import ZERO, Conflict, Degree, degrees_through
from graphscale.flow.degree import is_small_zero as is_zero
from graphscale.graph.values import (
    constant_number,
    inputs_of,
    is_scalar,
    op_name,
    operands_of,
    own_dtype,
    reads_shape,
    subgraphs,
)
from graphscale.graph.walks import ancestors, carried_by, descendants
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["SupposedScale"]

# The largest numbers of float16, bfloat16 and float32: a finite check may compare with them.
_LARGEST = (65504.0, 3.3895313892515355e38, 3.4028234663852886e38)
# Average number of visits per node before the judgement counts as uncertain.
_PATIENCE = 64


def _has_every_degree(value: ir.Value | None) -> bool:
    """Return whether a value is all zeros, or a number that tests of finiteness compare with."""
    number = constant_number(value)
    if number is not None and (not math.isfinite(number) or abs(number) in _LARGEST):
        return True
    return is_zero(value)


def _compares_with_infinity(node: ir.Node) -> bool:
    """Return whether a node compares values with the largest number, with infinity, or with themselves."""
    rule = rule_of(node)
    numbers = [constant_number(value) for value in node.inputs]
    is_large = any(number is not None and (not math.isfinite(number) or abs(number) in _LARGEST) for number in numbers)
    return rule is not None and rule.kind is Kind.COMPARE and (is_large or len(set(node.inputs)) == 1)


class SupposedScale:
    """A number that may be a loss scale, with its power in each value of a graph.

    Args:
        graph: the main graph.
        numbers: the values computed from single numbers, constants and flags alone.
        symbols: the values that are powers of the supposed scale, with the power of each.

    Attributes:
        degrees: the powers other than 0.
        touched: the values that depend on the scale.
        bent: the values that depend on the scale, but not by a power.
        unscaled: the gradients that an exact inverse of the scale multiplies.
        tested: whether values that depend on the scale are tested for finiteness.
    """

    def __init__(self, graph: ir.Graph, numbers: set[ir.Value], symbols: Mapping[ir.Value, Degree]) -> None:
        self.graph = graph
        self.numbers = numbers
        self.symbols = symbols
        self.degrees: dict[ir.Value, Degree] = {**symbols}
        self.touched = {*symbols}
        self.bent: set[ir.Value] = set()
        self.unscaled: dict[ir.Value, None] = {}
        self.tested = False
        self._gradients: set[ir.Value] = set()
        # The values that depend on unscaled gradients, and on gradients that lost the scale otherwise.
        self._freed: set[ir.Value] = set()
        self._normalised: set[ir.Value] = set()
        # The contractions and gradient operators that compute on multiples of the scale.
        self._carrying: list[ir.Node] = []
        self._is_refuted = self._is_used = self._has_inverse = False
        # Bodies are visited twice, nested ones again each time.
        self._left = _PATIENCE * sum(1 for _ in graph.all_nodes())
        self._walk(graph)

    # --- the judgement ----------------------------------------------------------------------------------------------

    def find_loss(self, candidates: Sequence[ir.Value]) -> ir.Value | None:
        """Return the first loss that the number certainly scales: it multiplies the gradients, and comes out again."""
        scaled = {output for output in self.graph.outputs if self._keeps_scale(output)}
        is_used = self._is_used or any(v in self._freed and not self._is_metric(v) for v in self.graph.outputs)
        if not is_used or self._is_refuted or len(scaled) > 1:
            return None
        for loss in candidates:
            forward = ancestors([loss])
            backward = [node for node in self._carrying if forward.isdisjoint(node.outputs)]
            is_multiple = self.degrees.get(loss, 0) == 1 and len(backward) == len(self._carrying)
            is_seen = self._reads_cotangent(backward, forward) or (self.tested and not self._has_inverse)
            if is_seen and scaled <= {loss} and (is_multiple or forward.isdisjoint(self.symbols)):
                return loss
        return None

    def _reads_cotangent(self, nodes: Sequence[ir.Node], forward: set[ir.Value]) -> bool:
        """Return whether a multiple in a contraction depends on the loss's own values, or is the seed alone."""
        behind = descendants(self.graph, {v for v in forward if v.producer() is not None}) if nodes else set()
        # These values include none of bodies.
        return any(
            node.graph is not self.graph or (self.degrees.get(v, 0) and (v in behind or v in self.numbers))
            for node in nodes
            for v in inputs_of(node)
        )

    def _is_metric(self, value: ir.Value) -> bool:
        return value in self.numbers or (value.shape is not None and len(value.shape) == 0)

    def _keeps_scale(self, value: ir.Value) -> bool:
        """Return whether a value, other than a metric or a number, may vary with the scale."""
        differs = self.degrees.get(value, 0) not in (0, ZERO) or value in self.bent or value in self._normalised
        return differs and not self._is_metric(value)

    # --- the flow ---------------------------------------------------------------------------------------------------

    def _walk(self, graph: ir.Graph) -> None:
        for node in graph:
            self._left -= 1
            if self._left < 0:
                self._is_refuted = True
            elif subgraphs(node):
                self._visit_bodies(node)
            elif not self.touched.isdisjoint(node.inputs):
                self._visit(node)

    def _visit_bodies(self, node: ir.Node) -> None:
        if op_name(node) not in ("If", "Loop", "Scan"):
            self.bent.update(() if self.touched.isdisjoint(operands_of(node)) else node.outputs)
            return
        first, count, ahead = (len(node.inputs), 0, 0) if node.op_type == "If" else carried_by(node)
        for body in subgraphs(node):
            for value, given in zip(body.inputs[first:], node.inputs[first:], strict=False):
                self._join(value, [given])
            self._walk(body)
            pairs = zip(body.inputs[first : first + count], body.outputs[ahead:], strict=False)
            changed = [self._join(value, [value, after]) for value, after in pairs]
            if any(changed):
                self._walk(body)
        leaving = zip(*(body.outputs[ahead:] for body in subgraphs(node)), strict=False)
        for output, values in zip(node.outputs, leaving, strict=False):
            self._join(output, values)
            if not self.touched.isdisjoint(node.inputs):
                self.touched.add(output)

    def _join(self, value: ir.Value, sources: Sequence[ir.Value | None]) -> bool:
        """Give a value the common degree of its sources; return whether its degree changed."""
        known = [source for source in sources if source is not None]
        before = self.degrees.get(value, 0)
        degrees = {ZERO if is_zero(v) else self.degrees.get(v, 0) for v in known}
        for group in (self.touched, self.bent, self._gradients, self._freed, self._normalised):
            if not group.isdisjoint(known):
                group.add(value)
        if len(degrees - {ZERO}) > 1:
            self.bent.add(value)
        # Zeros have every degree.
        self.degrees[value] = degrees.pop() if len(degrees) == 1 else next(iter(degrees - {ZERO}), 0)
        return before != self.degrees[value]

    def _visit(self, node: ir.Node) -> None:
        if reads_shape(node):
            return
        operands, rule = inputs_of(node), rule_of(node)
        self.touched.update(v for v in node.outputs if v not in self.symbols)
        degrees = [0 if v is None else self.degrees.get(v, 0) for v in node.inputs]
        powers = [degree or 0 for degree in degrees]
        if has_trait(node, Trait.EFFECT):
            self._is_refuted |= any(map(self._keeps_scale, operands))
            self._is_used |= not self._freed.isdisjoint(operands)
        result = degrees_through(node, degrees, _has_every_degree)
        if isinstance(result, Conflict) or not self.bent.isdisjoint(operands):
            self.bent.update(node.outputs)
            return
        is_number = self.numbers.issuperset(operands)
        if rule is not None and (rule.contraction or rule.gradient) and not is_number:
            # An inverse of the number in a contraction normalizes features, and the result undoes it.
            self.bent.update(node.outputs if min(powers) < 0 or max(powers) > 1 else ())
            self._carrying += [node] if any(powers) else []
        if not is_number:
            self.tested |= has_trait(node, Trait.FINITENESS_TEST) or _compares_with_infinity(node)
        for value, degree in zip(node.outputs, result, strict=True):
            if degree != 0 and value not in self.symbols:
                self.degrees[value] = degree
                self._gradients.update([value] if self._is_gradient(node, value, powers) else [])
                self._has_inverse |= value not in self.numbers and (degree or 0) < 0
        if node.outputs and result[0] == 0 and own_dtype(node.outputs[0]) is not ir.DataType.BOOL:
            for group in (self._freed, self._normalised):
                group.update(() if group.isdisjoint(operands) else node.outputs)
            self._note_inverse(node, powers)

    def _is_gradient(self, node: ir.Node, value: ir.Value, powers: Sequence[float]) -> bool:
        """Return whether a multiple of the scale is a gradient, or a product of the seed with values of the step."""
        rule = rule_of(node)
        if any(v in self._gradients for v, power in zip(node.inputs, powers, strict=True) if power):
            return True
        is_large = value.shape is not None and not is_scalar(value)
        return value not in self.numbers and (is_large or (rule is not None and (rule.contraction or rule.gradient)))

    def _note_inverse(self, node: ir.Node, powers: Sequence[float]) -> None:
        """Record a gradient that loses the scale: to its inverse, to another gradient, or to a sign."""
        rule, output = rule_of(node), node.outputs[0]
        carrying = [i for i, power in enumerate(powers) if power]
        gradients = [i for i in carrying if node.inputs[i] in self._gradients]
        is_product = rule is not None and rule.kind in (Kind.PRODUCT, Kind.QUOTIENT)
        if len(gradients) > 1 or (gradients and not is_product):
            self._normalised.add(output)
        elif gradients and not (rule is not None and rule.kind is Kind.QUOTIENT and gradients[0] == 1):
            self.unscaled[output] = None
            self._freed.add(output)
            self._normalised.discard(output)
