"""lower-optimizers: replace ONNX's own optimizer operators, for which no runtime has a kernel."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.errors import ModelFileError
from graphscale.graph.builder import Builder, Editor
from graphscale.graph.values import node_name
from graphscale.operators import PREVIEW_TRAINING
from graphscale.passes.graph_pass import GraphPass
from graphscale.passes.nodes.optimizer_formulas import LOWERINGS, Formula

__all__ = ["LowerOptimizers"]


@dataclasses.dataclass(frozen=True)
class LowerOptimizers(GraphPass):
    """Replace `ai.onnx.preview.training` Adam, Momentum and Adagrad by standard operators.

    Before: `w.next, v.next = Momentum <alpha, beta, mode> (r, t, w, g, v)`
    After:  `v.next = Add(Mul(v, alpha), Mul(g, beta)); w.next = Sub(w, Mul(r, v.next))`

    The formulas are those of the operators' specifications in ONNX.
    """

    name = "lower-optimizers"
    sign = "↓"
    optional = True

    @staticmethod
    def applies(model: ir.Model) -> bool:
        """Return whether a model has such operators."""
        return bool(_optimizers(model))

    def call(self, model: ir.Model) -> PassResult:
        nodes = _optimizers(model)
        if not nodes:
            return PassResult(model, modified=False)
        build = self.builder(Editor(model.graph))
        for node in nodes:
            _lower(build, node)
        model.opset_imports.pop(PREVIEW_TRAINING, None)
        return PassResult(model, modified=True)


def _optimizers(model: ir.Model) -> list[ir.Node]:
    if PREVIEW_TRAINING not in model.opset_imports:
        return []
    return [node for node in model.graph if node.domain == PREVIEW_TRAINING and node.op_type in LOWERINGS]


def _lower(build: Builder, node: ir.Node) -> None:
    rate, count, *tensors = node.inputs
    groups, lowering = LOWERINGS[node.op_type]
    n = len(tensors) // groups
    if len(tensors) != n * groups or len(node.outputs) != n * (groups - 1):
        raise ModelFileError(
            f"{node.op_type} node {node_name(node)!r} has {len(tensors)} tensors and {len(node.outputs)} results; for "
            f"each weight it needs {groups} and {groups - 1}"
        )
    for i in range(n):
        operands = [tensors[i + n * k] for k in range(groups)]
        results = lowering(Formula(build, node, operands[0]), rate, count, *operands)
        for k, new in enumerate(results):
            build.editor.replace_result(node.outputs[i + n * k], new, "lowered")
    build.editor.graph.remove(node, safe=True)
