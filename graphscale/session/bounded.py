"""The gradients of a scaled step that a bound can be told of, and the finite check that they are part of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.graph.builder import Editor, read_only, replace_reads
from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import Use, captured_values, is_scalar, read, uses_of
from graphscale.graph.walks import descendants
from graphscale.passes import UnscaleGradients
from graphscale.passes.nodes.bound import CHECK
from graphscale.session.probes import NAME as PROBES
from graphscale.session.terms import Sum, Term, elements, terms_of
from graphscale.session.thresholds import Thresholds

__all__ = ["Bounded", "Check", "bounded_gradients", "find_check"]

_UNSCALE = UnscaleGradients.name


@dataclasses.dataclass(frozen=True)
class Bounded:
    """A gradient that a bound can be told of, or a small one that need not be divided.

    Attributes:
        terms: what it is the sum of before it is unscaled.
        itself: or the gradient, which must be read, scaled or unscaled. If there is neither, it is small: its probe
            stays.
        early: whether each term is unscaled where it reads its cotangent.
        rate: or where the step reads a number that it multiplies it by, and that is all it does with it: there it is
            unscaled. If neither, it is divided.
        division: the node that unscales it.
        probe: the nodes that test it alone for finiteness, in execution order, which its bound replaces.
    """

    terms: tuple[Term, ...]
    itself: ir.Value | None
    early: bool
    rate: Use | None
    division: ir.Node
    probe: tuple[ir.Node, ...]

    @property
    def scaled(self) -> ir.Value:
        """What is unscaled."""
        value = self.division.inputs[0]
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

    def leave_out(self, gradients: Sequence[Bounded]) -> None:
        """Take the probes of gradients out of the sum, and out of the graph."""
        graph = self.total.graph
        assert isinstance(graph, ir.Graph)
        probes = {gradient.probe[-1].outputs[0] for gradient in gradients if gradient.probe}
        kept = [value for value in self.total.inputs if value is not None and value not in probes]
        read_only(self.total, kept or [self.zero])
        graph.remove([node for gradient in gradients for node in gradient.probe], safe=True)

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
    outcome = descendants((node for node in graph if node is not step), [value])
    if decision not in outcome or not outcome.isdisjoint(captured_values(step)):
        return None
    return Check(total, zero, value, decision)


def bounded_gradients(
    graph: ir.Graph, check: Check, scale: ir.Value, step: ir.Node, thresholds: Thresholds, *, exact: bool
) -> list[Bounded]:
    """The large float32 gradients that are tested alone, and small ones that the step only multiplies by a number.

    Args:
        graph: the main graph.
        check: the finite check.
        scale: the loss scale.
        step: the If that applies a step.
        thresholds: sizes from which a bound pays.
        exact: whether the scale is a power of two, so that gradients that the step alone reads may be unscaled early.
    """
    unscales = [node for node in graph if node.metadata_props.get(PASS_KEY) == _UNSCALE]
    scaled = descendants((node for node in graph if node.metadata_props.get(PASS_KEY) != _UNSCALE), [scale])
    found = (_bounded(node, check, scaled, step, thresholds, exact=exact) for node in unscales)
    return [gradient for gradient in found if gradient is not None]


def _bounded(
    division: ir.Node, check: Check, scaled: set[ir.Value], step: ir.Node, thresholds: Thresholds, *, exact: bool
) -> Bounded | None:
    gradient, dividend = division.outputs[0], division.inputs[0]
    if division.op_type != "Div" or dividend is None or gradient.dtype is not ir.DataType.FLOAT:
        return None
    if gradient.shape is None or not gradient.shape.is_static():
        return None
    then = step.attributes["then_branch"].as_graph()
    readers = [use.node for use in uses_of(gradient) if use.node.graph is not then]
    only_step = exact and len(readers) == 1 and not gradient.is_graph_output()
    rate = _rate(gradient, then) if only_step else None
    probes = [probe for node in readers if (probe := _probe(node, check)) is not None]
    if len(probes) != 1:
        return None
    if math.prod(gradient.shape.numpy()) < thresholds.bound_elements:
        return None if rate is None else Bounded((), None, False, rate, division, ())
    if any(node.op_type == "Concat" for node in probes[0]):
        return None
    size = elements(gradient)
    found = terms_of(division, scaled, thresholds.narrow_ratio) or Sum((), False)
    terms = found.terms
    read_once = sum(map(elements, {value for term in terms for value in (*term.operands, *term.factors)}))
    # An early cotangent is read once more, and written.
    early = sum(2 * elements(read(use)) for use in {term.cotangent for term in terms} if use is not None)
    is_early = rate is None and only_step and found.is_alone
    if terms and is_early and read_once + early <= thresholds.unbounded_passes * size:
        return Bounded(terms, None, True, None, division, probes[0])
    if terms and read_once <= thresholds.bound_share * size:
        return Bounded(terms, None, False, rate, division, probes[0])
    return Bounded((), gradient if rate is None else dividend, False, rate, division, probes[0])


def _rate(gradient: ir.Value, then: ir.Graph) -> Use | None:
    """Where a branch reads the number that it multiplies a gradient by, if that is all that it does with it.

    A number that is a gradient itself is none: it may be unscaled elsewhere.
    """
    uses = [use for use in uses_of(gradient) if use.node.graph is then]
    if len(uses) != 1 or uses[0].node.op_type != "Mul":
        return None
    use = Use(uses[0].node, 1 - uses[0].idx)
    rate, node = read(use), read(use).producer()
    is_outer = node is None or (node.graph is not then and node.metadata_props.get(PASS_KEY) != _UNSCALE)
    return use if is_outer and is_scalar(rate) and rate.dtype is ir.DataType.FLOAT else None


def _probe(node: ir.Node, check: Check) -> tuple[ir.Node, ...] | None:
    """The nodes from the first reader of a gradient to the sum of all probes, if they are a probe and nothing else."""
    path = [node]
    while path[-1].metadata_props.get(PASS_KEY) in (PROBES, CHECK) and len(path) < 5:
        uses = uses_of(path[-1].outputs[0])
        if len(uses) != 1:
            return None
        if uses[0].node is check.total:
            return tuple(path)
        path.append(uses[0].node)
    return None
