"""Sums of gradients that a host resets by a flag."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from graphscale.flow.resets import find_reset_flags, is_reset

pytestmark = pytest.mark.static

HEADER = '<ir_version: 10, opset_import: ["" : 20]>'
INPUTS = "bool[1] flag, float[2] sum, float[2] other, float[2] gradient, float limit"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("old = Where(flag, zero, sum)", True),
        ("view = Squeeze(flag) old = Where(view, zero, sum)", True),
        ("still = Not(flag) old = Where(still, zero, sum)", False),
        ("size = ReduceMax<keepdims = 0>(gradient) large = Greater(size, limit) old = Where(large, zero, sum)", False),
        ("old = Where(flag, one, sum)", False),
        ("old = Where(flag, sum, zero)", False),
        ("old = Where(flag, zero, other)", False),
        ("moved = Neg(sum) old = Where(flag, zero, moved)", False),
    ],
    ids=["fed", "viewed", "negated", "computed", "ones", "swapped", "another", "no state"],
)
def test_flags(nodes: str, expected: bool) -> None:
    """Zeros in place of the state, by a flag that is an input."""
    numbers = "<float zero = {0}, float one = {1}>"
    text = f"{HEADER} step ({INPUTS}) => (float[2] next) {numbers} {{ {nodes} next = Add(old, gradient) }}"
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    state = next(value for value in graph.inputs if value.name == "sum")
    old = next(value for node in graph for value in node.outputs if value.name == "old")
    assert is_reset(old, state) == expected
    assert find_reset_flags(graph) == ({"flag"} if expected or "other" in nodes else set())


def test_an_accumulator_has_a_flag_as_well() -> None:
    header = HEADER.replace("]>", ', "com.microsoft" : 1]>')
    node = "done = com.microsoft.InPlaceAccumulatorV2(sum, gradient, flag)"
    model = onnx.parser.parse_model(f"{header} step ({INPUTS}) => (bool[1] done) {{ {node} }}")
    assert find_reset_flags(ir.from_proto(model).graph) == {"flag"}
