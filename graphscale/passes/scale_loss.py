"""scale-loss: multiply by the loss scale where the gradients begin."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.analysis.edits import Place
from graphscale.analysis.hints import Hints
from graphscale.analysis.updates import promote_zeros
from graphscale.errors import AlreadyScaledError
from graphscale.graph.builder import Builder, Editor, Position, behind, replace_outputs, replace_reads
from graphscale.graph.marks import SCALE_LOSS
from graphscale.graph.notes import SCALED_LOSS_NOTE
from graphscale.graph.original import record_original
from graphscale.graph.stamp import is_scaled
from graphscale.graph.types import dtype_of
from graphscale.graph.values import main_node, main_nodes, uses_of
from graphscale.graph.walks import NodeIndex
from graphscale.passes.graph_pass import GraphPass
from graphscale.passes.nodes.graph_scale import add_scale, refuse_infinite_seed
from graphscale.passes.step_pass import hold_step, is_under_way
from graphscale.policy.loss_scale import get_policy
from graphscale.step.training_step import Step
from graphscale.step.understanding import make_report, understand
from graphscale.targets import get_target

__all__ = ["ScaleLoss"]


@dataclasses.dataclass(frozen=True)
class ScaleLoss(GraphPass):
    """Multiply by the loss scale at every place from the analysis.

    Before: `dy = Sub(p, t);              dw = MatMul(x, dy)`
    After:  `dy = Sub(p, t); s = Mul(dy, current_loss_scale); dw = MatMul(x, s)`

    The product of a value of a smaller type is computed in float32, too, since float16 cannot hold a scale above 65504,
    though it can hold the product.

    Attributes:
        loss_scale: any argument of `graphscale.get`.
        loss: the name of the loss, several names, or None to find it.
        seed: `NODE:INDEX`, the edge where the scale enters, or None to find the places.
        gradients: names of values that are gradients.
        updates: `{output name: input name}` of carried state.
        roles: answers about roles, with the content of a roles file.
        target: the runtime that executes the graph.
        skip_nonfinite: check and guard the step for a fixed loss scale as well.
        expose_scaled_loss: append the output `scaled_loss`, the loss times the scale, to the graph.
    """

    name = SCALE_LOSS
    sign = "×S"  # noqa: RUF001

    loss_scale: Any = "dynamic"
    loss: str | Sequence[str] | None = None
    seed: str | None = None
    gradients: tuple[str, ...] = ()
    updates: Mapping[str, str] | None = None
    roles: Any = None
    target: str = "onnx"
    skip_nonfinite: bool = False
    expose_scaled_loss: bool = False

    def call(self, model: ir.Model) -> PassResult:
        if is_under_way(model) or is_scaled(model):
            raise AlreadyScaledError(f"{self.name}: the model already carries a loss scale; scale the original graph")
        get_policy(self.loss_scale)  # the record of the original takes longer
        with record_original(model):
            hold_step(self.begin(model))
        return PassResult(model, modified=True)

    def begin(self, model: ir.Model, hints: Hints | None = None, index: NodeIndex | None = None) -> Step:
        """Understand a training graph, by hints in place of the pass's own, and return the step after this pass."""
        index = index or NodeIndex(model.graph)
        step = understand(model, hints or Hints.of(self), index)
        report, editor = make_report(step), Editor(step.graph, index)
        promote_zeros(step.graph, step.states)
        scale = add_scale(editor, get_policy(self.loss_scale), get_target(self.target))
        build, by_value = self.builder(editor), dict[ir.Value, list[Place]]()
        for place in step.places:
            by_value.setdefault(place.value, []).append(place)
        products: dict[ir.Value, ir.Value] = {}
        for value, places in by_value.items():
            refuse_infinite_seed(value, scale.policy)
            products[value] = _enter(build, value, places, scale.value)
        exposed = list[ir.Value]()
        if self.expose_scaled_loss:
            exposed = [_multiply(build, step.loss, scale.value, "scaled_loss", behind(step.loss))]
            editor.output(exposed[0], "scaled_loss")
            exposed[0].doc_string = SCALED_LOSS_NOTE
        return dataclasses.replace(
            step,
            report=report,
            editor=editor,
            scales=(scale,),
            skips=self.skip_nonfinite or not scale.is_fixed,
            products=products,
            exposed=tuple(exposed),
            done=frozenset((self.name,)),
            modified=True,
        )


def _enter(build: Builder, value: ir.Value, places: Sequence[Place], scale: ir.Value) -> ir.Value:
    """Multiply one value for its readers, or for some edges."""
    edges = [place.edge for place in places if place.edge is not None]
    everywhere = len(edges) < len(places)
    uses = uses_of(value) if everywhere else edges
    at, graph, main = behind(value), value.graph, build.editor.graph
    if graph is main and not everywhere:
        owners = main_nodes(main)
        readers = {main_node(owners, edge.node) for edge in edges}
        at = ("before", next(node for node in main if node in readers))
    elif at is None and isinstance(graph, ir.Graph):
        at = ("before", graph[0])
    scaled = _multiply(build, value, scale, f"{value.name}.scaled", at)
    replace_reads(value, scaled, uses)
    if everywhere and graph is not main:
        replace_outputs(value, scaled)
    return scaled


def _multiply(build: Builder, value: ir.Value, scale: ir.Value, name: str, at: Position) -> ir.Value:
    """Add `value * scale` in the value's dtype, computed in float32 or wider."""
    dtype = dtype_of(value)
    wide = ir.DataType.DOUBLE if dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
    operands: list[ir.Value] = []
    for operand, operand_dtype in ((value, dtype), (scale, ir.DataType.FLOAT)):
        if operand_dtype is not wide:
            operand = build.cast(operand, wide, name=f"{name}.wide", at=at)
            at = behind(operand)
        operands.append(operand)
    product = build.op("Mul", operands, name=name, like=value, dtype=wide, at=at)
    return product if dtype is wide else build.cast(product, dtype, name=f"{name}.narrow", at=behind(product))
