"""Holders of states, in the search of moved weights."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.analysis.updates import Factors, find_holders
from tests.build import parse

pytestmark = pytest.mark.static

BRANCHES = """out = If (flag) <
    then_branch = kept () => (float[4,4] a) { a = Identity(w) },
    else_branch = moved () => (float[4,4] b) { b = Sub(w, u) }
>"""


@pytest.mark.parametrize(
    ("node", "holds"),
    [
        pytest.param("out = Sub(w, u)", True, id="difference"),
        pytest.param("out = Gemm(u, u, w)", True, id="update in a Gemm"),
        pytest.param(BRANCHES, True, id="update in a branch"),
        pytest.param("out = Add(more, w)", False, id="broadcast"),
        pytest.param("out = MatMul(w, u)", False, id="product"),
    ],
)
def test_holders(node: str, holds: bool) -> None:
    size = "2,4,4" if "more" in node else "4,4"
    graph = ir.from_proto(
        parse(f"""<ir_version: 10, opset_import: ["" : 20]>
            g (float[4,4] w, float[4,4] u, float[2,4,4] more, bool flag) => (float[{size}] out)
            {{ {node} }}""")
    ).graph
    (state, *_), (value,) = graph.inputs, graph.outputs
    assert (value in find_holders([state], graph, Factors())) is holds
