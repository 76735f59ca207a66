"""Gradients that are read themselves: summed up by rows, or in one go."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.graph.builder import Editor
from graphscale.session import bounds
from graphscale.session.thresholds import Thresholds
from tests.session.plain import ALWAYS, BY_ROWS
from tests.session.test_lowering import F32_MAX, assert_same_steps
from tests.session.test_lowering_more import plain_and_lowered
from tests.session.test_lowering_terms import ALL_LARGEST, Kind, model_of


@pytest.mark.parametrize(
    ("shape", "sums"), [((700, 800), 2), ((70, 80), 1), ((20000, 32), 1), ((800, 10, 70), 2)], ids=str
)
def test_large_gradients_are_summed_up_by_rows(shape: tuple[int, ...], sums: int) -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20})
    value = ir.Value(name="dw", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    build = bounds._Builder(Editor(graph), bounds.NAME, dtype=ir.DataType.FLOAT, shape=())
    bounds._add_sum(build, value, Thresholds())
    assert [node.op_type for node in graph] == [*sums * ["ReduceSum"], "Abs"]


@pytest.mark.parametrize("policy", [gs.DynamicLossScale(1.0, 5), gs.DynamicLossScale(1.0, 5, 3.0)], ids=["2", "3"])
@pytest.mark.parametrize("numbers", ALL_LARGEST)
@pytest.mark.parametrize("lowering", [BY_ROWS, ALWAYS], ids=["by rows", "in one go"])
def test_gradients_that_are_read_are_the_largest_finite_numbers(
    lowering: Thresholds, numbers: str, policy: gs.LossScale
) -> None:
    """And those with a NaN or an infinite one in the middle."""
    signs, size, finite = ALL_LARGEST[numbers]
    model = model_of(Kind("g = MatMul(xt, dy) dw = Max(g, g)"), optimizer="w_next = Sub(w, dw)")
    for tensor in model.graph.initializer:
        if tensor.name == "two_over_n":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(1), tensor.name))
    x, t = np.zeros((8, 4), np.float32), np.zeros((8, 3), np.float32)
    x[3], t[3] = size or 1.0, np.array(signs, np.float32) * F32_MAX
    result = gs.scale(model, policy, updates={"w_next": "w"})
    plain, lowered, nodes = plain_and_lowered(result, {"w": np.zeros((4, 3), np.float32)}, lowering)
    assert nodes["session-bounds", "ReduceSum"] == (2 if lowering is BY_ROWS else 1)
    assert assert_same_steps(plain, lowered, [{"x": x, "t": t}]) == [finite]
    if finite:
        assert (np.abs(lowered.state_dict()["w"]) == F32_MAX).all()
