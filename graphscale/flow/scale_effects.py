"""Loss scales: the effect of a supposed one on each value of a graph, and the values computed from numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from graphscale.flow.degree import ZERO, Degree, DegreeDomain, Element, Mixed, degree_of
from graphscale.flow.interpreter import Domain, run
from graphscale.flow.support import SupportDomain
from graphscale.graph.values import constant_tensor, is_float, is_scalar, own_dtype, reads_shape
from graphscale.operators import Kind, rule_of

__all__ = [
    "BENT",
    "DATA",
    "FREED",
    "KEPT",
    "NUMBER",
    "TOUCHED",
    "Effect",
    "ScaleDomain",
    "find_origins",
    "is_single_flag",
]

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

# Marks of values: they depend on the scale; not by a power, or on such a value; not through exact inverses of the scale
# and flags alone; on a gradient that an exact inverse multiplied.
TOUCHED, BENT, KEPT, FREED = 1, 2, 4, 8


class Effect(NamedTuple):
    """The effect of a scale on a value.

    Attributes:
        power: its degree.
        marks: its marks.
    """

    power: Element = 0
    marks: int = 0

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
        goes_on: True to go on with degrees behind a conflict, for a diagnosis.

    Attributes:
        unscaled: the gradients that an exact inverse of the scale multiplies, with their nodes.
    """

    default = Effect()

    def __init__(
        self,
        degrees: DegreeDomain,
        known: Mapping[ir.Value, Effect],
        is_number: Callable[[ir.Value], bool],
        *,
        goes_on: bool = False,
    ) -> None:
        self.degrees = degrees
        self.unscaled: dict[ir.Value, ir.Node] = {}
        self._known = known
        self._is_number = is_number
        self._goes_on = goes_on

    def transfer(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        marks, before = _union(operands), [effect.power for effect in operands]
        has_power = any(before) or ZERO in before
        if not (marks or has_power) or reads_shape(node):
            return [self.default] * len(node.outputs)
        if not has_power or (marks & BENT and not self._goes_on):
            return [Effect(0, _pass(value, marks)) for value in node.outputs]
        powers = self.degrees.transfer(node, before)
        if any(isinstance(power, Mixed) for power in powers):
            marks |= BENT
        for value in node.outputs[:1]:
            self.unscaled.pop(value, None)
            if self._unscales(node, operands, powers[0]):
                self.unscaled[value] = node
                marks = (marks if marks & BENT else marks & ~KEPT) | FREED
        pairs = zip(node.outputs, powers, strict=True)
        return [Effect(power if is_float(value) else 0, _pass(value, marks)) for value, power in pairs]

    def _unscales(self, node: ir.Node, operands: Sequence[Effect], power: Element) -> bool:
        """Return whether a node multiplies a gradient by the inverse of its power of the scale."""
        rule = rule_of(node)
        if rule is None or rule.kind not in (Kind.PRODUCT, Kind.QUOTIENT) or degree_of(power) != 0:
            return False
        multiples = [i for i, value in enumerate(node.inputs) if value is not None and operands[i].degree]
        gradients = [i for i in multiples if (v := node.inputs[i]) is not None and not self._is_number(v)]
        # The scale times the norm of unscaled gradients is no gradient.
        gradients = [i for i in gradients if not operands[i].marks & FREED] or gradients
        return len(gradients) == 1 and (rule.kind is Kind.PRODUCT or gradients == [0])

    def opaque(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        powers = self.degrees.opaque(node, [effect.power for effect in operands])
        marks = _union(operands)
        return [Effect(power, marks and marks | BENT) for power in powers]

    def join(self, node: ir.Node, elements: Sequence[Effect]) -> Effect:
        power = self.degrees.join(node, [effect.power for effect in elements])
        return Effect(power, _union(elements) | (BENT if isinstance(power, Mixed) else 0))

    def pass_border(self, value: ir.Value, element: Effect) -> Effect:
        return Effect(self.degrees.pass_border(value, element.power), element.marks)

    def control(self, element: Effect, condition: Effect) -> Effect:
        return Effect(element.power, element.marks | condition.marks & ~FREED)

    def write(self, value: ir.Value, element: Effect) -> Effect:
        return self._known.get(value, element)


def _union(effects: Sequence[Effect]) -> int:
    marks = 0
    for _, each in effects:
        marks |= each
    return marks


def _pass(value: ir.Value, marks: int) -> int:
    """Return the marks that pass to a value: a flag decides on a gradient, and carries none."""
    if marks & (FREED | KEPT) == 0 or own_dtype(value) is not ir.DataType.BOOL:
        return marks
    return marks & ~(FREED | KEPT if is_single_flag(value) and not marks & BENT else FREED)


def is_single_flag(value: ir.Value) -> bool:
    """Return whether a value is bool, and may be a single one."""
    return own_dtype(value) is ir.DataType.BOOL and (value.shape is None or is_scalar(value))
