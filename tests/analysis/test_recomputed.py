"""Forward values that are computed twice."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.analysis.recomputed import find_recomputed_values
from graphscale.flow.flat_graph import FlatGraph
from tests.build import parse

pytestmark = pytest.mark.static


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("Tanh(x)", True),
        ("Dropout(x, half, flag)", False),
        ("RandomNormalLike(x)", False),
        (
            "If(flag) <then_branch = t () => (same) { same = Neg(x) }, else_branch = e () => (same) { same = Abs(x) }>",
            True,
        ),
    ],
    ids=["equal", "dropout", "noise", "bodies"],
)
def test_an_operator_that_runs_twice(operator: str, expected: bool) -> None:
    text = f"first = {operator} second = {operator}"
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        twice (float[4] x, bool flag) => (float[4] first, float[4] second) <float half = {{0.5}}> {{ {text} }}
    """)
    graph = ir.from_proto(model).graph
    first, second = graph.outputs
    parts = [*FlatGraph(graph).parts()]
    half = len(parts) // 2
    assert find_recomputed_values(parts[:half], parts[half:], {first}) == ({second: first} if expected else {})
