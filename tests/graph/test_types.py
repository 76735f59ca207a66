"""Types that a model does not declare."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from graphscale.graph.inference import complete_types
from graphscale.graph.values import is_float, is_known_zero

pytestmark = pytest.mark.static

HEADER = '<ir_version: 10, opset_import: ["": 20]>'


def completed(text: str) -> dict[str, tuple[ir.DataType | None, ir.Shape | None]]:
    """Return the types after completion of a model that declares none for its outputs."""
    proto = onnx.parser.parse_model(f"{HEADER} step {text}")
    for output in proto.graph.output:
        output.ClearField("type")
    model = ir.from_proto(proto)
    complete_types(model)
    return {
        v.name or "": (v.dtype, v.shape) for v in (*model.graph.outputs, *(o for n in model.graph for o in n.outputs))
    }


def test_outputs_and_what_lies_between() -> None:
    types = completed("(float[2,3] x, float[3,4] w) => (y) { h = MatMul(x, w) y = Relu(h) }")
    assert types == {name: (ir.DataType.FLOAT, ir.Shape([2, 4])) for name in ("h", "y")}


def test_declared_types_stay() -> None:
    proto = onnx.parser.parse_model(f"{HEADER} step (float[n,3] x) => (float[m,3] y, z) {{ y = Relu(x) z = Relu(x) }}")
    proto.graph.output[1].ClearField("type")
    model = ir.from_proto(proto)
    complete_types(model)
    y, z = model.graph.outputs
    assert str(y.shape) == "[m,3]"
    assert str(z.shape) == "[n,3]"


def test_outputs_that_are_all_declared_need_no_inference() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(f"{HEADER} step (float[2] x) => (float[2] y) {{ h = Relu(x) y = Relu(h) }}")
    )
    complete_types(model)
    assert model.graph[0].outputs[0].shape is None


def test_a_model_that_cannot_be_inferred(capfd: pytest.CaptureFixture[str]) -> None:
    assert completed("(float[2,3] x) => (y) { y = Reshape(x) }") == {"y": (None, None)}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("cast", ["Cast <to = 1>(zero)", "CastLike(zero, x)"])
def test_an_integer_zero_that_is_cast_is_zero(cast: str) -> None:
    proto = onnx.parser.parse_model(
        f"{HEADER} step (float[2] x) => (float y) {{ zero = Constant <value_int = 0>() y = {cast} }}"
    )
    assert is_known_zero(ir.from_proto(proto).graph.outputs[0])


@pytest.mark.parametrize(
    ("node", "is_one"),
    [
        ("Less(x, x)", False),
        ("Cast <to = 7>(x)", False),
        ("Cast <to = 10>(x)", True),
        ("Cast <to = 2147483648>(x)", True),
        ("Constant <value_int = 1>()", False),
        ("Mul(x, x)", True),
    ],
)
def test_a_value_without_a_dtype_is_a_float_unless_its_operator_says_otherwise(node: str, is_one: bool) -> None:
    model = ir.from_proto(onnx.parser.parse_model(f"{HEADER} step (float[2] x) => (y) {{ y = {node} }}"))
    assert is_float(model.graph[0].outputs[0]) == is_one
