"""Outputs that no later step reads, by facts alone: the loss, gradients, constants, signals, predictions."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.roles.facts import VIEWS, Dependence, Facts
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.updates import NEXT_STATE, ByType, find_coefficients, is_constant_view, same_type
from graphscale.graph.values import constant_tensor, inputs_of, is_known_zero, is_scalar
from graphscale.graph.walks import reach
from graphscale.operators import Trait, has_trait, optimizer_of

__all__ = ["Gradients", "fixed_role"]


def fixed_role(facts: Facts, gradients: Gradients, output: ir.Value) -> Assigned | None:
    """Return the role of an output that cannot be state, else None."""
    node, is_backward = output.producer(), output in facts.behind_gradients
    if output in facts.topology.losses:
        return Assigned(Role.LOSS, "the backward pass differentiates it")
    if not is_backward and _is_decay(facts, output):
        return Assigned(Role.GRADIENT, "the gradient of weight decay alone")
    if gradients.includes(output) and (gradients.are_counted(output) or not gradients.remembers(output)):
        return Assigned(Role.GRADIENT, "it scales with the loss")
    if node is None or (is_constant_view(output) or _is_filled(facts, output)):
        return Assigned(Role.CONSTANT, "an input or a constant itself" if node is None else "a constant")
    optimizer = optimizer_of(node)
    if has_trait(node, Trait.EFFECT) and (optimizer is None or optimizer.source(output.index() or 0) is None):
        return Assigned(Role.METRIC, "the signal of an operator that writes into its inputs")
    if is_scalar(output):
        return None
    if output in facts.topology.tail and _is_unreduced_loss(facts, output):
        return Assigned(Role.METRIC, "the loss is its mean or its sum")
    if not is_backward and _meets_target(facts, output):
        return Assigned(Role.METRIC, "it is compared with a target")
    return None


def _is_filled(facts: Facts, output: ir.Value) -> bool:
    return not any(map(ir.Value.is_graph_input, facts.held(output))) and is_known_zero(output)


def _is_decay(facts: Facts, value: ir.Value) -> bool:
    """Return whether a value is a share of one weight, of less than a half."""
    held = find_coefficients(value, facts.sources, facts.factors, least=0.0)
    shares = {v: c for v, c in held.items() if constant_tensor(v) is None}
    if len(shares) != 1 or not all(0 < c < NEXT_STATE for c in shares.values()):
        return False
    sources = [v for v in facts.sources_of(value) if constant_tensor(v) is None]
    return sources == [*shares] and sources[0] in facts.topology.forward and same_type(value, sources[0])


def _meets_target(facts: Facts, value: ir.Value) -> bool:
    """Return whether a node reads a value beside a target, masked or not, or subtracts one from the other."""
    topology, targets = facts.topology, facts.topology.targets
    readers = [*topology.consumers(value)]
    if any(operand in targets for node in readers for operand in topology.operands(node)):
        return True
    compared = [node for node in readers if node.op_type == "Sub" and node.outputs[0] in topology.tail]
    others = (each for node in compared for each in inputs_of(node) if each is not value and each.shape == value.shape)
    is_compared = value.shape is not None and any(_is_of_batch(facts, other) for other in others)
    return is_compared and value in topology.activation_dependent


def _is_of_batch(facts: Facts, value: ir.Value) -> bool:
    """Return whether a value is computed from a batch element by element."""
    above = facts.above(value)
    nodes = [node for each in above if (node := each.producer()) is not None]
    is_elementwise = bool(nodes) and all(has_trait(node, Trait.ELEMENTWISE) for node in nodes)
    return is_elementwise and any(each.is_graph_input() and not is_scalar(each) for each in above)


def _is_unreduced_loss(facts: Facts, value: ir.Value) -> bool:
    """Return whether a loss is only a mean or a sum of a value, times numbers."""

    def below(each: tuple[ir.Value, bool]) -> Iterator[tuple[ir.Value, bool]]:
        for node in facts.topology.consumers(each[0]):
            others = [operand for operand in inputs_of(node) if operand is not each[0]]
            is_total = node.op_type in ("ReduceMean", "ReduceSum")
            is_scaled = node.op_type in ("Mul", "Div") and [*map(is_scalar, others)] == [True]
            is_linear = is_total or is_scaled or node.op_type == "Neg" or has_trait(node, Trait.VIEW)
            if is_linear and node.outputs[0] in facts.topology.forward:
                yield node.outputs[0], each[1] or is_total

    return any(is_reduced and each in facts.topology.losses for each, is_reduced in reach([(value, False)], below))


class Gradients:
    """The gradients of a step, in contrast to moments and gradients that it keeps for the next one.

    Attributes:
        includes: returns whether a value is a gradient, viewed, clipped, summed, or times other values.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        wholes = {whole for each in facts.plan.unscaled.values() for whole in each.wholes}
        # The sum of a gradient and a small share of a weight is a gradient with decay.
        wholes = {whole for whole in wholes if not self._holds_state(whole)}
        self.doubtful = self._unknown_shares(wholes) if wholes else set()
        self._values = {*facts.plan.unscaled, *wholes} - self.doubtful
        self.includes = functools.cache(self._includes)

    @functools.cached_property
    def _memory(self) -> Dependence:
        """The dependence of all values on inputs outside the loss."""
        facts = self._facts
        ignored = (value for value in facts.graph.inputs if facts.is_ignored(value))
        return Dependence(facts.topology, ignored, {*facts.plan.unscaled, facts.topology.loss})

    def _unknown_shares(self, wholes: set[ir.Value]) -> set[ir.Value]:
        """Return the sums with an unknown share of a weight, or with a filled initializer."""
        facts = self._facts
        weights = [value for value in facts.graph.inputs if value in facts.topology.forward]
        dependence = Dependence(facts.topology, weights, {*facts.plan.unscaled, facts.topology.loss})
        found = set()
        for whole in wholes:
            known = find_coefficients(whole, facts.sources, facts.factors, least=0.0)
            stored = any(c >= NEXT_STATE and same_type(whole, v) for v, c in known.items() if not v.is_graph_input())
            if stored or any(v not in known for v, _ in dependence.alike(whole)):
                found.add(whole)
        return found

    def _includes(self, value: ir.Value) -> bool:
        def above(each: ir.Value) -> tuple[ir.Value, ...]:
            if (node := each.producer()) is None:
                return ()
            operands = inputs_of(node)
            if node.op_type in ("Mul", "Where"):
                return operands if len({*operands}) == len(operands) else ()  # a square is no gradient
            return operands[:1] if node.op_type in ("Div", "ReduceSum") or has_trait(node, VIEWS | Trait.BOUND) else ()

        return any(each in self._values for each in reach([value], above))

    def remembers(self, value: ir.Value) -> bool:
        """Return whether a value may be the next value of a weight or a moment."""
        return self._holds_state(value) or any(self._memory.alike(value)) or bool(self.met(value))

    def are_counted(self, output: ir.Value) -> bool:
        """Return whether there is a weight for each output of a type that scales with the loss."""
        return len(self._outputs.like(output)) <= len(self._facts.weights_like(output))

    @functools.cached_property
    def _outputs(self) -> ByType:
        return ByType(filter(self.includes, self._facts.outputs))

    def _holds_state(self, value: ir.Value) -> bool:
        held = self._facts.held(value).items()
        return any(c >= NEXT_STATE or self._facts.is_ignored(v) for v, c in held if same_type(value, v))

    def met(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs of its type outside the loss that a gradient is added to or subtracted from."""
        facts, topology = self._facts, self._facts.topology
        readers = (node for view in facts.views(value) for node in topology.consumers(view))
        others = (each for node in readers if node.op_type in ("Add", "Sub") for each in topology.operands(node))
        return [each for each in others if facts.is_ignored(each) and same_type(value, each)]
