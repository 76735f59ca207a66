"""States that follow a step's own test of its gradients, such as a count of errors: a skipped step keeps them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.analysis.edits import Plan
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import Update
from graphscale.graph.values import constant_number, inputs_of, subgraphs
from graphscale.graph.walks import descendants, source_by_trait
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["note_own_tests"]

# Numbers that stand for infinity in a comparison.
_LARGEST = frozenset(float(np.finfo(dtype).max) for dtype in (np.float16, np.float32, np.float64))


def note_own_tests(topology: Topology, plan: Plan, states: Sequence[Update]) -> Iterator[str]:
    """Yield a note on the states that gradients reach by tests of finiteness alone, and that a guard would keep.

    A step counter that is selected as the weights are needs none: both stay on a step that is not applied.

    Args:
        topology: the topology of the graph.
        plan: the places of the loss scale, and of the divisions by it.
        states: the carried state.
    """
    tests = {node for node in topology.nodes if _is_test(node)}
    if not tests:
        return
    others = [node for node in topology.nodes if node not in tests]
    data = descendants(others, {*topology.losses, *plan.unscaled, *plan.degrees()}, operands=topology.operands)
    read = (node for node in tests if not data.isdisjoint(topology.operands(node)))
    flags = topology.descendants({value for node in read for value in node.outputs})
    learnt = {_find_selection(each) for each in states if each.output in data}
    own = [each for each in states if each.output in flags and each.output not in data and not each.kept]
    own = [each for each in own if (selection := _find_selection(each)) is None or selection not in learnt]
    if own:
        names = [each.output.name or "" for each in own]
        yield (
            f"{', '.join(map(repr, names))}: the step's own test of its gradients decides on this state, and a skipped "
            f"step keeps it, so that it counts no error; to let it advance: {' '.join(f'--keep {n}' for n in names)}"
        )


def _is_test(node: ir.Node) -> bool:
    if has_trait(node, Trait.FINITENESS_TEST):
        return True
    rule = rule_of(node)
    if rule is None or rule.kind is not Kind.COMPARE:
        return False
    numbers = [number for value in inputs_of(node) if (number := constant_number(value)) is not None]
    return len({*node.inputs}) == 1 or any(math.isinf(number) or number in _LARGEST for number in numbers)


def _find_selection(state: Update) -> tuple[ir.Value | None, int] | None:
    """Return the condition that selects between a state and a new value, and the state's branch; None for others."""
    output = source_by_trait(state.output, Trait.VIEW)
    node = output.producer()
    if node is None or node.op_type not in ("Where", "If"):
        return None
    index = output.index() or 0
    branches = inputs_of(node)[1:] if node.op_type == "Where" else [body.outputs[index] for body in subgraphs(node)]
    kept = (i for i, value in enumerate(branches) if source_by_trait(value, Trait.VIEW) is state.input)
    return next(((node.inputs[0], i) for i in kept), None)
