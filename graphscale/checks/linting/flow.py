"""The loss scale of a graph: its flow through all values, and the faults.

The analysis continues behind every fault, with the degree of the larger operand, so that its consequences are not
reported again. The bookkeeping of the loss scale (growth of the scale, the count of good steps, 1 / scale, a threshold
times the scale) is no part of the gradient path.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.scales import Bookkeeping
from graphscale.checks.linting.view import View
from graphscale.flow import interpreter
from graphscale.flow.degree import ZERO, Conflict, Degree, DegreeDomain, Element, Mixed, is_small_zero
from graphscale.flow.scale_effects import BENT, TOUCHED, ScaleDomain, ScaleEffect
from graphscale.operators import Kind, Rule

__all__ = ["Fault", "Misuse", "Scale"]


class Misuse(enum.Enum):
    """The kinds of products and quotients with the loss scale, or with its state, that are wrong in right degrees."""

    TWICE = "multiplied by the scale again"
    DIVIDED = "divided by the scale again, or without being multiplied by it"
    OTHER_SCALE = "multiplied or divided by another value of the loss scale's state"


@dataclasses.dataclass(frozen=True)
class Fault(Conflict):
    """A place with a wrong degree, in the main graph or in a subgraph.

    Attributes:
        misuse: the kind of misuse; None for a conflict of degrees.
    """

    misuse: Misuse | None = None


class Scale:
    """The loss scale of a graph, with the degrees of all values.

    Attributes:
        value: the loss scale: carried, fed or an initializer.
        scalars: the bookkeeping; its symbol is the factor and divisor: `value`, or one computed from it.
        nexts: the next values of the state of the loss scale, `{state: next value}`; none for a fixed scale.
        touched: the values that depend on the loss scale, without its bookkeeping; bodies included.
        degrees: the degrees other than 0.
        unscaled: the gradients, as the values where the scale comes out, each with its node.
        faults: the certain faults.
        scaled_outputs: the outputs of another degree than 0 without a fault above.
    """

    def __init__(self, view: View, value: ir.Value, scalars: Bookkeeping, nexts: Mapping[ir.Value, ir.Value]) -> None:
        self.value, self.scalars, self.nexts = value, scalars, nexts
        effects = {value: ScaleEffect(degree, TOUCHED) for value, degree in scalars.degrees.items()}
        effects.update(dict.fromkeys(scalars.bent, ScaleEffect(0, BENT)))
        domain = ScaleDomain(_Degrees(scalars), effects, scalars.values, goes_on=True)
        self._flow = interpreter.Flow[ScaleEffect](domain, effects)
        self._flow.visit_all(node for node in view.nodes if scalars.values.isdisjoint(node.outputs))
        elements = self._flow.elements.items()
        self.touched = {v for v, effect in elements if effect.marks & TOUCHED and v not in scalars.values}
        self.degrees = {v: effect.degree for v, effect in elements if effect.degree != 0}
        self.unscaled = domain.unscaled
        outputs = [each for each in view.graph.outputs if self.carries(each) and each not in view.exempt(nexts)]
        self.faults = [*self._faults(domain.degrees.conflicts, outputs)]
        self.scaled_outputs = [value for value in outputs if not self._causes([value])]

    def degree(self, value: ir.Value | None) -> Degree:
        """Return the degree of a value."""
        return None if value is None else self.degrees.get(value, 0)

    @property
    def adjusts(self) -> bool:
        """True if the graph itself adjusts the scale."""
        return self.value in self.nexts

    def carries(self, value: ir.Value | None) -> bool:
        """Return whether a value is multiplied by the scale."""
        return self.degree(value) not in (0, ZERO)

    def _faults(self, conflicts: Mapping[ir.Node, Conflict], outputs: Sequence[ir.Value]) -> Iterator[Conflict]:
        """Yield the certain faults: of a misuse by a wrong degree behind it, and no consequences of others."""
        found: list[Conflict] = []
        certain = set(self._causes(outputs))
        for node, conflict in conflicts.items():
            if isinstance(conflict, Fault):
                found.append(conflict)
                certain.update([node] if conflict.misuse is Misuse.OTHER_SCALE else [])
                continue
            causes = self._causes(conflict.scaled)
            is_known = len(causes) == len(conflict.scaled) and node not in causes
            # It may also be an unscaled branch with a needless division.
            certain.update(causes if is_known else (node, *self._causes(conflict.unscaled)))
            found += [] if is_known else [conflict]
        return (conflict for conflict in found if conflict.node in certain)

    def _causes(self, values: Sequence[ir.Value]) -> list[ir.Node]:
        """Return the node of the fault that each value with one above comes from."""
        powers = [self._flow.of(value).power for value in values]
        return [power.reason.node for power in powers if isinstance(power, Mixed) and power.reason.operands]


class _Degrees(DegreeDomain):
    """The degrees of the loss scale; misuses of the scale are conflicts, too."""

    def __init__(self, scalars: Bookkeeping) -> None:
        super().__init__(functools.cache(is_small_zero))
        self._scalars = scalars

    def result(self, node: ir.Node, rule: Rule | None, degrees: Mapping[int, Degree]) -> Degree | Conflict:
        if any(value in self._scalars.values for value in node.outputs):
            return 0  # known before
        result = super().result(node, rule, degrees)
        if rule is None or rule.kind not in (Kind.PRODUCT, Kind.QUOTIENT) or isinstance(result, Conflict):
            return result
        bent = tuple(i for i, value in enumerate(node.inputs) if value in self._scalars.bent)
        data = tuple(i for i, degree in degrees.items() if degree)
        if bent and data:
            return Fault(node, data, bent, degree=result, misuse=Misuse.OTHER_SCALE)
        return None if result is None else self._use(node, rule, degrees, result)

    def _use(self, node: ir.Node, rule: Rule, degrees: Mapping[int, Degree], degree: float) -> Degree | Conflict:
        """Return the misuse in a product or quotient with the scale that leads away from degrees 0 and 1."""
        index = next((i for i, value in enumerate(node.inputs) if value in self._scalars.multiples), None)
        data = {i: power or 0 for i, power in degrees.items() if i != index}
        if index is None or all(v is None or self._is_own(v) for v in map(node.inputs.__getitem__, data)):
            return degree
        others, own = data.values(), degrees[index] or 0
        if degree > 1 and degree > max(others) and (max(others) >= 1 or own > 1):
            return Fault(node, tuple(data), degree=degree, misuse=Misuse.TWICE)
        # The scale as a numerator does not divide.
        divides = degree < min(others) and not (rule.kind is Kind.QUOTIENT and index == 0)
        return Fault(node, tuple(data), degree=degree, misuse=Misuse.DIVIDED) if degree < 0 and divides else degree

    def _is_own(self, value: ir.Value) -> bool:
        return self._scalars.is_constant(value) or value in self._scalars.values

    def reason(self, conflict: Conflict | None, operands: Mapping[int, Element]) -> Conflict | None:
        # Branches that disagree are no fault, and a conflict of operands with faults is no further one.
        above = {i: e.reason for i, e in operands.items() if isinstance(e, Mixed) and e.reason.operands}
        is_further = conflict is not None and (isinstance(conflict, Fault) or not above.keys() >= {*conflict.operands})
        return conflict if is_further else next(iter(above.values()), None)
