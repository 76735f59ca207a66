"""Values that are to be checked beside the gradients: what else can carry NaN or infinity into a weight.

An optimizer may add gradients up in float16, or narrow them: each gradient is finite, and their sum is not. Such a
value is checked itself. A next weight is none: the weight overflows there. And a batch may move a weight past all
gradients, by a rate or by the weight of an example.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.edits import Plan
from graphscale.analysis.learnt import find_summands
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import Factors, Update, find_held
from graphscale.flow.support import reach
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import Use, is_float, is_source, uses_of
from graphscale.graph.walks import ancestors
from graphscale.operators import Kind, Trait, has_trait, rule_of, survival_of

__all__ = ["find_moving_terms", "find_narrow_sums"]

# The floating-point types with a smaller range than float32.
_SMALL = frozenset((ir.DataType.FLOAT16,))
_NUMBERS = Trait.MOVE | Trait.EXACT


def find_moving_terms(
    topology: Topology, plan: Plan, batches: Collection[ir.Value], weights: Mapping[ir.Value, ir.Value]
) -> tuple[ir.Value, ...]:
    """Find the terms that move weights by a batch that reaches them past all gradients.

    Args:
        topology: the topology of the graph.
        plan: the plan of the scaling.
        batches: the inputs with data of a batch.
        weights: `{next weight: weight}`.
    """
    moved = reach(topology.graph, batches, plan.unscaled)
    terms = (
        v for o, state in weights.items() if o in moved for v in find_summands(topology, o, {state}, 0.0) if v is not o
    )
    return tuple(dict.fromkeys(v for v in terms if v in moved and is_float(v) and plan.degree(v) == 0))


def find_narrow_sums(
    nodes: Sequence[ir.Node],
    checked: Collection[ir.Value],
    exact: Collection[ir.Value],
    losses: Collection[ir.Value],
    updates: Sequence[Update],
) -> list[ir.Value]:
    """Find the last values of a small range in which finite gradients can overflow, before other readers read them.

    Args:
        nodes: the nodes of a main graph, in execution order.
        checked: the checked gradients.
        exact: values that need no check: they hold all their numbers, or are checked elsewhere.
        losses: the losses; a state that they depend on is a weight.
        updates: the carried states.
    """
    dtypes = dtypes_of(nodes)
    behind = reach(nodes, checked)
    weights = {value for value in ancestors(losses) if is_source(value)}
    exact = {*exact, *(update.output for update in updates if update.input in weights)}
    found, factors = dict[ir.Value, None](), Factors()
    for node in nodes:
        for value in node.outputs:
            if value in behind and dtypes.get(value) in _SMALL and value not in exact and _adds(node, dtypes):
                if not find_held([value], weights, factors):
                    found[value] = None
    return [value for value in found if value.is_graph_output() or not all(_shows(u, found) for u in _readers(value))]


def _adds(node: ir.Node, dtypes: dict[ir.Value, ir.DataType]) -> bool:
    """Return whether a node sums its operands, or narrows one: its result may overflow though they are finite."""
    rule = rule_of(node)
    if rule is None:
        return False
    indices = (*rule.operands(len(node.inputs)), *rule.addends)
    data = [v for i in indices if i < len(node.inputs) and (v := node.inputs[i]) is not None]
    if has_trait(node, Trait.CAST):
        return dtypes.get(data[0]) not in _SMALL
    is_sum = rule.kind is Kind.LINEAR and not has_trait(node, _NUMBERS | Trait.BOUND)
    return rule.contraction or (is_sum and (len(data) > 1 or has_trait(node, Trait.REDUCTION)))


def _readers(value: ir.Value) -> Iterator[Use]:
    """Yield the readers of a value, past views."""
    pending = [value]
    for each in pending:
        for use in uses_of(each):
            if has_trait(use.node, Trait.RESHAPE | Trait.PERMUTE) and not use.node.outputs[0].is_graph_output():
                pending.append(use.node.outputs[0])
            else:
                yield use


def _shows(use: Use, found: Collection[ir.Value]) -> bool:
    """Return whether a reader is a found value that is infinite or NaN wherever its operand is."""
    return use.node.outputs[0] in found and survival_of(use.node, use.idx).shows
