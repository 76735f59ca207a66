"""What a value depends on, from within a subgraph, too."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from graphscale.analysis.topology import Topology

STEP = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[4] x, float[4] w, float[4] v, bool first) => (float y)
{
   before = Neg(x)
   product = Mul(before, w)
   aside = Neg(v)
   chosen = If (first) <
      then_branch = one () => (float[4] a) { inner = Abs(product)  a = Exp(inner) },
      else_branch = two () => (float[4] b) { b = Identity(aside) }
   >
   y = ReduceSum <keepdims = 0> (chosen)
}
"""


def names(values: set[ir.Value]) -> set[str | None]:
    return {value.name for value in values}


def test_from_within_a_subgraph() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(STEP)).graph
    topology = Topology(graph, graph.outputs[0])
    values = {value.name: value for node in graph.all_nodes() for value in node.outputs}
    assert names(topology.ancestors([values["a"]])) == {"a", "inner", "product", "before", "x", "w"}
    assert names(topology.ancestors([values["y"]])) >= {"chosen", "product", "aside", "x", "w", "v", "first"}
    reached = topology.ancestors([values["a"]], stop=lambda node: node.op_type == "Mul")
    assert names(reached) == {"a", "inner", "product"}
    reached = topology.ancestors([values["a"]], stop=lambda node: node.op_type == "Abs")
    assert names(reached) == {"a", "inner"}
