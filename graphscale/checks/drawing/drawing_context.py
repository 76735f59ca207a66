"""The facts about nodes and values in a drawing: the phase, the inserting pass, the degree in the loss scale."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.edits import Unscaling
from graphscale.analysis.hints import NO_HINTS, Hints
from graphscale.analysis.proof import scale_degrees
from graphscale.errors import GraphscaleError
from graphscale.flow.degree import ZERO, Degree
from graphscale.graph.builder import PASS_KEY
from graphscale.graph.cones import nodes_above
from graphscale.graph.stamp import is_scaled
from graphscale.graph.values import inner_nodes, uses_of
from graphscale.passes import scale_nodes
from graphscale.passes.preparation import prepare
from graphscale.policy.names import ScaledValue
from graphscale.step.scaled_step import read
from graphscale.step.training_step import Step
from graphscale.step.understanding import understand

__all__ = ["DrawingContext", "Phase", "make_context"]


class Phase(enum.Enum):
    """The parts of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    UNKNOWN = "graph"


@dataclasses.dataclass(frozen=True)
class DrawingContext:
    """A step, and the facts in its drawing.

    Attributes:
        step: the step of the model that is drawn, with the degrees of its values; bare where there is a note.
        phases: the phase of each node of the main graph.
        passes: the pass of each inserted node of the main graph; "added" where the node names none.
        unclear: the values whose degree does not follow, since the scale does not cancel out.
        note: why there are no phases and degrees; None where there are.
    """

    step: Step
    phases: Mapping[ir.Node, Phase]
    passes: Mapping[ir.Node, str]
    unclear: frozenset[ir.Value] = frozenset()
    note: str | None = None

    @functools.cached_property
    def scale(self) -> ir.Value | None:
        """The loss scale, in a model that has one."""
        return self.step.named.get(ScaledValue.LOSS_SCALE) if self.step.scales else None

    @functools.cached_property
    def unscalings(self) -> Mapping[ir.Value, Unscaling]:
        """The unscalings, in a model without a loss scale, by the value."""
        return {unscale.value: unscale for unscale in self.step.unscalings}

    def carries_scale(self, value: ir.Value) -> bool:
        """Return whether a value is a multiple of the loss scale."""
        return self.step.degrees.get(value, 0) not in (0, ZERO)

    def degree_read(self, value: ir.Value, reader: ir.Node | None) -> Degree:
        """Return the degree with which a node, or with None the graph's output, reads a value; ZERO if unknown.

        Before scaling, that is the degree which the node would see.
        """
        if value in self.unclear:
            return ZERO
        unscale = self.unscalings.get(value)
        if unscale is not None:
            covered = [unscale.covers(use) for use in uses_of(value) if use.node is reader]
            if unscale.everywhere or (unscale.output if reader is None else covered and all(covered)):
                return 0
        return self.step.degrees.get(value, 0) or 0

    def nodes_inside(self, node: ir.Node) -> list[ir.Node]:
        """Return the nodes of the function that a node calls, and those in its subgraphs."""
        return [*self.step.model.functions.get(node.op_identifier(), ()), *inner_nodes(node)]


def make_context(
    model: ir.Model, name: str, *, added: frozenset[ir.Node] = frozenset(), strict: bool = True, hints: Hints = NO_HINTS
) -> DrawingContext:
    """Find out what a drawing of a model says.

    Args:
        model: the model; where it has no loss scale, what hides the gradient path is spelled out in it.
        name: its name in messages.
        added: nodes to be marked as added, where they name no pass.
        strict: raise what the analysis raises; else draw the graph without phases, and note why.
        hints: names that the user gives.

    Raises:
        GraphscaleError: the stamp of a scaled model is damaged, or, if strict, the analysis found no training graph.
    """
    passes = {node: "added" for node in model.graph if node in added}
    passes |= {node: node.metadata_props[PASS_KEY] for node in model.graph if PASS_KEY in node.metadata_props}
    note = None
    try:
        if is_scaled(model):
            return _scaled(read(model, name), passes)
        prepare(model)
        found = understand(model, hints, asking=False)
    except GraphscaleError as error:
        if strict:
            raise
        note = str(error)
    # Inlined nodes are new in the graph, and no part of the comparison.
    passes = {node: mark for node, mark in passes.items() if node.graph is model.graph}
    if note is not None:
        bare = Step(graph=model.graph, loss=ir.val(""), model=model)
        return DrawingContext(bare, dict.fromkeys(model.graph, Phase.UNKNOWN), passes, note=note)
    return DrawingContext(found, _phases(found, found.gradients), passes)


def _scaled(step: Step, passes: Mapping[ir.Node, str]) -> DrawingContext:
    graph, scale = step.graph, step.named.get(ScaledValue.LOSS_SCALE)
    degrees, unclear = dict[ir.Value, Degree](), frozenset[ir.Value]()
    if scale is not None:
        degrees, conflicts = scale_degrees(graph, scale, scale_nodes(graph))
        unclear = frozenset(value for node in conflicts for value in node.outputs)
    unscaled = (node.inputs[0] for each in step.quotients if (node := each.value.producer()) is not None)
    scaled = [value for value in unscaled if value is not None and degrees.get(value, 0) != 0]
    scaled += [value for value, degree in degrees.items() if degree == 1 and value.producer() in passes]
    step = dataclasses.replace(step, degrees=degrees)
    return DrawingContext(step, _phases(step, scaled), passes, unclear)


def _phases(step: Step, gradients: Sequence[ir.Value]) -> dict[ir.Node, Phase]:
    graph, degrees = step.graph, step.degrees
    forward, backward = nodes_above(step.loss), nodes_above(*gradients)
    # A gradient that nothing reads, as that of the batch, belongs to the backward pass as well.
    unread = [v for v, degree in degrees.items() if degree == 1 and (node := v.producer()) and node.graph is graph]
    backward |= nodes_above(*unread) if gradients else set()
    return {n: Phase.FORWARD if n in forward else Phase.BACKWARD if n in backward else Phase.UPDATE for n in graph}
