"""Degrees: several scales, half and negative powers, conflicts, zeros."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.flow.degree import ZERO, Degree, DegreeDomain, Element, Mixed, degree_of
from graphscale.flow.interpreter import Flow
from graphscale.graph.values import values_by_name
from tests.build import parse

pytestmark = pytest.mark.static

S, T = 1.0, 1024.0  # two scales, far apart


def degrees(nodes: str, seeds: dict[str, Degree]) -> tuple[dict[str, Element], list[str]]:
    """Return the element of each value that the nodes compute, and the outputs of the nodes in conflict."""
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        flow (float[3] x, float[3] y, float s, float t, int64 n, bool go) => (float[3] out)
            <float two = {{2}}, float zero = {{0}}> {{ {nodes} out = Identity(x) }}
    """)
    graph = ir.from_proto(model).graph
    values, domain = values_by_name(graph), DegreeDomain()
    flow = Flow(domain, {values[name]: degree for name, degree in seeds.items()})
    flow.visit_all(graph)
    found = {str(value.name): flow.of(value) for node in graph for value in node.outputs}
    return found, [str(node.outputs[0].name) for node in domain.conflicts]


def test_two_scales_cancel_one_by_one() -> None:
    found, conflicts = degrees(
        "a = Mul(x, s) b = Mul(a, t) c = Div(b, s) d = Div(c, t) e = Add(a, c)", {"s": S, "t": T}
    )
    assert (found["b"], found["c"], found["d"]) == (S + T, T, 0)
    assert isinstance(found["e"], Mixed) and conflicts == ["e"]


def test_half_and_negative_powers_cancel() -> None:
    nodes = """
        a = Mul(x, s) inverse = Reciprocal(s) b = Mul(a, inverse) root = Sqrt(s) half = Mul(x, root)
        c = Mul(half, root) square = Mul(s, s) d = Div(square, s) three = Pow(s, two) e = ReduceL2<keepdims = 0>(a)
        f = ReduceSumSquare<keepdims = 0>(a)
    """
    found, conflicts = degrees(nodes, {"s": 1})
    expected = {"b": 0, "half": 0.5, "c": 1, "d": 1, "inverse": -1, "three": 2, "e": 1, "f": 2}
    assert {name: found[name] for name in expected} == expected
    assert not conflicts


def test_a_conflict_is_the_top_and_a_diagnosis_goes_on() -> None:
    """Past the conflict the value has the degree of its larger operand, and no second conflict is found."""
    found, conflicts = degrees("a = Mul(x, s) b = Add(a, y) c = Exp(b) d = Div(b, s)", {"s": 1})
    assert isinstance(found["b"], Mixed) and degree_of(found["b"]) == 1
    assert conflicts == ["b", "c"]
    assert found["d"] == 0


def test_zeros_have_every_degree() -> None:
    found, conflicts = degrees("z = Mul(x, zero) a = Mul(y, s) b = Add(z, a) c = Add(a, zero)", {"s": 1})
    assert (found["b"], found["c"], conflicts) == (1, 1, [])


@pytest.mark.parametrize(("start", "is_mixed"), [("zero", False), ("two", True)])
def test_a_sum_over_rounds_begins_with_zeros(start: str, is_mixed: bool) -> None:
    nodes = f"""g = Mul(x, s) total = Loop(n, go, {start}) <body = l (int64 i, bool more, float[3] sum) =>
        (bool on, float[3] sum2) {{ on = Identity(more) sum2 = Add(sum, g) }}>"""
    found, conflicts = degrees(nodes, {"s": 1})
    assert isinstance(found["total"], Mixed) is is_mixed and degree_of(found["total"]) == 1
    assert bool(conflicts) is is_mixed


def test_a_scale_that_grows_in_a_loop_has_no_power() -> None:
    nodes = """grown = Loop(n, go, s) <body = l (int64 i, bool more, float p) =>
        (bool on, float p2) { on = Identity(more) p2 = Mul(p, s) }>"""
    assert isinstance(degrees(nodes, {"s": 1})[0]["grown"], Mixed)


def test_a_branch_of_zeros_has_the_degree_of_the_other() -> None:
    nodes = """g = Mul(x, s) h = If(go) <then_branch = a () => (float[3] p) { p = Neg(g) },
        else_branch = b () => (float[3] q) { q = Mul(x, zero) }>"""
    assert degrees(nodes, {"s": 1}) == ({**degrees(nodes, {"s": 1})[0], "h": 1}, [])


def test_zero_is_below_every_power() -> None:
    domain = DegreeDomain()
    node = ir.node("If", [ir.val("go")])
    assert domain.join(node, [ZERO, ZERO]) is ZERO
    assert domain.join(node, [ZERO, S]) == domain.join(node, [S, ZERO]) == S
    mixed = domain.join(node, [1, 0])
    assert isinstance(mixed, Mixed) and domain.join(node, [mixed, 1]) is mixed is not domain.join(node, [1, 1])
