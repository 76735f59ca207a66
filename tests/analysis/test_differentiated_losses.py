"""Losses that are no number, functions of the loss, metrics of its derivatives, and losses that are no outputs."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

import graphscale as gs
from tests.build import assert_skips, feeds_for

HEAD = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[8,4] x, float[8,3] y, float[4,3] w, float[8,1] share, float[4,3] old)
=> (float[4,3] w_next, {outputs})
<float n = {{24}}, float two = {{2}}, float rate = {{0.1}}, float less = {{-1}}, int64[1] last = {{-1}}>
{{
   {forward}
   xt = Transpose <perm = [1, 0]> (x)
   g = MatMul(xt, dp)
   u = Mul(g, rate)
   w_next = Sub(w, u)
}}
"""
SQUARES = "p = MatMul(x, w) e = Sub(p, y) q = Mul(e, e) c = Div(two, n) dp = Mul(e, c)"
PROBABILITIES = """
   p = MatMul(x, w) logs = LogSoftmax(p) z = Exp(logs) hits = Mul(logs, y)
   chosen = ReduceSum <keepdims = 1> (hits, last) shared = Mul(chosen, share) gain = ReduceSum <keepdims = 0> (shared)
   mean = Div(gain, n) loss = Neg(mean)
   inner = Mul(z, logs) sum = ReduceSum <keepdims = 0> (inner) part = Div(sum, n) entropy = Neg(part)
   d = Sub(z, y) ds = Mul(d, share) dp = Div(ds, n)
"""
# The gradient at an older weight, of the same samples, is subtracted; its loss is no output.
REDUCED = f"""
   {SQUARES.replace("dp =", "da =")} loss = ReduceMean <keepdims = 0> (q)
   p_old = MatMul(x, old) h = Tanh(p_old) e_old = Sub(h, y) d_old = Mul(e_old, c)
   hh = Mul(h, h) minus = Mul(hh, less) one = Div(two, two) slope = Add(minus, one) db = Mul(d_old, slope)
   dp = Sub(da, db)
"""


def model(forward: str, outputs: str) -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(HEAD.format(forward=forward, outputs=outputs))
    onnx.checker.check_model(parsed, full_check=True)
    return parsed


@pytest.mark.parametrize(
    ("forward", "outputs", "loss"),
    [
        (f"{SQUARES} losses = ReduceMean <keepdims = 0> (q, last)", "float[8] losses", "losses"),
        (f"{SQUARES} mean = ReduceMean <keepdims = 0> (q) grown = Exp(mean)", "float grown", "mean"),
        (f"{SQUARES} each = ReduceMean <keepdims = 0> (q, last) least = ReduceMin <keepdims = 0> (each)",
         "float least", "each"),
        (PROBABILITIES, "float loss, float entropy", "loss"),
        (REDUCED, "float loss", "loss"),
    ],
    ids=["samples", "an exponential", "a minimum", "an entropy", "an older weight"],
)  # fmt: skip
def test_the_differentiated_loss(forward: str, outputs: str, loss: str) -> None:
    step = model(forward, outputs)
    result = gs.scale(step)
    assert (result.report.loss, result.report.coverage) == (loss, 1.0)
    assert {role.name for role in result.report.roles if role.role == "loss"} <= {loss}
    assert_skips(result, feeds_for(step))


@pytest.mark.parametrize("name", ["losses", "first"])
def test_a_loss_of_samples_can_be_named(name: str) -> None:
    forward = f"{SQUARES} losses = ReduceMean <keepdims = 0> (q, last) first = Identity(losses)"
    assert gs.scale(model(forward, "float[8] losses, float[8] first"), loss=name).report.loss == name


# Two layers, and the gradients at older weights, whose loss is no output, are subtracted.
TWO_LAYERS = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[8,4] x, float[8,3] y, float[4,5] v, float[5,3] w, float[4,5] v_old, float[5,3] w_old)
=> (float[4,5] v_next, float[5,3] w_next, float loss)
<float c = {0.1}, float rate = {0.1}, float one = {1}>
{
   a = MatMul(x, v) h = Tanh(a) p = MatMul(h, w) e = Sub(p, y) q = Mul(e, e) loss = ReduceMean <keepdims = 0> (q)
   xt = Transpose <perm = [1, 0]> (x)
   dp = Mul(e, c) ht = Transpose <perm = [1, 0]> (h) dw = MatMul(ht, dp)
   wt = Transpose <perm = [1, 0]> (w) dh = MatMul(dp, wt) hh = Mul(h, h) s = Sub(one, hh) da = Mul(dh, s)
   dv = MatMul(xt, da)
   a2 = MatMul(x, v_old) h2 = Tanh(a2) p2 = MatMul(h2, w_old) e2 = Sub(p2, y)
   dp2 = Mul(e2, c) dpt2 = Transpose <perm = [1, 0]> (dp2) dwt2 = MatMul(dpt2, h2)
   dw2 = Transpose <perm = [1, 0]> (dwt2)
   wt2 = Transpose <perm = [1, 0]> (w_old) dh2 = MatMul(dp2, wt2) s2 = Sub(one, h2) r2 = Mul(dh2, s2)
   k2 = Mul(r2, h2) da2 = Add(r2, k2) dv2 = MatMul(xt, da2)
   gv = Sub(dv, dv2) gw = Sub(dw, dw2) uv = Mul(gv, rate) uw = Mul(gw, rate)
   v_next = Sub(v, uv) w_next = Sub(w, uw)
}
"""


def test_the_layers_of_a_loss_that_is_no_output() -> None:
    step = onnx.parser.parse_model(TWO_LAYERS)
    result = gs.scale(step)
    assert (result.report.loss, result.report.coverage) == ("loss", 1.0)
    assert "h2" not in {place.value for place in result.report.places}
    assert_skips(result, feeds_for(step))


CLUSTERS = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[8,4] x, float[4,3] w) => (float[4,3] {name}, float loss)
<float less = {{-1}}, int64[1] last = {{-1}}, int64[1] first = {{0}}>
{{
   far = MatMul(x, w)
   near = Mul(far, less)
   share = Softmax(near)
   part = Mul(share, far)
   loss = ReduceMean <keepdims = 0> (part)
   xt = Transpose <perm = [1, 0]> (x)
   sum = MatMul(xt, share)
   count = ReduceSum(share, first)
   {name} = Div(sum, count)
}}
"""


@pytest.mark.parametrize(("name", "pair"), [("w_next", "w"), ("newW", "w"), ("w_grad", None)])
def test_a_gradient_that_is_named_as_a_next_value(name: str, pair: str | None) -> None:
    roles = {role.name: role for role in gs.inspect(onnx.parser.parse_model(CLUSTERS.format(name=name))).roles}
    assert (roles[name].pair, roles[name].certain) == (pair, pair is None)
