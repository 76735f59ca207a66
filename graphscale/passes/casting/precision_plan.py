"""The choice of the nodes that run in float16: the allowed ones, and the nodes between them.

As in grappler's auto_mixed_precision: allowed nodes first; a denied node makes the infer nodes behind it
denied, up to the next allowed one; the remaining infer and clear nodes between allowed ones run in float16; in the
end, single clear and infer nodes change sides where that saves casts.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphscale.analysis.training_graph import TrainingGraph
from graphscale.errors import AutocastError
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import captured_values, constant_tensor, main_node, subgraphs
from graphscale.graph.walks import nodes_above
from graphscale.operators import OPERATORS, CastRule, Colour, Kind, operators_of_kind
from graphscale.passes.casting.constants import Misfit, find_misfits
from graphscale.passes.casting.region import LOSS, SEED, pin_nodes
from graphscale.passes.casting.schema import Slots, find_refusal
from graphscale.passes.casting.settings import Settings

__all__ = ["PrecisionPlan", "plan_precision", "takes_any_type"]

UNKNOWN = "the operator is unknown"
_SHAPE_READERS = frozenset(key for key in operators_of_kind(Kind.SHAPE) if OPERATORS[key].dtype is not None)
_UNKNOWN_RULE = CastRule(Colour.DENY, UNKNOWN)
_LONG = 256  # elements: a longer sum is computed in float32
_ROUNDS = 8  # of changing sides


class Sides(NamedTuple):
    """The float32 operands and results of a node.

    Attributes:
        inputs: the indices of the operands that are float16 if the node is.
        operands: these operands.
        outputs: the results that are float16 if the node is.
        low: the indices of these operands, and of these results.
        wide: the indices of the other float32 operands and results.
    """

    inputs: tuple[int, ...]
    operands: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    low: Slots
    wide: Slots


@dataclasses.dataclass
class PrecisionPlan:
    """The choice of the nodes that run in float16.

    Attributes:
        operators: all nodes that compute on float32 numbers, in order, bodies included, with domain and operator.
        rules: how to treat each node.
        floats: the float32 values.
        constants: those that are constants, with their tensors.
        typed: the dtypes of all results whose dtype is known.
        forward: the nodes of the main graph that the loss depends on.
        low: the nodes that run in float16.
        reasons: why each other one does not.
        nodes: all nodes.
        sides: the float32 operands and results of each.
    """

    operators: dict[ir.Node, tuple[str, str]]
    rules: dict[ir.Node, CastRule]
    floats: set[ir.Value]
    constants: dict[ir.Value, ir.TensorProtocol]
    typed: Mapping[ir.Value, ir.DataType]
    forward: set[ir.Node]
    low: set[ir.Node] = dataclasses.field(default_factory=set)
    reasons: dict[ir.Node, str] = dataclasses.field(default_factory=dict)
    nodes: list[ir.Node] = dataclasses.field(init=False)
    sides: dict[ir.Node, Sides] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.nodes = list(self.operators)
        self.sides = {node: _sides(node, rule, self.floats) for node, rule in self.rules.items()}

    def nodes_on(self, colour: Colour) -> set[ir.Node]:
        """Return the nodes on a list."""
        return {node for node, rule in self.rules.items() if rule.colour is colour}


def _sides(node: ir.Node, rule: CastRule, floats: set[ir.Value]) -> Sides:
    read, results = node.inputs, node.outputs
    inputs = tuple([i for i, value in enumerate(read) if value in floats])
    outputs = tuple([i for i, value in enumerate(results) if value in floats and value.name])
    wide: Slots = ((), ())
    if rule.wide_inputs or rule.wide_outputs:
        wide = (
            tuple(i for i in inputs if i in rule.wide_inputs),
            tuple(i for i in outputs if i in rule.wide_outputs),
        )
        inputs = tuple(i for i in inputs if i not in rule.wide_inputs)
        outputs = tuple(i for i in outputs if i not in rule.wide_outputs)
    operands = tuple([value for i in inputs if (value := read[i]) is not None])
    return Sides(inputs, operands, tuple([results[i] for i in outputs]), (inputs, outputs), wide)


def plan_precision(
    training: TrainingGraph, settings: Settings, dtype: ir.DataType, wide_ops: Collection[str] = ()
) -> PrecisionPlan:
    """Choose the nodes that run in a small type.

    Args:
        training: the analysis of the graph.
        settings: the lists.
        dtype: the small type.
        wide_ops: operators that the runtime cannot load in it.

    Raises:
        AutocastError: a node to keep does not exist.
    """
    everything = list(training.graph.all_nodes()) if training.owners else list(training.nodes)
    typed = dtypes_of(everything)
    read: set[ir.Value | None] = set()
    for node in everything:
        read.update(node.inputs)
    floats = {value for value, dtype in typed.items() if dtype is ir.DataType.FLOAT}
    floats.update(v for v in read.difference(typed) if v is not None and v.dtype is ir.DataType.FLOAT)
    touching = (node for node in everything if _touches(node, floats))
    operators = {node: kind for node in touching if (kind := (node.domain, node.op_type)) not in _SHAPE_READERS}
    rules = {node: settings.rules.get(kind, _UNKNOWN_RULE) for node, kind in operators.items()}
    constants = _constants(floats.difference(typed), operators)
    plan = PrecisionPlan(operators, rules, floats, constants, typed, nodes_above(training.loss))
    untyped: set[ir.Value | None] = {
        v for v in read.difference(typed) if v is not None and v.dtype is None and v.const_value is None
    }
    _deny(plan, training, settings, dtype, wide_ops, untyped)
    _propagate_denial(plan)
    _take_between(plan)
    _save_casts(plan)
    for node in plan.nodes:
        if node not in plan.low:
            plan.reasons.setdefault(node, "no allowed operator on both sides")
    return plan


def _constants(
    values: Iterable[ir.Value], operators: Mapping[ir.Node, tuple[str, str]]
) -> dict[ir.Value, ir.TensorProtocol]:
    """Find the constants among values that no node computes, and the results of Constant nodes."""
    made = (node.outputs[0] for node, (_, op_type) in operators.items() if op_type == "Constant")
    tensors = ((value, constant_tensor(value)) for value in (*values, *made))
    return {value: tensor for value, tensor in tensors if tensor is not None}


def _deny(
    plan: PrecisionPlan,
    training: TrainingGraph,
    settings: Settings,
    dtype: ir.DataType,
    wide_ops: Collection[str],
    untyped: set[ir.Value | None],
) -> None:
    """Note why each node that must stay float32 does."""
    moving = plan.nodes_on(Colour.CLEAR)
    pinned = pin_nodes(training, plan.forward, plan.nodes_on(Colour.ALLOW), moving)
    _check_kept(settings, training.graph)
    owners, kept, opsets = training.owners, settings.keep, training.graph.opset_imports
    unfit = find_misfits(plan.operators, plan.floats, plan.constants, moving, dtype)

    def reason_of(node: ir.Node, domain: str, op_type: str) -> str | None:
        rule, sides = plan.rules[node], plan.sides[node]
        reason = pinned.get(main_node(owners, node) if owners else node)
        if reason is not None:
            return reason
        if kept and node.name in kept:
            return "kept by the user"
        if owners and subgraphs(node):
            return "its bodies are treated by themselves"
        if untyped and not untyped.isdisjoint(node.inputs):
            return "the type of an operand is not known"
        if not sides.inputs:
            return "it makes float32 numbers of others"
        if op_type in wide_ops:
            return "the runtime cannot load it in a small type"
        if rule.colour is Colour.DENY:
            return rule.reason
        if unfit or op_type in _LOOKED_AT:
            reason = _own_reason(plan, node, unfit)
        return reason or find_refusal(op_type, domain, sides.low, sides.wide, dtype, opsets)

    for node, (domain, op_type) in plan.operators.items():
        reason = reason_of(node, domain, op_type)
        if reason is not None:
            plan.reasons[node] = reason


def _check_kept(settings: Settings, graph: ir.Graph) -> None:
    names = [node.name or "" for node in graph.all_nodes()] if settings.keep else []
    unknown = settings.keep.difference(names)
    if unknown:
        name = min(unknown)
        close = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AutocastError(f"there is no node {name!r} to keep in float32{hint}")


# The operators that `_own_reason` looks at in any case.
_LOOKED_AT = frozenset({"Clip", "LayerNormalization", "Mul", "Pad", "ReduceL1", "ReduceSum", "ReduceSumTraining"})


def _own_reason(plan: PrecisionPlan, node: ir.Node, unfit: Mapping[ir.Value, Misfit]) -> str | None:
    """Return why this one node stays float32, though its operator need not."""
    (_, op_type), inputs = plan.operators[node], node.inputs
    if op_type == "Mul" and inputs[0] is inputs[1]:
        return "a square leaves the range of float16"
    if op_type in ("ReduceSum", "ReduceSumTraining", "ReduceL1") and _summed(node) > _LONG:
        return f"it sums more than {_LONG} elements"
    if op_type == "LayerNormalization" and "stash_type" in node.attributes:
        if node.attributes["stash_type"].as_int() != ir.DataType.FLOAT:
            return "its statistics are not float32"
    if op_type in ("Clip", "Pad") and not {"max", "min", "value"}.isdisjoint(node.attributes):
        return "its bounds are attributes, which are float32"
    for i in plan.sides[node].inputs if unfit else ():
        value = inputs[i]
        problem = None if value is None else unfit.get(value)
        # Small numbers among the weights of a contraction may become zero, as those of trained weights do.
        if problem is not None and (problem.overflows or plan.rules[node].colour is not Colour.ALLOW):
            return problem.reason
    return None


def _summed(node: ir.Node) -> float:
    """Return how many elements a reduction adds up for each element of its result, as far as shapes tell."""
    before, after = (None if v is None or v.shape is None else v.shape for v in (node.inputs[0], node.outputs[0]))
    if before is None or after is None or not before.is_static() or not after.is_static():
        return np.inf
    sizes = [int(np.prod(shape.numpy(), dtype=np.int64)) for shape in (before, after)]
    return sizes[0] / max(1, sizes[1])


def _propagate_denial(plan: PrecisionPlan) -> None:
    """Deny the infer nodes that the result of a denied node reaches through infer and clear ones."""
    reached: set[ir.Value | None] = set()
    for node in plan.nodes:
        if node in plan.reasons:
            # Sources (constants, casts of integers) gave nothing that was computed in float32, and the seed is kept
            # there for its range alone.
            if plan.reasons[node] not in (SEED, LOSS) and not plan.floats.isdisjoint(node.inputs):
                reached.update(plan.floats.intersection(node.outputs))
            continue
        colour = plan.rules[node].colour
        if colour is Colour.ALLOW or reached.isdisjoint(node.inputs):
            continue
        reached.update(plan.floats.intersection(node.outputs))
        if colour is Colour.INFER:
            plan.reasons[node] = "it works on what a float32 operator gave"


def _take_between(plan: PrecisionPlan) -> None:
    """Take the allowed nodes, and the free infer and clear nodes between them."""
    low, rules = plan.low, plan.rules
    free = [(node, sides) for node, sides in plan.sides.items() if node not in plan.reasons]
    low.update(node for node, _ in free if rules[node].colour is Colour.ALLOW)
    behind = {value for node in low for value in plan.sides[node].outputs}
    for _, sides in free:
        if not behind.isdisjoint(sides.operands):
            behind.update(sides.outputs)
    ahead: set[ir.Value] = set()
    for node, sides in reversed(free):
        if node in low or not ahead.isdisjoint(sides.outputs):
            ahead.update(sides.operands)
    between = behind & ahead
    low.update(node for node, sides in free if not between.isdisjoint(sides.outputs))


def _save_casts(plan: PrecisionPlan) -> None:
    """Let clear nodes change sides, and infer nodes go back to float32, where that takes fewer casts."""
    low, rules = plan.low, plan.rules
    movable = {
        node: sides
        for node, sides in plan.sides.items()
        if node not in plan.reasons and rules[node].colour in (Colour.CLEAR, Colour.INFER)
    }
    # A node without a cast around it saves none; its answer changes only after a neighbour has changed sides.
    borders = _borders(plan).difference(plan.constants)
    pending = {
        node
        for node, sides in movable.items()
        if not borders.isdisjoint(sides.operands) or not borders.isdisjoint(sides.outputs)
    }
    for _ in range(_ROUNDS):
        for node in (*movable, *reversed(movable)):
            if node not in pending:
                continue
            pending.discard(node)
            if node not in low and rules[node].colour is Colour.INFER:
                continue
            sides = movable[node]
            around = dict.fromkeys((*sides.operands, *sides.outputs))
            # Constants are cast offline.
            values = [value for value in around if value not in plan.constants]
            if _saves_casts(plan, node, values):
                low.symmetric_difference_update({node})
                pending.update(_around(values))
        pending.intersection_update(movable)
        if not pending:
            return


def _borders(plan: PrecisionPlan) -> set[ir.Value]:
    """Find the values that take a cast: low ones that are read or leave wide, wide ones that are read low."""
    low_given: set[ir.Value] = set()
    low_read: set[ir.Value] = set()
    wide_read: set[ir.Value | None] = set()
    for node, sides in plan.sides.items():
        inputs = node.inputs
        if node not in plan.low:
            wide_read.update(inputs)
            continue
        low_given.update(sides.outputs)
        low_read.update(sides.operands)
        if len(inputs) > len(sides.inputs):
            wide_read.update([value for i, value in enumerate(inputs) if i not in sides.inputs])
    return {v for v in low_given if v in wide_read or v.is_graph_output()} | (low_read - low_given)


def _around(values: Iterable[ir.Value]) -> Iterable[ir.Node]:
    """Yield the nodes that give or read some values."""
    for value in values:
        producer = value.producer()
        if producer is not None:
            yield producer
        yield from (use.node for use in value.uses())


def _saves_casts(plan: PrecisionPlan, node: ir.Node, values: Iterable[ir.Value]) -> bool:
    """Return whether the values around a node take fewer casts if it changes sides: one each, for all readers."""
    low, sides = plan.low, plan.sides
    is_low = node in low
    saved = 0
    for value in values:
        producer = value.producer()
        given_low = producer in low and value in sides[producer].outputs
        reads = low_readers = False
        wide_readers = value.is_graph_output()
        for reader, index in value.uses():
            known = sides.get(reader)
            if known is None:
                continue
            if index not in known.inputs:
                wide_readers = True
            elif reader is node:
                reads = True
            elif reader in low:
                low_readers = True
            else:
                wide_readers = True
        for side, sign in ((is_low, 1), (not is_low, -1)):
            if side if producer is node else given_low:
                saved += sign * (wide_readers or (reads and not side))
            else:
                saved += sign * (low_readers or (reads and side))
    return saved > 0


def takes_any_type(node: ir.Node) -> bool:
    """Return whether a node reads the shape of its operand alone."""
    return (node.domain, node.op_type) in _SHAPE_READERS


def _touches(node: ir.Node, floats: set[ir.Value]) -> bool:
    """Return whether a node, or a body of it, reads or gives one of these values."""
    own = floats.isdisjoint(node.inputs) and floats.isdisjoint(node.outputs)
    return not own or not floats.isdisjoint(captured_values(node))
