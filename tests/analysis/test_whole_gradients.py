"""A gradient of several shares, only some of which carry the loss scale, is tested for finiteness as a whole."""

from __future__ import annotations

import numpy as np
import onnx.parser

import graphscale as gs

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
