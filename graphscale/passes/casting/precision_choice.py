"""The choice of the nodes that run in float16: the allowed ones, and the nodes between them.

The order is that of grappler's auto_mixed_precision: allowed nodes first; denied nodes deny the infer nodes behind
them, up to the next allowed ones; the remaining infer and clear nodes between allowed ones run in float16; finally,
single clear and infer nodes change sides to save casts.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from graphscale.graph.cones import producers_of
from graphscale.operators import Colour
from graphscale.passes.casting.denial import deny_nodes, propagate_denial
from graphscale.passes.casting.precision_plan import PrecisionPlan, begin_plan
from graphscale.passes.casting.settings import Settings
from graphscale.step.training_step import Step

__all__ = ["plan_precision", "save_casts", "takes_cast"]

_ROUNDS = 8  # rounds of changing sides


def plan_precision(step: Step, settings: Settings, dtype: ir.DataType, wide_ops: Collection[str] = ()) -> PrecisionPlan:
    """Choose the nodes that run in a small type.

    Args:
        step: the step, before any cast.
        settings: the lists.
        dtype: the small type.
        wide_ops: operators that the runtime cannot load in the small type.

    Raises:
        AutocastError: a node to keep does not exist.
    """
    plan = begin_plan(step, settings)
    deny_nodes(plan, step, settings, dtype, wide_ops)
    propagate_denial(plan)
    _take_between(plan)
    save_casts(plan)
    for node in plan.operators:
        if node not in plan.low:
            plan.reasons.setdefault(node, "no allowed operator on both sides")
    return plan


def _take_between(plan: PrecisionPlan) -> None:
    """Choose the allowed nodes, and the free infer and clear nodes between them."""
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


def save_casts(plan: PrecisionPlan) -> None:
    """Move clear nodes to the other side, and infer nodes back to float32, where this saves casts."""
    low, rules = plan.low, plan.rules
    # Constants are cast offline.
    around = {
        node: [v for v in dict.fromkeys((*sides.operands, *sides.outputs)) if v not in plan.constants]
        for node, sides in plan.sides.items()
        if node not in plan.reasons and rules[node].colour in (Colour.CLEAR, Colour.INFER)
    }
    # A node without a cast around it saves none, until a neighbour has changed sides.
    cast = {value for value in {v for values in around.values() for v in values} if takes_cast(plan, value)}
    pending = {node for node, values in around.items() if not cast.isdisjoint(values)}
    for _ in range(_ROUNDS):
        for node in (*around, *reversed(around)):
            if node not in pending:
                continue
            pending.discard(node)
            if node not in low and rules[node].colour is Colour.INFER:
                continue
            values = around[node]
            before = sum(takes_cast(plan, value) for value in values)
            low ^= {node}
            if sum(takes_cast(plan, value) for value in values) < before:
                pending.update(producers_of(values), *([use.node for use in value.uses()] for value in values))
            else:
                low ^= {node}
        pending.intersection_update(around)
        if not pending:
            return


def takes_cast(plan: PrecisionPlan, value: ir.Value) -> bool:
    """Return whether some reader of a value, or the graph's output, needs the other type."""
    producer = value.producer()
    is_low = producer in plan.low and value in plan.sides[producer].outputs
    if is_low and value.is_graph_output():
        return True
    return any(plan.reads_low(node, index) is not is_low for node, index in value.uses() if node in plan.sides)
