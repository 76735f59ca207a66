"""The helpers of formulas on every opset: one result for all forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.checker
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphscale.graph.builder import Editor
from graphscale.graph.releases import release_of
from graphscale.passes.lower_training_ops.writer import Writer
from graphscale.targets import RELEASES
from tests.build import parse
from tests.conftest import run_once

NEWEST = (release_of(ort.__version__) or RELEASES[-1]).max_opset
X = np.random.default_rng(7).standard_normal((2, 3, 4)).astype(np.float32)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    exponential = np.exp(x - x.max(axis, keepdims=True))
    return exponential / exponential.sum(axis, keepdims=True)


HELPERS: dict[str, tuple[Callable[[Writer, ir.Value], ir.Value], np.ndarray]] = {
    "sum": (lambda f, x: f.reduce_sum(x, [0, -1]), X.sum((0, 2), keepdims=True)),
    "sum of all": (lambda f, x: f.reduce_sum(x, keepdims=False), X.sum()),
    "sum of none": (lambda f, x: f("Neg", f.reduce_sum(x, [])), -X),
    "mean": (lambda f, x: f.reduce_mean(x, [1], keepdims=False), X.mean(1)),
    "max": (lambda f, x: f.reduce_max(x, [-1]), X.max(-1, keepdims=True)),
    "squeeze": (lambda f, x: f.squeeze(f.reduce_max(x, [-2]), [-2]), X.max(1)),
    "unsqueeze": (lambda f, x: f.unsqueeze(x, [0, 2]), X[None, :, None]),
    "softmax": (lambda f, x: f.softmax(x, -1), softmax(X, -1)),
    "softmax inside": (lambda f, x: f.softmax(x, 1), softmax(X, 1)),
    "log_softmax": (lambda f, x: f.log_softmax(x, 2), np.log(softmax(X, 2))),
    "log_softmax inside": (lambda f, x: f.log_softmax(x, 0), np.log(softmax(X, 0))),
    "shape": (lambda f, x: f("Cast", f("Mul", f.shape_of(x), 2), to=ir.DataType.FLOAT), np.float32([4, 6, 8])),
    "expand": (lambda f, x: f.expand(f.reduce_sum(x, [0]), f.shape_of(x)), np.broadcast_to(X.sum(0), X.shape)),
    "expand to numbers": (lambda f, x: f.expand(x, [5, 1, 1, 1]), np.broadcast_to(X, (5, 2, 3, 4))),
    "reshape": (lambda f, x: f.reshape(x, [0, -1]), X.reshape(2, 12)),
    "reshape to a value": (lambda f, x: f.reshape(f.reshape(x, [-1]), f.shape_of(x)), X),
    "cast": (lambda f, x: f("Neg", f.cast(f.cast(x, ir.DataType.DOUBLE), ir.DataType.FLOAT)), -X),
    "two results": (lambda f, x: f.several(2, "TopK", x, f.integers(1))[0], X.max(-1, keepdims=True)),
}


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("opset", [10, 11, 12, 13, 17, 18, NEWEST])
@pytest.mark.parametrize("name", HELPERS)
def test_helper(name: str, opset: int, static: bool) -> None:
    shape = "2,3,4" if static else "a,b,c"
    model = ir.from_proto(
        parse(f'<ir_version: 8, opset_import: ["" : {opset}]> f (float[{shape}] x) => (float y) {{ y = Neg(x) }}')
    )
    node = model.graph.node(0)
    helper, expected = HELPERS[name]
    result = helper(Writer.before(node, Editor(model.graph).builder("test")), model.graph.inputs[0])
    assert result.dtype is ir.DataType.FLOAT
    assert result.shape is not None
    assert static is False or tuple(result.shape) == expected.shape
    model.graph.outputs[0] = result
    model.graph.remove(node)
    lowered = ir.to_proto(model)
    onnx.checker.check_model(lowered, full_check=True)
    outputs, _ = run_once(lowered, {"x": X})
    np.testing.assert_allclose(outputs[str(result.name)], expected, rtol=1e-5, atol=1e-6)
