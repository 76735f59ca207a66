"""Terms: equal computations have one number, others differ."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.flow.interpreter import Flow
from graphscale.flow.term import TermDomain
from graphscale.graph.values import values_by_name
from tests.build import parse

pytestmark = pytest.mark.static

CASES = {
    "the same": ("u = Add(x, y) v = Add(x, y)", True),
    "a sum in another order": ("u = Add(x, y) v = Add(y, x)", True),
    "a difference in another order": ("u = Sub(x, y) v = Sub(y, x)", False),
    "another operator": ("u = Add(x, y) v = Sub(x, y)", False),
    "another attribute": ("u = Softmax<axis = 0>(x) v = Softmax<axis = 1>(x)", False),
    "another constant": ("u = Add(x, one) v = Add(x, two)", False),
    "an equal constant": ("u = Add(x, one) v = Add(x, again)", True),
    "an equal constant of a node": ("c = Constant<value_float = 1.0>() u = Add(x, one) v = Add(x, c)", True),
    "through several nodes": ("a = Exp(x) u = Neg(a) b = Exp(x) v = Neg(b)", True),
    "random numbers": ("u = RandomNormalLike(x) v = RandomNormalLike(x)", False),
    "a function of one random number": ("r = RandomNormalLike(x) u = Neg(r) v = Neg(r)", True),
    "a random number and a part of it": (
        "r = RandomNormalLike(x) s = RandomNormalLike(x) u = Neg(r) v = Neg(s)",
        False,
    ),
    "equal branches": (
        """u = If(go) <then_branch = a () => (float[2,3] p) { p = Neg(x) },
            else_branch = b () => (float[2,3] q) { q = Neg(x) }> v = Neg(x)""",
        True,
    ),
    "branches that differ": (
        """u = If(go) <then_branch = a () => (float[2,3] p) { p = Neg(x) },
            else_branch = b () => (float[2,3] q) { q = Neg(y) }> v = Neg(x)""",
        False,
    ),
    "a value that no round changes": (
        """u = Loop(n, go, x) <body = l (int64 i, bool more, float[2,3] p) => (bool on, float[2,3] p2)
            { on = Identity(more) p2 = Neg(x) }> v = Neg(x)""",
        False,
    ),
    "outputs of one node": ("u, v = Split<num_outputs = 2, axis = 0>(x)", False),
}


@pytest.mark.parametrize(("nodes", "expected"), CASES.values(), ids=CASES)
def test_equal_terms(nodes: str, expected: bool) -> None:
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        terms (float[2,3] x, float[2,3] y, int64 n, bool go) => (float[2,3] u, float[2,3] v)
            <float one = {{1}}, float again = {{1}}, float two = {{2}}> {{ {nodes} }}
    """)
    graph = ir.from_proto(model).graph
    flow, values = Flow(TermDomain()), values_by_name(graph)
    for node in graph:
        flow.visit(node)
    first, second = flow.of(values["u"]), flow.of(values["v"])
    assert (first == second and first is not None) is expected


def test_one_table_for_two_graphs() -> None:
    """Sources of two graphs are one where the caller says so; a closed table gives no new terms."""
    domain, outputs = TermDomain(), []
    source = ir.val("x")
    for nodes in ("u = Exp(x)", "u = Exp(x)", "u = Log(x)"):
        graph = ir.from_proto(
            parse(f"""<ir_version: 10, opset_import: ["" : 20]> g (float x) => (float u) {{ {nodes} }}""")
        ).graph
        flow = Flow(domain, {graph.inputs[0]: domain.source(source)})
        for node in graph:
            flow.visit(node)
        outputs.append(flow.of(graph.outputs[0]))
        domain.is_closed = True
    assert outputs[0] is not None and outputs == [outputs[0], outputs[0], None]
