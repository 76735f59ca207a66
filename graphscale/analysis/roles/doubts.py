"""Doubts: evidence against a role, collected in one pass over the matched pairs and the other outputs.

Names that agree with a pair settle the doubts about its content.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from graphscale.analysis.roles.evidence import Table
from graphscale.analysis.roles.facts import Facts, Gradients, Strength
from graphscale.analysis.roles.naming import likeness
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.updates import LEAST_SHARE, NEXT_STATE, ByType, find_coefficients, same_type
from graphscale.graph.values import is_float, is_known_zero, is_scalar
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait

__all__ = ["Doubt", "Matched", "doubt"]

# An output, the doubt about its role, and whether its pair is out of the question.
_Found = tuple[ir.Value, str, bool]
# Readers of a stored gradient; sums in bodies begin at zeros, too.
_MOVING = frozenset(("Mul", "Sub", "Sign"))


@dataclasses.dataclass(frozen=True)
class Matched:
    """A step with its matched pairs.

    Attributes:
        facts: the facts about it.
        gradients: its gradients.
        table: the evidence for all pairs.
        outputs: the roles of the outputs so far.
        pattern: the pairs of the widest pattern of names.
    """

    facts: Facts
    gradients: Gradients
    table: Table
    outputs: Mapping[ir.Value, Assigned]
    pattern: Mapping[ir.Value, ir.Value]

    @functools.cached_property
    def roles(self) -> set[Role]:
        """The roles of the outputs."""
        return {each.role for each in self.outputs.values()}

    @functools.cached_property
    def pairs(self) -> dict[ir.Value, ir.Value]:
        """The certain pairs by evidence alone, without those that the user named."""
        return {o: a.pair for o, a in self.outputs.items() if a.pair is not None and a.certain and not a.is_named}

    @functools.cached_property
    def owners(self) -> dict[ir.Value, ir.Value]:
        """The output of each input in a certain pair by evidence alone."""
        return {value: output for output, value in self.pairs.items()}

    @functools.cached_property
    def nexts(self) -> ByType:
        """The outputs of these pairs."""
        return ByType(self.pairs)

    @functools.cached_property
    def unpaired(self) -> tuple[ir.Value, ...]:
        """The inputs and initializers without a next value."""
        taken = {each.pair for each in self.outputs.values()}
        return tuple(value for value in self.facts.holders if value not in taken)

    @functools.cached_property
    def _left(self) -> ByType:
        return ByType(value for value in self.unpaired if value not in self.facts.topology.forward)

    def left_like(self, output: ir.Value) -> list[ir.Value]:
        """Return the inputs of an output's type outside the loss that have no next value yet."""
        left = (value for value in self._left.like(output) if value is not output)
        return [v for v in left if v.is_graph_input() or self._may_be_stored(output, v)]

    def _may_be_stored(self, output: ir.Value, value: ir.Value) -> bool:
        """Return whether an initializer may hold state beside the weights: unlike an operand, or a repeated number."""
        facts = self.facts
        is_read = facts.copied_input(output) is value or value in facts.held(output)
        may_be_state = (
            not value.uses() or value.dtype is ir.DataType.BOOL or not (is_scalar(value) or facts.factors[value])
        )
        is_start = bool(value.uses()) and is_float(value) and is_known_zero(value)
        is_start = is_start and not any(node.op_type in _MOVING for node, _ in value.uses())
        return not (is_read or is_start) and (facts.stores_weights or may_be_state)


@dataclasses.dataclass(frozen=True)
class Doubt:
    """A doubt about the role of an output.

    Attributes:
        text: the evidence against the role.
        is_excluded: True if the pair is out of the question.
        by_content: True if the graph itself shows that; else names do.
    """

    text: str
    is_excluded: bool
    by_content: bool


def doubt(step: Matched) -> dict[ir.Value, Doubt]:
    """Return the doubt about each output against whose role there is evidence."""
    found: dict[ir.Value, Doubt] = {}
    for find in (*_BY_NAMES, *_BY_CONTENT):
        for output, text, is_excluded in find(step):
            pair, by_content = step.outputs[output].pair, find not in _BY_NAMES
            if not by_content or find is _weak or pair is None or step.pattern.get(output) is not pair:
                first = found.setdefault(output, Doubt(text, is_excluded, by_content))
                if by_content and is_excluded and first.is_excluded:
                    found[output] = dataclasses.replace(first, by_content=True)
    return found


