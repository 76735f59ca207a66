"""Overflows that reach a tested value, or do not: by the domain, and by running the nodes at a scale that overflows."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphscale.analysis.proof import find_untested, scale_degrees
from graphscale.flow.survival import Loss, find_lost
from graphscale.graph.values import node_name, values_by_name
from graphscale.operators import Fate
from tests.counting import calls

GRAPH = """
<ir_version: 10, opset_import: ["" : {opset}]>
step (float[2,4] x, float[2,4] y, bool forward, float scale) => ({outputs})
<float zero = {{0}}, float one = {{1}}, int64[1] first = {{0}}, int64[1] second = {{1}}, int64[1] axis = {{1}},
 float[2,4] far = {{-3, -3, 0, 0, 3, 3, 0, 0}},
 float[4,3] v = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}, int64 rounds = {{2}}, bool always = {{1}}>
{{
   p = Mul(x, scale)
   q = Mul(far, scale)
   one_far = Add(p, q)
   two_far = Add(one_far, q)
   half_back = Sub(two_far, q)
   scaled = Sub(half_back, q)
   {nodes}
   dw = Div(g, scale)
}}
"""
BRANCH = (
    "g = If(forward) <then_branch = a () => (float[2,4] o) {{ o = {}(scaled) }}, "
    "else_branch = b () => (float[2,4] other) {{ other = Identity(scaled) }}>"
)
LOOP = (
    "start = Mul(y, scale) g = Loop(rounds, always, start) "
    "<body = a (int64 n, bool go, float[2,4] c) => (bool going, float[2,4] d) "
    "{{ going = Identity(go) e = {}(scaled) d = Add(c, e) }}>"
)
CARRIED = (
    "g = Loop(rounds, always, scaled) <body = a (int64 n, bool go, float[2,4] c) => (bool going, float[2,4] d) "
    "{{ going = Identity(go) d = {}(c) }}>"
)
KEPT = {
    "a view": "g = Reshape(scaled, shape_of_it)".replace("shape_of_it", "flat"),
    "float16": "half = Cast<to = 10>(scaled) g = Cast<to = 1>(half)",
    "a sum": "g = ReduceSum<keepdims = 0>(scaled)",
    "a difference": "mean = ReduceMean<keepdims = 1>(scaled) g = Sub(scaled, mean)",
    "a contraction": "g = MatMul(scaled, v)",
    "a product with a mask": "mask = Greater(y, zero) number = Cast<to = 1>(mask) g = Mul(scaled, number)",
    "a selection by a forward value": "mask = Greater(y, zero) g = Where(mask, scaled, zero)",
    "a part": "g = Slice(scaled, first, second, axis)",
    "gathered": "g = Gather<axis = 1>(scaled, first)",
    "its size": "g = Abs(scaled)",
    "a leaky slope": "g = LeakyRelu<alpha = 0.5>(scaled)",
    "the bound of a size": "size = Abs(scaled) half = Mul(size, size) root = Sqrt(half) g = Identity(root)",
    "a branch": BRANCH.format("Neg"),
    "a loop that captures it": LOOP.format("Neg"),
    "a loop that carries it": CARRIED.format("Neg"),
    "nothing but its shape": "shape = Shape(scaled) filled = ConstantOfShape(shape) g = Mul(filled, scale)",
}
# With the operator that loses it.
LOST = {
    "Relu": ("Relu", "g = Relu(scaled)"),
    "Max": ("Max", "g = Max(scaled, zero)"),
    "Min": ("Min", "g = Min(scaled, zero)"),
    "a lower bound": ("Clip", "g = Clip(scaled, zero)"),
    "no bound": ("Clip", "g = Clip(scaled)"),
    "two bounds": ("Clip", "top = Mul(scale, one) low = Neg(top) g = Clip(scaled, low, top)"),
    "float8": ("Cast", "low = Cast<to = 17>(scaled) g = Cast<to = 1>(low)"),
    "a divisor": ("Div", "r = Div(y, scaled) s = Mul(r, scale) g = Mul(s, scale)"),
    "a comparison": ("Less", "mask = Less(scaled, scale) g = Where(mask, y, scaled)"),
    "its place": (
        "ArgMax",
        "place = ArgMax<axis = 1>(scaled) part = GatherElements<axis = 1>(y, place) g = Mul(part, scale)",
    ),
    "the greatest": ("ReduceMax", "g = ReduceMax(scaled, axis)"),
    "a flag as a number": ("IsInf", "flag = IsInf(scaled) number = Cast<to = 1>(flag) g = Mul(number, scale)"),
    "a branch": ("Relu", BRANCH.format("Relu")),
    "a branch by a gradient": (
        "Less",
        "sum = ReduceSum<keepdims = 0>(scaled) small = Less(sum, scale) "
        "g = If(small) <then_branch = a () => (float[2,4] o) { o = Mul(y, scale) }, "
        "else_branch = b () => (float[2,4] other) { other = Mul(x, scale) }>",
    ),
    "a loop that captures it": ("Relu", LOOP.format("Relu")),
    "a loop that carries it": ("Relu", CARRIED.format("Relu")),
}


def model(nodes: str, opset: int = 20) -> onnx.ModelProto:
    text = GRAPH.format(nodes=nodes, opset=opset, outputs="float dw")
    loaded = onnx.parser.parse_model(text.replace("int64 rounds", "int64[1] flat = {-1}, int64 rounds"))
    loaded.graph.output[0].type.tensor_type.ClearField("shape")
    return loaded


def lost(loaded: onnx.ModelProto, *checked: str) -> dict[str | None, Loss]:
    graph = ir.from_proto(loaded).graph
    values = values_by_name(graph)
    found = find_lost(tuple(graph), values["scale"], [values[name] for name in checked or ("dw",)])
    return {value.name: loss for value, loss in found.items()}


def overflows_wrongly(loaded: onnx.ModelProto) -> bool:
    """Return whether a scale that overflows gives a finite number that is not that of the scale 1."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(loaded.SerializeToString(), options, providers=["CPUExecutionProvider"])
    # A partial sum overflows, with a sign that need not be that of the sum.
    x = np.array([[1.5, -1, 1, 0.5], [-1.5, 1, -1, -0.5]], np.float32)
    y = np.array([[1, -1, 2, -2], [0.5, 3, -3, 1]], np.float32)
    runs = []
    for scale in (1, 2.0**126):
        feeds = {"x": x, "y": y, "forward": np.array(True), "scale": np.array(scale, np.float32)}
        (result,) = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
        runs.append(result)
    right, result = runs
    return bool((np.isfinite(result) & ~np.isclose(result, right, rtol=1e-2)).any())


