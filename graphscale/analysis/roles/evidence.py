"""The table of evidence: for each output, the inputs whose next value it may be, each with a strength and a reason.

Before it come the outputs that no later step reads, by facts alone: the loss, gradients, constants, signals,
predictions. The functions are pure: each reads the facts of a step alone, and none reads a role that another assigned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from graphscale.analysis.roles.facts import Evidence, Facts, Finder, Found, Gradients, Row, Strength, without_stored
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.updates import NEXT_STATE, find_coefficients, is_constant_view, same_type
from graphscale.graph.values import constant_tensor, inputs_of, is_known_zero, is_scalar
from graphscale.graph.walks import reach
from graphscale.operators import Trait, has_trait, optimizer_of

__all__ = ["Table", "fixed_role"]


# --- outputs that no later step reads ---------------------------------------------------------------------------------


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
    if not is_backward and not _is_average(facts, output) and _meets_target(facts, output):
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


def _is_average(facts: Facts, value: ir.Value) -> bool:
    """Return whether a value holds an input of its type and depends on no layer, such as the mean of targets."""
    held = (c >= NEXT_STATE and same_type(value, v) for v, c in facts.held_firmly(value).items())
    return any(held) and not any(v.producer() in facts.topology.contractions for v in facts.above(value))


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


# --- evidence for pairs -----------------------------------------------------------------------------------------------


class Table:
    """The evidence for all pairs of an output and an input of its type, collected as far as it is read.

    Args:
        facts: the facts about the step.
        gradients: its gradients.
    """

    def __init__(self, facts: Facts, gradients: Gradients) -> None:
        self._facts, self._gradients = facts, gradients
        self._rows: dict[ir.Value, Row] = {}
        self._pending: dict[ir.Value, list[tuple[Strength, Finder]]] = {}

    def row(self, output: ir.Value, least: Strength = Strength.TYPE) -> Row:
        """Return the evidence for the pairs of an output; less than a strength may be missing."""
        return without_stored(self._facts, self._collect(output, lambda _: least))

    def strength(self, output: ir.Value, value: ir.Value) -> Strength:
        """Return the strength of the evidence for a pair; weaker evidence is not collected."""
        row = self._collect(output, lambda row: row[value].strength + 1 if value in row else 0)
        evidence = without_stored(self._facts, row).get(value)
        return Strength.TYPE if evidence is None else evidence.strength

    def possibilities(self, output: ir.Value) -> Row:
        """Return the inputs that an output may replace by the types and readers of the two alone."""
        from graphscale.analysis.roles.weak_evidence import possibilities

        return possibilities(self._facts, output)

    def evidence(self, output: ir.Value, value: ir.Value) -> Evidence:
        """Return the evidence for a pair that a row had."""
        return self._rows[output][value]

    def _collect(self, output: ir.Value, least: Callable[[Row], int]) -> Row:
        """Return a row after all finders that may add evidence of at least a strength, by the row so far."""
        row, pending = self._rows.setdefault(output, {}), self._pending.setdefault(output, [*_FINDERS])
        like = self._facts.inputs_like(output) if pending else ()
        while pending and pending[-1][0] >= least(row):
            for value, evidence in pending.pop()[1](self._facts, self._gradients, output):
                if value in like and (value not in row or evidence.strength > row[value].strength):
                    row[value] = evidence
        return row


def _contents(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    """Yield the inputs that an output contains as terms of sums."""
    held, forward, like = facts.held(output), facts.topology.forward, facts.inputs_like(output)
    if like.isdisjoint(held) or facts.copied_input(output) is not None:
        return
    firm = facts.held_firmly(output)
    for value, c in ((v, c) for each in (firm, held) for v, c in each.items() if v in like):
        if is_scalar(value) and not value.is_graph_input():
            if not (c >= NEXT_STATE and value in forward and facts.takes_gradient(output)):
                continue
        is_firm, is_near_one = value in firm, c >= NEXT_STATE
        if is_near_one or (value not in forward and c >= 0):
            strength = Strength.STAYS if is_near_one else Strength.HOLDS
            if is_firm and is_near_one and facts.remains(output, value):
                strength = Strength.REMAINS
            yield value, Evidence(strength if is_firm else Strength.SHARE, "depends on its own previous value")


def _possible_contents(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    """Yield the inputs that an output contains in any products."""
    if facts.copied_input(output) is None and not is_scalar(output):
        for value in facts.held_possibly(output):
            if facts.is_number(value):
                continue  # the factor of another value
            yield value, Evidence(Strength.SHARE, "depends on its own previous value")


def _weak(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    from graphscale.analysis.roles.weak_evidence import find_weak_evidence  # most pairs have stronger evidence

    return find_weak_evidence(facts, gradients, output)


# Each with the greatest strength of its evidence; the last are the first.
_FINDERS: tuple[tuple[Strength, Finder], ...] = (
    (Strength.PLAIN, _weak),
    (Strength.SHARE, _possible_contents),
    (Strength.REMAINS, _contents),
)
