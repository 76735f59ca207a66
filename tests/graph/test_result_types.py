"""The types of results that no declaration says: an operand's, by the operator's row."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.graph.types import dtypes_of

BODIES = {
    "y = DequantizeLinear(q, scale, zero)": (ir.DataType.INT8, ir.DataType.FLOAT),
    "y = QuantizeLinear(x, scale, zero)": (ir.DataType.FLOAT, ir.DataType.INT8),
    "y = CastLike(x, q)": (ir.DataType.FLOAT, ir.DataType.INT8),
    "a, y, c = DynamicQuantizeLinear(x)": (ir.DataType.FLOAT, ir.DataType.FLOAT),
}


@pytest.mark.static
@pytest.mark.parametrize("body", BODIES)
def test_results(body: str) -> None:
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[3] x, int8[3] q, float scale, int8 zero) '
        f"=> (float[3] z) {{ {body} t = Cast<to=1>(y) z = Relu(t) }}"
    )
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    found = {value.name: dtype for value, dtype in dtypes_of(model.graph).items()}
    assert found["y"] is BODIES[body][1]


def test_a_moment_in_eight_bits() -> None:
    """A moment that is stored as int8 with its step: the scaled file loads, and runs as the original."""
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[4,3] x, float[4,2] y, float[3,2] w, int8[3,2] m8, float step)
      => (float loss, int8[3,2] m8_next, float step_next, float[3,2] w_next) {
        p = MatMul(x, w) e = Sub(p, y) s = Mul(e, e) loss = ReduceMean<keepdims=0>(s)
        c = Constant<value_float=0.25>() d = Mul(e, c) xt = Transpose<perm=[1,0]>(x) g = MatMul(xt, d)
        m = DequantizeLinear(m8, step) k = Constant<value_float=0.9>() ma = Mul(m, k) mn = Add(ma, g)
        size = Abs(mn) top = ReduceMax<keepdims=0>(size) l = Constant<value_float=127.0>() st = Div(top, l)
        tiny = Constant<value_float=1e-8>() step_next = Add(st, tiny)
        zero = Constant<value = int8 {0}>() m8_next = QuantizeLinear(mn, step_next, zero)
        r = Constant<value_float=0.1>() u = Mul(mn, r) w_next = Sub(w, u)
    }"""
    model = onnx.parser.parse_model(text)
    scaled = gs.scale(model, updates={"{}_next": "{}"}).model
    draw = np.random.default_rng(0)
    feeds = {
        "x": draw.normal(size=(4, 3)).astype(np.float32),
        "y": draw.normal(size=(4, 2)).astype(np.float32),
        "w": draw.normal(size=(3, 2)).astype(np.float32),
        "m8": np.zeros((3, 2), np.int8),
        "step": np.array(0.01, np.float32),
    }
    names = [value.name for value in model.graph.output]
    one, other = (
        ort.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(names, feeds)
        for each in (model, scaled)
    )
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)
