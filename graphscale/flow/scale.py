"""Loss scales: the effect of a supposed one on each value of a graph, and the values computed from numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from graphscale.flow.degree import DegreeDomain, Element, Mixed, degree_of
from graphscale.flow.interpreter import Domain, Flow
from graphscale.flow.support import SupportDomain
from graphscale.graph.values import is_float, own_dtype, reads_shape
from graphscale.operators import Kind, rule_of

__all__ = ["BENT", "DATA", "FLAG", "FREED", "NORMALISED", "NUMBER", "TOUCHED", "Effect", "ScaleDomain", "find_origins"]

# --- origins ----------------------------------------------------------------------------------------------------------

# Origins of a value other than constants: numbers, such as the state of a loss scale, flags, and all others.
NUMBER, FLAG, DATA = 1, 2, 4


class _OriginDomain(SupportDomain):
    """Sets of origins. A flag computed from data is an origin of its own."""

    def __init__(self, sources: Mapping[ir.Value, int], is_flag: Callable[[ir.Value], bool]) -> None:
        super().__init__()
        self._sources = sources
        self._is_flag = is_flag

    def write(self, value: ir.Value, element: int) -> int:
        if value in self._sources:
            return self._sources[value]
        if element & DATA:
            return FLAG if self._is_flag(value) else element
        # A cast, or a selection of constants, makes a number of a flag.
        return NUMBER if element == FLAG and not self._is_flag(value) else element


def find_origins(
    nodes: Iterable[ir.Node], sources: Mapping[ir.Value, int], is_flag: Callable[[ir.Value], bool]
) -> Mapping[ir.Value, int]:
    """Find the origins of the values of a graph and its bodies; those of constants have none.

    Args:
        nodes: the nodes of the main graph, in execution order.
        sources: the origins of its inputs and initializers, and of other values with an origin of their own.
        is_flag: tests whether a value is a flag.
    """
    flow = Flow(_OriginDomain(sources, is_flag), sources)
    flow.visit_all(nodes)
    return flow.elements


# --- effects ----------------------------------------------------------------------------------------------------------

# Marks of values: they depend on the scale; not by a power; on a gradient that its exact inverse multiplied; on one
# that lost it otherwise.
TOUCHED, BENT, FREED, NORMALISED = 1, 2, 4, 8


class Effect(NamedTuple):
    """The effect of a scale on a value.

    Attributes:
        power: its degree.
        marks: marks of its way.
    """

    power: Element = 0
    marks: int = 0

    @property
    def degree(self) -> float | None:
        """The degree apart from conflicts above."""
        return degree_of(self.power)


class ScaleDomain(Domain[Effect]):
    """The degrees of a supposed scale, with the marks of its way.

    Args:
        degrees: the domain of its degrees.
        symbols: the effect of values that are known before, such as the scale and its bookkeeping.
        is_number: tests whether a value is computed from single numbers alone, and hence no gradient.

    Attributes:
        unscaled: the gradients that an exact inverse of the scale multiplies, with their nodes.
    """

    default = Effect()

    def __init__(
        self, degrees: DegreeDomain, symbols: Mapping[ir.Value, Effect], is_number: Callable[[ir.Value], bool]
    ) -> None:
        self.degrees = degrees
        self.symbols = symbols
        self.is_number = is_number
        self.unscaled: dict[ir.Value, ir.Node] = {}

    def transfer(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        if not node.outputs or reads_shape(node) or all(effect == self.default for effect in operands):
            return [self.default] * len(node.outputs)
        powers = self.degrees.transfer(node, [effect.power for effect in operands])
        marks = _union(operands) | (BENT if any(isinstance(power, Mixed) for power in powers) else 0)
        first = node.outputs[0]
        self.unscaled.pop(first, None)
        # A flag decides on a gradient, and carries none.
        is_flag = own_dtype(first) is ir.DataType.BOOL
        kept = marks & (TOUCHED | BENT) if is_flag else marks
        effects = [Effect(power if is_float(v) else 0, kept) for v, power in zip(node.outputs, powers, strict=True)]
        if not is_flag and effects[0].degree == 0:
            end = self._end(node, operands)
            if end == FREED:
                self.unscaled[first] = node
                kept &= ~NORMALISED
            effects[0] = Effect(effects[0].power, kept | end)
        return effects

    def _end(self, node: ir.Node, operands: Sequence[Effect]) -> int:
        """Return the way in which a gradient loses the scale: by its inverse, by another gradient, or by a sign."""
        multiples = [i for i, v in enumerate(node.inputs) if v is not None and operands[i].degree]
        gradients = [i for i in multiples if (v := node.inputs[i]) is not None and not self.is_number(v)]
        # The scale times the norm of unscaled gradients is no gradient.
        gradients = [i for i in gradients if not operands[i].marks & FREED] or gradients
        if not gradients:
            return 0
        rule = rule_of(node)
        is_quotient = rule is not None and rule.kind is Kind.QUOTIENT
        if len(gradients) > 1 or rule is None or not (is_quotient or rule.kind is Kind.PRODUCT):
            return NORMALISED
        return 0 if is_quotient and gradients[0] == 1 else FREED

    def opaque(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        powers = self.degrees.opaque(node, [effect.power for effect in operands])
        marks = _union(operands) & (TOUCHED | BENT)
        return [Effect(power, marks and marks | BENT) for power in powers]

    def join(self, node: ir.Node, elements: Sequence[Effect]) -> Effect:
        power = self.degrees.join(node, [effect.power for effect in elements])
        return Effect(power, _union(elements) | (BENT if isinstance(power, Mixed) else 0))

    def pass_border(self, value: ir.Value, element: Effect) -> Effect:
        return Effect(self.degrees.pass_border(value, element.power), element.marks)

    def control(self, element: Effect, condition: Effect) -> Effect:
        return Effect(element.power, element.marks | condition.marks & TOUCHED)

    def write(self, value: ir.Value, element: Effect) -> Effect:
        return self.symbols.get(value, element)


def _union(effects: Sequence[Effect]) -> int:
    marks = 0
    for effect in effects:
        marks |= effect.marks
    return marks
