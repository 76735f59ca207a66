"""A supposed loss scale: its effects on the values of a training step, and the judgement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphscale.flow.degree import ZERO, Conflict, Degree, DegreeDomain, is_small_zero
from graphscale.flow.interpreter import Flow
from graphscale.flow.scale import BENT, DATA, FREED, NORMALISED, TOUCHED, Effect, ScaleDomain
from graphscale.flow.support import reach
from graphscale.graph.values import constant_number, inputs_of, reads_shape
from graphscale.graph.walks import ancestors
from graphscale.operators import Kind, Rule, Trait, has_trait, rule_of

__all__ = ["SupposedScale"]

# The largest numbers of float16, bfloat16 and float32: a finite check may compare with them.
_LARGEST = (65504.0, 3.3895313892515355e38, 3.4028234663852886e38)


def _is_large(value: ir.Value | None) -> bool:
    """Return whether a value is a number that tests of finiteness compare with."""
    number = constant_number(value)
    return number is not None and (not math.isfinite(number) or abs(number) in _LARGEST)


def _compares_with_infinity(node: ir.Node) -> bool:
    """Return whether a node compares values with the largest number, with infinity, or with themselves."""
    rule = rule_of(node)
    is_comparison = rule is not None and rule.kind is Kind.COMPARE
    return is_comparison and (any(map(_is_large, node.inputs)) or len(set(node.inputs)) == 1)


class _Degrees(DegreeDomain):
    """The degrees of a supposed scale, which every number that stands for infinity has."""

    def __init__(self, origins: Mapping[ir.Value, int]) -> None:
        super().__init__(lambda value: _is_large(value) or is_small_zero(value))
        self._origins = origins

    def result(self, node: ir.Node, rule: Rule | None, degrees: Mapping[int, Degree]) -> Degree | Conflict:
        powers = [degree or 0 for degree in degrees.values()]
        is_product = rule is not None and (rule.contraction or rule.gradient) and any(powers)
        if is_product and any(self._origins.get(v, 0) & DATA for v in inputs_of(node)):
            # An inverse of the number in a contraction normalizes features, and the result undoes it.
            if min(powers) < 0 or max(powers) > 1:
                return Conflict(node, tuple(degrees))
        return super().result(node, rule, degrees)


class SupposedScale:
    """A number that may be a loss scale, with its effect on each value of a graph.

    Args:
        graph: the main graph.
        origins: the origins of its values.
        symbols: the values that are powers of the supposed scale, with the power of each.

    Attributes:
        unscaled: the gradients that an exact inverse of the scale multiplies.
        tested: whether values that depend on the scale are tested for finiteness.
    """

    def __init__(self, graph: ir.Graph, origins: Mapping[ir.Value, int], symbols: Mapping[ir.Value, Degree]) -> None:
        self.graph = graph
        self._origins = origins
        self._symbols = symbols
        effects = {value: Effect(power, TOUCHED) for value, power in symbols.items()}
        domain = ScaleDomain(_Degrees(origins), effects, self.is_number)
        self._flow = Flow[Effect](domain, effects)
        self._flow.visit_all(graph)
        self.unscaled = [v for v in domain.unscaled if not self._flow.of(v).marks & BENT]
        self.tested = False
        # The contractions and gradient operators that compute on multiples of the scale.
        self._carrying: list[ir.Node] = []
        self._is_refuted = self._is_used = False
        for node in graph.all_nodes():
            if not reads_shape(node) and any(map(self.depends, inputs_of(node))):
                self._note(node)

    def is_number(self, value: ir.Value) -> bool:
        """Return whether a value is computed from single numbers, constants and flags alone."""
        return not self._origins.get(value, 0) & DATA

    def depends(self, value: ir.Value) -> bool:
        """Return whether a value depends on the scale."""
        return bool(self._flow.of(value).marks & TOUCHED)

    def _note(self, node: ir.Node) -> None:
        """Record the effect of a node that depends on the scale."""
        rule, operands = rule_of(node), inputs_of(node)
        if has_trait(node, Trait.EFFECT):
            self._is_refuted |= any(map(self._keeps_scale, operands))
            self._is_used |= any(self._has(v, FREED) for v in operands)
        if any(self._has(v, BENT) for v in operands) or all(map(self.is_number, operands)):
            return
        self.tested |= has_trait(node, Trait.FINITENESS_TEST) or _compares_with_infinity(node)
        if rule is not None and (rule.contraction or rule.gradient) and any(map(self._degree, operands)):
            self._carrying.append(node)

    def _has(self, value: ir.Value, mark: int) -> bool:
        return bool(self._flow.of(value).marks & mark)

    def _degree(self, value: ir.Value) -> Degree:
        """Return the power of the scale in a value, 0 where no power describes it."""
        effect = self._flow.of(value)
        return 0 if effect.marks & BENT else effect.degree

    # --- the judgement ----------------------------------------------------------------------------------------------

    def find_loss(self, candidates: Sequence[ir.Value]) -> ir.Value | None:
        """Return the first loss that the number certainly scales: it multiplies the gradients, and comes out again."""
        scaled = {output for output in self.graph.outputs if self._keeps_scale(output)}
        is_used = self._is_used or any(self._has(v, FREED) and not self._is_metric(v) for v in self.graph.outputs)
        if not is_used or self._is_refuted or len(scaled) > 1:
            return None
        has_inverse = any((self._degree(v) or 0) < 0 and not self.is_number(v) for v in self._flow.elements)
        for loss in candidates:
            forward = ancestors([loss])
            backward = [node for node in self._carrying if forward.isdisjoint(node.outputs)]
            is_multiple = self._degree(loss) == 1 and len(backward) == len(self._carrying)
            is_seen = self._reads_cotangent(backward, forward) or (self.tested and not has_inverse)
            if is_seen and scaled <= {loss} and (is_multiple or forward.isdisjoint(self._symbols)):
                return loss
        return None

    def _reads_cotangent(self, nodes: Sequence[ir.Node], forward: set[ir.Value]) -> bool:
        """Return whether a multiple in a contraction depends on the loss's own values, or is the seed alone."""
        behind = reach(self.graph, {v for v in forward if v.producer() is not None}) if nodes else set()
        return any(self._degree(v) and (v in behind or self.is_number(v)) for node in nodes for v in inputs_of(node))

    def _is_metric(self, value: ir.Value) -> bool:
        return self.is_number(value) or (value.shape is not None and len(value.shape) == 0)

    def _keeps_scale(self, value: ir.Value) -> bool:
        """Return whether a value, other than a metric or a number, may vary with the scale."""
        differs = self._degree(value) not in (0, ZERO) or self._has(value, BENT | NORMALISED)
        return differs and not self._is_metric(value)
