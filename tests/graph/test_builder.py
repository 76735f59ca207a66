"""Nodes as a builder creates them."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.graph.builder import PASS_KEY, Editor, behind

pytestmark = pytest.mark.static


def test_names_types_places_and_marks() -> None:
    x = ir.val("x", ir.DataType.FLOAT16, ["N", 3])
    first = ir.node("Neg", [x], outputs=[ir.val("neg")], name="first")
    graph = ir.Graph([x], [], nodes=[first], opset_imports={"": 20})
    build = Editor(graph).builder("pass", shape=())
    total = build.op("ReduceSum", [x], name="neg", dtype=ir.DataType.FLOAT, keepdims=0)
    wide = build.cast(x, ir.DataType.FLOAT, at=behind(first.outputs[0]))
    build.op("IsAllFinite", [x], dtype=ir.DataType.BOOL, domain="com.microsoft", at=("before", first))
    assert [node.op_type for node in graph] == ["IsAllFinite", "Neg", "Cast", "ReduceSum"]
    assert (total.name, total.dtype, total.shape) == ("neg_1", ir.DataType.FLOAT, ir.Shape([]))
    assert (wide.name, wide.dtype, wide.shape) == ("cast", ir.DataType.FLOAT, x.shape)
    assert wide.shape is not x.shape
    assert [node.metadata_props.get(PASS_KEY) for node in graph] == ["pass", None, "pass", "pass"]
    assert graph[2].name == "graphscale/pass/cast"
    assert graph.opset_imports == {"": 20, "com.microsoft": 1}


def test_a_body() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [3])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20})
    body = Editor(graph).builder("pass", "branch", is_marked=False).within("then_branch")
    branch = body.closed([body.op("Neg", [x], like=x)])
    assert not len(graph)
    assert [node.outputs[0].name for node in branch] == ["branch.neg"]
    assert (branch.outputs[0].dtype, branch.outputs[0].shape) == (x.dtype, x.shape)
    assert not branch[0].metadata_props
