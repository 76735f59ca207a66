"""A gradient of several shares, only some of which carry the loss scale, is tested for finiteness as a whole."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import graphscale as gs
from graphscale.errors import UpdateError

# The gradient of mean((x w - t)^2) + sum(w^2): the second share carries no scale.
STEP = """
<ir_version: 10, opset_import: ["": 17]>
step (float[4,3] x, float[4,2] t, float[3,2] w) => (float loss, float[3,2] w_next)
<float two_over_n = {0.25}, float two = {2}, float rate = {0.1}>
{
    y = MatMul(x, w)
    d = Sub(y, t)
    squares = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(squares)
    dy = Mul(d, two_over_n)
    xt = Transpose<perm = [1, 0]>(x)
    dw_loss = MatMul(xt, dy)
    dw_decay = Mul(w, two)
    dw = Add(dw_loss, dw_decay)
    u = Mul(dw, rate)
    w_next = Sub(w, u)
}
"""


def test_an_overflow_in_the_weight_decay_alone_skips_the_step() -> None:
    x = np.ones((4, 3), np.float32)
    x[:, 0] = 0  # the batch does not touch the first row of the weights
    feeds = {"x": x, "t": np.ones((4, 2), np.float32)}
    weights = np.ones((3, 2), np.float32)
    result = gs.scale(onnx.parser.parse_model(STEP))
    assert gs.Session(result, state={"w": weights}).step(feeds)["all_finite"]

    weights[0] = 3e38  # twice that is no float32 any more
    session = gs.Session(result, state={"w": weights})
    outputs = session.step(feeds)
    assert np.isfinite(outputs["loss"])
    assert not outputs["all_finite"]
    assert session.loss_scale == 2**14
    np.testing.assert_array_equal(session.state_dict()["w"], weights)


ACCUMULATED = """
<ir_version: 10, opset_import: ["" : 20]>
accumulated (float[4,3] x1, float[4,3] x2, float[4,2] t, float[3,2] w, float[3,2] m, float[3,2] v) =>
    (float loss, float[3,2] w_next, float[3,2] m_next, float[3,2] v_next)
<float half = {0.5}, float quarter = {0.25}, float tenth = {0.1}, float keep = {0.99}, float small = {0.01}>
{
    y1 = MatMul(x1, w)
    d1 = Sub(y1, t)
    y2 = MatMul(x2, w)
    d2 = Sub(y2, t)
    squares1 = Mul(d1, d1)
    squares2 = Mul(d2, d2)
    squares = Add(squares1, squares2)
    loss = ReduceMean<keepdims = 0>(squares)
    dy1 = Mul(d1, quarter)
    x1t = Transpose<perm = [1, 0]>(x1)
    dw1 = MatMul(x1t, dy1)
    dy2 = Mul(d2, quarter)
    x2t = Transpose<perm = [1, 0]>(x2)
    dw2 = MatMul(x2t, dy2)
    dw_sum = Add(dw1, dw2)
    dw = Mul(dw_sum, half)
    apart = Sub(dw, m)
    part = Mul(apart, tenth)
    m_next = Add(m, part)
    square = Mul(dw, dw)
    v_old = Mul(v, keep)
    v_new = Mul(square, small)
    v_next = Add(v_old, v_new)
    w_next = Sub(w, m_next)
}
"""


def test_a_gradient_that_a_moment_is_taken_from_is_no_mere_share_of_the_difference() -> None:
    """m + 0.1 * (g - m): the sum of two batches reaches the square as well, and is checked itself."""
    report = gs.scale(onnx.parser.parse_model(ACCUMULATED)).report
    assert report.proved
    assert {state.output for state in report.state} >= {"w_next", "m_next", "v_next"}


LOOKUP = """
<ir_version: 10, opset_import: ["" : 17]>
lookup (float[4,2] table, int64[3] rows, float[3,2] t) => (float loss, float[4,2] table_next)
<float third = {0.3333333}, float[4,2] zeros = {0,0,0,0,0,0,0,0}, int64[1] last = {1}, int64[2] whole = {3,2},
 float rate = {0.05}, float keep = {0.999}>
{
    h = Gather<axis = 0>(table, rows)
    d = Sub(h, t)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
    dh = Mul(d, third)
    column = Unsqueeze(rows, last)
    index = Expand(column, whole)
    dtable = ScatterElements<axis = 0, reduction = "add">(zeros, index, dh)
    move = Mul(dtable, rate)
    kept = Mul(table, keep)
    table_next = Sub(kept, move)
}
"""


def test_a_next_weight_is_not_taken_for_a_gradient_where_no_contraction_tells() -> None:
    model = onnx.parser.parse_model(LOOKUP)
    with pytest.raises(UpdateError, match="'table', or a gradient, and no contraction tells"):
        gs.scale(model)
    report = gs.scale(model, gradients=["dtable"]).report
    assert [state.output for state in report.state if state.input == "table"] == ["table_next"]
