"""Dense models by hand: every gradient is a matrix product that somebody derived on paper."""

from collections.abc import Iterator

import numpy as np

from models.zoo.hand.exporter import written
from models.zoo.steps import PLAIN, Step, Style, kind


@kind("fresh-hand-browser-regression", "hand")
def browser_regression() -> Iterator[Step]:
    """Linear regression for a page: neutral names, axes as attributes below opset 13, rate in the graph or fed."""
    text = """(float[8,3] in0, float[8,1] in1, float[3,1] in2, float[1] in3) =>
        (float[3,1] out0, float[1] out1, float out2) {
        p = MatMul(in0, in2)  q = Add(p, in3)  e = Sub(q, in1)  s = Mul(e, e)  out2 = ReduceMean<keepdims=0>(s)
        d = Mul(e, 0.25)  t = Transpose<perm=[1, 0]>(in0)  g = MatMul(t, d)  h = ReduceSum<axes=[0], keepdims=0>(d)
        u = Mul(g, 0.05)  v = Mul(h, 0.05)  out0 = Sub(in2, u)  out1 = Sub(in3, v) }"""
    for opset in (9, 12):
        roles = {"states": "in2:out0 in3:out1", "losses": "out2", "checks": {"in2": 0.05, "in3": 0.05}}
        yield written(f"opset{opset}", text, **roles, opset=opset)


@kind("fresh-hand-softmax-classifier", "hand")
def softmax_classifier() -> Iterator[Step]:
    """Softmax minus one-hot, divided by the batch; the loss is logged and no ancestor of the gradient."""
    text = """(int64[6] label, float[6,4] x, float lr, float[4,5] w, float[5] b) =>
        (float[5] b_next, float accuracy, float loss, float[4,5] w_next) <float[2] onoff = {0.0, 1.0}> {
        z0 = MatMul(x, w)  z = Add(z0, b)  lp = LogSoftmax<axis=1>(z)  p = Softmax<axis=1>(z)
        depth = Constant<value_int=5>()  hot = OneHot<axis=1>(label, depth, onoff)  picked = Mul(lp, hot)
        per = ReduceSum<keepdims=0>(picked, [1])  mean = ReduceMean<keepdims=0>(per)  loss = Neg(mean)
        best = ArgMax<axis=1, keepdims=0>(z)  hit = Equal(best, label)  hitf = Cast<to=1>(hit)
        accuracy = ReduceMean<keepdims=0>(hitf)  d0 = Sub(p, hot)  d = Div(d0, 6.0)  xt = Transpose<perm=[1, 0]>(x)
        gw = MatMul(xt, d)  gb = ReduceSum<keepdims=0>(d, [0])  uw = Mul(lr, gw)  ub = Mul(lr, gb)
        w_next = Sub(w, uw)  b_next = Sub(b, ub) }"""
    roles = {"states": "w:w_next b:b_next", "metrics": "accuracy", "hyper": "lr"}
    checks = {"w": "gw", "b": "gb"}
    feeds = {"label": np.random.randint(0, 5, 6), "lr": 0.1}
    yield written("fed", text, **roles, feeds=feeds, checks=checks, opset=13, style=PLAIN)
    yield written("scrambled", text, **roles, feeds=feeds, checks=checks, style=Style(names="scrambled"))
    seeded = text.replace("d = Div(d0, 6.0)", "one = Div(6.0, 6.0)\n seed = Div(one, 6.0)\n d = Mul(d0, seed)")
    yield written("initializers", seeded, **roles, feeds=feeds, opset=21, style=Style(states="initializers"))


