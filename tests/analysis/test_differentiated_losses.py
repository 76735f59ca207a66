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
   p = MatMul(x, w) logs = LogSoftmax(p) z = Exp(logs) hits = Mul(logs, y) gain = ReduceSum <keepdims = 0> (hits)
   mean = Div(gain, n) loss = Neg(mean) d = Sub(z, y) dp = Div(d, n)
   inner = Mul(z, logs) sum = ReduceSum <keepdims = 0> (inner) entropy = Div(sum, n)
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
    assert_skips(result, feeds_for(step))


@pytest.mark.parametrize("name", ["losses", "first"])
def test_a_loss_of_samples_can_be_named(name: str) -> None:
    forward = f"{SQUARES} losses = ReduceMean <keepdims = 0> (q, last) first = Identity(losses)"
    assert gs.scale(model(forward, "float[8] losses, float[8] first"), loss=name).report.loss == name


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
