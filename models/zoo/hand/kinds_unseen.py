"""Steps `unseen-*` by hand: operators that no exporter writes, If, own guards, quantized weights, online learning."""

from dataclasses import replace

import numpy as np

from models.zoo.hand.exporter import written
from models.zoo.unseen import ABOUT, OURS


def text(name, parameters, faces, graph, right="scale", **more):
    def maker():
        ABOUT[f"unseen-{name}"] = {"parameters": parameters.split(), "right": right}
        step = written("any", graph, **more)
        return [replace(step, variant=face) for face in faces.split()]

    OURS[f"unseen-{name}"] = "hand", maker


text(
    "hand-softmax-op",
    "w b",
    "x0 next",
    """(float[6,4] x, int64[6] y, float[4,3] w, float[3] b)
    => (float loss, float[4,3] w2, float[3] b2, float accuracy) {
    z = Gemm(x, w, b)  loss, logp = SoftmaxCrossEntropyLoss<reduction="mean">(z, y)  p = Exp(logp)
    k = Constant<value_int=3>()  hot = OneHot<axis=-1>(y, k, [0, 1])  hotf = Cast<to=1>(hot)  e = Sub(p, hotf)
    d = Div(e, 6.0)
    gw = Gemm<transA=1>(x, d)  gb = ReduceSum<keepdims=0>(d, [0])
    sw = Mul(gw, 0.3)  sb = Mul(gb, 0.3)  w2 = Sub(w, sw)  b2 = Sub(b, sb)
    top = ArgMax<axis=1, keepdims=0>(z)  hit = Equal(top, y)  hitf = Cast<to=1>(hit)
    accuracy = ReduceMean<keepdims=0>(hitf) }""",
    feeds={"y": np.array([0, 1, 2, 1, 0, 2])},
    states="w:w2 b:b2",
    metrics="accuracy",
    checks={"w": 0.3, "b": 0.3},
)
text(
    "hand-relu-adagrad",
    "w1 w2",
    "mixed donated",
    """(float[5,4] x, float[5,2] y, float[4,6] w1, float[6,2] w2, float[4,6] h1, float[6,2] h2)
      => (float[4,6] nw1, float[6,2] nw2, float[4,6] nh1, float[6,2] nh2, float loss) {
    a = MatMul(x, w1)  r = Relu(a)  p = MatMul(r, w2)  e = Sub(p, y)
    s = ReduceSumSquare<keepdims=0>(e)  loss = Mul(s, 0.1)  d = Mul(e, 0.2)
    rt = Transpose(r)  g2 = MatMul(rt, d)  w2t = Transpose(w2)  dr = MatMul(d, w2t)
    pos = Greater(a, 0.0)  da = Where(pos, dr, 0.0)  xt = Transpose(x)  g1 = MatMul(xt, da)
    q1 = Mul(g1, g1)  q2 = Mul(g2, g2)  nh1 = Add(h1, q1)  nh2 = Add(h2, q2)
    t1 = Sqrt(nh1)  t2 = Sqrt(nh2)  u1 = Add(t1, 0.001)  u2 = Add(t2, 0.001)  v1 = Div(g1, u1)  v2 = Div(g2, u2)
    k1 = Mul(v1, 0.1)  k2 = Mul(v2, 0.1)  nw1 = Sub(w1, k1)  nw2 = Sub(w2, k2) }""",
    feeds={"h1": 0.1, "h2": 0.1},
    states="w1:nw1 w2:nw2 h1:nh1 h2:nh2",
    checks={"w1": "g1", "w2": "g2"},
)
text(
    "hand-factors-scatter",
    "users items",
    "new x0",
    """(int64[4] u, int64[4] i, float[4] rating, float[5,3] users, float[7,3] items)
      => (float loss, float[5,3] users2, float[7,3] items2) {
    a = Gather(users, u)  b = Gather(items, i)  ab = Mul(a, b)  p = ReduceSum<keepdims=0>(ab, [1])  e = Sub(p, rating)
    ee = Mul(e, e)  loss = ReduceMean<keepdims=0>(ee)  d = Mul(e, 0.5)  dc = Unsqueeze(d, [1])
    ga = Mul(dc, b)  gb = Mul(dc, a)  sa = Mul(ga, -0.2)  sb = Mul(gb, -0.2)  uc = Unsqueeze(u, [1])
    ic = Unsqueeze(i, [1])
    users2 = ScatterND<reduction="add">(users, uc, sa)  items2 = ScatterND<reduction="add">(items, ic, sb) }""",
    feeds={"u": np.array([0, 3, 3, 1]), "i": np.array([6, 2, 0, 2])},
    states="users:users2 items:items2",
    checks={"users": 0.2, "items": 0.2},
    opset=18,
)
SQUARES = """p = MatMul(x, w)  e = Sub(p, y)  s = Mul(e, e)  loss = ReduceMean<keepdims=0>(s)
    d = Mul(e, 0.16666667)  xt = Transpose<perm=[1, 0]>(x)  g = MatMul(xt, d)"""
