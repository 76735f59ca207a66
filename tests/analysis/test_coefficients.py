"""The inputs in a value's sum, with their coefficients, and comparisons of types."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.analysis.updates import (
    Factors,
    average_factors,
    find_coefficients,
    find_held_initializers,
    is_constant_view,
    known_factors,
    possible_factors,
    same_type,
    shares,
)
from graphscale.operators import Trait
from tests.build import numbers, parse
from tests.expressions import nodes

pytestmark = pytest.mark.static

UNEVEN = numbers(12, "0.5").replace("}", "1}").replace(", 0.51", ", 1")
CONSTANTS = f"""
    float half = {{0.5}}, float one = {{1}}, float two = {{2}}, float[1] long = {{0.5}}, int64[1] axes = {{0}},
    float[4,3] halves = {numbers(12, "0.5")}, float[4,3] zeros = {numbers(12)}, float[4,3] mask = {UNEVEN},
    float tiny = {{0.001}}, float least = {{0.00001}}
"""


def graph_of(text: str, outputs: str = "float[4,3] out", constants: str = "") -> ir.Graph:
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "nobody" : 1]>
        sums (float[4,3] w, float[4,3] v, float[4,3] g, float s, int64 n, bool flag, int64[2,1] rows, float[2,3] new,
              float[3] mean, float[3] var, float[3] scale, float[3] bias, float[2,3,4] x) => ({outputs})
        <{CONSTANTS} {constants}> {{ {text} }}
    """)
    return ir.from_proto(model).graph


def coefficients(text: str, factors: Factors | None = None, index: int = 0, **options: object) -> dict[str, float]:
    """The coefficients of the inputs in an output of the last node."""
    graph = graph_of(text, "float out")
    states = {*graph.inputs, graph.initializers["zeros"]}
    found = find_coefficients(graph[-1].outputs[index], states, factors, **options)  # type: ignore[arg-type]
    return {value.name or "": coefficient for value, coefficient in found.items()}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("Sum(w, v)", {"w": 1, "v": 1}),
        ("w - v", {"w": 1, "v": -1}),
        ("Neg(w)", {"w": -1}),
        ("w * half", {"w": 0.5}),
        ("half * w", {"w": 0.5}),
        ("w * s", {}),
        ("w * v", {}),
        ("w / two", {"w": 0.5}),
        ("two / w", {}),
        ("w / s", {}),
        ("Pow(w, one)", {"w": 1}),
        ("Pow(w, two)", {}),
        ("Tanh(w)", {}),
        ("w + w * half", {"w": 1}),
        ("w * half + w", {"w": 1}),
        ("Reshape(w, axes) + v.T", {"w": 1, "v": 1}),
        ("Where(flag, w, v * half)", {"w": 1, "v": 0.5}),
        ("Clip(w, half, one)", {"w": 1}),
        ("Clip(w)", {"w": 1}),
        ("Gemm(v, g, w)", {"w": 1}),
        ("Gemm(v, g, w, beta=0.5)", {"w": 0.5}),
        ("Gemm(v, g)", {}),
        # Factors
        ("w / tiny * tiny", {"w": pytest.approx(1)}),
        ("w / least * least", {}),
        ("w * (one - half)", {"w": 0.5}),
        ("w * (half + one)", {"w": 1.5}),
        ("w * (half * half)", {"w": 0.25}),
        ("w * Reshape(half, axes)", {"w": 0.5}),
        ("w * long", {"w": 0.5}),
        ("w * halves", {"w": 0.5}),
        ("w * mask", {}),
        ("w * (one - s)", {"w": 1}),
        ("w * Exp(half)", {}),
    ],
)
def test_sums(expression: str, expected: dict[str, float]) -> None:
    assert coefficients(nodes(f"out = {expression}")) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("Floor(w)", {"w": 1}),
        ("Ceil(w)", {"w": 1}),
        ("Round(w)", {"w": 1}),
        ("Relu(w)", {"w": 1}),
        ("ScatterND(w, rows, new)", {"w": 1}),
        ("ScatterElements(w, rows, new)", {"w": 1}),
        ("ScatterND(zeros, rows, new)", {}),
        ("Tanh(w)", {}),
    ],
)
def test_moved_elements(expression: str, expected: dict[str, float]) -> None:
    text = nodes(f"out = {expression}")
    assert coefficients(text, through=Trait.MOVE) == expected
    assert coefficients(text) == {}


def test_operators_of_another_domain_are_no_sums() -> None:
    assert coefficients("out = nobody.Add(w, v)") == {}
    assert coefficients("out = nobody.Floor(w)", through=Trait.MOVE) == {}
    assert coefficients("sum = nobody.Add(half, half) out = Mul(w, sum)") == {}


def test_a_second_output_is_no_running_statistic() -> None:
    assert coefficients("most, places = TopK(w, axes)", index=1) == {}


@pytest.mark.parametrize(
    ("moment", "expected"), [("v", [{"n": 1}, {"v": 1}, {"mean": 1}, {"w": 1}, {}, {}]), ("", None)]
)
def test_states_of_an_optimizer(moment: str, expected: list[dict[str, float]] | None) -> None:
    """The gradient has no next value, nor has a copy of the weight that is not given."""
    text = f"n_, v_, mean_, w_, g_, half_ = com.microsoft.AdamOptimizer(s, n, w, g, {moment}, mean)"
    found = [coefficients(text, index=index) for index in range(6)]
    assert found == (expected or [{"n": 1}, {}, {"mean": 1}, {"w": 1}, {}, {}])


