"""The nodes that stay float32, each for a reason.

The reasons are the loss, its seed, the optimizer, lists, constants that a small type cannot hold, and ONNX's schemas.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from graphscale.analysis.training_graph import TrainingGraph
from graphscale.errors import AutocastError
from graphscale.graph.values import constant_tensor, inner_nodes, is_scalar, main_node, subgraphs
from graphscale.graph.walks import nodes_above, source_of
from graphscale.operators import Colour
from graphscale.passes.casting.precision_plan import PrecisionPlan, Slots
from graphscale.passes.casting.settings import Settings

__all__ = ["OPTIMIZER", "deny_nodes", "propagate_denial"]

OPTIMIZER = "the optimizer stays float32"
LOSS = "the loss stays float32"
# So that a loss scale of 2**24 does not overflow float16 by itself.
SEED = "the seed of the backward pass stays float32"

# Elements; larger constants are read only if they are in memory already: weights are never loaded to be looked at.
_LOOK = 2**16
_LONG = 256  # elements: a longer sum is computed in float32
# The operators that `_own_reason` looks at in any case.
_LOOKED_AT = frozenset({"Clip", "LayerNormalization", "Mul", "Pad", "ReduceL1", "ReduceSum", "ReduceSumTraining"})


@dataclasses.dataclass(frozen=True)
class _Misfit:
    """The reason why a constant must not be rounded to a small type.

    Attributes:
        reason: a sentence for the report.
        overflows: a finite number of it would become infinite; else a nonzero one would become zero.
    """

    reason: str
    overflows: bool


def deny_nodes(
    plan: PrecisionPlan, training: TrainingGraph, settings: Settings, dtype: ir.DataType, wide_ops: Collection[str]
) -> None:
    """Note why each node that must stay float32 does; the arguments are those of `plan_precision`.

    Raises:
        AutocastError: a node to keep does not exist.
    """
    _check_kept(settings, training.graph)
    owners, kept, untyped, opsets = training.owners, settings.keep, plan.untyped, training.graph.opset_imports
    moving = plan.nodes_on(Colour.CLEAR)
    pinned = _pin_nodes(training, plan.forward, plan.nodes_on(Colour.ALLOW), moving)
    unfit = _find_misfits(plan, moving, dtype)

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
        if not sides.low[0]:
            return "it makes float32 numbers of others"
        if op_type in wide_ops:
            return "the runtime cannot load it in a small type"
        if rule.colour is Colour.DENY:
            return rule.reason
        if unfit or op_type in _LOOKED_AT:
            reason = _own_reason(plan, node, unfit)
        version = opsets.get(domain, opsets.get("ai.onnx", 1))
        return reason or _find_refusal(op_type, domain, version, sides.low, sides.wide, dtype)

    reasons = {node: reason_of(node, *operator) for node, operator in plan.operators.items()}
    plan.reasons.update((node, reason) for node, reason in reasons.items() if reason is not None)


def _pin_nodes(
    training: TrainingGraph, forward: set[ir.Node], on_allow_list: set[ir.Node], on_clear_list: set[ir.Node]
) -> dict[ir.Node, str]:
    """Find the nodes of the main graph that stay float32 wherever they are on the lists, with the reason.

    Args:
        training: the analysis of the graph.
        forward: the nodes that the loss depends on.
        on_allow_list: the nodes on the allow list.
        on_clear_list: the nodes on the clear list; they may move the numbers of the seed about in a small type.
    """
    # Clear nodes may have moved the loss since it was computed.
    moved = source_of(training.loss, lambda node: node.inputs[0] if node in on_clear_list and node.inputs else None)
    allowed = set(_contractions(training, on_allow_list)) - {moved.producer()}
    nodes = training.nodes
    backward = nodes_above(*training.gradients)
    reasons = {node: OPTIMIZER for node in nodes if node not in forward and node not in backward}
    reasons |= dict.fromkeys(_head(training, [node for node in nodes if node in forward], allowed), LOSS)
    reasons |= {node: SEED for node in _seed(training, allowed) if node not in forward and node not in on_clear_list}
    return reasons


def _contractions(training: TrainingGraph, on_allow_list: set[ir.Node]) -> Iterator[ir.Node]:
    """Yield the allowed nodes of the main graph, by their bodies if they have some, without sums to scalars."""
    for node in training.nodes:
        if node in on_allow_list:
            if not any(is_scalar(value) for value in node.outputs):
                yield node
        elif training.owners and any(inner in on_allow_list for inner in inner_nodes(node)):
            yield node


def _head(training: TrainingGraph, forward: Sequence[ir.Node], allowed: set[ir.Node]) -> Iterator[ir.Node]:
    """Yield the nodes of the forward pass behind its last allowed ones."""
    leading: set[ir.Node] = set()
    leads_on: set[ir.Value] = set()
    for node in reversed(forward):
        if node in allowed or not leads_on.isdisjoint(node.outputs):
            leading.add(node)
            leads_on.update(training.reads[node])
    depends: set[ir.Value] = set()
    for node in forward:
        if node in allowed:
            depends.update(node.outputs)
        elif not depends.isdisjoint(training.reads[node]):
            depends.update(node.outputs)
            if node not in leading:
                yield node


def _seed(training: TrainingGraph, allowed: set[ir.Node]) -> Iterator[ir.Node]:
    """Yield the nodes between the places where a loss scale enters and the first allowed ones.

    A sum of the seed and of an allowed node's result, by a residual connection, is the seed no longer.
    """
    seed: set[ir.Value | None] = {place.value for place in training.places if place.edge is None}
    edges = {place.edge.node for place in training.places if place.edge is not None}
    for place in training.places:
        producer = place.value.producer()
        if place.edge is None and producer is not None:
            yield producer
    beyond: set[ir.Value | None] = set()
    for node in training.nodes:
        reads_seed = node in edges or not seed.isdisjoint(node.inputs)
        if (reads_seed and node in allowed) or not beyond.isdisjoint(node.inputs):
            beyond.update(node.outputs)
        elif reads_seed:
            seed.update(node.outputs)
            yield node


def _check_kept(settings: Settings, graph: ir.Graph) -> None:
    names = [node.name or "" for node in graph.all_nodes()] if settings.keep else []
    unknown = settings.keep.difference(names)
    if unknown:
        name = min(unknown)
        close = difflib.get_close_matches(name, names)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AutocastError(f"there is no node {name!r} to keep in float32{hint}")


def _own_reason(plan: PrecisionPlan, node: ir.Node, unfit: Mapping[ir.Value, _Misfit]) -> str | None:
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
    for i in plan.sides[node].low[0] if unfit else ():
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
        return math.inf
    return math.prod(before.numpy()) / max(1, math.prod(after.numpy()))


def _find_misfits(plan: PrecisionPlan, moving: set[ir.Node], dtype: ir.DataType) -> dict[ir.Value, _Misfit]:
    """Find the constants that do not fit into a small type, and the values that only hold their numbers.

    Args:
        plan: the plan.
        moving: the nodes that give the numbers that they get, elsewhere.
        dtype: float16 or bfloat16. An infinity is exact in both, and fits.
    """
    unfit: dict[ir.Value, _Misfit] = {}
    derived: set[ir.Value] = set()  # values that only hold the numbers of constants

    def look(value: ir.Value, tensor: ir.TensorProtocol) -> None:
        derived.add(value)
        problem = _misfit(value, tensor, dtype)
        if problem is not None:
            unfit[value] = problem

    for value, tensor in plan.constants.items():
        look(value, tensor)
    for node, operator in plan.operators.items():
        if operator == ("", "ConstantOfShape") and "value" in node.attributes:
            look(node.outputs[0], node.attributes["value"].as_tensor())
        elif operator == ("", "Cast") and node.outputs[0] in plan.floats:
            cast = constant_tensor(node.inputs[0])
            if cast is not None:
                look(node.outputs[0], cast)
        elif node in moving and (operands := plan.floats.intersection(node.inputs)) and derived.issuperset(operands):
            derived.update(node.outputs)
            problem = next((unfit[v] for v in node.inputs if v in operands and v in unfit), None)
            if problem is not None:
                unfit.update(dict.fromkeys(node.outputs, problem))
    return unfit


def _misfit(value: ir.Value, tensor: ir.TensorProtocol, dtype: ir.DataType) -> _Misfit | None:
    if isinstance(tensor, ir.ExternalTensor) and tensor.size > _LOOK:
        return None
    array = tensor.numpy()
    if array.dtype.kind not in "fiu":
        return None
    array = array.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        rounded = array.astype(dtype.numpy()).astype(np.float32)
    over = np.isfinite(array) & np.isinf(rounded)
    under = (rounded == 0) & (array != 0)
    if not (over.any() or under.any()):
        return None
    number = float(array[over if over.any() else under].flat[0])
    reason = f"the constant {value.name!r} holds {number:g}, which {dtype.name.lower()} cannot hold"
    return _Misfit(reason, bool(over.any()))


@functools.cache
def _find_refusal(op_type: str, domain: str, version: int, low: Slots, wide: Slots, dtype: ir.DataType) -> str | None:
    """Return why an operator of a version cannot compute in a small type; None if it can, or ONNX does not define it.

    The slots are those of `Sides`: `low` would be of that type, `wide` stay float32.
    """
    if not onnx.defs.has(op_type, version, domain):
        return None
    schema = onnx.defs.get_schema(op_type, version, domain)
    sides = (schema.inputs, schema.outputs)
    inputs, outputs = ([_parameter(side, i) for i in slots] for side, slots in zip(sides, low, strict=True))
    text = f"tensor({dtype.name.lower()})"
    if any(text not in parameter.types for parameter in (*inputs, *outputs)):
        return f"opset {version} does not define it for {dtype.name.lower()}"
    bound = {parameter.type_str for parameter in inputs}
    if any(parameter.type_str not in bound for parameter in outputs):
        return "the type of its result does not follow from its operands"
    for side, slots in zip(sides, wide, strict=True):
        if any(_parameter(side, i).type_str in bound for i in slots):
            return f"opset {version} has one type for all its operands, and some must stay float32"
    return None


def _parameter(side: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> onnx.defs.OpSchema.FormalParameter:
    return side[min(index, len(side) - 1)]


def propagate_denial(plan: PrecisionPlan) -> None:
    """Deny the infer nodes that the result of a denied node reaches through infer and clear ones."""
    reached: set[ir.Value | None] = set()
    for node in plan.operators:
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
