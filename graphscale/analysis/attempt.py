"""A candidate for the loss, with its places of the scale, and its verdicts on other candidates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set

import onnx_ir as ir

from graphscale.analysis.loss_choice import LossCandidate
from graphscale.analysis.solve import Solver
from graphscale.analysis.topology import Topology
from graphscale.analysis.training_result import Coverage
from graphscale.graph.values import constant_tensor, inputs_of, is_scalar
from graphscale.graph.walks import ancestors
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["Attempt", "TryTogether"]

# Operators whose derivative depends on their operand, though their result scales with it.
_KINKED = frozenset(("Abs", "Relu", "LeakyRelu", "PRelu", "Max", "Min", "Clip", "ReduceMax", "ReduceMin"))
_KINKED |= {"ReduceL1", "ReduceL2"}
# Operators that pass one number on.
_NUMBER = Trait.VIEW | Trait.REDUCTION


@dataclasses.dataclass(frozen=True, eq=False)
class Attempt:
    """A candidate for the loss, with its places of the scale."""

    topology: Topology
    solver: Solver
    coverage: Coverage

    @functools.cached_property
    def reached(self) -> Set[ir.Value]:
        """The values that depend on a place where the scale enters."""
        plan = self.solver.plan
        return self.topology.descendants(plan.scaled_values, {use.node for use in plan.scaled_edges})

    @functools.cached_property
    def misfits(self) -> int:
        """The number of values to unscale that are no gradients of state: a wrong choice unscales activations."""
        forced = (each.value for each in self.solver.plan.unscaled.values() if each.reason is not None)
        return sum(not (is_scalar(value) or self.topology.may_be_state(value)) for value in forced)

    @functools.cached_property
    def differentiates_all(self) -> bool:
        """True if, for each of several losses, cotangents depend on values that this loss alone is computed from."""
        above = [{v for v in self.topology.ancestors([loss]) if v.producer()} for loss in self.topology.losses]
        return all(
            any(v in self.solver.live for v in own.difference(*(a for a in above if a is not own))) for own in above
        )

    @functools.cached_property
    def begins_with_constants(self) -> bool:
        """True if the scale enters at constants alone."""
        return all(constant_tensor(place.value) is not None for place in self.solver.plan.places)

    def candidate(self, *losses: ir.Value) -> LossCandidate:
        """Return the candidate for a runtime's choice, with some of the losses, or all."""
        ends, live = self.solver.plan.unscaled.values(), self.solver.live
        # A factor of a cotangent, unscaled for one reader, is no gradient.
        gradients = tuple(each for each in ends if each.everywhere or each.output or each.value not in live)
        return LossCandidate(losses or self.topology.losses, gradients, self.solver.plan.flow.elements.keys())

    def edits_as(self, other: Attempt) -> bool:
        """Return whether another candidate has the same places and unscalings."""
        mine, others = self.solver.plan, other.solver.plan
        return {*mine.places} == {*others.places} and mine.unscaled == others.unscaled

    def is_gradient_of(self, other: Attempt) -> bool:
        """Return whether the loss of this choice scales with that of another choice, and not the reverse."""
        mine, others = self.topology.loss, other.topology.loss
        scaled = other.solver.plan.degree(mine) == 1 and self.solver.plan.degree(others) == 0
        seeded = other.begins_with_constants and not self.begins_with_constants
        return scaled and seeded and not other.misfits and others not in self.topology.forward

    def excludes(self, other: Attempt) -> bool:
        """Return whether another candidate is no loss, if the loss of this one is.

        The other one is a metric of the gradients, whose own choice protects nothing, or `excludes_value` decides.
        """
        loss, coverage = other.topology.loss, self.coverage
        if loss in self.reached and coverage.covered and not (other.coverage.covered or coverage.missed):
            return not self.misfits
        if self._may_be_metric_of(other) or any(v in other.solver.live for v in self._apart(loss)[1]):
            return False
        return self.excludes_value(loss)

    def _may_be_metric_of(self, other: Attempt) -> bool:
        """Return whether the loss may be a metric of the gradients of another candidate.

        Such a loss depends on the places of the other's scale, unless these are parts of a total.
        """
        return self.topology.loss in other.reached and not (
            self.begins_with_constants and not other.begins_with_constants
        )

    def excludes_value(self, value: ir.Value) -> bool:
        """Return whether a value is no loss, if the loss of this choice is.

        Such a value is the loss plus numbers, or a non-linear function of values without effect on cotangents.
        """
        if _adds_numbers(value, self.topology.loss):
            return True
        mine, others = self._apart(value)
        is_used = self._differentiates(mine) and not any(v in self.solver.live for v in others)
        return is_used and _is_nonlinear(self.topology, others)

    def contains(self, value: ir.Value) -> bool:
        """Return whether a value is a part of the loss, and cotangents depend on the operands of another part."""
        return value in self.topology.forward and self._differentiates(self._apart(value)[0])

    def _differentiates(self, values: set[ir.Value]) -> bool:
        live, activations = self.solver.live, self.topology.activation_dependent
        return any(value in live and value in activations for value in values)

    def _apart(self, value: ir.Value) -> tuple[set[ir.Value], set[ir.Value]]:
        """Return the ancestors of the loss alone, and the computed ancestors of another value alone."""
        forward, again = self.topology.forward, self.topology.recomputed
        above = self.topology.ancestors([value])
        others = {v for v in above if v not in forward and v.producer() is not None}
        return {v for v in forward if again.get(v, v) not in above}, others


# Tries several losses at once; None for a refusal.
TryTogether = Callable[[Sequence[ir.Value]], Attempt | None]


def _adds_numbers(value: ir.Value, loss: ir.Value) -> bool:
    """Return whether a value is a sum of a loss and numbers computed from numbers alone."""
    while value is not loss:
        node = value.producer()
        if node is None or not (node.op_type == "Add" or has_trait(node, _NUMBER)):
            return False
        above = {operand: ancestors([operand]) for operand in inputs_of(node)}
        ahead = [operand for operand, values in above.items() if loss in values]
        if len(ahead) != 1 or not all(is_scalar(v) for o, values in above.items() if o not in ahead for v in values):
            return False
        value = ahead[0]
    return True


def _is_nonlinear(topology: Topology, values: Set[ir.Value]) -> bool:
    """Return whether some of the values are non-linear functions of others; operands of no activation do not count."""
    activations = topology.descendants(topology.activation_dependent)
    nodes = (node for node in topology.nodes if node.outputs[0] in values)
    return any(_bends(topology, node, values, activations) for node in nodes)


def _bends(topology: Topology, node: ir.Node, values: Set[ir.Value], activations: Set[ir.Value]) -> bool:
    rule = rule_of(node)
    read = [value for value in topology.operands(node) if value in activations]
    if rule is None or not read or not all(value in values for value in read):
        return False
    is_product = rule.kind in (Kind.PRODUCT, Kind.QUOTIENT) and len(read) > 1
    return rule.bends or is_product or node.op_type in _KINKED
