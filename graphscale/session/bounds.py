"""Knowing that gradients are finite without reading them, and unscaling them before they are large.

A gradient dw = MatMul(x, dy) has no element larger than the sum of all |x| times the sum of all |dy|, and neither has a
part of its sums (the triangle inequality). Where that is far below the largest float32 number, dw is finite: x and dy
are the activations of a batch, and smaller than the weights. Then dy can be divided by the loss scale instead of dw.

Without an overflow both quotients are the same, bit for bit, unless a number is subnormal on the way: the scale is a
power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.analysis.values import Use, read, uses_of
from graphscale.editing import Editor, replace_reads
from graphscale.marks import PASS_KEY, SELECTION
from graphscale.session.bounded import Bounded, Check

__all__ = ["bound_gradients"]

NAME = "session-bounds"
_SAFE = 1e36  # far enough below 3.4e38 for the rounding of the sums
_FLAG, _REAL = ir.DataType.BOOL, ir.DataType.FLOAT


class _Nodes:
    """Creates nodes whose results are scalars, or of the shape of an operand, in a graph or to be put into a branch."""

    def __init__(self, editor: Editor, nodes: list[ir.Node] | None = None) -> None:
        self._editor, self._nodes = editor, nodes

    def op(
        self, op_type: str, *inputs: ir.Value, like: ir.Value | None = None, dtype: ir.DataType = _REAL, **options: Any
    ) -> ir.Value:
        shape = ir.Shape([]) if like is None else like.shape
        result = ir.Value(name=self._editor.unique(f"bound.{op_type}"), type=ir.TensorType(dtype), shape=shape)
        node = ir.node(op_type, inputs, outputs=[result], attributes=options, metadata_props={PASS_KEY: NAME})
        node.name = self._editor.unique(f"graphscale/{NAME}/{result.name}")
        if self._nodes is None:
            self._editor.graph.append(node)
        else:
            self._nodes.append(node)
        return result


def bound_gradients(graph: ir.Graph, check: Check, scale: ir.Value, step: ir.Node, found: Sequence[Bounded]) -> None:
    """Test gradients by the bounds of the operands that they come from.

    Before: `dw = Div(MatMul(x, dy), scale); finite = ...(dw)`
            `w.next = If <then: f(dw); else: w> (finite)`
    After:  `fits = Less(Mul(ReduceL1(x), ReduceL1(dy)), 1e36); raw = MatMul(x, Mul(dy, Where(fits, 1 / scale, 1)))`
            `finite, w.next = If <then: True, f(raw);`
            `                     else: dw = Div(raw, Where(fits, 1, scale)); ok = ...(dw);`
            `                           ok, If <then: f(dw); else: w> (ok)> (fits)`

    Args:
        graph: the main graph, which is changed.
        check: the finite check.
        scale: the loss scale.
        step: the If that applies a step or leaves the state as it was.
        found: the gradients to treat so.
    """
    editor = Editor(graph)
    one = editor.shared_constant(f"graphscale/{NAME}.one", np.asarray(1, dtype=np.float32))
    fit, flags = _unscale_early(editor, scale, found, one)
    for gradient in found:
        check.leave_out(gradient)
    at_once = _Nodes(editor).op("And", fit, check.decision, dtype=_FLAG)
    then, keep = (step.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    otherwise = _exact_branch(editor, check, scale, found, flags, one, then.clone(allow_outer_scope_values=True), keep)
    for gradient in found:
        unscaled = gradient.division.outputs[0]
        replace_reads(unscaled, gradient.scaled, [use for use in uses_of(unscaled) if use.node.graph is then])
    inside: list[ir.Node] = []
    then.outputs.insert(0, _Nodes(editor, inside).op("Identity", at_once, dtype=_FLAG))
    then.extend(inside)
    outputs = [("finite", _FLAG, ir.Shape([])), *((f"{v.name}.bound", v.dtype, v.shape) for v in step.outputs)]
    branches = {"then_branch": then, "else_branch": otherwise}
    node = editor.node(NAME, "If", [at_once], outputs, attributes=branches)
    node.metadata_props[SELECTION] = NAME
    for old, new in zip(step.outputs, node.outputs[1:], strict=True):
        replace_reads(old, new, uses_of(old))
        if old.is_graph_output():
            editor.take_over_output(old, new, "selected")
    graph.remove(step, safe=True)
    check.hand_over(editor, node.outputs[0], otherwise)
    graph.remove([gradient.division for gradient in found], safe=True)
    graph.sort()


def _unscale_early(
    editor: Editor, scale: ir.Value, found: Sequence[Bounded], one: ir.Value
) -> tuple[ir.Value, list[ir.Value]]:
    """Unscale the cotangents of gradients that are bounded; whether all are, and whether each is."""
    make = _Nodes(editor)

    def number(name: str, value: float) -> ir.Value:
        return editor.shared_constant(f"graphscale/{NAME}.{name}", np.asarray(value, dtype=np.float32))

    # A scale below 1, which can only have been loaded, makes numbers larger; one above 2**126 has no normal reciprocal.
    # Nothing is below the limit then.
    outside = make.op(
        "Or",
        make.op("Less", scale, one, dtype=_FLAG),
        make.op("Greater", scale, number("largest_scale", 2.0**126), dtype=_FLAG),
        dtype=_FLAG,
    )
    limit = make.op("Where", outside, number("none", 0.0), number("limit", _SAFE))
    inverse = make.op("Reciprocal", scale)
    sums: dict[ir.Value, ir.Value] = {}
    bounds, flags = [], []
    for gradient in found:
        terms = []
        for operands in (term.operands for term in gradient.terms):
            for value in operands:
                if value not in sums:
                    sums[value] = make.op("ReduceL1", value, keepdims=0)
            terms.append(
                make.op("Mul", *(sums[value] for value in operands)) if len(operands) > 1 else sums[operands[0]]
            )
        bound = make.op("Sum", *terms)
        fits = make.op("Less", bound, limit, dtype=_FLAG)
        factor = make.op("Where", fits, inverse, one)
        for node, index in (term.cotangent for term in gradient.terms):
            cotangent = read(Use(node, index))
            node.replace_input_with(index, make.op("Mul", cotangent, factor, like=cotangent))
        bounds.append(bound)
        flags.append(fits)
    # A sum below the limit has only terms below it; what is no number is below nothing.
    return make.op("Less", make.op("Sum", *bounds), limit, dtype=_FLAG), flags


def _exact_branch(
    editor: Editor,
    check: Check,
    scale: ir.Value,
    found: Sequence[Bounded],
    flags: Sequence[ir.Value],
    one: ir.Value,
    apply: ir.Graph,
    keep: ir.Graph,
) -> ir.Graph:
    """The branch that unscales and tests the gradients themselves."""
    nodes: list[ir.Node] = []
    make = _Nodes(editor, nodes)
    probes = []
    for gradient, fits in zip(found, flags, strict=True):
        rest = make.op("Where", fits, one, scale)
        unscaled = make.op("Div", gradient.scaled, rest, like=gradient.scaled)
        old = gradient.division.outputs[0]
        replace_reads(old, unscaled, [use for use in uses_of(old) if use.node.graph is apply])
        probes.append(make.op("ReduceSum", make.op("Mul", unscaled, check.zero, like=unscaled), keepdims=0))
    bad = make.op("IsNaN", make.op("Sum", *probes), dtype=_FLAG)
    finite = make.op("And", check.decision, make.op("Not", bad, dtype=_FLAG), dtype=_FLAG)
    _rename(editor, apply)
    results = [
        ir.Value(name=editor.unique(f"{value.name}.exact"), type=value.type, shape=value.shape)
        for value in apply.outputs
    ]
    attributes = {"then_branch": apply, "else_branch": keep}
    mark = {PASS_KEY: NAME, SELECTION: NAME}
    node = ir.node("If", [finite], attributes=attributes, outputs=results, metadata_props=mark)
    node.name = editor.unique(f"graphscale/{NAME}/exact")
    return ir.Graph([], [finite, *results], nodes=[*nodes, node], name=f"{NAME}.exact")


def _rename(editor: Editor, graph: ir.Graph) -> None:
    """Give the nodes and values of a copy names of their own."""
    for node in graph:
        node.name = editor.unique(node.name or "node")
        for value in node.outputs:
            value.name = editor.unique(value.name or "value")
