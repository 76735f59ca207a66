"""The view of a graph with the nodes of bodies in their place: the ways of values across borders."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
import pytest

from graphscale.flow.flat_graph import FlatGraph
from tests.build import parse

pytestmark = pytest.mark.static

STEP = """
    <ir_version: 10, opset_import: ["" : 20]>
    step (float[4] x, float[3,4] rows, bool flag) => (float[4] y)
    <float[4] zeros = {0, 0, 0, 0}, int64 three = {3}, bool go = {1}> {
        first = Neg(x)
        last, all = Loop(three, go, first) <body = outer (int64 i, bool more, float[4] v)
            => (bool going, float[4] v_next, float[4] total)
            {
                going = Identity(more)
                row = Gather<axis = 0>(rows, i)
                total, parts = Scan(zeros, v) <num_scan_inputs = 1, body = inner
                    (float[4] s, float e) => (float[4] s_next, float p)
                    { s_next = Add(s, e) p = Identity(e) }>
                v_next = Mul(v, row)
            }>
        y = If(flag) <
            then_branch = one () => (float[4] a) { a = Exp(last) },
            else_branch = two () => (float[4] b) { b = Identity(x) }>
    }
"""


def names(values: Iterable[ir.Value]) -> list[str | None]:
    return [value.name for value in values]


@pytest.fixture
def graph() -> ir.Graph:
    return ir.from_proto(parse(STEP)).graph


def values_of(graph: ir.Graph) -> dict[str | None, ir.Value]:
    bodies = (graph, *graph.subgraphs())
    values = [value for body in bodies for value in (*body.inputs, *body.initializers.values())]
    return {value.name: value for value in (*values, *(v for node in graph.all_nodes() for v in node.outputs))}


def test_nodes_stand_at_the_place_of_their_body(graph: ir.Graph) -> None:
    flat = FlatGraph(graph)
    assert [node.outputs[0].name for node in flat.nodes] == [
        *("first", "going", "row", "s_next", "p", "total", "v_next", "last", "a", "b", "y")
    ]
    assert names(value for _, results, _ in flat.parts() for value in results) == [
        *("first", "i", "going", "row", "s", "s_next", "p", "total", "parts", "v_next", "last", "all", "a", "b", "y")
    ]


def test_values_go_across_borders(graph: ir.Graph) -> None:
    flat, values = FlatGraph(graph), values_of(graph)
    assert [flat.origin(values[name]).name for name in ("v", "e", "more")] == ["first", "first", "go"]
    # The sum begins with zeros, which are no state.
    assert [flat.is_source(values[name]) for name in ("s", "i", "x", "zeros")] == [False, False, True, True]
    assert [names(flat.above(values[name])) for name in ("last", "all", "total", "y", "v_next")] == [
        *(["v_next"], ["total"], ["s_next"], ["flag", "a", "b"], ["first", "row"])
    ]
    consumers = [node.outputs[0].name for node in flat.consumers(values["first"])]
    assert sorted(filter(None, consumers)) == ["p", "s_next", "v_next"]
    assert [node.outputs[0].name for node in flat.consumers(values["v_next"])] == ["last"]


def test_closed_bodies_are_operands_alone(graph: ir.Graph) -> None:
    flat, values = FlatGraph(graph, closed=True), values_of(graph)
    assert [node.outputs[0].name for node in flat.nodes] == ["first", "last", "y"]
    assert {*names(flat.above(values["last"]))} == {"three", "go", "first", "rows", "zeros"}
    assert [node.outputs[0].name for node in flat.consumers(values["rows"])] == ["last"]


def test_the_graph_is_left_alone(graph: ir.Graph) -> None:
    values = values_of(graph)
    before = {name: [*value.uses()] for name, value in values.items()}
    [*FlatGraph(graph).parts()]
    assert {name: [*value.uses()] for name, value in values.items()} == before