def test_a_small_share_is_that_of_a_gradient_with_decay() -> None:
    assert coefficients(nodes("out = w * (half * half * half * half * half)")) == {}
    assert coefficients(nodes("out = w * (half * half * half * half * half)"), least=0.0) == {"w": 0.03125}
    assert coefficients(nodes("out = w * least"), least=0.0) == {"w": pytest.approx(1e-5)}


def test_a_value_is_no_share_of_itself() -> None:
    graph = graph_of("out = Neg(w)")
    assert find_coefficients(graph.inputs[0], set(graph.inputs)) == {}


@pytest.mark.parametrize(("domain", "operator"), [("", "BatchNormalization"), ("com.microsoft.", "BatchNormInternal")])
@pytest.mark.parametrize(("momentum", "share"), [("", 0.9), (", momentum = 0.75", 0.75)])
def test_running_statistics(domain: str, operator: str, momentum: str, share: float) -> None:
    more = ", saved_mean, saved_var" if domain else ""
    text = f"y, mean_, var_{more} = {domain}{operator}<training_mode = 1{momentum}>(x, scale, bias, mean, var) "
    found = [coefficients(text, index=index) for index in range(3 + 2 * bool(domain))]
    assert found == [{}, {"mean": pytest.approx(share)}, {"var": pytest.approx(share)}, {}, {}][: len(found)]


def test_each_output_of_a_branch() -> None:
    text = """
        one_out, other = If(flag) <
            then_branch = t () => (float[4,3] a, float[4,3] b) { a = Identity(w) b = Mul(v, half) },
            else_branch = e () => (float[4,3] a2, float[4,3] b2) { a2 = Identity(g) b2 = Identity(g) }
        >
    """
    assert coefficients(text) == {"w": 1, "g": 1}
    assert coefficients(text, index=1) == {"v": 0.5, "g": 1}


SHARE, FILLED = "w * half", "w * halves"
UNKNOWN, BESIDE_ONE, COUNTED, COMPUTED = "w * s", "w * (one - s)", "w * Cast(n, to=1)", "w * Exp(g)"


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        (Factors(), {SHARE: 0.5, FILLED: 0.5, BESIDE_ONE: 1}),
        (shares(Factors()), {SHARE: 0.5, FILLED: 0.5, UNKNOWN: 1, BESIDE_ONE: 1}),
        (possible_factors(Factors()), {SHARE: 0.5, FILLED: 0.5, UNKNOWN: 1, BESIDE_ONE: 1, COUNTED: 1, COMPUTED: 1}),
        (known_factors(), {SHARE: 0.5}),
        (average_factors(), {SHARE: 0.5, UNKNOWN: 1, BESIDE_ONE: 1, COUNTED: 1}),
    ],
)
def test_factors(factors: Factors, expected: dict[str, float]) -> None:
    expressions = (SHARE, FILLED, UNKNOWN, BESIDE_ONE, COUNTED, COMPUTED)
    found = {each: coefficients(nodes(f"out = {each}"), factors).get("w") for each in expressions}
    assert {each: share for each, share in found.items() if share is not None} == expected


@pytest.mark.parametrize(
    ("output", "held"),
    [("float[4,3] out", {"mask"}), ("float[3,4] out", set()), ("float out", set())],
)
def test_initializers_that_outputs_hold(output: str, held: set[str]) -> None:
    graph = graph_of(nodes("out = mask - g * halves * two"), output)
    assert {value.name for value in find_held_initializers(graph, ())} == held


def test_a_small_share_of_an_initializer_is_not_held() -> None:
    assert not find_held_initializers(graph_of(nodes("out = mask * (half * half) - g")), ())


def test_initializers_of_unknown_type_may_be_held() -> None:
    graph = graph_of(nodes("out = mask - g"))
    graph.outputs[0].shape = None
    assert {value.name for value in find_held_initializers(graph, ())} == {"mask"}
    graph.outputs[0].shape = ir.Shape([5])
    graph.initializers["zeros"].shape = None
    assert {value.name for value in find_held_initializers(graph, ())} == {"mask"}


def test_constants_that_are_moved_at_most() -> None:
    text = nodes("out = Reshape(mask, axes); other = Neg(mask); view = Reshape(w, axes)")
    graph = graph_of(text, "float out, float other, float view, float[4,3] mask")
    assert [is_constant_view(value) for value in graph.outputs] == [True, False, False, False]


def test_types_are_the_same_as_far_as_they_are_known() -> None:
    def value(dtype: ir.DataType | None, shape: list[int] | None) -> ir.Value:
        return ir.Value(type=dtype and ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))

    single, half = ir.DataType.FLOAT, ir.DataType.FLOAT16
    assert same_type(value(single, [3]), value(single, [3]))
    assert same_type(value(None, [3]), value(single, None))
    assert same_type(value(single, None), value(None, [3]))
    assert not same_type(value(single, [3]), value(half, [3]))
    assert not same_type(value(single, [3]), value(single, [4]))
    assert not same_type(value(None, [3]), value(single, [4]))
