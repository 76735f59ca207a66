"""Branches that may write a result over a state among their operands, and nodes of a branch that can fail."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.analysis.hazards import Branches, may_overwrite
from graphscale.graph.marks import PASS_KEY
from graphscale.lowering.lowering_pass import is_inserted
from tests.build import parse

pytestmark = pytest.mark.static

BRANCHES = {
    "the last reader": ("new = Sub(w, u)", True),
    "a reader before": ("a = Mul(w, u)  new = Sub(w, a)", True),
    "a reader that need not be before": ("new = Sub(w, u)  late = Mul(w, u)", False),
    "a reader of many elements": ("a = MatMul(w, u)  new = Sub(w, a)", False),
    "a reduction before": ("a = ReduceSum <keepdims: int = 0> (w)  new = Sub(w, a)", False),
    "what contractions give": ("a = MatMul(u, u)  new = Add(w, a)", False),
    "a node that can fail": ("other = Gather(u, i)  new = Sub(w, u)", False),
    "no reader": ("new = Neg(u)", True),
    "the state itself": ("new = Identity(w)", True),
    "a view that is read late": ("a = Identity(w)  new = Sub(w, u)  late = Neg(a)", False),
}


def if_node(then: str) -> ir.Node:
    late = ", float[4,4] late" if "late =" in then else ""
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step (bool c, float[4,4] w, float[4,4] u, int64[4] i) => (float[4,4] w_next) {{
            w_next = If(c) <then_branch = t() => (float[4,4] new{late}) {{ {then} }},
                            else_branch = e() => (float[4,4] old) {{ old = Identity(w) }}>
        }}""")
    return next(iter(ir.serde.deserialize_model(model).graph))


def then_branch(node: ir.Node) -> ir.Graph:
    branch = node.attributes["then_branch"].as_graph()
    for inner in branch:
        for value in inner.outputs:
            value.shape = value.shape or ir.Shape([4, 4])
    return branch


@pytest.mark.parametrize(("then", "expected"), BRANCHES.values(), ids=BRANCHES)
def test_may_overwrite(then: str, expected: bool) -> None:
    branch = then_branch(if_node(then))
    values = [value for node in branch for value in node.inputs if value is not None]
    outer = {value.name: value for value in values if value.producer() is None}
    state = outer.get("w", ir.Value(name="w", shape=ir.Shape([4, 4])))
    assert may_overwrite(branch, state, branch.outputs[0], Branches()) is expected


@pytest.mark.parametrize(("then", "expected"), [("new = Sub(w, u)", True), ("new = Gather(u, i)", False)])
def test_what_was_moved_into_a_branch_may_fail(then: str, expected: bool) -> None:
    node = if_node(then)
    then_branch(node)
    assert not is_inserted(node)
    node.metadata_props[PASS_KEY] = "select-update"
    assert is_inserted(node) is expected