@pytest.mark.parametrize("name", KEPT)
def test_an_overflow_survives(name: str) -> None:
    loaded = model(KEPT[name])
    assert lost(loaded) == {}
    assert not overflows_wrongly(loaded)


@pytest.mark.parametrize("name", LOST)
def test_an_overflow_is_lost(name: str) -> None:
    operator, nodes = LOST[name]
    loaded = model(nodes)
    assert lost(loaded)["dw"].node.op_type == operator
    assert overflows_wrongly(loaded)


def test_bounds_in_attributes() -> None:
    for bounds in ("", "<min = 0.0>", "<max = 1.0>", "<min = -1.0, max = 1.0>"):
        assert lost(model(f"g = Clip{bounds}(scaled)", 10))["dw"].kinds == Fate.PLUS | Fate.MINUS


def test_a_value_that_is_tested_before_its_bound() -> None:
    loaded = model("u = Div(scaled, scale) bounded = Clip(u, zero, one) g = Mul(bounded, scale)")
    assert set(lost(loaded)) == {"dw"}
    assert lost(loaded, "u", "dw") == {}


def test_the_first_node_and_what_it_loses() -> None:
    found = lost(model("[halved] h = Relu(scaled) g = Tanh(h)"))["dw"]
    assert found.value is not None
    assert (node_name(found.node), found.value.name, found.kinds) == ("halved", "scaled", Fate.MINUS)
    assert str(found) == "Relu of node 'halved' may make minus infinity in 'scaled' finite"


def test_an_unknown_operator_loses_everything() -> None:
    loaded = model("g = Relu(scaled)")
    loaded.graph.node[6].domain, loaded.graph.node[6].op_type = "custom", "Strange"
    assert lost(loaded)["dw"].kinds == Fate.PLUS | Fate.MINUS | Fate.NAN


def test_a_tested_result_of_a_branch() -> None:
    loaded = model(BRANCH.format("Relu"))
    assert lost(loaded, "g")["g"].node.op_type == "Relu"
    loaded = model(BRANCH.format("Neg").replace("g = If", "chosen = If") + " g = Relu(chosen)")
    assert lost(loaded, "chosen", "dw") == {}
    assert set(lost(loaded)) == {"dw"}


def test_bodies_of_an_unknown_operator_lose_everything() -> None:
    loaded = model(BRANCH.format("Neg"))
    loaded.graph.node[6].domain, loaded.graph.node[6].op_type = "custom", "Choose"
    assert lost(loaded)["dw"].kinds == Fate.PLUS | Fate.MINUS | Fate.NAN


def test_the_scale_itself_does_not_overflow() -> None:
    assert lost(model("inverse = Reciprocal(scale) u = Mul(scaled, inverse) g = Mul(u, scale)")) == {}


TRIPLED = "g = Loop(rounds, always, scaled) <body = a (int64 n, bool go, float[2,4] c) => (bool going, float[2,4] d) "


@pytest.mark.parametrize(
    ("nodes", "is_lost"),
    [
        ("g = Relu(scaled)", False),
        ("n = Neg(scaled) g = Relu(n)", True),  # any operator may overflow
        ("m = MatMul(scaled, v) g = Relu(m)", True),
        ("m = MatMul(scaled, v) g = Neg(m)", False),
        (TRIPLED + "{ going = Identity(go) t = Constant<value_float = 3.0>() m = Mul(c, t) d = Relu(m) }>", True),
    ],
)
def test_what_follows_from_a_tested_multiple_may_overflow(nodes: str, is_lost: bool) -> None:
    assert ("dw" in lost(model(nodes), "scaled", "dw")) is is_lost


def test_the_proof_names_value_and_node() -> None:
    graph = ir.from_proto(model("[bound] g = Clip(scaled, zero)")).graph
    values = values_by_name(graph)
    degrees, _ = scale_degrees(graph, values["scale"])

    def faults(*checked: str) -> list[str]:
        return [*find_untested(graph, values["scale"], {values[name] for name in checked}, (), degrees)]

    (fault,) = faults("dw")
    assert "finite check of 'dw': Clip of node 'bound' may make infinity and minus infinity" in fault
    assert not faults("scaled", "dw")


def test_the_time_is_linear() -> None:
    """Ten times as many nodes, in a loop, take about ten times as many calls."""

    def cost(count: int) -> int:
        chain = "".join(f" c{i + 1} = Neg(c{i})" for i in range(count))
        nodes = CARRIED.format("Neg").replace("d = Neg(c)", f"c0 = Neg(c){chain} d = Relu(c{count})")
        graph = ir.from_proto(model(nodes)).graph
        values = values_by_name(graph)
        assert find_lost(tuple(graph), values["scale"], [values["dw"]])
        return calls(lambda: find_lost(tuple(graph), values["scale"], [values["dw"]]))

    assert cost(3000) < 12 * cost(300)
