"""Knowing that gradients are finite without reading them, and unscaling them where that costs nothing.

A gradient dw = MatMul(x, dy) has no element larger than the sum of all |x| times the sum of all |dy|, and neither has a
part of its sums (the triangle inequality). Where that is far below the largest float32 number, dw is finite: x and dy
are the activations of a batch, and smaller than the weights. A gradient that is no sum of such products is read: where
the sum of its elements is finite, so are they.

Where the scale is a power of two, the number that the step multiplies dw by can be divided by it instead of dw; or dy.
Without an overflow the results are the same, bit for bit, unless a number is subnormal on the way. Otherwise dw is
divided.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Editor, replace_reads
from graphscale.graph.marks import PASS_KEY, SELECTION
from graphscale.graph.values import constant_tensor, read, uses_of
from graphscale.session.bounded import Bounded, Check
from graphscale.session.terms import Term, elements
from graphscale.session.thresholds import Thresholds

__all__ = ["bound_gradients"]

NAME = "session-bounds"
_SAFE = 1e36  # far enough below 3.4e38 for the rounding of the sums, and for the sum of 100 terms
_LARGEST = 126  # the power of two that is the largest one with a normal reciprocal
_FLAG, _REAL = ir.DataType.BOOL, ir.DataType.FLOAT


class _Nodes:
    """Creates nodes whose results are scalars, or of the shape of an operand, in a graph or to be put into a branch."""

    def __init__(self, editor: Editor, nodes: list[ir.Node] | None = None) -> None:
        self._editor, self._nodes = editor, nodes

    def op(
        self,
        op_type: str,
        *inputs: ir.Value,
        like: ir.Value | None = None,
        shape: ir.Shape | None = None,
        dtype: ir.DataType = _REAL,
        **options: Any,
    ) -> ir.Value:
        if shape is None:
            shape = ir.Shape([]) if like is None else like.shape
        result = ir.Value(name=self._editor.unique(f"bound.{op_type}"), type=ir.TensorType(dtype), shape=shape)
        node = ir.node(op_type, inputs, outputs=[result], attributes=options, metadata_props={PASS_KEY: NAME})
        node.name = self._editor.unique(f"graphscale/{NAME}/{result.name}")
        if self._nodes is None:
            self._editor.graph.append(node)
        else:
            self._nodes.append(node)
        return result

    def total(self, terms: Sequence[ir.Value]) -> ir.Value:
        """The sum of scalars."""
        return self.op("Sum", *terms) if len(terms) > 1 else terms[0]


def bound_gradients(
    graph: ir.Graph, check: Check, scale: ir.Value, step: ir.Node, found: Sequence[Bounded], thresholds: Thresholds
) -> None:
    """Test gradients by the bounds of the operands that they come from.

    Before: `dw = Div(MatMul(x, dy), scale); finite = ...(dw)`
            `w.next = If <then: f(dw); else: w> (finite)`
    After:  `bound = Mul(ReduceL1(x), ReduceL1(dy)); factor = Clip(ThresholdedRelu <1e36> (bound), 1 / scale, 1)`
            `raw = MatMul(x, Mul(dy, factor))`
            `finite, w.next = If <then: True, f(raw);`
            `                     else: dw = Div(raw, Mul(scale, factor)); ok = ...(dw);`
            `                           ok, If <then: f(dw); else: w> (ok)> (Less(bound, 1e36))`

    If the scale is no power of two:
    After:  `fits = Less(Mul(ReduceL1(x), ReduceL1(dy)), 1e36); dw = Div(MatMul(x, dy), scale)`
            `finite, w.next = If <then: True, f(dw);`
            `                     else: ok = ...(dw); ok, If <then: f(dw); else: w> (ok)> (fits)`

    If it is one, and f(dw) begins with `Mul(dw, rate)` (a small dw is tested as it is, before it is unscaled):
    After:  `fits = Less(Mul(ReduceL1(x), ReduceL1(dy)), 1e36); raw = MatMul(x, dy); step = Mul(rate, 1 / scale)`
            `finite, w.next = If <then: True, f'(Mul(raw, step));`
            `                     else: dw = Div(raw, scale); ok = ...(dw);`
            `                           ok, If <then: f(dw); else: w> (ok)> (fits)`

    Args:
        graph: the main graph, which is changed.
        check: the finite check.
        scale: the loss scale.
        step: the If that applies a step or leaves the state as it was.
        found: the gradients to treat so.
        thresholds: sizes from which a gradient is summed up by rows.
    """
    editor = Editor(graph)
    one = editor.shared_constant(f"graphscale/{NAME}.one", np.asarray(1, dtype=np.float32))
    test = _test(editor, scale, found, one, thresholds)
    check.leave_out(found)
    at_once = _Nodes(editor).op("And", test.fit, check.decision, dtype=_FLAG)
    then, keep = (step.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    apply = then.clone(allow_outer_scope_values=True)
    otherwise = _exact_branch(editor, check, scale, found, test.factors, apply, keep)
    undivided = [gradient for gradient in found if gradient.early or gradient.rate]
    for gradient in undivided:
        unscaled = gradient.division.outputs[0]
        replace_reads(unscaled, gradient.scaled, uses_of(unscaled))
        if gradient.rate is not None:
            node, index = gradient.rate
            node.replace_input_with(index, test.rates[read(gradient.rate)])
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
    graph.remove([gradient.division for gradient in undivided], safe=True)
    graph.sort()


class _Test(NamedTuple):
    """What bounds say of gradients.

    Attributes:
        fit: whether all fit, and all gradients may be unscaled as they are in the branch that applies a step at once.
        factors: of each node that unscales a gradient, what that one's cotangents have been multiplied by.
        rates: of each number that gradients are multiplied by, its quotient with the scale.
    """

    fit: ir.Value
    factors: dict[ir.Node, ir.Value]
    rates: dict[ir.Value, ir.Value]


def _test(editor: Editor, scale: ir.Value, found: Sequence[Bounded], one: ir.Value, thresholds: Thresholds) -> _Test:
    """Compute bounds, and unscale the cotangents of gradients whose bound fits."""
    make = _Nodes(editor)
    inverse, rates = one, dict.fromkeys(read(gradient.rate) for gradient in found if gradient.rate is not None)
    is_moved = bool(rates) or any(gradient.early for gradient in found)
    if is_moved:
        reciprocal = make.op("Reciprocal", scale)
        quotients = {rate: make.op("Mul", rate, reciprocal, like=rate) for rate in rates}
        exact = _is_exact(editor, make, scale, quotients)
        if any(gradient.early for gradient in found):
            inverse = make.op("Where", exact, reciprocal, one)
    sums: dict[ir.Value, ir.Value] = {}
    bounds, factors, choice = [], {}, _Choice(editor, make, inverse, one)
    for gradient in found:
        if gradient.itself is not None:
            bounds.append(_sum_of(editor, make, gradient.itself, thresholds))
            choice.wait_for(bounds[-1])
        parts = [_bound_of(editor, make, term, sums, one) for term in gradient.terms]
        bounds += parts
        if not gradient.early:
            continue
        factors[gradient.division] = factor = choice.factor(gradient.terms, parts)
        for use in dict.fromkeys(term.cotangent for term in gradient.terms):
            assert use is not None
            (node, index), cotangent = use, read(use)
            node.replace_input_with(index, make.op("Mul", cotangent, factor, like=cotangent))
    # A sum below the limit has only terms below it; what is no number is below nothing.
    if not is_moved:
        return _Test(make.op("Less", make.total(bounds), _limit(editor, make, scale, one), dtype=_FLAG), {}, {})
    fit = make.op("Less", make.total(bounds), _number(editor, "limit", _SAFE), dtype=_FLAG)
    return _Test(make.op("And", fit, exact, dtype=_FLAG), factors, quotients)


class _Choice:
    """What to multiply cotangents by: 1 / scale where bounds fit, else 1.

    Whoever comes later waits for the gradients before that are read themselves. Nothing else does until the step is
    decided: ONNX Runtime would form them last, when what they come from has left the caches.
    """

    def __init__(self, editor: Editor, make: _Nodes, inverse: ir.Value, one: ir.Value) -> None:
        self._editor, self._make, self._inverse, self._one = editor, make, inverse, one
        self._unseen: list[ir.Value] = []
        self._before: list[ir.Value] = []

    def wait_for(self, total: ir.Value) -> None:
        """Let all later factors wait for a number, which should be small like a bound."""
        self._unseen.append(total)

    def factor(self, terms: Sequence[Term], parts: Sequence[ir.Value]) -> ir.Value:
        """The factor for the cotangents of one gradient.

        A bound that is no number is one of zeros times a sum that has overflowed, or of something that is not finite.
        The former is 0, however it is formed. So it may count for 0, if the latter makes the gradient not finite.

        Args:
            terms: what the gradient is the sum of.
            parts: the bound of each.
        """
        make = self._make
        if self._unseen:
            self._before = [make.total([*self._before, *map(self._excess, self._unseen)])]
            self._unseen.clear()
        if not all(term.is_kept for term in terms):
            limit = _number(self._editor, "limit", _SAFE)
            fits = make.op("Less", make.total([*parts, *self._before]), limit, dtype=_FLAG)
            return make.op("Where", fits, self._inverse, self._one)
        excess = make.total([*map(self._excess, parts), *self._before])
        return make.op("Clip", excess, self._inverse, self._one)

    def _excess(self, number: ir.Value) -> ir.Value:
        """The number, if it is too large; else 0."""
        return self._make.op("ThresholdedRelu", number, alpha=_SAFE)


def _is_exact(editor: Editor, make: _Nodes, scale: ir.Value, quotients: Mapping[ir.Value, ir.Value]) -> ir.Value:
    """Whether it makes no difference where a gradient is unscaled, if nothing overflows.

    The scale must be a power of two, which any other one than the policy's can only have been loaded; at least 1, for
    a smaller one makes numbers larger; and not so large that 1 / scale, or its product with a rate, is subnormal.
    Of the largest such power of two the remainder is 0 then. Of another scale of at least 1 it is 2**-23 or more.

    Args:
        editor: of the main graph.
        make: creates nodes.
        scale: the loss scale.
        quotients: of each number that gradients are multiplied by, its quotient with the scale.
    """
    largest, fed = _LARGEST, []
    for rate in quotients:
        exponent = _exponent(rate)
        if exponent is None or _LARGEST + exponent < 0:
            fed.append(rate)
        else:
            largest = min(largest, _LARGEST + exponent)
    remainder = make.op("Mod", _number(editor, "largest_scale", 2.0**largest), scale, fmod=1)
    is_power = make.op("Less", remainder, _number(editor, "no_remainder", 2.0**-24), dtype=_FLAG)
    is_large = make.op("Less", _number(editor, "half", 0.5), scale, dtype=_FLAG)
    exact = make.op("And", is_power, is_large, dtype=_FLAG)
    for rate in fed:
        # A quotient that is subnormal may be inexact; that of 0 is not.
        error = make.op("Sub", make.op("Mul", quotients[rate], scale, like=rate), rate, like=rate)
        is_off = make.op("Less", _number(editor, "none", 0.0), make.op("ReduceL1", error, keepdims=0), dtype=_FLAG)
        exact = make.op("And", exact, make.op("Not", is_off, dtype=_FLAG), dtype=_FLAG)
    return exact


def _exponent(rate: ir.Value) -> int | None:
    """The largest power of two that a number is not below, if it is a constant other than 0."""
    tensor = constant_tensor(rate)
    number = 0.0 if tensor is None else abs(float(np.ravel(tensor.numpy())[0]))
    return math.frexp(number)[1] - 1 if 0 < number < math.inf else None


def _limit(editor: Editor, make: _Nodes, scale: ir.Value, one: ir.Value) -> ir.Value:
    """What bounds must be below, so that no quotient overflows: a scale below 1 makes numbers larger."""
    is_large = make.op("Less", one, scale, dtype=_FLAG)
    return make.op("Mul", _number(editor, "limit", _SAFE), make.op("Where", is_large, one, scale))


def _bound_of(editor: Editor, make: _Nodes, term: Term, sums: dict[ir.Value, ir.Value], one: ir.Value) -> ir.Value:
    """What the sum of the absolute values of a term is at most."""
    for value in (*term.operands, *term.factors):
        if value not in sums:
            sums[value] = make.op("ReduceL1", value, keepdims=0)
    # A factor below 1 must not hide what is too large before it.
    numbers = [sums[value] for value in term.operands]
    numbers += [make.op("Add", sums[value], one) for value in term.factors]
    numbers += [] if term.largest == 1 else [_number(editor, f"largest.{term.largest!r}", term.largest)]
    return functools.reduce(lambda a, b: make.op("Mul", a, b), numbers)


def _sum_of(editor: Editor, make: _Nodes, value: ir.Value, thresholds: Thresholds) -> ir.Value:
    """The absolute value of the sum of all elements: where it is finite, so are they.

    That of a large value is formed by rows, side by side.
    """
    shape = value.shape
    assert shape is not None
    size = elements(value)
    if size >= thresholds.row_sum_elements and size >= thresholds.row_elements * shape.numpy()[0]:
        axes = editor.shared_constant(f"graphscale/{NAME}.axes.{len(shape)}", np.arange(1, len(shape), dtype=np.int64))
        value = make.op("ReduceSum", value, axes, keepdims=0, shape=ir.Shape(shape[:1]))
    return make.op("Abs", make.op("ReduceSum", value, keepdims=0))


def _number(editor: Editor, name: str, value: float) -> ir.Value:
    with np.errstate(over="ignore"):
        return editor.shared_constant(f"graphscale/{NAME}.{name}", np.asarray(value, dtype=np.float32))


def _exact_branch(
    editor: Editor,
    check: Check,
    scale: ir.Value,
    found: Sequence[Bounded],
    factors: Mapping[ir.Node, ir.Value],
    apply: ir.Graph,
    keep: ir.Graph,
) -> ir.Graph:
    """The branch that tests the gradients themselves, and unscales those that are not."""
    nodes: list[ir.Node] = []
    make = _Nodes(editor, nodes)
    probes = []
    for gradient in found:
        old = unscaled = gradient.division.outputs[0]
        if gradient.early or gradient.rate:
            factor = factors.get(gradient.division)
            rest = scale if factor is None else make.op("Mul", scale, factor)
            unscaled = make.op("Div", gradient.scaled, rest, like=gradient.scaled)
            replace_reads(old, unscaled, [use for use in uses_of(old) if use.node.graph is apply])
        probes.append(make.op("ReduceSum", make.op("Mul", unscaled, check.zero, like=unscaled), keepdims=0))
    bad = make.op("IsNaN", make.total(probes), dtype=_FLAG)
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
