"""The gradients of a scaled step that a bound can be told of, and the finite check that they are part of."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from graphscale.analysis.values import Use, captured_values, constant_tensor, uses_of
from graphscale.bound import CHECK
from graphscale.editing import Editor, replace_reads
from graphscale.marks import PASS_KEY
from graphscale.session.factors import NAME as FACTORS
from graphscale.session.probes import NAME as PROBES

__all__ = ["Bounded", "Check", "bounded_gradients", "find_check"]

_UNSCALE = ("unscale-gradients", FACTORS)
_WORTH = 2**13  # elements of a gradient: below, reading it costs less than its bound


@dataclasses.dataclass(frozen=True)
class Bounded:
    """A gradient that a contraction gives.

    Attributes:
        operands: what the contraction multiplies, before a transposition.
        cotangent: where it, or the transposition before it, reads its scaled operand.
        scaled: what is unscaled: the result of the contraction, or that times a number of at most 1.
        product: the node that unscales it.
        probe: the nodes that test it for finiteness, in execution order.
    """

    operands: tuple[ir.Value, ir.Value]
    cotangent: Use
    scaled: ir.Value
    product: ir.Node
    probe: tuple[ir.Node, ...]

    @property
    def inverse(self) -> ir.Value:
        """The reciprocal of the loss scale."""
        value = self.product.inputs[1]
        assert value is not None
        return value


@dataclasses.dataclass(frozen=True)
class Check:
    """The finite check of a step.

    Attributes:
        total: the sum of all probes.
        zero: a float32 0.
        flag: whether all gradients are finite.
        decision: the same, once all has run that can fail.
    """

    total: ir.Node
    zero: ir.Value
    flag: ir.Value
    decision: ir.Value

    def leave_out(self, gradient: Bounded) -> None:
        """Take the probe of a gradient out of the sum, and out of the graph."""
        graph = self.total.graph
        assert isinstance(graph, ir.Graph)
        probe = gradient.probe[-1].outputs[0]
        kept = [value for value in self.total.inputs if value is not probe] or [self.zero]
        self.total.resize_inputs(len(kept))
        for index, value in enumerate(kept):
            self.total.replace_input_with(index, value)
        graph.remove(gradient.probe, safe=True)

    def hand_over(self, editor: Editor, finite: ir.Value, branch: ir.Graph) -> None:
        """Let all that asks whether the gradients are finite ask another value.

        Args:
            editor: of the main graph.
            finite: that value.
            branch: a branch that goes on to ask this check.
        """
        asking = finite.producer()
        for value in {self.flag, self.decision}:
            uses = [
                use
                for use in uses_of(value)
                if use.node.graph is not branch
                and use.node.metadata_props.get(PASS_KEY) != "fence"
                and not (asking is not None and use.node.outputs[0] is asking.inputs[0])
            ]
            replace_reads(value, finite, uses)
            if value.is_graph_output():
                editor.take_over_output(value, finite, "others")


def find_check(graph: ir.Graph, decision: ir.Value, step: ir.Node) -> Check | None:
    """The finite check by standard operators, unless what it says goes into the step itself by another way.

    Args:
        graph: the main graph.
        decision: whether the step is applied, a scalar bool value.
        step: the If that applies it.
    """
    total = next((n for n in graph if n.op_type == "Sum" and n.metadata_props.get(PASS_KEY) == CHECK), None)
    zero = graph.initializers.get("graphscale/zero.float")
    if total is None or zero is None:
        return None
    value = total.outputs[0]
    for op_type in ("IsNaN", "Not"):
        uses = uses_of(value)
        if len(uses) != 1 or uses[0].node.op_type != op_type or value.is_graph_output():
            return None
        value = uses[0].node.outputs[0]
    outcome = {value, decision}
    for node in graph:
        if node is not step and not outcome.isdisjoint((*node.inputs, *captured_values(node))):
            outcome.update(node.outputs)
    if decision not in outcome or not outcome.isdisjoint(captured_values(step)):
        return None
    return Check(total, zero, value, decision)


def bounded_gradients(graph: ir.Graph, check: Check, scale: ir.Value, step: ir.Node) -> list[Bounded]:
    """The large gradients that a contraction of float32 operands gives, and that the step alone reads."""
    scaled = {scale}
    found = []
    for node in graph:
        if node.metadata_props.get(PASS_KEY) in _UNSCALE:
            gradient = _bounded(node, check, scaled, step)
            if gradient is not None:
                found.append(gradient)
        elif not scaled.isdisjoint((*node.inputs, *captured_values(node))):
            scaled.update(node.outputs)
    return found


def _bounded(product: ir.Node, check: Check, scaled: set[ir.Value], step: ir.Node) -> Bounded | None:
    gradient, dividend = product.outputs[0], product.inputs[0]
    if product.op_type != "Mul" or dividend is None or gradient.is_graph_output():
        return None
    if gradient.shape is None or not gradient.shape.is_static() or math.prod(gradient.shape.numpy()) < _WORTH:
        return None
    contraction = _contraction(dividend)
    then = step.attributes["then_branch"].as_graph()
    probes = [use.node for use in uses_of(gradient) if use.node.graph is not then]
    probe = _probe(probes[0], check) if len(probes) == 1 else None
    if contraction is None or probe is None:
        return None
    cotangents = [i for i, value in enumerate(contraction.inputs) if value in scaled]
    operands = [value for value in contraction.inputs if value is not None]
    if len(cotangents) != 1 or any(value.dtype is not ir.DataType.FLOAT for value in operands):
        return None
    use, sources = Use(contraction, cotangents[0]), []
    for index, value in enumerate(operands):
        node = value.producer()
        source = node.inputs[0] if node is not None and node.op_type == "Transpose" and node.domain == "" else None
        sources.append(value if source is None else source)
        if index == cotangents[0] and source is not None and node is not None and len(uses_of(value)) == 1:
            use = Use(node, 0)  # ONNX Runtime fuses the transposition with the contraction
    return Bounded((sources[0], sources[1]), use, dividend, product, probe)


def _contraction(value: ir.Value) -> ir.Node | None:
    """The contraction that gives a value which one node alone reads, past a factor of at most 1."""
    if len(uses_of(value)) != 1 or value.is_graph_output():
        return None
    node = value.producer()
    if node is not None and node.op_type == "Mul" and node.domain == "":
        for index in (0, 1):
            tensor, other = constant_tensor(node.inputs[index]), node.inputs[1 - index]
            if tensor is not None and tensor.size == 1 and abs(float(tensor.numpy().item())) <= 1 and other is not None:
                return _contraction(other)
        return None
    if node is None or node.domain != "" or len(node.inputs) != 2:
        return None
    if node.op_type == "Gemm":
        alpha = node.attributes.get("alpha")
        return node if alpha is None or abs(alpha.as_float()) <= 1 else None
    return node if node.op_type == "MatMul" else None


def _probe(node: ir.Node, check: Check) -> tuple[ir.Node, ...] | None:
    """The nodes from the first reader of a gradient to the sum of all probes, if they are a probe of it alone."""
    path = [node]
    while path[-1].metadata_props.get(PASS_KEY) in (PROBES, CHECK) and len(path) < 4:
        uses = uses_of(path[-1].outputs[0])
        if len(uses) != 1 or path[-1].op_type == "Concat":
            return None
        if uses[0].node is check.total:
            return tuple(path)
        path.append(uses[0].node)
    return None
