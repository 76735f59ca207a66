"""The walks up and down a graph, compared with the recursive ones of their docstrings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import onnx_ir as ir
import pytest

from graphscale.graph.cones import descendants
from graphscale.graph.values import operands_of, values_by_name
from graphscale.graph.walks import ancestors, reach, source_of

pytestmark = pytest.mark.static


def random_graph(seed: int) -> ir.Graph:
    """Return a graph of sums, some of them in the branches of an If."""
    draw, known = random.Random(seed), [ir.val(name, ir.DataType.FLOAT, []) for name in "xyz"]
    graph = ir.Graph(known, [], nodes=[], opset_imports={"": 20})
    for i in range(30):
        node = ir.node("Sum", draw.sample(known, 2), name=f"n{i}")
        if draw.random() < 0.3:
            branch = ir.Graph([], node.outputs, nodes=[node])
            node = ir.node("If", [draw.choice(known)], attributes={"then_branch": branch}, name=f"if{i}")
        graph.append(node)
        known = [*known, *node.outputs]
    return graph


@pytest.mark.parametrize("seed", range(5))
def test_up_and_down(seed: int) -> None:
    graph = random_graph(seed)
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    stop = set(values[::5])

    def above(start: Iterable[ir.Value]) -> set[ir.Value]:
        going = [value.producer() for value in start if value not in stop]
        return {*start}.union(*(above(operands_of(node)) for node in going if node is not None))

    def below(start: Iterable[ir.Value]) -> set[ir.Value]:
        readers = [node for node in graph if not {*start}.isdisjoint(operands_of(node))]
        return {*start}.union(*(below(node.outputs) for node in readers))

    assert ancestors(values[-1:], stop=stop.__contains__) == above(values[-1:])
    assert descendants(graph, values[2:4]) == below(values[2:4])


def test_deep_graphs() -> None:
    graph = ir.Graph([ir.val("x")], [], nodes=[], opset_imports={"": 20})
    for _ in range(5000):
        graph.append(ir.node("Neg", [graph[-1].outputs[0] if len(graph) else graph.inputs[0]]))
    last = graph[-1].outputs[0]
    assert len(ancestors([last])) == len(descendants(graph, graph.inputs)) == 5001
    assert source_of(last, lambda node: node.inputs[0]) is values_by_name(graph)["x"]


def test_each_thing_once_and_the_nearest_first() -> None:
    steps: Callable[[int], list[int]] = {1: [2, 3], 2: [4], 3: [4, 1], 4: []}.__getitem__
    assert list(reach([1], steps)) == [1, 2, 3, 4]
