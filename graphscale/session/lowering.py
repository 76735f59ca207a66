"""A step as the CPU provider of ONNX Runtime runs it fastest, in a session's private copy of the graph.

Every rewrite gives the same step, bit for bit; which ones pay was measured (benchmarks/step_cost.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from graphscale.policy.loss_scale import get
from graphscale.session.bounded import bounded_gradients, find_check
from graphscale.session.bounds import bound_gradients
from graphscale.session.factors import is_at_least_one, keeps_to_powers_of_two, multiply_first
from graphscale.session.probes import probe_at_once
from graphscale.session.selection import select_step

__all__ = ["lower_for_cpu"]

_OPSET = 13  # since which ReduceSum takes its axes as an input


def lower_for_cpu(
    graph: ir.Graph, decision: ir.Value, outputs: Iterable[ir.Value | None], scale: ir.Value | None, policy: Any
) -> None:
    """Rewrite a scaled step for a CPU.

    Args:
        graph: the main graph, which is changed.
        decision: whether the step is applied, a scalar bool value.
        outputs: the next values of states.
        scale: the loss scale, a value of the graph.
        policy: its config.
    """
    rule = get(policy)
    exact = keeps_to_powers_of_two(rule)
    if exact and is_at_least_one(rule):
        multiply_first(graph)
    probe_at_once(graph)
    step = select_step(graph, decision, outputs)
    check = None if step is None or scale is None else find_check(graph, decision, step)
    if step is None or scale is None or check is None:
        return
    found = bounded_gradients(graph, check, scale, step, exact=exact)
    if any(gradient.terms or gradient.itself for gradient in found) and graph.opset_imports.get("", 0) >= _OPSET:
        bound_gradients(graph, check, scale, step, found)
    _drop_unused(graph)


def _drop_unused(graph: ir.Graph) -> None:
    """Take out inserted constants that nothing reads any more: ONNX Runtime would warn of each."""
    for name, value in list(graph.initializers.items()):
        is_read = value.uses() or value.is_graph_output()
        if name.startswith("graphscale/") and not is_read and not value.is_graph_input():
            del graph.initializers[name]
