"""The table of evidence: for each output, the inputs whose next value it may be, each with a strength and a reason.

Before it come the outputs that no later step reads, by facts alone: the loss, gradients, constants, signals,
predictions. The functions are pure: each reads the facts of a step alone, and none reads a role that another assigned.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphscale.analysis.roles.facts import VIEWS, Facts
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.updates import NEXT_STATE, ByType, find_coefficients, is_constant_view, same_type
from graphscale.graph.values import constant_tensor, inputs_of, is_float, is_known_zero, is_scalar
from graphscale.graph.walks import follows_from_numbers, reach
from graphscale.operators import Trait, has_trait, optimizer_of

if TYPE_CHECKING:
    from graphscale.analysis.roles.dependence import Dependence

__all__ = ["Evidence", "Gradients", "Row", "Strength", "Table", "fixed_role", "possibilities"]


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
        return facts.dependence_on(ignored)

    def _unknown_shares(self, wholes: set[ir.Value]) -> set[ir.Value]:
        """Return the sums with an unknown share of a weight, or with a filled initializer."""
        facts = self._facts
        weights = [value for value in facts.graph.inputs if value in facts.topology.forward]
        dependence = facts.dependence_on(weights)
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


# --- evidence for pairs -----------------------------------------------------------------------------------------------


class Strength(enum.IntEnum):
    """The strength of evidence for a pair, the weakest first."""

    TYPE = 0  # nothing excludes the pair
    DEPENDS = 1
    PLAIN = 2  # on a path without a contraction
    SHARE = 3  # a term of a sum, with a factor that is no constant
    HOLDS = 4  # any constant multiple of an input outside the loss
    STAYS = 5  # with a constant coefficient near one
    REMAINS = 6  # in each branch of a choice


@dataclasses.dataclass(frozen=True, order=True)
class Evidence:
    """Evidence for a pair.

    Attributes:
        strength: its strength.
        text: the reason, for a reader.
    """

    strength: Strength
    text: str


Row = dict[ir.Value, Evidence]


class Table:
    """The evidence for all pairs of an output and an input of its type, collected as far as it is read.

    Args:
        facts: the facts about the step.
        gradients: its gradients.
    """

    def __init__(self, facts: Facts, gradients: Gradients) -> None:
        self._facts, self._gradients = facts, gradients
        self._rows: dict[ir.Value, Row] = {}
        self._pending: dict[ir.Value, list[tuple[Strength, _Finder]]] = {}

    def row(self, output: ir.Value, least: Strength = Strength.TYPE) -> Row:
        """Return the evidence for the pairs of an output; less than a strength may be missing."""
        return _without_stored(self._facts, self._collect(output, lambda _: least))

    def strength(self, output: ir.Value, value: ir.Value) -> Strength:
        """Return the strength of the evidence for a pair; weaker evidence is not collected."""
        row = self._collect(output, lambda row: row[value].strength + 1 if value in row else 0)
        evidence = _without_stored(self._facts, row).get(value)
        return Strength.TYPE if evidence is None else evidence.strength

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


_Found = Iterator[tuple[ir.Value, Evidence]]
_Finder = Callable[[Facts, Gradients, ir.Value], _Found]


def _contents(facts: Facts, gradients: Gradients, output: ir.Value) -> _Found:
    """Yield the inputs that an output contains as terms of sums."""
    held, forward = facts.held(output), facts.topology.forward
    if facts.copied_input(output) is not None or not any(same_type(output, value) for value in held):
        return
    firm = facts.held_firmly(output)
    for value, c in (*firm.items(), *held.items()):
        if not same_type(output, value):
            continue
        if is_scalar(value) and not value.is_graph_input():
            is_weight = c >= NEXT_STATE and value in forward and facts.takes_gradient(output)
            if not (is_weight or _is_counter(facts, output, value)):
                continue
        is_firm, is_near_one = value in firm, c >= NEXT_STATE
        if is_near_one or (value not in forward and c >= 0):
            strength = Strength.STAYS if is_near_one else Strength.HOLDS
            if is_firm and is_near_one and facts.remains(output, value):
                strength = Strength.REMAINS
            yield value, Evidence(strength if is_firm else Strength.SHARE, "depends on its own previous value")


def _possible_contents(facts: Facts, gradients: Gradients, output: ir.Value) -> _Found:
    """Yield the inputs that an output contains in any products."""
    if facts.copied_input(output) is None and not is_scalar(output):
        for value in facts.held_possibly(output):
            if facts.is_number(value):
                continue  # the factor of another value
            yield value, Evidence(Strength.SHARE, "depends on its own previous value")


def _dependences(facts: Facts, gradients: Gradients, output: ir.Value) -> _Found:
    """Yield the inputs that an output depends on, on paths apart from gradients and the loss."""
    for value, is_plain in facts.dependence.alike(output):
        if _may_hold_state(facts, output, value):
            strength = Strength.PLAIN if is_plain else Strength.DEPENDS
            yield value, Evidence(strength, "it depends on its previous value")


def _shifts(facts: Facts, gradients: Gradients, output: ir.Value) -> _Found:
    """Yield the inputs outside the loss whose next value a handed-through input may be: that of the last step."""
    source = facts.copied_input(output)
    if source is not None and source.is_graph_input() and source is not output and not is_scalar(source):
        for value in facts.inputs_like(output):
            if value is not source and facts.is_ignored(value):
                yield value, Evidence(Strength.DEPENDS, "the value of the last step")


def _compared(facts: Facts, gradients: Gradients, output: ir.Value) -> _Found:
    """Yield the inputs outside the loss that a gradient or a number is compared with: its values of the last step."""
    if gradients.includes(output):
        for value in gradients.met(output):
            yield value, Evidence(Strength.PLAIN, "the gradient that the next step compares with its own")
    is_number = is_scalar(output) and is_float(output) and not output.shape
    for node in (each for view in facts.views(output) for each in facts.comparing(view)) if is_number else ():
        for other in map(facts.copied_input, inputs_of(node)):
            if other is not None and facts.is_ignored(other):
                yield other, Evidence(Strength.DEPENDS, "the number that the next step compares with its own")


def _other_forms(facts: Facts, gradients: Gradients, output: ir.Value) -> _Found:
    """Yield the weights whose next value is another output in another form, such as float16 casts of masters."""
    if output in facts.behind_gradients and any(view.is_graph_output() for view in facts.views(output)[1:]):
        for value in facts.inputs_like(output):
            if value in facts.topology.forward and not is_scalar(value) and value not in facts.topology.targets:
                yield value, Evidence(Strength.DEPENDS, "it is another form of the next value of a state")


def _stored_numbers(facts: Facts, gradients: Gradients, output: ir.Value) -> _Found:
    """Yield the stored numbers that an output holds: counts, averages, rates; a constant is added to a metric."""
    node = output.producer()
    if not is_scalar(output) or node is None:
        return
    is_choice = node.op_type in ("Where", "If", "Max", "Min")
    for value, c in facts.held(output).items():
        if c >= NEXT_STATE and is_scalar(value) and not value.is_graph_input():
            is_next = not is_float(output) or c != 1 or (facts.stores_weights and is_choice)
            if is_next or (facts.stores_weights and not any(map(ir.Value.is_graph_input, facts.sources_of(output)))):
                yield value, Evidence(Strength.PLAIN, "it is computed from a number in the graph")


# Each with the greatest strength of its evidence; the last are the first.
_FINDERS: tuple[tuple[Strength, _Finder], ...] = (
    (Strength.PLAIN, _stored_numbers),
    (Strength.PLAIN, _other_forms),
    (Strength.PLAIN, _compared),
    (Strength.PLAIN, _shifts),
    (Strength.PLAIN, _dependences),
    (Strength.SHARE, _possible_contents),
    (Strength.REMAINS, _contents),
)


def possibilities(facts: Facts, output: ir.Value) -> Row:
    """Return the inputs that an output may replace by the types and readers of the two alone."""
    fitting = (v for v in facts.inputs_like(output) if _may_hold_state(facts, output, v))
    possible = (value for value in fitting if _may_replace(facts, output, value))
    return _without_stored(facts, dict.fromkeys(possible, Evidence(Strength.TYPE, "it has the type of an open input")))


def _without_stored(facts: Facts, row: Row) -> Row:
    """Leave out initializers no stronger than an input, where weights are inputs, as all states then are."""
    if facts.stores_weights or all(map(ir.Value.is_graph_input, row)):
        return row
    least = max((each.strength for v, each in row.items() if v.is_graph_input()), default=None)
    if least is None:
        return row
    return {value: each for value, each in row.items() if value.is_graph_input() or each.strength > least}


def _may_hold_state(facts: Facts, output: ir.Value, value: ir.Value) -> bool:
    """Return whether a value may be the state that an output replaces: an input, a stored weight, moment, or key."""
    if value.is_graph_input():
        return True
    if is_scalar(value) and value.uses() and value not in facts.topology.states:
        return False
    return facts.stores_weights or not value.uses() or value in facts.held_possibly(output)


def _may_replace(facts: Facts, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output could be the next value of an input of its type, by the two alone."""
    topology, is_backward = facts.topology, output in facts.behind_gradients
    is_stored = value.is_initializer() and not value.is_graph_input()
    if not value.uses():
        return not (is_stored and is_scalar(value) and is_float(value))  # a remaining constant
    if is_stored:
        if value in topology.forward or output in topology.forward:
            return False
        return is_backward or not (facts.factors[value] or is_known_zero(value))
    if is_scalar(value) and is_float(value):
        # A metric reads a batch; a number computed from numbers may be a schedule's. The loss reads no next rate.
        return output not in topology.forward and facts.is_ignored(value) and follows_from_numbers(output)
    # An input that enters behind the last contraction is a target or similar.
    return is_backward or (not topology.late_inputs(value) and is_float(value))


def _is_counter(facts: Facts, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output is an unfolded sum of constants; an integer may have an upper bound.

    The added number may not be zero, nor be compared with the bound.
    """
    node, begins_at_zero = output.producer(), facts.factors[value] == 0
    if node is not None and node.op_type == "Add":
        return begins_at_zero and all(map(constant_tensor, node.inputs))
    above = facts.above(output)
    if is_float(output) or any(each.is_graph_input() for each in above):
        return False
    readers = [reader for reader in facts.topology.consumers(value) if reader.outputs[0] in above]
    is_bounded = any(reader.op_type in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual") for reader in readers)
    sums = [reader.outputs[0] for reader in readers if reader.op_type == "Add"]
    return (begins_at_zero or is_bounded) and facts.holds_one_of(output, sums)
