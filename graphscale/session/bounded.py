"""The gradients of a scaled step that a bound can be told of, and the finite check that they are part of.

They are those of contractions, those of tables, which are sums of rows that were looked up, and sums of such.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeGuard

import onnx_ir as ir

from graphscale.analysis.values import Use, captured_values, constant_tensor, is_known_zero, read, uses_of
from graphscale.bound import CHECK
from graphscale.editing import Editor, read_only, replace_reads
from graphscale.marks import PASS_KEY
from graphscale.session.probes import NAME as PROBES

__all__ = ["Bounded", "Check", "bounded_gradients", "find_check"]

_UNSCALE = "unscale-gradients"
_WORTH = 2**13  # elements of a gradient: below, reading it costs less than its bound
_PASSES = 3  # over a gradient that is not bounded: it is read twice, and written
_BATCH = 64  # what an axis of unknown size is taken for
_TABLES = frozenset({"ScatterElements", "ScatterND"})


class Term(NamedTuple):
    """A sum of products, or a sum, that a gradient consists of.

    Attributes:
        operands: what is multiplied, before a transposition, or what is summed.
        cotangent: where the node that gives it, or the transposition before that, reads its scaled operand.
    """

    operands: tuple[ir.Value, ...]
    cotangent: Use


@dataclasses.dataclass(frozen=True)
class Bounded:
    """A gradient that a bound can be told of.

    Attributes:
        terms: what it is the sum of.
        scaled: what is unscaled: that sum, or it times a number of at most 1.
        division: the node that unscales it.
        probe: the nodes that test it for finiteness, in execution order.
    """

    terms: tuple[Term, ...]
    scaled: ir.Value
    division: ir.Node
    probe: tuple[ir.Node, ...]


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
        kept = [value for value in self.total.inputs if value is not None and value is not probe]
        read_only(self.total, kept or [self.zero])
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
    """The finite check by standard operators that a step goes by, unless it reads what that says by another way, too.

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
    outcome = {value}
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
        if node.metadata_props.get(PASS_KEY) == _UNSCALE:
            gradient = _bounded(node, check, scaled, step)
            if gradient is not None:
                found.append(gradient)
        elif not scaled.isdisjoint((*node.inputs, *captured_values(node))):
            scaled.update(node.outputs)
    return found


def _bounded(division: ir.Node, check: Check, scaled: set[ir.Value], step: ir.Node) -> Bounded | None:
    gradient, dividend = division.outputs[0], division.inputs[0]
    if division.op_type != "Div" or dividend is None or gradient.is_graph_output():
        return None
    if gradient.shape is None or not gradient.shape.is_static() or math.prod(gradient.shape.numpy()) < _WORTH:
        return None
    then = step.attributes["then_branch"].as_graph()
    probes = [use.node for use in uses_of(gradient) if use.node.graph is not then]
    probe = _probe(probes[0], check) if len(probes) == 1 else None
    sources = _sources(dividend)
    if sources is None or probe is None:
        return None
    terms = [_term(node, scaled) for node in sources]
    # The bound reads all operands; the cotangent is read once more, and written.
    cost = sum(sum(map(_size, term.operands)) + 2 * _size(read(term.cotangent)) for term in terms if term is not None)
    if None in terms or cost > _PASSES * _size(gradient):
        return None
    return Bounded(tuple(term for term in terms if term is not None), dividend, division, probe)


def _term(node: ir.Node, scaled: set[ir.Value]) -> Term | None:
    indices = [2] if node.op_type in _TABLES else [0, 1]
    cotangents = [index for index in indices if node.inputs[index] in scaled]
    operands = [value for index in indices if (value := node.inputs[index]) is not None]
    if len(cotangents) != 1 or any(value.dtype is not ir.DataType.FLOAT for value in operands):
        return None
    use = Use(node, cotangents[0])
    cotangent = read(use)
    transposition = cotangent.producer()
    if _is_transposition(transposition) and len(uses_of(cotangent)) == 1:
        use = Use(transposition, 0)  # ONNX Runtime fuses the transposition with the contraction
    return Term(tuple(map(_before_transposition, operands)), use)


def _size(value: ir.Value) -> int:
    if value.shape is None:
        return _BATCH**2
    return math.prod(axis if isinstance(axis, int) else _BATCH for axis in value.shape)


def _is_transposition(node: ir.Node | None) -> TypeGuard[ir.Node]:
    return node is not None and node.op_type == "Transpose" and node.domain == ""


def _before_transposition(value: ir.Value) -> ir.Value:
    node = value.producer()
    return node.inputs[0] or value if _is_transposition(node) else value


def _sources(value: ir.Value) -> list[ir.Node] | None:
    """The nodes whose sum a value is which one node alone reads, past factors of at most 1."""
    if len(uses_of(value)) != 1 or value.is_graph_output():
        return None
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Mul":
        for index in (0, 1):
            tensor, other = constant_tensor(node.inputs[index]), node.inputs[1 - index]
            if tensor is not None and tensor.size == 1 and abs(float(tensor.numpy().item())) <= 1 and other is not None:
                return _sources(other)
        return None
    if node.op_type in ("Add", "Sum"):
        found: list[ir.Node] = []
        for term in node.inputs:
            sources = None if term is None or term.shape != value.shape else _sources(term)
            if sources is None:
                return None
            found += sources
        return found
    if node.op_type in _TABLES:
        reduction = node.attributes.get("reduction")
        adds = reduction is None or reduction.as_string() in ("none", "add")
        return [node] if adds and is_known_zero(node.inputs[0], of_finite=False) else None
    if node.op_type == "Gemm":
        alpha = node.attributes.get("alpha")
        adds = len(node.inputs) > 2 and node.inputs[2] is not None
        return None if adds or (alpha is not None and abs(alpha.as_float()) > 1) else [node]
    return [node] if node.op_type == "MatMul" else None


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
