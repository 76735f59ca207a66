"""The values that each output of an If, a Loop or a Scan depends on."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.flow.support import depends_on, reach
from tests.build import parse

pytestmark = pytest.mark.static

IF = """If(flag) <then_branch = t () => (float p, float q) { p = Neg(a) q = Neg(b) },
    else_branch = e () => (float p2, float q2) { p2 = Neg(c) q2 = Neg(b) }>"""
NESTED = f"""If(flag) <then_branch = o () => (float r, float s) {{ r, s = {IF.replace("(flag)", "(inner)")} }},
    else_branch = n () => (float r2, float s2) {{ r2 = Neg(d) s2 = Neg(d) }}>"""
LOOP = """Loop(count, flag, a, b) <body = l (int64 i, bool more, float p, float q) => (bool on, float p2, float q2)
    { on = Greater(c, d) p2 = Add(p, q) q2 = Neg(q) }>"""
FOLLOWING = """Loop(count, flag, a) <body = l (int64 i, bool more, float p) => (bool on, float p2)
    { on = Greater(c, d) p2 = Neg(b) }>"""
ENDLESS = FOLLOWING.replace("(count,", "(,")
CAPTURE = (
    """If(flag) <then_branch = t () => (float p) { p = Neg(e) }, else_branch = e () => (float p2) { p2 = Neg(c) }>"""
)
MAP = "SequenceMap(a, b) <body = m (float p, float q) => (float p2) { p2 = Mul(p, c) }>"
SCAN = """Scan(a, b, xs, ys) <num_scan_inputs = 2, body = s (float p, float q, float x, float y)
    => (float p2, float q2, float z) { p2 = Add(p, x) q2 = Add(q, y) z = Mul(q, c) }>"""
CASES = {
    "If, first": ("u, v", IF, 0, "flag a c"),
    "If, second": ("u, v", IF, 1, "flag b"),
    "If in If": ("u, v", NESTED, 1, "flag inner b d"),
    "Loop, another value in the round before": ("u, v", LOOP, 0, "count flag a b c d"),
    "Loop, itself": ("u, v", LOOP, 1, "count flag b c d"),
    "Loop, the value at first": ("u", FOLLOWING, 0, "count flag a b c d"),
    "Loop without a number of rounds": ("u", ENDLESS, 0, "flag a b c d"),
    "If, a value that is computed around it": ("u", CAPTURE, 0, "flag c e"),
    "Scan, itself": ("u, v, w", SCAN, 0, "a xs"),
    "Scan, what is stacked": ("u, v, w", SCAN, 2, "b ys c"),
}


def sources(outputs: str, node: str, index: int) -> set[str | None]:
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        flow (bool flag, bool inner, int64 count, float a, float b, float c, float d, float[3] xs, float[3] ys)
            => (float u) {{ e = Neg(d) {outputs} = {node} }}
    """)
    graph = ir.from_proto(model).graph
    value, around = graph[-1].outputs[index], (*graph.inputs, *graph[0].outputs)
    found = {each.name for each in around if value in reach([graph[-1]], [each])}
    above = found | ({"d"} if "e" in found else set())
    assert above == {each.name for each in around if depends_on(value, each, graph)}
    return found


@pytest.mark.parametrize(("outputs", "node", "index", "expected"), CASES.values(), ids=CASES)
def test_sources(outputs: str, node: str, index: int, expected: str) -> None:
    assert sources(outputs, node, index) == set(expected.split())


def test_any_other_operator_depends_on_its_inputs_and_all_that_its_body_reads() -> None:
    assert sources("u", MAP, 0) >= {"a", "b", "c"}
