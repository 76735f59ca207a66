"""Outputs that are gradients, in contrast to moments and gradients that a step keeps for the next one."""

from __future__ import annotations

import functools
from collections.abc import Collection

import onnx_ir as ir

from graphscale.analysis.roles.nearness import Nearness
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.roles.step_interface import VIEWS, Dependence, Interface
from graphscale.analysis.updates import NEXT_STATE, Type, find_coefficients, same_type, type_of
from graphscale.graph.values import inputs_of, is_float, is_known_zero, is_scalar
from graphscale.graph.walks import ancestors, reach
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["Gradients"]

_SCALES = "it scales with the loss"


class Gradients:
    """The gradients among the outputs of a step."""

    def __init__(self, step: Interface) -> None:
        self._step = step
        step.is_gradient = self.includes
        wholes = {whole for each in step.plan.unscaled.values() for whole in each.wholes}
        # The sum of a gradient and a small share of a weight is a gradient with decay.
        wholes = {whole for whole in wholes if not self._holds_state(whole)}
        step.doubtful = self._unknown_shares(wholes) if wholes else set()
        self._values = {*step.plan.unscaled, *wholes} - step.doubtful

    @functools.cached_property
    def _memory(self) -> Dependence:
        """The dependence of all values on inputs outside the loss."""
        step = self._step
        return step.dependence(value for value in step.graph.inputs if step.is_ignored(value) and not is_scalar(value))

    def _unknown_shares(self, wholes: set[ir.Value]) -> set[ir.Value]:
        """Return the sums with an unknown share of a weight, or with a filled initializer."""
        step = self._step
        weights = [value for value in step.graph.inputs if value in step.topology.forward]
        dependence, sources = step.dependence(weights), {*step.graph.inputs, *step.graph.initializers.values()}
        found = set()
        for whole in wholes:
            known = find_coefficients(whole, sources, step.factors, least=0.0)
            stored = any(c >= NEXT_STATE and same_type(whole, v) for v, c in known.items() if not v.is_graph_input())
            if stored or any(same_type(whole, v) and v not in known for v in dependence.of(whole)):
                found.add(whole)
        return found

    def assign(self) -> None:
        """Treat as gradients the open outputs that scale with the loss and contain no state."""
        for output in self._step.open_outputs():
            if self.includes(output) and not self._remembers(output):
                self._step.outputs[output] = Assigned(Role.GRADIENT, _SCALES)

    def assign_counted(self) -> None:
        """Treat as gradients the open outputs that scale with the loss, if there is a weight for each."""
        step = self._step
        groups: dict[Type, list[ir.Value]] = {}
        for output in step.open_outputs():
            if self.includes(output):
                groups.setdefault(type_of(output), []).append(output)
        for alike in groups.values():
            if len(alike) + len(step.gradients_like(alike[0])) <= len(step.weights_like(alike[0])):
                step.outputs.update((output, Assigned(Role.GRADIENT, _SCALES)) for output in alike)

    def pair_compared(self, among: Collection[ir.Value] | None = None) -> None:
        """Pair the gradients, all or some, that the next step compares with its own."""
        step = self._step
        outputs = [v for v in step.open_outputs() if self.includes(v) and (among is None or v in among)]
        candidates = {o: [v for v in step.open_inputs_like(o) if self._meets(o, v)] for o in outputs}
        step.settle(candidates, "the gradient that the next step compares with its own")

    def doubt(self) -> None:
        """Doubt gradients that outnumber the weights of their type, if an open input of it is outside the loss."""
        step = self._step
        groups: dict[Type, dict[ir.Value, list[ir.Value]]] = {}
        for value in step.holders:
            if value in step.inputs or is_scalar(value) or not is_float(value) or value.shape is None:
                continue
            if value in step.topology.forward or not (value.is_graph_input() or _may_be_gradient(step, value)):
                continue
            for gradient in step.gradients_like(value):
                is_mask = not value.is_graph_input() and _is_masked(step, gradient, value)
                if not is_mask and not step.outputs[gradient].is_named:
                    groups.setdefault(type_of(value), {}).setdefault(gradient, []).append(value)
        nearness = Nearness(step, self._memory)
        for candidates in groups.values():
            gradient = next(iter(candidates))
            surplus = len(step.gradients_like(gradient)) - len(step.weights_like(gradient))
            for output, value in [*nearness.assign(candidates).items()][: max(surplus, 0)]:
                evidence = f"{_SCALES}, but {value.name!r} has its type and the loss ignores it"
                step.pair(output, value, evidence, certain=False)

    def doubt_noise(self) -> None:
        """Doubt sums of a gradient and a share of an input in a graph without updates: the input may be noise.

        A sum of a gradient and an input without a factor is an accumulation.
        """
        step = self._step
        if any(v in step.topology.forward and is_float(v) and not is_scalar(v) for v in step.inputs):
            return
        for output, assigned in [*step.outputs.items()]:
            value = assigned.pair
            if value is None or assigned.is_named or is_scalar(value) or output not in step.behind_gradients:
                continue
            if step.weights_like(value) and step.held(output).get(value) != 1:
                step.pair(output, value, f"a gradient and a share of {value.name!r}: it may be noise", certain=False)

    def includes(self, value: ir.Value) -> bool:
        """Return whether a value is a gradient, viewed, clipped, summed, or times other values."""

        def above(each: ir.Value) -> tuple[ir.Value, ...]:
            if (node := each.producer()) is None:
                return ()
            operands = inputs_of(node)
            if node.op_type in ("Mul", "Where"):
                return operands if len({*operands}) == len(operands) else ()  # a square is no gradient
            return operands[:1] if node.op_type in ("Div", "ReduceSum") or has_trait(node, VIEWS | Trait.BOUND) else ()

        return any(each in self._values for each in reach([value], above))

    def _remembers(self, value: ir.Value) -> bool:
        """Return whether a value may be the next value of a weight or a moment."""
        if self._holds_state(value) or any(same_type(value, source) for source in self._memory.of(value)):
            return True
        if is_scalar(value) and self._adds_number(value):
            return True
        return any(self._meets(value, source) for source in self._step.open_inputs_like(value))

    def _adds_number(self, value: ir.Value) -> bool:
        """Return whether a number is a sum with a value computed only from an input of its type outside the loss."""
        step = self._step
        numbers = {v for v in step.open_inputs_like(value) if step.is_ignored(v)}

        def summands(each: ir.Value) -> list[ir.Value]:
            node = each.producer()
            is_sum = node is not None and (node.op_type in ("Add", "Sub", "Sum") or has_trait(node, VIEWS))
            return [*inputs_of(node)] if node is not None and is_sum else []

        ends = (each for each in reach([value] if numbers else [], summands) if not summands(each))
        return any(
            not numbers.isdisjoint(above) and step.topology.forward.isdisjoint(above)
            for above in map(ancestors, ([end] for end in ends if end not in step.behind_gradients))
        )

    def _holds_state(self, value: ir.Value) -> bool:
        held = self._step.held(value).items()
        return any(c >= NEXT_STATE or self._step.is_ignored(v) for v, c in held if same_type(value, v))

    def _meets(self, value: ir.Value, source: ir.Value) -> bool:
        """Return whether a gradient is added to or subtracted from an input outside the loss."""
        if not self._step.is_ignored(source):
            return False
        views, readers = self._step.views(value), self._step.topology.consumers(source)
        sums = (node for node in readers if node.op_type in ("Add", "Sub"))
        return any(operand in views for node in sums for operand in self._step.topology.operands(node))


def _may_be_gradient(step: Interface, value: ir.Value) -> bool:
    """Return whether a stored value may be the last step's gradient, for comparison with others.

    Sums of gradients in a body begin at zeros, too, masks are factors, and filled tensors are constants.
    """
    readers = [node for node, _ in value.uses()]
    if is_known_zero(value):
        return any(node.op_type in ("Mul", "Sub", "Sign") for node in readers)
    products = [node.outputs[0] for node in readers if node.op_type == "Mul"]
    is_added = any(node.op_type in ("Add", "Sub", "Where") for node in readers)
    return step.factors[value] == 0 and (is_added or any(map(_is_compared, (value, *products))))


def _is_compared(value: ir.Value) -> bool:
    """Return whether a value is an operand of a comparison or a sign."""
    rules = (rule_of(node) for node, _ in value.uses())
    return any(rule is not None and rule.kind in (Kind.COMPARE, Kind.DEGREE_0) for rule in rules)


def _is_masked(step: Interface, gradient: ir.Value, value: ir.Value) -> bool:
    node = step.views(gradient)[-1].producer()
    return node is not None and node.op_type == "Mul" and value in node.inputs
