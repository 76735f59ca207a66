"""read-flag: make an optimizer model read the flag of a window, written by flag-window, instead of all gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder, Editor, replace_inputs
from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.lowering.lowering_pass import LoweringPass
from graphscale.passes import CheckFinite
from graphscale.passes.nodes.write_order import write_in_place
from graphscale.step.training_step import Step

__all__ = ["ReadFlag"]

_REAL, _WHOLE, _FLAG = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


class ReadFlag(LoweringPass):
    """Test the smallest gradient with elements, the flag of the window, instead of all gradients.

    Before: `g = SequenceAt(gradients, 0); h = SequenceAt(gradients, 1)`
            `all_finite = Not(IsNaN(Sum(ReduceSum(Mul(g, 0)), ReduceSum(Mul(h, 0)))))`
    After:  `found = If <then: ArgMin(Size(SequenceAt(gradients, 0)), Size(SequenceAt(gradients, 1)));`
            `            else: flag_position> (flag_position < 0)`, written to `flag_position`, -1 at first
            `flag = SequenceAt(gradients, found); all_finite = Not(IsNaN(Sum(ReduceSum(Mul(flag, 0)))))`

    The order of gradients differs from session to session, so that the first step of each session searches the
    smallest. A test of a gradient copies it.
    """

    name = "read-flag"
    sign = "1·∞?"
    relies_on = "a training model with flag-window; gradients that keep their places in the sequence"

    def lower(self, step: Step) -> bool:
        graph = step.graph
        elements = [node for node in graph if node.op_type == "SequenceAt" and CheckFinite.inserted(node)]
        products = [use.node for node in elements for use in uses_of(node.outputs[0])]
        if len(elements) < 2:
            return False
        editor = Editor(graph)
        flag = self._find_flag(editor, elements)
        probe, *others = products
        probe.replace_input_with(0, flag)
        sums = [use.node for product in products for use in uses_of(product.outputs[0])]
        (reader,) = {use.node for node in sums for use in uses_of(node.outputs[0])}
        replace_inputs(reader, [sums[0].outputs[0]])
        graph.remove([*others, *sums[1:]], safe=True)
        graph.sort()
        return True

    def _find_flag(self, editor: Editor, elements: Sequence[ir.Node]) -> ir.Value:
        """Add the smallest gradient, whose position the graph keeps from the first step on."""
        build = self.builder(editor, shape=(), dtype=_REAL)
        sequence = operand_at(Use(elements[0], 0))
        state = editor.state("flag_position", np.asarray(-1, dtype=np.float32))
        zero = build.number(0, _REAL)
        unknown = build.op("Less", [state, zero], name="flag_unknown", dtype=_FLAG)
        editor.graph.remove(elements)
        search, keep = build.within(f"{self.name}.search", elements), build.within(f"{self.name}.keep")
        # Sum of one operand copies; Identity would share the written buffer.
        branches = {
            "then_branch": search.closed([_find_smallest(search, [node.outputs[0] for node in elements])]),
            "else_branch": keep.closed([keep.op("Sum", [state])]),
        }
        outputs = [("flag_position.next", _REAL, ())]
        position = build.node("If", [unknown], outputs, attributes=branches).outputs[0]
        write_in_place(build, state, position)
        index = build.cast(position, _WHOLE, name="flag_index")
        return build.op("SequenceAt", [sequence, index], name="flag", dtype=sequence.dtype or _REAL)


def _find_smallest(build: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """Add the position of the first of the smallest gradients with elements, a float32 scalar."""
    count = [len(gradients)]
    build = dataclasses.replace(build, dtype=_WHOLE, shape=count)
    one = build.number([1], _WHOLE)
    sizes = [build.op("Reshape", [build.op("Size", [value], shape=()), one], shape=[1]) for value in gradients]
    joined = build.op("Concat", sizes, axis=0)
    is_empty = build.op("Less", [joined, one], dtype=_FLAG)
    largest = build.op("ReduceMax", [joined], keepdims=1, shape=[1])
    present = build.op("Where", [is_empty, largest, joined])
    is_smallest = build.op("Equal", [present, build.op("ReduceMin", [present], keepdims=1, shape=[1])], dtype=_FLAG)
    first = build.op("ArgMax", [build.cast(is_smallest, _REAL)], axis=0, keepdims=0, shape=())
    return build.cast(first, _REAL)
