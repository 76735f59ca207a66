"""The base class of passes that lower a scaled step, and the values of the step for them."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.analysis.hazards import find_in_place_writes
from graphscale.graph.marks import PASS_KEY
from graphscale.graph.stamp import Stamp, read_stamp
from graphscale.graph.values import Use, cannot_fail, operand_at, subgraphs, uses_of, values_by_name
from graphscale.lowering.thresholds import PRODUCTION, Thresholds
from graphscale.passes import CheckFinite, GraphPass
from graphscale.policy.loss_scale import LossScale, get
from graphscale.policy.names import ScaledValue

__all__ = ["LoweringPass", "ScaledStep", "is_inserted"]

# The name of the pass whose last node becomes the decision.
_WAITING = "delay-update"


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """A scaled step, by its metadata and the marks of its nodes.

    Attributes:
        graph: its graph.
        policy: its loss scale.
        loss: the loss; None in a half of a split step.
        scale: the loss scale, where it is an input.
        decision: the value that decides whether the step is applied, behind the nodes that it waits for; None where
            every step is. In a window of accumulated gradients: whether all are finite so far.
        states: the next values of the carried state.
    """

    graph: ir.Graph
    policy: LossScale | None
    loss: ir.Value | None
    scale: ir.Value | None
    decision: ir.Value | None
    states: tuple[ir.Value, ...]

    @classmethod
    def of(cls, model: ir.Model) -> ScaledStep:
        """Read a scaled model.

        Raises:
            ModelFileError: the model carries no loss scale, or its metadata are damaged.
        """
        stamp, graph = read_stamp(model, "the model"), model.graph
        values, results = values_by_name(graph), {value.name: value for value in graph.outputs}
        scale = values.get(stamp.names.get(ScaledValue.LOSS_SCALE, ""))
        written = [value for node in find_in_place_writes(graph) if (value := node.inputs[1]) is not None]
        return cls(
            graph=graph,
            policy=get(stamp.policy),
            loss=values.get(stamp.names.get(ScaledValue.LOSS, "")),
            scale=scale if scale is not None and scale.is_graph_input() else None,
            decision=_find_decision(stamp, graph, values),
            states=(*(results[name] for name in stamp.state.values()), *written),
        )


def _find_decision(stamp: Stamp, graph: ir.Graph, values: dict[str, ir.Value]) -> ir.Value | None:
    window = values.get(stamp.names.get(ScaledValue.WINDOW_FINITE, ""))
    for write in find_in_place_writes(graph):
        if write.inputs[0] is window:
            number = operand_at(Use(write, 1)).producer()
            return None if number is None else number.inputs[0]
    decision = values.get(stamp.names.get(ScaledValue.ALL_FINITE, ""))
    if decision is None and ScaledValue.WINDOW_FINITE in stamp.names:  # an optimizer model
        return next((n.outputs[0] for n in graph if n.op_type == "Not" and CheckFinite.inserted(n)), None)
    for node, _ in () if decision is None else uses_of(decision):
        if node.op_type == "Or" and node.metadata_props.get(PASS_KEY) == _WAITING:
            return node.outputs[0]
    return decision


def is_inserted(node: ir.Node) -> bool:
    """Return whether graphscale inserted a node; such a node never fails, unlike nodes moved into a branch."""
    if PASS_KEY not in node.metadata_props:
        return False
    return all(is_inserted(inner) or cannot_fail(inner) for body in subgraphs(node) for inner in body)


@dataclasses.dataclass(frozen=True)
class LoweringPass(GraphPass):
    """A pass over a scaled step, with the same results afterwards.

    Attributes:
        thresholds: the sizes from which a rewrite pays.
        relies_on: the premises for equal bits, for readers.
    """

    relies_on: ClassVar[str]
    thresholds: Thresholds = PRODUCTION

    def call(self, model: ir.Model) -> PassResult:
        """Lower a scaled step in place; a step that applies every update is unchanged."""
        step = ScaledStep.of(model)
        is_changed = step.decision is not None and self.lower(step)
        if is_changed:
            _drop_unused(model.graph)
        return PassResult(model, is_changed)

    @abstractmethod
    def lower(self, step: ScaledStep) -> bool:
        """Lower a step, and return whether it has changed."""


def _drop_unused(graph: ir.Graph) -> None:
    """Remove inserted constants without readers: ONNX Runtime would warn of each."""
    for name, value in list(graph.initializers.items()):
        is_read = value.uses() or value.is_graph_output()
        if name.startswith("graphscale/") and not is_read and not value.is_graph_input():
            del graph.initializers[name]