def _other_names(step: Matched) -> Iterator[_Found]:
    """Doubt pairs where the names say another."""
    named = {v: o for o, v in step.pattern.items()}
    for output, value in step.pairs.items():
        by_name, other = step.pattern.get(output), named.get(value)
        if by_name is not None and by_name is not value:
            yield output, f"it holds {value.name!r}, but is named after {by_name.name!r}", True
        elif other is not None and other is not output:
            yield output, f"it holds {value.name!r}, but {other.name!r} is named after it", True
    for output, value in step.pattern.items():
        if step.outputs[output].role in (Role.LOSS, Role.GRADIENT) and value in step.unpaired:
            yield output, f"it is named as the next value of {value.name!r}", False


def _named_metrics(step: Matched) -> Iterator[_Found]:
    """Doubt metrics that are named after an open input of their type, or one in a pair without its name."""
    for output, value in step.pattern.items():
        is_metric = step.outputs[output].role is Role.METRIC and not step.outputs[output].is_named
        if is_metric and (value in step.owners or value in step.unpaired):
            yield output, f"it is named after {value.name!r}", False


def _silent_names(step: Matched) -> Iterator[_Found]:
    """Doubt the only pair that does not follow the pattern of all others."""
    facts, pairs = step.facts, step.pairs
    silent = [(output, value) for output, value in pairs.items() if output not in step.pattern]
    silent = [(o, v) for o, v in silent if _is_error(step, o, v) or not (is_scalar(v) or step.gradients.includes(o))]
    for output, value in silent if len(silent) == 1 and step.pattern else ():
        is_learnt = facts.has_gradient(value) and facts.takes_gradient(output)
        if not is_learnt and facts.copied_input(output) is not value:
            is_excluded = likeness(value, output)[0] < 1 or facts.held_firmly(output).get(value) == 1
            yield output, f"it holds {value.name!r}, but is not named like the other next values", is_excluded


def _is_error(step: Matched, output: ir.Value, value: ir.Value) -> bool:
    """Return whether a number adds the result of a layer to an input, as an error does, and a sum of losses."""
    facts, node = step.facts, output.producer()
    is_sum = node is not None and node.op_type in ("Add", "Sub") and facts.held_firmly(output).get(value) == 1
    is_layer = is_sum and any(v.producer() in facts.topology.contractions for v in facts.above(output))
    return is_layer and is_scalar(value) and len(step.pattern) > 1


def _exchanged(step: Matched) -> Iterator[_Found]:
    """Doubt two outputs that hold each other's input, in each branch where they are chosen."""
    facts = step.facts
    for output, value in step.pairs.items():
        for present in facts.held(output):
            other = step.owners.get(present)
            if other is not None and other is not output and value in facts.held(other):
                if facts.remains(output, present, LEAST_SHARE) and facts.remains(other, value, LEAST_SHARE):
                    yield output, f"it could be exchanged with {other.name!r}: each holds the other's input", False


def _holds_next(step: Matched) -> Iterator[_Found]:
    """Doubt an output that holds the next value of another state, beside an unknown share of its own input."""
    facts, pairs = step.facts, step.pairs
    for output, value in pairs.items():
        if step.table.strength(output, value) <= Strength.SHARE and not is_scalar(value):
            for other, c in find_coefficients(output, step.nexts.like(output), facts.factors).items():
                if c >= NEXT_STATE and other not in facts.views(output):
                    yield output, f"it holds {other.name!r}, the next value of another state", False
                    yield other, f"{output.name!r} holds it, and may be the next value of {pairs[other].name!r}", False


def _composed(step: Matched) -> Iterator[_Found]:
    """Doubt the sum of a weight and a function of the next values of other weights alone: their merged form."""
    facts, pairs, topology = step.facts, step.pairs, step.facts.topology
    weights = {output: value for output, value in pairs.items() if value in topology.forward}
    for output, value in weights.items():
        is_moved = facts.held_firmly(output).get(value) == 1 and facts.copied_input(output) is not value
        if is_moved and not facts.takes_gradient(output):
            ends = {other.producer() for other in weights if other is not output}
            above = topology.ancestors([output], stop=ends.__contains__)
            sources = [v for v in above if v.is_graph_input() and v is not value]
            if not sources and any(v.producer() in ends for v in above):
                yield output, f"it adds the next values of other weights to {value.name!r}", True


def _errors(step: Matched) -> Iterator[_Found]:
    """Doubt the sum of an input and another value that the loss is computed from: the error of a prediction."""
    facts, topology = step.facts, step.facts.topology
    moved = [(o, v) for o, v in step.pairs.items() if facts.held_firmly(o).get(v) == 1 and not facts.takes_gradient(o)]
    above = topology.ancestors(topology.losses) if moved else ()
    for output, value in moved:
        if output in above and facts.copied_input(output) is not value:
            others = [v for v in facts.dependence.of(output) if v is not value]
            text = f"it adds to {value.name!r}, and the loss is computed from it, as from an error"
            yield output, text, _is_compared(step, output, value, others)


