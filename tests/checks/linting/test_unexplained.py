"""State added to a scaled graph that neither the metadata nor the roles explain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphscale as gs
from tests.checks.linting.hand import HALF, changed, codes
from tests.conftest import MODELS

pytestmark = pytest.mark.static

NEXT, SHAPE = "fc1.bias.next", [32]
OTHERS = "i1 = Constant<value_int = 1>() i7 = Constant<value_int = 7>() half = Constant<value_float = 0.5>()"
LIKE_A_BIAS = f"float[{SHAPE[0]}]"
# The nodes that compute `st_next`, and its type.
OUTPUTS = {
    "an average": ("k = Mul(st, half) p = Mul(fc1_bias, half) st_next = Add(k, p)", LIKE_A_BIAS),
    "an average with a small share": ("k = Mul(st, tenth) p = Mul(fc1_bias, half) st_next = Add(k, p)", LIKE_A_BIAS),
    "a guarded sum": ("k = Add(st, fc1_bias) st_next = Where(all_finite, k, st)", LIKE_A_BIAS),
    "a count": ("st_next = Add(st, i1)", "int64"),
    "a count that begins anew": ("k = Add(st, i1) st_next = Mod(k, i7)", "int64"),
    "a flag": ("st_next = Not(st)", "bool"),
    "the best loss": ("st_next = Min(loss, st)", "float"),
    "the last loss": ("st_next = Identity(loss)", "float"),
    "a recurrence": ("st_next = Tanh(st)", "float[3]"),
    "without a shape": ("st_next = Relu(st)", "float[N]"),
    "in another type": ("k = Cast<to = 7>(st) n = Cast<to = 1>(k) st_next = Add(n, half)", "float"),
    "a queue": (
        "flat = Constant<value_ints = [1]>() k = Reshape(loss, flat) q = Concat<axis = 0>(st, k)"
        "end = Constant<value_ints = [9]>() st_next = Slice(q, flat, end)",
        "float[5]",
    ),
    "random numbers": ("k = RandomUniformLike(st) st_next = Add(st, k)", "float[2]"),
    "in a branch": (
        "st_next = If (all_finite) <then_branch = a () => (float[3] o1) { o1 = Add(st, st) }, "
        "else_branch = b () => (float[3] o2) { o2 = Identity(st) }>",
        "float[3]",
    ),
    "in a loop": (
        "always = Constant<value = bool {1}>() st_next = Loop(i7, always, st) <body = l (int64 n, bool go, float[3] c) "
        "=> (bool go2, float[3] c2) { go2 = Identity(go) c2 = Add(c, c) }>",
        "float[3]",
    ),
}


def add(model: onnx.ModelProto, text: str, inputs: str, outputs: str, stored: Sequence[onnx.TensorProto] = ()) -> None:
    """Add nodes, inputs, outputs and initializers to a graph."""
    names = "fc1_bias = Identity(fc1b)" if "fc1_bias" in text else ""
    body = f"extra ({inputs}) => ({outputs}) {{ {OTHERS} tenth = Constant<value_float = 0.1>() {names} {text} }}"
    graph = onnx.parser.parse_graph(body)
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = NEXT if name == "fc1b" else name
    model.graph.node.extend(graph.node)
    model.graph.input.extend(graph.input)
    model.graph.output.extend(graph.output)
    model.graph.initializer.extend(stored)


def scaled(target: str = "onnx") -> onnx.ModelProto:
    model = gs.scale(onnx.load(MODELS / "pytorch" / "mlp_momentum.onnx"), target=target).model
    assert isinstance(model, onnx.ModelProto) and gs.lint(model).findings == ()
    return model


def unexplained(model: onnx.ModelProto) -> list[str | None]:
    return [finding.value for finding in gs.lint(model).findings if finding.code == "GS407"]


@pytest.mark.parametrize("is_stored", [False, True], ids=["fed", "stored"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_a_next_value(name: str, is_stored: bool) -> None:
    text, kind = OUTPUTS[name]
    stored = []
    if is_stored and "N" not in kind:
        value = onnx.parser.parse_graph(f"g ({kind} st) => () {{ }}").input[0].type.tensor_type
        shape = [d.dim_value for d in value.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.elem_type)
        stored = [numpy_helper.from_array(np.zeros(shape, dtype), "st")]
    model = scaled()
    add(model, text, f"{kind} st", f"{kind} st_next", stored)
    assert unexplained(model) == ["st"]


def test_a_batch_becomes_state() -> None:
    """Its role is known, and says that no output is its next value."""
    model = scaled()
    (x,) = (value for value in model.graph.input if value.name == "x")
    model.graph.node.append(helper.make_node("Identity", ["x"], ["x_next"]))
    model.graph.output.append(helper.make_value_info("x_next", x.type))
    assert unexplained(model) == ["x"]


def test_in_a_function() -> None:
    model = scaled()
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    model.functions.append(helper.make_function("mine", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 20)]))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    add(model, "", "float[3] st", "float[3] st_next")
    model.graph.node.append(helper.make_node("Twice", ["st"], ["st_next"], domain="mine"))
    assert unexplained(model) == ["st"]


def write(*operands: str, result: str = "written", kind: str = "InPlaceAccumulatorV2") -> onnx.NodeProto:
    return helper.make_node(kind, operands, [result], domain="com.microsoft")


def choice(node: onnx.NodeProto) -> onnx.NodeProto:
    """Do something in one branch of an If."""
    result = helper.make_tensor_value_info(node.output[0], TensorProto.BOOL, [1])
    other = helper.make_tensor_value_info("other", TensorProto.BOOL, [1])
    copy = helper.make_node("Identity", ["graphscale/overwrite"], ["other"])
    branches = (helper.make_graph([node], "a", [], [result]), helper.make_graph([copy], "b", [], [other]))
    return helper.make_node("If", ["all_finite"], ["chosen"], then_branch=branches[0], else_branch=branches[1])


WRITES = {
    "added": write("buffer", NEXT),
    "assigned": write("buffer", NEXT, "graphscale/overwrite"),
    "added, and given out": write("buffer", NEXT, kind="InPlaceAccumulator"),
    "in a branch": choice(write("buffer", "buffer")),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_in_place(name: str) -> None:
    model = scaled("ort-training")
    model.graph.node.append(WRITES[name])
    kind = f"float[{SHAPE[0]}]" if "given" in name else "bool[1]"
    buffer = numpy_helper.from_array(np.zeros(SHAPE, np.float32), "buffer")
    add(model, "", f"float[{SHAPE[0]}] buffer", f"{kind} {WRITES[name].output[0]}", [buffer])
    assert unexplained(model) == ["buffer"]


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("norm = ReduceL2<keepdims = 0>(fc1_bias)", "", "float norm"),
        ("norm = Mul(loss, weighting)", "float[7] weighting", "float[1] norm"),
        ("shown = Identity(fc1_bias)", "", f"{LIKE_A_BIAS} shown"),
    ],
)
def test_other_outputs(text: str, inputs: str, outputs: str) -> None:
    model = scaled()
    add(model, text, inputs, outputs)
    assert gs.lint(model).findings == ()


COPY = {"inputs": "float[4,3] master", "outputs": "float[4,3] master_next"}
STORED = (("float[4,3] w,", "float16[4,3] w,"), ("float[4,3] dw)", "float16[4,3] w_next)"))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("master_next = Sub(master, dw) w_next = Cast<to = 10>(master_next)", []),
        ("master_next = Sub(master, dw) v = Cast<to = 1>(w) n = Sub(v, dw) w_next = Cast<to = 10>(n)", ["GS607"]),
        ("master_next = Sub(master, dw) s = Cast<to = 10>(dw) w_next = Sub(w, s)", ["GS607"]),
    ],
)
def test_weights_rounded_from_masters(more: str, expected: list[str]) -> None:
    assert codes(changed(HALF, *STORED, more=more, **COPY)) == expected
