"""A constant that float16 cannot hold, behind what only moves its numbers."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from graphscale.graph.values import constant_tensor
from graphscale.passes.casting.constants import find_misfits

GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
moved (float[2] x, float[2,1] w) => (float[2,2] y)
<float[2] large = {100000.0, 1.0}, float[2] small = {1.0, 2.0}, int64[2] shape = {2, 1}>
{
   column = Reshape(large, shape)
   turned = Transpose(column)
   harmless = Reshape(small, shape)
   mixed = Concat <axis = 0> (large, x)
   y = Add(turned, w)
}
"""


def test_numbers_are_followed_through_what_moves_them() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(GRAPH)).graph
    operators = {node: (node.domain, node.op_type) for node in graph}
    floats = {v for node in operators for v in (*node.inputs, *node.outputs) if v is not None and v.name != "shape"}
    constants = {value: tensor for value in floats if (tensor := constant_tensor(value)) is not None}
    moving = {node for node in operators if node.op_type != "Add"}
    found = find_misfits(operators, floats, constants, moving, ir.DataType.FLOAT16)
    assert {value.name for value in found} == {"large", "column", "turned"}
    assert all(problem.overflows for problem in found.values())
    assert not find_misfits(operators, floats, constants, moving, ir.DataType.BFLOAT16)
