"""A step as the CPU provider of ONNX Runtime runs it fastest, in a session's private copy of the graph.

Every rewrite gives the same step, bit for bit; which ones pay was measured (benchmarks/step_cost.py).
"""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.hazards import find_in_place_writes
from graphscale.graph.marks import SELECTION
from graphscale.graph.stamp import Stamp
from graphscale.graph.values import values_by_name
from graphscale.policy.loss_scale import get
from graphscale.session.bounds import bound_gradients
from graphscale.session.factors import has_powers_of_two, is_at_least_one, multiply_first
from graphscale.session.fence import add_fence
from graphscale.session.gradient_tests import find_check, plan_tests
from graphscale.session.loading import maps_files
from graphscale.session.probes import simplify_probes
from graphscale.session.selection import select_step
from graphscale.session.thresholds import Thresholds

__all__ = ["prepare_step"]

_OPSET = 13  # since which ReduceSum takes its axes as an input


def prepare_step(
    source: ir.Model, path: str | None, stamp: Stamp, lowering: Thresholds | None
) -> tuple[ir.Model, ir.Value | None]:
    """Return the model that a session runs, and its decision whether a step is applied, after all that can fail.

    A model whose files ONNX Runtime must map is run as it stands there. Without thresholds for lowering no rewrite for
    a CPU takes place.
    """
    outputs, names = dict(stamp.state), stamp.names
    work = source if path is not None and maps_files(source, outputs) else source.clone()
    for node in work.graph.all_nodes():
        node.metadata_props.pop(SELECTION, None)  # a claim of the file, on which buffers would be shared
    values = values_by_name(work.graph)
    decision = values.get(names.get("all_finite", ""))
    if decision is None or work is source:
        return work, decision
    decision = add_fence(work.graph, decision, values.get(names["loss"]))
    if lowering is None:
        return work, decision
    graph, policy = work.graph, get(stamp.policy)
    scale = next((value for value in graph.inputs if value.name == names["loss_scale"]), None)
    results = {value.name: value for value in graph.outputs}
    written = [value for node in find_in_place_writes(graph) if (value := node.inputs[1]) is not None]
    exact = has_powers_of_two(policy)
    if exact and is_at_least_one(policy):
        multiply_first(graph)
    simplify_probes(graph, lowering.probe_elements)
    states = [*(results[name] for name in outputs.values()), *written]
    step = select_step(graph, decision, states, lowering.branch_elements)
    check = None if step is None else find_check(graph, decision, step)
    if step is not None and scale is not None and check is not None:
        tests = plan_tests(graph, check, scale, step, lowering, exact=exact)
        if any(test.terms or test.summed for test in tests) and graph.opset_imports.get("", 0) >= _OPSET:
            bound_gradients(check, scale, step, tests, lowering)
        _drop_unused(graph)
    return work, decision


def _drop_unused(graph: ir.Graph) -> None:
    """Take out inserted constants that nothing reads any more: ONNX Runtime would warn of each."""
    for name, value in list(graph.initializers.items()):
        is_read = value.uses() or value.is_graph_output()
        if name.startswith("graphscale/") and not is_read and not value.is_graph_input():
            del graph.initializers[name]