@kind("fresh-hand-gradients-only", "hand")
def gradients_only() -> Iterator[Step]:
    """A two-layer network in convolution form; the host updates. Weights are initializers, or inputs."""
    text = """(float[2,1,8] x, float[2,3] y, float[2,1,3] k, float[12,3] w) =>
        (float[12,3] gw, float loss, float[2,1,3] gk) {
        c = Conv(x, k)  r = Relu(c)  f = Flatten<axis=1>(r)  p = MatMul(f, w)  e = Sub(p, y)  s = Mul(e, e)
        loss = ReduceSum<keepdims=0>(s)  d = Mul(e, 2.0)  gw = Gemm<transA=1>(f, d)  df = Gemm<transB=1>(d, w)
        dr = Reshape(df, [2, 2, 6])  on = Greater(c, 0.0)  dc = Where(on, dr, 0.0)
        xs = Transpose<perm=[1, 0, 2]>(x)  ds = Transpose<perm=[1, 0, 2]>(dc)  gt = Conv(xs, ds)
        gk = Transpose<perm=[1, 0, 2]>(gt) }"""
    roles = {"states": "", "gradients": "gw gk", "constants": "k w", "checks": {"k": "gk", "w": "gw"}}
    yield written("inputs", text, **roles, style=PLAIN)
    yield written("embedded", text, **roles, style=Style(embedded_constants=True, shapes="inputs"))


@kind("fresh-hand-evaluation", "hand")
def evaluation() -> Iterator[Step]:
    """No backward pass: the loss of a validation batch, and a running mean that is carried. Not to be scaled."""
    text = """(float[6,4] x, float[6] y, float[4] w, float mean, float n) =>
        (float loss, float n_next, float mean_next) {
        p = MatMul(x, w)  e = Sub(p, y)  a = Abs(e)  loss = ReduceMean<keepdims=0>(a)  n_next = Add(n, 1.0)
        gap = Sub(loss, mean)  part = Div(gap, n_next)  mean_next = Add(mean, part) }"""
    roles = {"states": "mean:mean_next n:n_next", "losses": "", "metrics": "loss", "constants": "w"}
    yield written("plain", text, **roles, feeds={"n": 0, "mean": 0})


@kind("fresh-hand-layer-gain", "hand")
def layer_gain() -> Iterator[Step]:
    """A learnt gain, elementwise, then a normalization; the chain rule is seeded by a one."""
    text = """(float[5,6] x, float[5,3] y, float[6] gain, float[6] shift, float[6,3] w) =>
        (float[6] gain_next, float[6,3] w_next, float loss, float[6] shift_next) {
        h0 = Mul(x, gain)  h1 = Add(h0, shift)  mu = ReduceMean<axes=[1]>(h1)  c = Sub(h1, mu)  cc = Mul(c, c)
        var = ReduceMean<axes=[1]>(cc)  ve = Add(var, 0.00001)  sd = Sqrt(ve)  n = Div(c, sd)  p = MatMul(n, w)
        e = Sub(p, y)  s = Mul(e, e)  total = ReduceSum<keepdims=0>(s)  loss = Mul(total, 0.2)
        seed = Div(total, total)  part = Mul(seed, 0.4)  d = Mul(e, part)  gw = Gemm<transA=1>(n, d)
        dn = Gemm<transB=1>(d, w)  m1 = ReduceMean<axes=[1]>(dn)  dnn = Mul(dn, n)  m2 = ReduceMean<axes=[1]>(dnn)
        q = Mul(n, m2)  a = Sub(dn, m1)  b = Sub(a, q)  dh = Div(b, sd)  gs = ReduceSum<axes=[0], keepdims=0>(dh)
        dx = Mul(dh, x)  gg = ReduceSum<axes=[0], keepdims=0>(dx)  uw = Mul(gw, 0.02)  ug = Mul(gg, 0.02)
        us = Mul(gs, 0.02)  w_next = Sub(w, uw)  gain_next = Sub(gain, ug)  shift_next = Sub(shift, us) }"""
    roles = {"states": "gain:gain_next w:w_next shift:shift_next", "checks": {"gain": "gg", "shift": "gs", "w": "gw"}}
    yield written("plain", text, **roles, feeds={"gain": 1.0, "shift": 0.0}, opset=11)
