"""split-gemm: separate the product of a Gemm from its addend, where a gradient is fused into an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.analysis.updates import find_fused_updates
from graphscale.graph.builder import Builder, Editor
from graphscale.graph.types import dtype_of
from graphscale.operators import attribute
from graphscale.passes.graph_pass import GraphPass

__all__ = ["SplitGemm"]


@dataclasses.dataclass(frozen=True)
class SplitGemm(GraphPass):
    """Give the product in a Gemm a value of its own: a gradient, which is scaled and checked then.

    Before: `w.next = Gemm <alpha = -0.1, transA = 1> (x, dy, w)`
    After:  `dw = Gemm <transA = 1> (x, dy); w.next = Add(Mul(dw, -0.1), w)`

    ONNX Runtime's basic optimizations make such nodes of sums. Results may differ in their last bits.

    Attributes:
        nodes: the nodes; None for all that `find_fused_updates` finds.
    """

    name = "split-gemm"
    sign = "⊣"
    optional = True

    nodes: Collection[ir.Node] | None = None

    def call(self, model: ir.Model) -> PassResult:
        nodes = find_fused_updates(model.graph) if self.nodes is None else self.nodes
        if nodes:
            build = self.builder(Editor(model.graph))
            for node in nodes:
                _split(build, node)
        return PassResult(model, modified=bool(nodes))


def _split(build: Builder, node: ir.Node) -> None:
    left, right, addend = node.inputs
    result = node.outputs[0]
    assert left is not None and right is not None and addend is not None
    build = dataclasses.replace(build, prefix=result.name or "", at=("before", node))
    flags = {name: attribute(node, name, 0) for name in ("transA", "transB")}
    product = build.op("Gemm", [left, right, *_no_addend(build, result)], name=f"{result.name}.product", like=result)
    maker = product.producer()
    assert maker is not None
    for name, flag in flags.items():
        maker.attributes[name] = ir.AttrInt64(name, flag)
    terms = [_times(build, product, attribute(node, "alpha", 1.0)), _times(build, addend, attribute(node, "beta", 1.0))]
    total = build.op("Add", terms, name=f"{result.name}.sum", like=result)
    build.editor.replace_result(result, total, "fused")
    build.editor.graph.remove(node, safe=True)


def _no_addend(build: Builder, result: ir.Value) -> list[ir.Value]:
    """Return the addend of a product: none, but below opset 11 a zero."""
    if build.editor.graph.opset_imports.get("", 11) >= 11:
        return []
    dtype = dtype_of(result)
    return [build.editor.shared_constant(f"graphscale/no_addend.{dtype.name.lower()}", np.zeros((), dtype.numpy()))]


def _times(build: Builder, value: ir.Value, factor: float) -> ir.Value:
    return value if factor == 1 else build.op("Mul", [value, build.number(factor, dtype_of(value))], like=value)
