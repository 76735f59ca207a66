"""The flow of the loss scale through a graph, and its faults.

The analysis continues behind every fault, with the degree of the larger operand, so that its consequences are not
reported again. The bookkeeping of the loss scale (growth of the scale, the count of good steps, 1 / scale, a threshold
times the scale) is no part of the gradient path.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.scales import Bookkeeping
from graphscale.checks.linting.view import View
from graphscale.flow import interpreter
from graphscale.flow.degree import ZERO, Conflict, Degree, DegreeDomain, Element, Mixed
from graphscale.flow.scale_effects import BENT, TOUCHED, ScaleDomain, ScaleEffect
from graphscale.operators import Kind, Rule

__all__ = ["Event", "Fault", "Flow"]


class Fault(enum.Enum):
    """The kinds of faults in degrees."""

    MIXED = "operands of different degrees"
    TWICE = "multiplied by the scale again"
    DIVIDED = "divided by the scale again, or without being multiplied by it"
    OTHER_SCALE = "multiplied or divided by another value of the loss scale's state"
    NONLINEAR = "an operator that is not homogeneous"
    UNKNOWN = "an operator without a rule"
    OUTPUT = "an output of another degree than 0"


@dataclasses.dataclass(frozen=True)
class Event:
    """A place with a wrong degree.

    Attributes:
        fault: the kind of fault.
        node: the node, also one in a subgraph; None for an output of the graph.
        scaled: the operands that carry the scale.
        others: the other operands, where they matter.
        degree: the degree of the scaled operands, or of the result.
    """

    fault: Fault
    node: ir.Node | None
    scaled: tuple[ir.Value, ...]
    others: tuple[ir.Value, ...] = ()
    degree: Degree = 0


class Flow:
    """The degrees of all values.

    Args:
        view: the graph.
        scalars: the bookkeeping of its loss scale.
        exempt: the values that may carry the scale as outputs.

    Attributes:
        touched: the values that depend on the loss scale, without its bookkeeping; bodies included.
        unscaled: the gradients, as the values where the scale comes out, each with its node.
        events: the certain faults.
    """

    def __init__(self, view: View, scalars: Bookkeeping, exempt: Container[ir.Value]) -> None:
        effects = {value: ScaleEffect(degree, TOUCHED) for value, degree in scalars.degrees.items()}
        effects.update(dict.fromkeys(scalars.bent, ScaleEffect(0, BENT)))
        domain = ScaleDomain(_Degrees(view, scalars), effects, scalars.values, goes_on=True)
        self._flow = interpreter.Flow[ScaleEffect](domain, effects)
        self._flow.visit_all(node for node in view.nodes if scalars.values.isdisjoint(node.outputs))
        elements = self._flow.elements.items()
        self.touched = {v for v, effect in elements if effect.marks & TOUCHED and v not in scalars.values}
        self.unscaled = domain.unscaled
        outputs = [value for value in view.graph.outputs if self.degree(value) not in (0, ZERO) and value not in exempt]
        self.events = [*self._faults(domain.degrees.conflicts, outputs)]

    def degree(self, value: ir.Value | None) -> Degree:
        """Return the degree of a value."""
        return self._flow.of(value).degree

    def _faults(self, conflicts: Mapping[ir.Node, Conflict], outputs: Sequence[ir.Value]) -> Iterator[Event]:
        """Yield the certain faults: of a misuse by a wrong degree behind it, and no consequences of others."""
        found: list[Event] = []
        certain = set(self._causes(outputs))
        for node, conflict in conflicts.items():
            scaled, others = _values(node, conflict.operands), _values(node, conflict.others)
            if isinstance(conflict, _Misuse):
                found.append(Event(conflict.fault, node, scaled, others, conflict.degree))
                certain.update([node] if conflict.fault is Fault.OTHER_SCALE else [])
                continue
            causes = self._causes(scaled)
            is_known = len(causes) == len(scaled) and node not in causes
            # It may also be an unscaled branch with a needless division.
            certain.update(causes if is_known else (node, *self._causes(others)))
            if not is_known:
                fault = Fault.UNKNOWN if conflict.unknown else Fault.MIXED if others else Fault.NONLINEAR
                found.append(Event(fault, node, scaled, others, conflict.degree))
        yield from (event for event in found if event.node in certain)
        for value in outputs:
            if not self._causes([value]):
                yield Event(Fault.OUTPUT, None, (value,), degree=self.degree(value))

    def _causes(self, values: Sequence[ir.Value]) -> list[ir.Node]:
        """Return the node of the fault that each value with one above comes from."""
        powers = [self._flow.of(value).power for value in values]
        return [power.reason.node for power in powers if isinstance(power, Mixed) and power.reason.operands]


def _values(node: ir.Node, indices: Sequence[int]) -> tuple[ir.Value, ...]:
    return tuple(value for i in indices if (value := node.inputs[i]) is not None)


@dataclasses.dataclass(frozen=True)
class _Misuse(Conflict):
    """A product or quotient with the loss scale, or with its state, that its rule allows.

    Attributes:
        fault: the kind of fault.
    """

    fault: Fault = Fault.OTHER_SCALE


class _Degrees(DegreeDomain):
    """The degrees of the loss scale; misuses of the scale are conflicts, too."""

    def __init__(self, view: View, scalars: Bookkeeping) -> None:
        super().__init__(view.is_zero)
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
            return _Misuse(node, data, bent, degree=result)
        return None if result is None else self._use(node, rule, degrees, result)

    def _use(self, node: ir.Node, rule: Rule, degrees: Mapping[int, Degree], degree: float) -> Degree | Conflict:
        """Return the misuse in a product or quotient with the scale that leads away from degrees 0 and 1."""
        index = next((i for i, value in enumerate(node.inputs) if value in self._scalars.multiples), None)
        data = {i: power or 0 for i, power in degrees.items() if i != index}
        if index is None or all(self._is_own(value) for value in _values(node, [*data])):
            return degree
        others, own = data.values(), degrees[index] or 0
        if degree > 1 and degree > max(others) and (max(others) >= 1 or own > 1):
            return _Misuse(node, tuple(data), degree=degree, fault=Fault.TWICE)
        # The scale as a numerator does not divide.
        divides = degree < min(others) and not (rule.kind is Kind.QUOTIENT and index == 0)
        return _Misuse(node, tuple(data), degree=degree, fault=Fault.DIVIDED) if degree < 0 and divides else degree

    def _is_own(self, value: ir.Value) -> bool:
        return self._scalars.is_constant(value) or value in self._scalars.values

    def reason(self, conflict: Conflict | None, operands: Mapping[int, Element]) -> Conflict | None:
        # Branches that disagree are no fault, and a conflict of operands with faults is no further one.
        above = {i: e.reason for i, e in operands.items() if isinstance(e, Mixed) and e.reason.operands}
        is_further = conflict is not None and (
            isinstance(conflict, _Misuse) or not above.keys() >= {*conflict.operands}
        )
        return conflict if is_further else next(iter(above.values()), None)
