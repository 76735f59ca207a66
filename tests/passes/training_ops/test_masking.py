"""Masked gradients: products with the mask where no hidden element alone can be infinite."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import parse
from tests.conftest import run_once

HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
SCORES = np.float32([[1, -2, 3], [0.5, 4, -1]])
WEIGHT = np.float32([[1, 2], [-3, 0.5], [2, 1]])
Y = np.float32([[0, 2], [0.5, 0]])
FEEDS = {"a": SCORES, "w": WEIGHT, "y": Y, "half": np.float32(0.5)}
SLOPE = np.where(Y > 0, SCORES @ WEIGHT, 0)


def relu_after(nodes: str) -> onnx.ModelProto:
    """Lower a ReluGrad of the last value of some nodes."""
    text = f"masked (float[2,3] a, float[3,2] w, float[2,2] y, float half) => (float[2,2] dx) {{ {nodes}"
    return gs.lower_training_ops(parse(f"{HEADER} {text} dx = com.microsoft.ReluGrad(dy, y) }}")).model


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize(
    "nodes",
    [
        "dy = MatMul(a, w)",
        "u = MatMul(a, w) v = Transpose<perm = [1, 0]>(u) dy = Transpose<perm = [1, 0]>(v)",
        "u = MatMul(a, w) z = Gemm(a, w) v = Sum(u, z) dy = Mul(v, half)",
    ],
    ids=["product", "moved", "sum"],
)
def test_a_sum_of_products_is_multiplied_by_the_mask(nodes: str) -> None:
    model = relu_after(nodes)
    assert "Where" not in operators(model)
    outputs, _ = run_once(model, FEEDS)
    np.testing.assert_allclose(outputs["dx"], SLOPE, rtol=1e-6)


@pytest.mark.parametrize(
    "nodes",
    ["root = Sqrt(y) dy = Reciprocal(root)", "root = Sqrt(y) u = Reciprocal(root) v = MatMul(a, w) dy = Add(u, v)"],
    ids=["slope", "sum with a slope"],
)
def test_an_infinite_slope_that_the_mask_hides_is_zero(nodes: str) -> None:
    """The derivative of a square root is infinite at 0, where Relu lets nothing through."""
    outputs, _ = run_once(relu_after(nodes), FEEDS)
    assert outputs["dx"][Y == 0].tolist() == [0, 0]
    assert np.isfinite(outputs["dx"]).all()
    assert (outputs["dx"][Y > 0] != 0).all()


def test_float16_keeps_its_where() -> None:
    text = "dy16 (float16[2,2] a, float16[2,2] y) => (float16[2,2] dx) { dy = MatMul(a, a)"
    model = gs.lower_training_ops(parse(f"{HEADER} {text} dx = com.microsoft.ReluGrad(dy, y) }}")).model
    assert "Where" in operators(model)
    y = np.float16([[0, 1], [1, 0]])
    outputs, _ = run_once(model, {"a": np.full((2, 2), 300, np.float16), "y": y})
    assert outputs["dx"].tolist() == [[0, np.inf], [np.inf, 0]]