def _negative(step: Matched) -> Iterator[_Found]:
    """Doubt an output that holds its input with a negative coefficient."""
    for output, value in step.pairs.items():
        if step.facts.held(output).get(value, 0.0) < 0:
            yield output, f"it holds {value.name!r} with a negative coefficient", True


def _stays(step: Matched) -> Iterator[_Found]:
    """Doubt a state that stays itself, while another output holds it."""
    facts, pairs = step.facts, step.pairs
    staying = {v: o for o, v in pairs.items() if facts.copied_input(o) is v and not is_scalar(v)}
    inputs = ByType(filter(ir.Value.is_graph_input, step.unpaired if staying else ()))
    for value, output in staying.items():
        left = next(iter(inputs.like(output)), None)
        if left is not None:
            yield output, f"it is {value.name!r} itself, and may be the next value of {left.name!r}", False
    same = ByType(staying)
    for other, present in pairs.items() if staying else ():
        is_moved = facts.is_ignored(present) and facts.takes_gradient(other)
        moved = filter(facts.has_gradient, same.like(other)) if is_moved else ()
        for value in dict.fromkeys((*(v for v in facts.held_possibly(other) if v in same.like(other)), *moved)):
            if staying[value] is not other:
                yield staying[value], f"it is {value.name!r} itself, and {other.name!r} may be its next value", False
                yield other, f"it may be the next value of {value.name!r}", False


def _surplus(step: Matched) -> Iterator[_Found]:
    """Doubt an output without a pair that holds the input of another, and that pair."""
    owners = step.owners
    for output, assigned in step.outputs.items():
        if assigned.pair is None and is_float(output) and not is_scalar(output) and not assigned.is_named:
            for value, c in step.facts.held(output).items():
                if c >= NEXT_STATE and value in owners and same_type(output, value):
                    yield output, f"it may be the next value of {value.name!r}, too", False
                    yield owners[value], f"{output.name!r} may be the next value of {value.name!r}, too", False


def _changed_batches(step: Matched) -> Iterator[_Found]:
    """Doubt inputs of the loss in another form: they may be batches, unless mixed with carried state alone."""
    carried, topology = {*step.pairs.values()}, step.facts.topology
    for output, value in step.pairs.items():
        is_tensor = is_float(value) and bool(value.shape) and step.facts.copied_input(output) is not value
        if is_tensor and value in topology.forward and output not in step.facts.behind_gradients:
            others = [v for v in step.facts.dependence.of(output) if v is not value and (v.shape or not is_scalar(v))]
            is_read, is_mixed = _is_read(step.facts, output), any(map(ir.Value.is_graph_input, others))
            is_compared = is_mixed and _is_compared(step, output, value, others)
            if not others or ((is_read or is_compared) and not carried.issuperset(others)):
                is_excluded = is_compared or (is_read and not is_mixed)
                yield output, f"it may be {value.name!r}, a batch, as the network reads it", is_excluded


def _is_compared(step: Matched, output: ir.Value, value: ir.Value, others: list[ir.Value]) -> bool:
    """Return whether an output is a target, plus or minus activations: a residual, or a temporal difference.

    A target has an example for each one of another input. Rows that are written into a state are none of these.
    """
    facts, node = step.facts, output.producer()
    is_written = node is not None and node.op_type in ("ScatterND", "ScatterElements")
    if is_written or not facts.remains(output, value):
        return False
    if abs(facts.held(output).get(value, 0.0)) != 1 or not facts.topology.late_inputs(value) or not value.shape:
        return False
    fed = (v for v in others if v.is_graph_input() or is_scalar(v))
    shapes = (v.shape for v in fed if v not in step.owners and not same_type(v, value))
    return any(shape is not None and [*shape][:1] == [value.shape[0]] for shape in shapes)


def _is_read(facts: Facts, output: ir.Value) -> bool:
    """Return whether the loss reads an output, its negative, or the difference in the other order."""
    source = source_by_trait(output, Trait.EXACT)
    node, forward = source.producer(), facts.topology.forward
    if node is None or source in forward:
        return source in forward
    others = facts.topology.consumers(node.inputs[0]) if node.op_type == "Sub" and node.inputs[0] is not None else ()
    return any(other.outputs[0] in forward and [*other.inputs] == [*node.inputs][::-1] for other in others)


