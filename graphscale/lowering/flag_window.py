"""flag-window: write the flag of a window of accumulated gradients into the smallest one, for the optimizer model.

The only changing inputs of an optimizer model in a training session are parameters, gradients and moments.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hazards import find_in_place_writes
from graphscale.graph.builder import Builder, Editor, replace_reads
from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.lowering.lowering_pass import LoweringPass
from graphscale.lowering.thresholds import count_elements
from graphscale.step.training_step import Step

__all__ = ["FlagWindow", "can_flag"]


class FlagWindow(LoweringPass):
    """Overwrite the smallest gradient with NaN, to the end of the window, after a non-finite gradient.

    Before: `window_finite.next = Cast(all_finite)`
            `db.done, db.sum = InPlaceAccumulatorV2(db.buffer, db, resets)`
    After:  `window_finite.next = If <then: 1; else: Cast(Not(InPlaceAccumulatorV2(db.sum, NaN, True)))> (all_finite)`

    If several gradients are equally small, all are overwritten: their order in an optimizer model is unknown.
    """

    name = "flag-window"
    sign = "NaN"
    relies_on = "an optimizer model that looks at one of the smallest gradients alone"

    def lower(self, step: Step) -> bool:
        smallest, decision = _find_smallest(step.graph), step.guard
        assert decision is not None
        numbers = [use.node for use in uses_of(decision) if use.node.op_type == "Cast"]
        if not smallest or len(numbers) != 1:
            return False
        number = numbers[0].outputs[0]
        build = self.builder(Editor(step.graph), shape=())
        finite = build.within(f"{self.name}.finite")
        branches = {
            "then_branch": finite.closed([finite.number(1.0, ir.DataType.FLOAT)]),
            "else_branch": _overwrite(build.within(f"{self.name}.nonfinite"), [node.outputs[1] for node in smallest]),
        }
        outputs = [(f"{number.name}.flagged", number.dtype, ())]
        node = build.node("If", [decision], outputs, at=("after", numbers[0]), attributes=branches)
        replace_reads(number, node.outputs[0], uses_of(number))
        step.graph.remove(numbers, safe=True)
        return True


def can_flag(graph: ir.Graph) -> bool:
    """Return whether the shapes of all gradients are known, so that the smallest one can hold the flag."""
    return bool(_find_smallest(graph))


def _find_smallest(graph: ir.Graph) -> list[ir.Node]:
    """Find the accumulators of the smallest gradients with elements; none for an unknown shape."""
    nodes = [node for node in find_in_place_writes(graph) if PASS_KEY not in node.metadata_props]
    buffers = [operand_at(Use(node, 0)) for node in nodes]
    if any(value.shape is None or not value.shape.is_static() for value in buffers):
        return []
    sizes = [count_elements(value) for value in buffers]
    least = min(filter(None, sizes), default=None)
    return [node for node, size in zip(nodes, sizes, strict=True) if size == least]


def _overwrite(build: Builder, buffers: list[ir.Value]) -> ir.Graph:
    """Make the branch that fills buffers with NaN, and returns 0."""
    nan = build.number(np.nan, ir.DataType.FLOAT)
    always = build.number([True], ir.DataType.BOOL)
    flags = list[ir.Value]()
    for buffer in buffers:
        assert buffer.shape is not None
        shape = build.number(buffer.shape.numpy(), ir.DataType.INT64)
        fill = build.op("Expand", [nan, shape], like=buffer, dtype=ir.DataType.FLOAT)
        outputs = [(f"{buffer.name}.flagged", ir.DataType.BOOL, [1])]
        flags += build.node("InPlaceAccumulatorV2", [buffer, fill, always], outputs, domain="com.microsoft").outputs
    done = flags[0]
    for flag in flags[1:]:
        done = build.op("And", [done, flag], dtype=ir.DataType.BOOL, shape=[1])
    kept = build.op("Not", [done], dtype=ir.DataType.BOOL, shape=[1])
    number = build.cast(kept, ir.DataType.FLOAT)
    scalar = build.op("ReduceSum", [number], dtype=ir.DataType.FLOAT, keepdims=0)
    return build.closed([scalar])
