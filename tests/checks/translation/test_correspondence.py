"""The correspondence of two graphs: free in inner names and in order, strict in all else."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.checks.translation.models import compare_models
from graphscale.graph.marks import PASS_KEY, WAS_FLOAT
from tests.build import parse
from tests.conftest import load_example

SPLIT = "a, b = Split(x) d = Sub(a, b) y = Neg(d)"
NOISE = "m = RandomNormalLike(x) n = RandomNormalLike(x) y = Add(m, n)"


def model(nodes: str, inputs: str = "float[4] x, float[4] u, float[4] v") -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]> g ({inputs}) => (float[N] y) {{ {nodes} }}'
    return ir.from_proto(parse(text))


def differences(found: str, expected: str) -> list[str]:
    return compare_models(model(found), model(expected)).differences


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (SPLIT, SPLIT.replace("a", "p").replace("d", "q")),
        ("i = Neg(v) h = Neg(u) y = Sub(h, i)", "h = Neg(u) i = Neg(v) y = Sub(h, i)"),
        (
            "y = Neg(x) a = com.microsoft.InPlaceAccumulator(u, x) b = com.microsoft.InPlaceAccumulator(v, x)",
            "b = com.microsoft.InPlaceAccumulator(v, x) a = com.microsoft.InPlaceAccumulator(u, x) y = Neg(x)",
        ),
    ],
    ids=["names", "order", "order-of-writes"],
)
def test_names_and_order_are_free(found: str, expected: str) -> None:
    assert differences(found, expected) == []


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (SPLIT.replace("Sub(a, b)", "Sub(b, a)"), SPLIT, "input 0 of"),
        (NOISE.replace("Add(m, n)", "Add(m, m)"), NOISE, "input 1 of"),
        (NOISE, NOISE.replace("Add(m, n)", "Add(m, m)"), "input 1 of"),
        ("c = Clip(x) y = Neg(c)", "y = Neg(x)", "(Clip) is neither the original's nor an inserted piece"),
        ("y = Neg(x) dead = Abs(x)", "y = Neg(x)", "(Abs) is neither the original's nor an inserted piece"),
        ("y = Neg(x)", "y = Neg(x) dead = Abs(x)", "(Abs) is missing"),
        ("y = Neg(u)", "y = Neg(x)", "is 'u', and should be 'x'"),
        (
            "y = Neg(x) a = com.microsoft.InPlaceAccumulator(u, x)",
            "y = Neg(x) a = com.microsoft.InPlaceAccumulator(v, x)",
            "is 'u', and should be 'v'",
        ),
        ("y = Softmax<axis = 0>(x)", "y = Softmax(x)", "'axis'"),
        ("y = LeakyRelu<alpha = 0.1>(x)", "y = LeakyRelu<alpha = 0.10000001>(x)", "'alpha'"),
    ],
    ids=str,
)
def test_all_else_is_a_difference(found: str, expected: str, words: str) -> None:
    assert words in "; ".join(differences(found, expected))


def test_branches_of_an_if_in_the_order_of_a_file() -> None:
    """Each branch is the one of its name, and equal nodes may be exchanged."""
    branches = [
        "then_branch = a () => (float[4] p) { p = Neg(x) }",
        "else_branch = b () => (float[4] q) { q = Abs(x) }",
    ]
    swapped = [text.replace("then", "THEN").replace("else", "then").replace("THEN", "else") for text in branches]
    inputs = "float[4] x, bool go"

    def choice(texts: list[str]) -> ir.Model:
        return model(f"y = If(go) <{', '.join(texts)}>", inputs)

    assert compare_models(choice(branches[::-1]), choice(branches)).differences == []
    assert compare_models(choice(swapped), choice(branches)).differences
    assert differences("a = Neg(x) c = Neg(x) y = Add(a, a)", "a = Neg(x) c = Neg(x) y = Add(a, c)") == []


@pytest.mark.parametrize("inputs", ["float x, float[4] u, float[4] v", "float[4] u, float[4] x, float[4] v"])
def test_an_interface_that_declares_less_or_is_in_another_order(inputs: str) -> None:
    assert compare_models(model("y = Neg(x)", inputs), model("y = Neg(x)")).differences


def constants(one: str, other: str) -> ir.Model:
    text = "p = Neg(@) q = Neg(~) y = Sub(p, q)".replace("@", one).replace("~", other)
    proto = parse(f'<ir_version: 10, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) {{ {text} }}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.zeros(4, np.float32), name) for name in (one, other))
    return ir.from_proto(proto)


def test_constants_of_one_content() -> None:
    """They may be renamed, but not exchanged: a step may write them."""
    expected, exchanged = constants("u", "v"), constants("u", "v")
    for node in exchanged.graph:
        node.name = ""
    assert compare_models(constants("k", "l"), expected).differences == []
    first, second, _ = exchanged.graph
    first.replace_input_with(0, exchanged.graph.initializers["v"])
    second.replace_input_with(0, exchanged.graph.initializers["u"])
    assert compare_models(exchanged, expected).differences


def test_an_input_without_its_shape() -> None:
    found = model("y = Neg(x)")
    found.graph.inputs[1].shape = None
    assert "'u' is " in compare_models(found, model("y = Neg(x)")).differences[0]


@pytest.mark.parametrize("key", [PASS_KEY, WAS_FLOAT, "graphscale.later"])
def test_a_mark_that_a_node_should_not_have(key: str) -> None:
    found, expected = model("[n] y = Neg(x)"), model("[n] y = Neg(x)")
    found.graph[0].metadata_props[key] = "autocast"
    (difference,) = compare_models(found, expected).differences
    assert f"is marked 'autocast' as '{key}', and should be without that mark" in difference
    expected.graph[0].metadata_props[key] = "check-finite"
    (difference,) = compare_models(found, expected).differences
    assert difference.endswith("and should be marked 'check-finite'")


def test_all_marks_may_be_gone_and_not_some() -> None:
    found, expected = (model("[n] t = Neg(x) [a] y = Abs(t)") for _ in range(2))
    for node in expected.graph:
        node.metadata_props.update({PASS_KEY: "unscale", "another tool's": "word"})
    assert compare_models(found, expected).differences == []
    found.graph[1].metadata_props[PASS_KEY] = "unscale"
    (difference,) = compare_models(found, expected).differences
    assert "(Neg) lacks the mark 'graphscale.pass', which others have" in difference


def test_not_a_number_has_its_bits() -> None:
    found, expected = (model("y = Elu <alpha = 2.0> (x)") for _ in range(2))
    for each, bits in ((found, 0x7FC00001), (expected, 0x7FC00000)):
        number = float(np.uint32(bits).view(np.float32))
        each.graph[0].attributes["alpha"] = ir.AttrFloat32("alpha", number)
    (difference,) = compare_models(found, expected).differences
    assert "is nan, and should be nan" in difference


def test_results_without_a_name_are_none_too_many() -> None:
    """ONNX Runtime may crash on them."""
    found, expected = (model("y = BatchNormalization(x, u, u, u, u)") for _ in range(2))
    found.graph[0].resize_outputs(3)
    for value in found.graph[0].outputs[1:]:
        value.name = ""
    assert "gives 3 values, and should give 1" in "; ".join(compare_models(found, expected).differences)


def test_a_graph_whose_inner_names_were_exchanged_is_proved_and_run() -> None:
    original = load_example("jax/mlp").model()
    scaled = ir.from_proto(gs.scale(original).model)
    ends = {value.name for value in (*scaled.graph.inputs, *scaled.graph.outputs)}
    groups: dict[str, list[ir.Node]] = {}
    for node in scaled.graph:
        if not ends.intersection(value.name for value in node.outputs):
            groups.setdefault(f"{node.op_type} {[str(value.shape) for value in node.outputs]}", []).append(node)
    for nodes in groups.values():
        names = [(node.name, [value.name for value in node.outputs]) for node in nodes]
        for node, (name, outputs) in zip(nodes, reversed(names), strict=True):
            node.name = name
            for value, output in zip(node.outputs, outputs, strict=True):
                value.name = output
    report = gs.verify(original, scaled, runs=1)
    assert report.verdict == "verified, exact", report.checks
