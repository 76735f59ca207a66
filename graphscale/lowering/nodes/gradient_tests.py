"""The plan by which each gradient of a scaled step is tested and unscaled, and the finite check that tests replace."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.graph.builder import Editor, replace_inputs
from graphscale.graph.values import captured_values, uses_of
from graphscale.graph.walks import descendants
from graphscale.lowering.delay_update import DelayUpdate
from graphscale.lowering.merge_probes import MergeProbes
from graphscale.lowering.nodes.products import Product, find_product, find_scaled
from graphscale.lowering.sizes import count_elements
from graphscale.lowering.thresholds import Thresholds
from graphscale.passes import CheckFinite, UnscaleGradients

__all__ = ["FiniteCheck", "GradientTest", "find_check", "find_probe", "plan_tests"]


@dataclasses.dataclass(frozen=True)
class GradientTest:
    """The test of a large gradient: by a bound of its product, or else by its own sum.

    Attributes:
        division: the node that unscales the gradient.
        probe: the nodes of its finite check, in execution order, to be replaced.
        product: the product that the bound is computed from.
        early: whether the product is unscaled where it reads its cotangent.
    """

    division: ir.Node
    probe: tuple[ir.Node, ...]
    product: Product | None = None
    early: bool = False


@dataclasses.dataclass(frozen=True)
class FiniteCheck:
    """The finite check of a step.

    Attributes:
        total: the sum of all probes.
        flag: True if all gradients are finite.
        decision: the flag, once every node that can fail has run.
    """

    total: ir.Node
    flag: ir.Value
    decision: ir.Value

    def remove_probes(self, tests: Sequence[GradientTest], zero: ir.Value) -> None:
        """Take the probes of gradients out of the sum, and out of the graph; `zero` stands for an empty sum."""
        graph = self.total.graph
        assert isinstance(graph, ir.Graph)
        probes = {test.probe[-1].outputs[0] for test in tests}
        kept = [value for value in self.total.inputs if value is not None and value not in probes]
        replace_inputs(self.total, kept or [zero])
        graph.remove([node for test in tests for node in test.probe], safe=True)

    def redirect_readers(self, editor: Editor, finite: ir.Value, branch: ir.Graph) -> None:
        """Redirect readers of the flag and the decision to another flag, but for those in a branch."""
        asking = finite.producer()
        for value in {self.flag, self.decision}:
            uses = [
                use
                for use in uses_of(value)
                if use.node.graph is not branch
                and not DelayUpdate.inserted(use.node)
                and not (asking is not None and use.node.outputs[0] is asking.inputs[0])
            ]
            editor.replace(value, finite, uses, "others")


def find_check(graph: ir.Graph, decision: ir.Value, step: ir.Node) -> FiniteCheck | None:
    """Find the finite check by standard operators that a step, an If, depends on by its condition alone."""
    total = next((n for n in graph if n.op_type == "Sum" and CheckFinite.inserted(n)), None)
    if total is None:
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
    return FiniteCheck(total, value, decision)


def plan_tests(
    graph: ir.Graph, check: FiniteCheck, scale: ir.Value, step: ir.Node, thresholds: Thresholds, *, exact: bool
) -> list[GradientTest]:
    """Plan tests of large float32 gradients.

    Where the scale is `exact`, a power of two, gradients that the step, an If, alone reads may be unscaled early.
    """
    divisions = [node for node in graph if UnscaleGradients.inserted(node)]
    scaled = find_scaled(graph, scale)
    tests = (_plan_test(node, check, scaled, step, thresholds, exact=exact) for node in divisions)
    return [test for test in tests if test is not None]


def _plan_test(
    division: ir.Node, check: FiniteCheck, scaled: set[ir.Value], step: ir.Node, thresholds: Thresholds, *, exact: bool
) -> GradientTest | None:
    gradient = division.outputs[0]
    if division.op_type != "Div" or gradient.dtype is not ir.DataType.FLOAT:
        return None
    if gradient.shape is None or not gradient.shape.is_static():
        return None
    if math.prod(gradient.shape.numpy()) < thresholds.bound_elements:
        return None
    then = step.attributes["then_branch"].as_graph()
    readers = [use.node for use in uses_of(gradient) if use.node.graph is not then]
    only_step = exact and len(readers) == 1 and not gradient.is_graph_output()
    probes = [probe for node in readers if (probe := find_probe(node, check.total)) is not None]
    if len(probes) != 1:
        return None
    size, product = count_elements(gradient), find_product(division, scaled)
    if product is not None:
        if only_step and product.is_exclusive and product.count_early() <= thresholds.unbounded_passes * size:
            return GradientTest(division, probes[0], product, early=True)
        if product.count_reads() <= thresholds.bound_share * size:
            return GradientTest(division, probes[0], product)
    return GradientTest(division, probes[0])


def find_probe(node: ir.Node, total: ir.Node) -> tuple[ir.Node, ...] | None:
    """Return the nodes from a reader of a gradient to the sum of all probes, if they are a probe of it alone."""
    path = [node]
    while (MergeProbes.inserted(path[-1]) or CheckFinite.inserted(path[-1])) and len(path) < 5:
        uses = uses_of(path[-1].outputs[0])
        if len(uses) != 1:
            return None
        if uses[0].node is total:
            return None if any(each.op_type == "Concat" for each in path) else tuple(path)
        path.append(uses[0].node)
    return None