def _surplus_gradients(step: Matched) -> Iterator[_Found]:
    """Doubt gradients that outnumber the weights of their type, if an open input of it is outside the loss."""
    gradients = [o for o, each in step.outputs.items() if each.role is Role.GRADIENT and not each.is_named]
    alike = ByType(gradients)
    for output in gradients:
        left = [v for v in step.left_like(output) if not is_scalar(v)]
        if left and len(alike.like(output)) > len(step.facts.weights_like(output)):
            yield output, f"it scales with the loss, but {left[0].name!r} has its type and the loss ignores it", False


def _surplus_constants(step: Matched) -> Iterator[_Found]:
    """Doubt constants that may be the next values of inputs: a flag of the first step, an unchanged rate."""
    for output, assigned in step.outputs.items():
        if assigned.role is Role.CONSTANT and not assigned.is_named:
            for value in step.left_like(output)[:1]:
                yield output, f"a constant, and {value.name!r} has its type", False


def _numbers(step: Matched) -> Iterator[_Found]:
    """Doubt numbers that are chosen, or computed by factors that are no constants: a rate may be the present one."""
    facts = step.facts
    for output, value in step.pairs.items():
        node = facts.views(output)[-1].producer()
        if not is_scalar(value) or value.shape or node is None or (value.is_graph_input() and not is_float(value)):
            continue
        is_bound = node.op_type in ("Max", "Min") and bool(step.pattern)  # a clipped norm, by a file that names states
        if is_bound or step.table.strength(output, value) < Strength.HOLDS:
            is_excluded = output in facts.topology.forward or len(step.pattern) > 1
            yield output, f"it depends on {value.name!r}, which has its type", is_excluded


def _weak(step: Matched) -> Iterator[_Found]:
    """Doubt tensors that only depend on their input: so does a prediction, and a product for the log."""
    facts = step.facts
    for output, value in step.pairs.items():
        is_number = is_scalar(value) and not value.shape
        is_held = step.table.strength(output, value) > Strength.SHARE or facts.holds_a_share(output, value)
        if is_number or not is_float(value) or is_held or facts.copied_input(output) is not None:
            continue
        if not facts.is_ignored(value) and any(view in facts.plan.unscaled for view in facts.views(output)):
            yield output, f"it is a gradient, which depends on {value.name!r} by the loss", True
            continue
        node = facts.views(output)[-1].producer()
        is_product = node is not None and node.op_type in ("Mul", "Div") and value in node.inputs
        if (is_product and not facts.has_gradient(value)) or output not in facts.behind_gradients:
            yield output, f"it depends on {value.name!r}, and so does a prediction", False


def _repeated(step: Matched) -> Iterator[_Found]:
    """Doubt a number that is an output twice, where no names say more: the one of the last step may be fed."""
    facts = step.facts
    copies = Counter(facts.views(output)[-1] for output in step.outputs if is_scalar(output) and not step.pattern)
    for output, assigned in step.outputs.items():
        if assigned.role is Role.METRIC and not assigned.is_named and copies[facts.views(output)[-1]] > 1:
            for value in [v for v in step.unpaired if v.is_graph_input() and same_type(output, v)][:1]:
                is_loss = facts.views(output)[-1] in facts.topology.losses
                again = "it is the loss again" if is_loss else "it is an output twice"
                yield output, f"{again}, and {value.name!r} has its type", False
                for other, present in step.pairs.items():
                    if facts.copied_input(other) is present and same_type(other, value):
                        yield (
                            other,
                            f"it is {present.name!r} itself, and may be the next value of {value.name!r}",
                            False,
                        )


def _doubtful_gradients(step: Matched) -> Iterator[_Found]:
    """Doubt the sum of a gradient and an unknown share of a value, or their product, where no weight is updated."""
    facts, gradients = step.facts, step.gradients
    for output, value in step.pairs.items():
        if any(view in gradients.doubtful for view in facts.views(output)):
            yield output, "a gradient and a share of another value", False
        elif gradients.includes(output) and facts.weights_like(value) and facts.held(output).get(value) != 1:
            yield output, f"a gradient and a share of {value.name!r}, which may be noise or a mask", False


_BY_NAMES = (_other_names, _named_metrics, _silent_names)
_BY_CONTENT = (
    _errors,
    _exchanged,
    _holds_next,
    _composed,
    _negative,
    _stays,
    _surplus,
    _changed_batches,
    _surplus_gradients,
    _surplus_constants,
    _numbers,
    _doubtful_gradients,
    _repeated,
    _weak,
)