text(
    "hand-if-warmup",
    "w",
    "t anyorder",
    f"""(float[6,4] x, float[6,2] y, float[4,2] w, float[4,2] m, float n)
    => (float loss, float rate, float[4,2] w2, float[4,2] m2, float n2) {{
    {SQUARES}
    n2 = Add(n, 1.0)  early = Less(n2, 10.0)
    rate = If(early) <then_branch = warm () => (float r1) {{ r1 = Mul(n2, 0.01) }},
                      else_branch = cool () => (float r2) {{ q = Sqrt(n2)  r2 = Div(0.3, q) }}>
    mm = Mul(m, 0.8)  m2 = Add(mm, g)  step = Mul(m2, rate)  w2 = Sub(w, step) }}""",
    states="w:w2 m:m2 n:n2",
    metrics="rate",
    checks={"w": "g"},
)
text(
    "hand-passive-aggressive",
    "w",
    "old",
    """(float[4] x, float y, float[4] w) => (float loss, float[4] w2) {
    xw = Mul(x, w)  p = ReduceSum<keepdims=0>(xw)  yp = Mul(y, p)  gap = Sub(1.0, yp)  loss = Relu(gap)
    xx = Mul(x, x)  size = ReduceSum<keepdims=0>(xx)  room = Add(size, 2.0)  tau = Div(loss, room)
    ty = Mul(tau, y)  step = Mul(ty, x)  w2 = Add(w, step) }""",
    "refuse",
    feeds={"y": 1.0, "w": -0.5, "x": np.array([0.5, 0.2, -0.1, 0.7])},
    states="w:w2",
)
text(
    "hand-int8-weights",
    "w",
    "inout",
    """(float[6,4] x, float[6,2] y, uint8[4,2] w, float[4,2] residue)
    => (uint8[4,2] w2, float[4,2] residue2, float loss) {
    wf = DequantizeLinear(w, scale, zero)  full = Add(wf, residue)  p = MatMul(x, full)  e = Sub(p, y)  s = Mul(e, e)
    loss = ReduceMean<keepdims=0>(s)  d = Mul(e, 0.16666667)  xt = Transpose<perm=[1, 0]>(x)  g = MatMul(xt, d)
    step = Mul(g, 0.2)  next = Sub(full, step)  w2 = QuantizeLinear(next, scale, zero)
    back = DequantizeLinear(w2, scale, zero)
    residue2 = Sub(next, back) }""".replace("scale", "0.05").replace(
        "{", "{ zero = Constant<value = uint8 {128}>() ", 1
    ),
    feeds={"w": 128},
    states="w:w2 residue:residue2",
    opset=19,
)
text(
    "hand-own-dynamic-scale",
    "w",
    "next mixed",
    """(float[6,4] x, float[6,2] y, float[4,2] w, float scale, int64 good)
      => (float loss, float[4,2] w2, float scale2, int64 good2) {
    p = MatMul(x, w)  e = Sub(p, y)  s = Mul(e, e)  loss = ReduceMean<keepdims=0>(s)
    ds = Mul(scale, 0.16666667)  d = Mul(e, ds)  xt = Transpose<perm=[1, 0]>(x)  gs = MatMul(xt, d)
    size = Abs(gs)  top = ReduceMax<keepdims=0>(size)  ok = Less(top, 1000000.0)
    g = Div(gs, scale)  step = Mul(g, 0.1)  moved = Sub(w, step)  w2 = Where(ok, moved, w)
    one = Constant<value_int=1>()  nil = Constant<value_int=0>()  limit = Constant<value_int=200>()
    more = Add(good, one)  due = GreaterOrEqual(more, limit)  again = Where(due, nil, more)
    good2 = Where(ok, again, nil)
    twice = Mul(scale, 2.0)  half = Mul(scale, 0.5)  grown = Where(due, twice, scale)
    scale2 = Where(ok, grown, half) }""",
    "refuse",
    feeds={"scale": 1024.0, "good": 5},
    states="w:w2",
    kept="scale:scale2 good:good2",
)
text(
    "hand-vector-loss-rows",
    "w",
    "serving",
    """(float[6,4] x, float[6,2] y, float[4,2] w, float[4,2] v, float[1] lr)
    => (float[1] loss, float[6] per_row, float[4,2] w2, float[4,2] v2) {
    p = MatMul(x, w)  e = Sub(p, y)  t = Tanh(e)  tt = Mul(t, t)  per_row = ReduceSum<keepdims=0>(tt, [1])
    all = ReduceMean<keepdims=0>(per_row)  loss = Reshape(all, [1])
    left = Sub(1.0, tt)  slope = Mul(t, left)  d = Mul(slope, 0.33333334)  xt = Transpose<perm=[1, 0]>(x)
    g = MatMul(xt, d)
    vv = Mul(v, 0.9)  v2 = Add(vv, g)  step = Mul(v2, lr)  w2 = Sub(w, step) }""",
    feeds={"lr": 0.1},
    states="w:w2 v:v2",
    metrics="per_row",
    hyper="lr",
    checks={"w": "g"},
)
