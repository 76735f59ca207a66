"""Dependences of each value of a training graph."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
import pytest

from graphscale.analysis.topology import Topology
from graphscale.analysis.training_result import Coverage
from tests.build import parse
from tests.expressions import nodes

pytestmark = pytest.mark.static

# Two layers, a quadratic loss, and a backward pass that computes the first layer's product again.
STEP = """
    h = x * w; c = h @ v
    d = c - t; s = d * d; loss = ReduceSum(s, keepdims=0)
    again = x * w
    dd = d * two
    turned = again.T; dv = turned @ dd
    v_turned = v.T; dh = dd @ v_turned
    dw = dh * x
    w_next = w - dw; v_next = v - dv
"""


@pytest.fixture
def topology() -> Topology:
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[2,4] x, float[2,4] w, float[4,4] v, float[2,4] t)
            => (float loss, float[2,4] w_next, float[4,4] v_next)
        <float two = {{2.0}}, float[2,4] d> {{ {nodes(STEP)} }}
    """)
    graph = ir.from_proto(model).graph
    return Topology(graph, graph.outputs[0])


def names(values: Iterable[ir.Value]) -> set[str | None]:
    return {value.name for value in values}


def test_forward_and_backward(topology: Topology) -> None:
    assert names(topology.forward) == {"x", "w", "v", "t", "h", "c", "d", "s", "loss", "again"}
    assert names(topology.tail) == {"c", "t", "d", "s", "loss"}
    backward = {"dd", "turned", "dv", "v_turned", "dh", "dw", "w_next", "v_next"}
    assert names(value for node in topology.backward for value in node.outputs) == backward
    assert names(value for node in topology.contractions for value in node.outputs) == {"c", "dv", "dh"}


def test_what_depends_on_what(topology: Topology) -> None:
    behind_the_loss = {"d", "s", "loss", "dd", "dv", "dh", "dw", "w_next", "v_next"}
    assert names(topology.activation_dependent) == {"h", "c", "again", "turned"} | behind_the_loss
    assert names(topology.tail_dependent) == {"c"} | behind_the_loss
    assert names(topology.targets) == {"t"}
    assert names(topology.target_dependent) == {"t"} | behind_the_loss
    assert names(topology.propagated) == {"dv", "dh", "dw", "w_next", "v_next"}


def test_how_deep_and_how_late(topology: Topology) -> None:
    results = (value for node in topology.nodes for value in node.outputs)
    values = {value.name: value for value in (*topology.graph.inputs, *results)}
    depths = {name: topology.depth(value) for name, value in values.items()}
    assert {name for name, depth in depths.items() if depth == 0} == {"x", "w", "v", "t", "v_turned"}
    assert {name for name, depth in depths.items() if depth == 1} == {"h", "again", "turned"}
    assert {name: depths[name] for name in ("c", "d", "s", "loss")} == {"c": 2, "d": 3, "s": 4, "loss": 5}
    assert {depths[name] for name in ("dd", "dv", "dh", "dw", "w_next")} == {3}
    # The last layer's weight enters behind the last contraction's operands, as a label does.
    label, weight = topology.late_inputs(values["t"]), topology.late_inputs(values["v"])
    assert label.bit_count() == weight.bit_count() == 1
    assert label != weight
    lates = {name: topology.late_inputs(value) for name, value in values.items()}
    assert {name for name, late in lates.items() if late == 0} == {"x", "w", "h", "again", "turned"}
    assert {name for name, late in lates.items() if late == weight} == {"v", "c", "v_turned"}
    assert {lates[name] for name in ("d", "s", "loss", "dd", "dv", "dh", "dw", "w_next")} == {label | weight}


def test_values_that_are_not_of_the_graph(topology: Topology) -> None:
    other = ir.Value(name="other")
    assert topology.depth(other) == topology.late_inputs(other) == 0
    assert other not in topology.forward


def test_coverage_of_one_half() -> None:
    nodes = tuple(ir.Node("", "MatMul", [], name=name) for name in ("covered", "missed"))
    coverage = Coverage(nodes, nodes[1:])
    assert (coverage.covered, coverage.total, coverage.share) == (1, 2, 0.5)
    (warning,) = coverage.warnings()
    assert warning.startswith("coverage is 50.0 %") and "missed" in warning
