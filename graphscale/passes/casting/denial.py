"""The nodes that stay float32, each for a reason.

The reasons are the loss, its seed, the optimizer, lists, constants that a small type cannot hold, and ONNX's schemas.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from graphscale.errors import AutocastError, suggest
from graphscale.graph.values import main_node, main_nodes, subgraphs
from graphscale.operators import Colour
from graphscale.passes.casting.constants import Misfit, find_misfits
from graphscale.passes.casting.precision_plan import PrecisionPlan
from graphscale.passes.casting.region import LOSS, SEED, pin_nodes
from graphscale.passes.casting.schema import find_refusal
from graphscale.passes.casting.settings import Settings
from graphscale.step.training_step import Step

__all__ = ["deny_nodes", "propagate_denial"]

_LONG = 256  # elements: a longer sum is computed in float32
# The operators that `_own_reason` always checks.
_LOOKED_AT = frozenset({"Clip", "LayerNormalization", "Mul", "Pad", "ReduceL1", "ReduceSum", "ReduceSumTraining"})


def deny_nodes(
    plan: PrecisionPlan, step: Step, settings: Settings, dtype: ir.DataType, wide_ops: Collection[str]
) -> None:
    """Record the reason for each node that must stay float32; the arguments are those of `plan_precision`.

    Raises:
        AutocastError: a node to keep does not exist.
    """
    _check_kept(settings, step.graph)
    owners, kept, untyped, opsets = main_nodes(step.graph), settings.keep, plan.untyped, step.graph.opset_imports
    moving = plan.nodes_on(Colour.CLEAR)
    pinned = pin_nodes(step, plan.forward, plan.nodes_on(Colour.ALLOW), moving)
    unfit = find_misfits(plan, moving, dtype)

    def reason_of(node: ir.Node, domain: str, op_type: str) -> str | None:
        rule, sides = plan.rules[node], plan.sides[node]
        reason = pinned.get(main_node(owners, node) if owners else node)
        if reason is not None:
            return reason
        if kept and node.name in kept:
            return "kept by the user"
        if owners and subgraphs(node):
            return "its bodies are treated separately"
        if untyped and not untyped.isdisjoint(node.inputs):
            return "the type of an operand is not known"
        if not sides.low[0]:
            return "it converts other numbers to float32"
        if op_type in wide_ops:
            return "the runtime cannot load it in a small type"
        if rule.colour is Colour.DENY:
            return rule.reason
        if unfit or op_type in _LOOKED_AT:
            reason = _own_reason(plan, node, unfit)
        version = opsets.get(domain, opsets.get("ai.onnx", 1))
        return reason or find_refusal(op_type, domain, version, sides.low, sides.wide, dtype)

    reasons = {node: reason_of(node, *operator) for node, operator in plan.operators.items()}
    plan.reasons.update((node, reason) for node, reason in reasons.items() if reason is not None)


def _check_kept(settings: Settings, graph: ir.Graph) -> None:
    names = [node.name or "" for node in graph.all_nodes()] if settings.keep else []
    unknown = settings.keep.difference(names)
    if unknown:
        name = min(unknown)
        raise AutocastError(f"there is no node {name!r} to keep in float32{suggest(name, names, 'there are')}")


def _own_reason(plan: PrecisionPlan, node: ir.Node, unfit: Mapping[ir.Value, Misfit]) -> str | None:
    """Return the reason why this node stays float32, though its operator need not."""
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
        # Small numbers among the weights of a contraction may become zero, as in trained weights.
        if problem is not None and (problem.overflows or plan.rules[node].colour is not Colour.ALLOW):
            return problem.reason
    return None


def _summed(node: ir.Node) -> float:
    """Return the number of elements in each sum of a reduction, by known shapes."""
    before, after = (None if v is None or v.shape is None else v.shape for v in (node.inputs[0], node.outputs[0]))
    if before is None or after is None or not before.is_static() or not after.is_static():
        return math.inf
    return math.prod(before.numpy()) / max(1, math.prod(after.numpy()))


def propagate_denial(plan: PrecisionPlan) -> None:
    """Deny infer nodes within reach of a denied node's result through infer and clear nodes."""
    reached: set[ir.Value | None] = set()
    for node in plan.operators:
        if node in plan.reasons:
            # Sources (constants, casts of integers) compute nothing in float32, and the seed stays float32 only for its
            # range.
            if plan.reasons[node] not in (SEED, LOSS) and not plan.floats.isdisjoint(node.inputs):
                reached.update(plan.floats.intersection(node.outputs))
            continue
        colour = plan.rules[node].colour
        if colour is Colour.ALLOW or reached.isdisjoint(node.inputs):
            continue
        reached.update(plan.floats.intersection(node.outputs))
        if colour is Colour.INFER:
            plan.reasons[node] = "it reads the result of a float32 operator"
