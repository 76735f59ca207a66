"""Values by number, sets of them as bytes, and the ancestors of a value, also from within a subgraph."""

from __future__ import annotations

from collections.abc import Iterable

import onnx.parser
import onnx_ir as ir
import pytest

from graphscale.analysis.topology import Topology
from graphscale.errors import ModelFileError
from graphscale.graph.numbering import Numbering, ValueSet
from graphscale.graph.order import check_order
from graphscale.graph.values import operands_of

pytestmark = pytest.mark.static

STEP = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[4] x, float[4] w, bool first) => (float[4] y, float[2] low, float[2] high)
<float[4] w = {1, 2, 3, 4}, float[4] v = {1, 1, 1, 1}>
{
   product = Mul(x, w)
   low, high = Split <num_outputs = 2> (product)
   y = If (first) <
      then_branch = one () => (float[4] a) { inner = Abs(product)  a = Exp(inner) },
      else_branch = two () => (float[4] b) { b = Identity(v) }
   >
}
"""


@pytest.fixture
def graph() -> ir.Graph:
    return ir.from_proto(onnx.parser.parse_model(STEP)).graph


def numbered(graph: ir.Graph) -> Numbering:
    return Numbering(graph, ((node, node.outputs, operands_of(node)) for node in graph))


def names(values: Iterable[ir.Value]) -> list[str | None]:
    return [value.name for value in values]


def test_ancestors(graph: ir.Graph) -> None:
    topology = Topology(graph, graph.outputs[0])
    values = {value.name: value for node in graph.all_nodes() for value in node.outputs}
    assert {*names(topology.ancestors([values["a"]]))} == {"a", "inner", "product", "x", "w"}
    assert {*names(topology.ancestors([values["y"]]))} >= {"y", "product", "x", "w", "v", "first"}
    for stop, reached in (("Mul", {"a", "inner", "product"}), ("Abs", {"a", "inner"})):
        found = topology.ancestors([values["a"]], stop=lambda node: node.op_type == stop)  # noqa: B023
        assert {*names(found)} == reached


def test_numbers_are_in_graph_order(graph: ir.Graph) -> None:
    numbering = numbered(graph)
    assert numbering.ordered
    assert names(numbering.values) == ["x", "w", "first", "v", "product", "low", "high", "y"]
    assert [numbering.numbers[value] for value in numbering.values] == list(range(8))
    # A body's captures come last.
    assert [row[1:] for row in numbering.rows] == [(4, 5, (0, 1)), (5, 7, (4,)), (7, 8, (2, 4, 3))]


def test_what_stands_too_late_is_seen(graph: ir.Graph) -> None:
    product = graph[0]
    graph.remove(product)
    graph.append(product)
    assert not numbered(graph).ordered
    with pytest.raises(ModelFileError, match="before it is computed"):
        Topology(graph, graph.outputs[0])


def test_an_input_of_another_graph_is_taken_for_a_constant(graph: ir.Graph) -> None:
    """No model can be written like that; what onnx_ir objects say is that the value needs no node."""
    foreign = ir.Value(name="foreign", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4]))
    ir.Graph([foreign], [], nodes=[])
    node = ir.node("Add", [foreign, graph.inputs[0]], outputs=[ir.Value(name="sum")])
    graph.insert_before(graph[0], node)
    numbering = numbered(graph)
    assert numbering.ordered
    expected = ["x", "w", "first", "v", "foreign", "sum", "product", "low", "high", "y"]
    assert names(numbering.values) == expected
    assert numbering.rows[0][1:] == (5, 6, (4, 0))
    assert [numbering.numbers[value] for value in numbering.values] == list(range(10))
    assert foreign in Topology(graph, node.outputs[0]).forward


def test_an_output_that_nothing_computes_is_seen(graph: ir.Graph) -> None:
    graph.outputs[1] = ir.Value(name="nowhere")
    assert not numbered(graph).ordered
    with pytest.raises(ModelFileError, match="'nowhere' of the graph is computed by no node"):
        Topology(graph, graph.outputs[0])
    graph.outputs[1] = graph.inputs[0]
    assert numbered(graph).ordered
    check_order(graph)


def test_a_set_of_values(graph: ir.Graph) -> None:
    numbering = numbered(graph)
    values = {value.name: value for value in numbering.values}
    x, low, high, y = (values[name] for name in ("x", "low", "high", "y"))
    inner = next(value for node in graph.all_nodes() for value in node.outputs if value.name == "a")
    some = ValueSet(numbering, numbering.marks([high, x]))
    assert list(some) == [x, high]
    assert some == {x, high}
    assert (len(some), x in some, y in some, inner in some, None in some) == (2, True, False, False, False)
    assert type(some & {high, low}) is set
    assert (some & {high, low}, some | {low}) == ({high}, {x, low, high})
    assert (some.isdisjoint([low, y]), some.isdisjoint([low, high])) == (True, False)
    some.include([y])
    some.marks[numbering.numbers[x]] = 0
    assert some == {high, y}
