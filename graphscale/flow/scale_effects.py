"""Loss scales: the effect of a supposed one on each value of a graph, and the values computed from numbers alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import onnx_ir as ir

from graphscale.flow.degree import ZERO, Degree, DegreeDomain, Element, Mixed, degree_of
from graphscale.flow.interpreter import Domain, run
from graphscale.flow.support import SupportDomain
from graphscale.graph.values import (
    constant_number,
    constant_tensor,
    inputs_of,
    is_float,
    is_scalar,
    own_dtype,
    subgraphs,
)
from graphscale.operators import Kind, Rule, Trait, has_trait, rule_of

__all__ = [
    "BENT",
    "FREED",
    "KEPT",
    "TOUCHED",
    "Numbers",
    "ScaleDomain",
    "ScaleEffect",
    "is_flag",
    "is_large",
    "is_single_flag",
    "tests_finiteness",
]

# --- origins ----------------------------------------------------------------------------------------------------------

# Origins of a value: data, a flag of data, a number computed from such flags; numbers and constants have none.
_DATA, _FLAG, _COUNT = 1, 2, 4


class _OriginDomain(SupportDomain):
    """Sets of origins."""

    def __init__(self, numbers: Container[ir.Value], is_flag: Callable[[ir.Value], bool]) -> None:
        super().__init__(stop=numbers)
        self._is_flag = is_flag

    def write(self, value: ir.Value, element: int) -> int:
        if not element or value in self._stop:
            return 0
        if element & _DATA:
            return _FLAG if self._is_flag(value) else _DATA
        # A cast, or a selection of constants, makes a number of a flag.
        return _COUNT if element == _FLAG and not self._is_flag(value) else element


class Numbers:
    """The values computed from some numbers, constants and flags alone, such as from the state of a loss scale.

    Args:
        graph: the main graph.
        numbers: inputs, initializers or results.
        is_flag: tests whether a value is a flag.

    Attributes:
        counts: the numbers computed from flags.
    """

    def __init__(self, graph: ir.Graph, numbers: Collection[ir.Value], is_flag: Callable[[ir.Value], bool]) -> None:
        sources = (v for v in (*graph.inputs, *graph.initializers.values()) if constant_tensor(v) is None)
        data = {value: _FLAG if is_flag(value) else _DATA for value in sources if value not in numbers}
        self._graph = graph
        self._origins = run(graph, _OriginDomain(numbers, is_flag), data).elements
        self.counts = {value for value, origin in self._origins.items() if origin & _COUNT}

    def __contains__(self, value: object) -> bool:
        return isinstance(value, ir.Value) and not self._origins.get(value, 0) & _DATA

    def is_constant(self, value: ir.Value) -> bool:
        """Return whether a value depends on nothing but the numbers, and on no flag."""
        return not self._origins.get(value, 0)

    @functools.cached_property
    def nodes(self) -> Sequence[ir.Node]:
        """The nodes of the main graph that compute from them, and those with bodies."""
        return [node for node in self._graph if subgraphs(node) or all(value in self for value in inputs_of(node))]


# --- effects ----------------------------------------------------------------------------------------------------------

# Marks of values: they depend on the scale; not by a power, or on such a value; not through exact inverses of the scale
# and flags alone; on a gradient that an exact inverse multiplied.
TOUCHED, BENT, KEPT, FREED = 1, 2, 4, 8


class ScaleEffect(NamedTuple):
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


class ScaleDomain(Domain[ScaleEffect]):
    """The degrees of a supposed scale, and the places where it comes out of gradients.

    Args:
        degrees: the domain of its degrees.
        known: the effects of values that are known before, such as the scale and its bookkeeping.
        numbers: the values computed from single numbers alone, which are no gradients.
        goes_on: True to go on with degrees behind a conflict, for a diagnosis.

    Attributes:
        unscaled: the gradients that an exact inverse of the scale multiplies, with their nodes.
    """

    default = ScaleEffect()

    def __init__(
        self,
        degrees: DegreeDomain,
        known: Mapping[ir.Value, ScaleEffect],
        numbers: Container[ir.Value],
        *,
        goes_on: bool = False,
    ) -> None:
        self.degrees = degrees
        self.unscaled: dict[ir.Value, ir.Node] = {}
        self._known = known
        self._numbers = numbers
        self._goes_on = goes_on

    def transfer(self, node: ir.Node, operands: Sequence[ScaleEffect]) -> Sequence[ScaleEffect]:
        marks, before = _union(operands), [effect.power for effect in operands]
        has_power = any(before) or ZERO in before
        rule = rule_of(node)
        if not (marks or has_power) or not node.outputs or (rule is not None and rule.kind is Kind.SHAPE):
            return [self.default] * len(node.outputs)
        if not has_power or (marks & BENT and not self._goes_on):
            return [ScaleEffect(0, _pass(value, marks)) for value in node.outputs]
        powers = self.degrees.transfer(node, before)
        if any(isinstance(power, Mixed) for power in powers):
            marks |= BENT
            # A flag carries no power.
            powers = [power if is_float(value) else 0 for value, power in zip(node.outputs, powers, strict=True)]
        self.unscaled.pop(node.outputs[0], None)
        if powers[0] == 0 and rule is not None and rule.kind in (Kind.PRODUCT, Kind.QUOTIENT):
            marks = self._cancel(node, rule, operands, marks)
        return [ScaleEffect(power, _pass(value, marks)) for value, power in zip(node.outputs, powers, strict=True)]

    def _cancel(self, node: ir.Node, rule: Rule, operands: Sequence[ScaleEffect], marks: int) -> int:
        """Return the marks of a product of degree 0, where numbers, or a gradient and a number, cancel exactly."""
        pairs = [(i, v) for i, v in enumerate(node.inputs) if v is not None and operands[i].degree]
        gradients = [i for i, value in pairs if value not in self._numbers]
        # The scale times the norm of unscaled gradients is no gradient.
        gradients = [i for i in gradients if not operands[i].marks & FREED] or gradients
        if not pairs or len(gradients) > 1 or (rule.kind is Kind.QUOTIENT and gradients == [1]):
            return marks
        if gradients:
            self.unscaled[node.outputs[0]] = node
            marks |= FREED
        return marks if marks & BENT else marks & ~KEPT | _union([e for e in operands if not e.degree]) & KEPT

    def opaque(self, node: ir.Node, operands: Sequence[ScaleEffect]) -> Sequence[ScaleEffect]:
        powers = self.degrees.opaque(node, [effect.power for effect in operands])
        marks = _union(operands)
        return [ScaleEffect(power, marks and marks | BENT) for power in powers]

    def join(self, node: ir.Node, elements: Sequence[ScaleEffect]) -> ScaleEffect:
        power = self.degrees.join(node, [effect.power for effect in elements])
        return ScaleEffect(power, _union(elements) | (BENT if isinstance(power, Mixed) else 0))

    def pass_border(self, value: ir.Value, element: ScaleEffect) -> ScaleEffect:
        return ScaleEffect(self.degrees.pass_border(value, element.power), element.marks)

    def control(self, element: ScaleEffect, condition: ScaleEffect) -> ScaleEffect:
        return ScaleEffect(element.power, element.marks | condition.marks & ~FREED)

    def write(self, value: ir.Value, element: ScaleEffect) -> ScaleEffect:
        return self._known.get(value, element)


def _union(effects: Sequence[ScaleEffect]) -> int:
    marks = 0
    for _, each in effects:
        marks |= each
    return marks


def _pass(value: ir.Value, marks: int) -> int:
    """Return the marks that pass to a value: a flag decides on a gradient, and carries none."""
    if marks & (FREED | KEPT) == 0 or not is_flag(value):
        return marks
    return marks & ~(FREED | KEPT | BENT if is_single_flag(value) else FREED)


def is_flag(value: ir.Value) -> bool:
    """Return whether a value is bool."""
    return own_dtype(value) is ir.DataType.BOOL


def is_single_flag(value: ir.Value) -> bool:
    """Return whether a value is bool, and may be a single one."""
    return is_flag(value) and (value.shape is None or is_scalar(value))


# --- tests ------------------------------------------------------------------------------------------------------------

# The largest numbers of the floating-point types: a finite check may compare with them.
_TYPES = ("float16", "bfloat16", "float32", "float64")
_LARGEST = frozenset(float(ml_dtypes.finfo(dtype).max) for dtype in _TYPES)  # type: ignore[no-untyped-call]


def is_large(value: ir.Value | None) -> bool:
    """Return whether a value is a number that tests of finiteness compare with."""
    number = constant_number(value)
    return number is not None and (not math.isfinite(number) or abs(number) in _LARGEST)


def tests_finiteness(node: ir.Node) -> bool:
    """Return whether a node tests values for finiteness, perhaps as a comparison with infinity or with themselves."""
    rule = rule_of(node)
    is_comparison = rule is not None and rule.kind is Kind.COMPARE
    is_test = is_comparison and (any(map(is_large, node.inputs)) or len(set(node.inputs)) == 1)
    return is_test or has_trait(node, Trait.FINITENESS_TEST)
