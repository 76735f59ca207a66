"""Loss scales: the effect of a supposed one on each value of a graph, and the values computed from numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from graphscale.flow.degree import Degree, DegreeDomain, Element, Mixed, degree_of
from graphscale.flow.interpreter import Domain, run
from graphscale.flow.support import SupportDomain
from graphscale.graph.values import constant_tensor, is_float, own_dtype, reads_shape
from graphscale.operators import Kind, rule_of

__all__ = ["DATA", "FLAG", "NUMBER", "Effect", "ScaleDomain", "find_origins"]

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
    graph: ir.Graph, numbers: Iterable[ir.Value], is_flag: Callable[[ir.Value], bool]
) -> Mapping[ir.Value, int]:
    """Find the origins of the values of a graph and its bodies; constants have none.

    Args:
        graph: the main graph.
        numbers: inputs, initializers or results that are single numbers.
        is_flag: tests whether a value is a flag.
    """
    sources = (v for v in (*graph.inputs, *graph.initializers.values()) if constant_tensor(v) is None)
    origins = {**dict.fromkeys(sources, DATA), **dict.fromkeys(numbers, NUMBER)}
    return run(graph, _OriginDomain(origins, is_flag), origins).elements


# --- effects ----------------------------------------------------------------------------------------------------------


class Effect(NamedTuple):
    """The effect of a scale on a value.

    Attributes:
        power: its degree.
        is_bent: whether it depends on the scale, but not by a power, or on such a value.
        is_freed: whether it depends on a gradient that an exact inverse of the scale multiplied.
    """

    power: Element = 0
    is_bent: bool = False
    is_freed: bool = False

    @property
    def degree(self) -> Degree:
        """The degree apart from conflicts above."""
        return degree_of(self.power)


class ScaleDomain(Domain[Effect]):
    """The degrees of a supposed scale, and the places where it comes out of gradients.

    Args:
        degrees: the domain of its degrees.
        known: the effects of values that are known before, such as the scale and its bookkeeping.
        is_number: tests whether a value is computed from single numbers alone, and hence no gradient.

    Attributes:
        unscaled: the gradients that an exact inverse of the scale multiplies, with their nodes.
    """

    default = Effect()

    def __init__(
        self, degrees: DegreeDomain, known: Mapping[ir.Value, Effect], is_number: Callable[[ir.Value], bool]
    ) -> None:
        self.degrees = degrees
        self.unscaled: dict[ir.Value, ir.Node] = {}
        self._known = known
        self._is_number = is_number

    def transfer(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        if reads_shape(node) or all(effect == self.default for effect in operands):
            return [self.default] * len(node.outputs)
        powers = self.degrees.transfer(node, [effect.power for effect in operands])
        unscales = self._unscales(node, operands, powers)
        for value in node.outputs[:1]:
            self.unscaled.pop(value, None)
            self.unscaled.update({value: node} if unscales else {})
        is_bent = any(effect.is_bent for effect in operands) or any(isinstance(power, Mixed) for power in powers)
        is_freed = unscales or any(effect.is_freed for effect in operands)
        return [
            # A flag carries no power and no gradient.
            Effect(power if is_float(value) else 0, is_bent, is_freed and own_dtype(value) is not ir.DataType.BOOL)
            for value, power in zip(node.outputs, powers, strict=True)
        ]

    def _unscales(self, node: ir.Node, operands: Sequence[Effect], powers: Sequence[Element]) -> bool:
        """Return whether a node multiplies a gradient by the inverse of its power of the scale."""
        rule = rule_of(node)
        if rule is None or rule.kind not in (Kind.PRODUCT, Kind.QUOTIENT) or degree_of(powers[0]) != 0:
            return False
        multiples = [i for i, value in enumerate(node.inputs) if value is not None and operands[i].degree]
        gradients = [i for i in multiples if (v := node.inputs[i]) is not None and not self._is_number(v)]
        # The scale times the norm of unscaled gradients is no gradient.
        gradients = [i for i in gradients if not operands[i].is_freed] or gradients
        return len(gradients) == 1 and (rule.kind is Kind.PRODUCT or gradients == [0])

    def opaque(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        powers = self.degrees.opaque(node, [effect.power for effect in operands])
        is_freed = any(effect.is_freed for effect in operands)
        is_bent = any(effect != self.default for effect in operands)
        return [Effect(power, is_bent, is_freed) for power in powers]

    def join(self, node: ir.Node, elements: Sequence[Effect]) -> Effect:
        power = self.degrees.join(node, [effect.power for effect in elements])
        is_bent = isinstance(power, Mixed) or any(effect.is_bent for effect in elements)
        return Effect(power, is_bent, any(effect.is_freed for effect in elements))

    def pass_border(self, value: ir.Value, element: Effect) -> Effect:
        return element._replace(power=self.degrees.pass_border(value, element.power))

    def write(self, value: ir.Value, element: Effect) -> Effect:
        return self._known.get(value, element)
