"""Evidence by the order of inputs and outputs, which exporters keep: for open outputs alone, never needed.

Where the pairs before and behind an output are certain, as many inputs stand between theirs as outputs stand between
them, and the certain pairs around are in one order, the function that was exported returns its state in that order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from graphscale.analysis.roles.role_table import STATED
from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.updates import Update, same_type

__all__ = ["find_between", "pairs_by_order"]

# Of so many pairs in a row, a random order is the same on both sides once in 120 times.
_LEAST_PAIRS = 5
_EVIDENCE = f"{STATED}its place, between other next values"


def find_between(graph: ir.Graph, pairs: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Return the other outputs and inputs between two pairs, one by one, if both are equally many."""
    inputs, outputs = graph.inputs, graph.outputs
    known = [*_positions(graph, pairs)]
    return {
        outputs[index]: inputs[before + index - first]
        for (first, before), (last, behind) in itertools.pairwise(known)
        for index in range(first + 1, last)
        if last - first == behind - before
    }


def _positions(graph: ir.Graph, pairs: Mapping[ir.Value, ir.Value]) -> Iterable[tuple[int, int]]:
    places = {value: index for index, value in enumerate(graph.inputs)}
    for index, value in enumerate(graph.outputs):
        if value in pairs and pairs[value] in places:
            yield index, places[pairs[value]]


def pairs_by_order(step: Interface) -> list[Update]:
    """Return the pairs of open outputs that stand between certain pairs, if no proposal contradicts them."""
    certain = {
        output: assigned.pair
        for output, assigned in step.outputs.items()
        if assigned.pair is not None and assigned.certain and not assigned.is_named
    }
    found = {
        output: value
        for run in _runs(step.graph, certain)
        for output, value in find_between(step.graph, run).items()
        if same_type(output, value)
    }
    return [Update(output, value, _EVIDENCE) for output, value in found.items() if _may_stand_for(step, output, value)]


def _runs(graph: ir.Graph, pairs: Mapping[ir.Value, ir.Value]) -> list[dict[ir.Value, ir.Value]]:
    """Return the long runs of pairs, one output behind another, whose inputs stand in the same order."""
    runs: list[list[tuple[int, int]]] = []
    for index, place in _positions(graph, pairs):
        if not runs or place < runs[-1][-1][1]:
            runs.append([])
        runs[-1].append((index, place))
    return [{graph.outputs[i]: graph.inputs[j] for i, j in run} for run in runs if len(run) >= _LEAST_PAIRS]


def _may_stand_for(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an open output may be the next value of an open input, and depends on no other one of its type."""
    assigned = step.outputs[output]
    if assigned.certain or assigned.pair not in (None, value):
        return False
    others = [v for v in step.graph.inputs if _is_open(step, v) and same_type(output, v)]
    above = [other for other in others if other in step.topology.ancestors([output])]
    return value in others and (value in above or not above)


def _is_open(step: Interface, value: ir.Value) -> bool:
    assigned = step.inputs[value]
    return assigned.pair is None or not assigned.certain
