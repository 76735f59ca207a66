"""Steps by hand that no list of training steps has: filters, ratings, physics, local rules, no gradient at all."""

from collections.abc import Iterator

import numpy as np

from models.zoo.hand.exporter import BARE, written
from models.zoo.steps import PLAIN, Step, Style, kind


@kind("fresh-hand-echo-canceller", "hand")
def echo_canceller() -> Iterator[Step]:
    """Normalized least mean squares: one sample goes into a delay line; the squared error is the loss."""
    text = """(float[1] far, float[1] mic, float[8] line, float[8] taps) =>
        (float[1] out, float[8] taps_next, float loss, float[8] line_next) {
        old = Slice(line, [0], [7])  line_next = Concat<axis=0>(far, old)  echo = MatMul(line_next, taps)
        out = Sub(mic, echo)  sq = Mul(out, out)  loss = ReduceSum<keepdims=0>(sq)
        power = ReduceSumSquare<keepdims=0>(line_next)  pe = Add(power, 0.01)  step = Div(0.5, pe)
        g = Mul(line_next, out)  u = Mul(g, step)  taps_next = Add(taps, u) }"""
    yield written("plain", text, states="taps:taps_next", kept="line:line_next", metrics="out", warm=5)


@kind("fresh-hand-chess-ratings", "hand")
def chess_ratings() -> Iterator[Step]:
    """Ratings of two players move by K times (result minus expectation): the log loss, scattered."""
    text = """(int64[5,1] white, int64[5,1] black, float[5] result, float[12] rating) =>
        (float[12] rating_next, float loss) {
        a = GatherND(rating, white)  b = GatherND(rating, black)  gap = Sub(a, b)  z = Mul(gap, 0.0057564627)
        q = Sigmoid(z)  e = Sub(result, q)  sp = Softplus(z)  rz = Mul(result, z)  l = Sub(sp, rz)
        loss = ReduceMean<keepdims=0>(l)  k = Mul(e, 32.0)  kn = Neg(k)
        half = ScatterND<reduction="add">(rating, white, k)
        rating_next = ScatterND<reduction="add">(half, black, kn) }"""
    feeds = {"white": np.arange(5)[:, None], "black": np.arange(5, 10)[:, None]}
    feeds |= {"result": np.array([1, 0, 0.5, 1, 0]), "rating": 1500 + 100 * np.random.randn(12)}
    roles = {"states": "rating:rating_next", "checks": {"rating": 32 * 5 / 0.0057564627}}
    yield written("plain", text, **roles, feeds=feeds, opset=18)


@kind("fresh-hand-skip-grams", "hand")
def skip_grams() -> Iterator[Step]:
    """Word vectors with negative samples, rows by Gather, updates by ScatterND with addition."""
    text = """(int64[4,1] centre, int64[4,1] context, int64[4,1] noise, float[9,5] vin, float[9,5] vout) =>
        (float loss, float[9,5] vout_next, float[9,5] vin_next) {
        a = GatherND(vin, centre)  b = GatherND(vout, context)  c = GatherND(vout, noise)  ab = Mul(a, b)
        ac = Mul(a, c)  sp = ReduceSum(ab, [1])  sn = ReduceSum(ac, [1])  np = Neg(sp)  lp = Softplus(np)
        ln = Softplus(sn)  l = Add(lp, ln)  loss = ReduceSum<keepdims=0>(l)  qp = Sigmoid(sp)  dp = Sub(qp, 1.0)
        dn = Sigmoid(sn)  da1 = Mul(dp, b)  da2 = Mul(dn, c)  da = Add(da1, da2)  ua = Mul(da, -0.05)  db = Mul(dp, a)
        ub = Mul(db, -0.05)  dc = Mul(dn, a)  uc = Mul(dc, -0.05)
        vin_next = ScatterND<reduction="add">(vin, centre, ua)  vo = ScatterND<reduction="add">(vout, context, ub)
        vout_next = ScatterND<reduction="add">(vo, noise, uc) }"""
    feeds = {name: np.random.randint(0, 9, (4, 1)) for name in ("centre", "context", "noise")}
    roles = {"states": "vin:vin_next vout:vout_next", "feeds": feeds, "checks": {"vin": 0.05, "vout": 0.05}}
    yield written("plain", text, **roles, opset=16)


@kind("fresh-hand-leapfrog", "hand")
def leapfrog() -> Iterator[Step]:
    """Hamiltonian dynamics over weights: two half kicks by the gradient of the potential and a drift; two gradients of
    one loss at two points. Two-sided: both potentials and the Hamiltonian are right as the loss.
    """
    potential = """p{0} = MatMul(x, {1})  e{0} = Sub(p{0}, y)  s{0} = ReduceSumSquare<keepdims=0>(e{0})
        q{0} = ReduceSumSquare<keepdims=0>({1})  f{0} = Add(s{0}, q{0})  u{0} = Mul(f{0}, 0.5)
        t{0} = Gemm<transA=1>(x, e{0})  g{0} = Add(t{0}, {1})"""
    text = f"""(float[6,4] x, float[6,1] y, float[4,1] w, float[4,1] r) =>
        (float u0, float u1, float energy, float[4,1] w_next, float[4,1] r_next) {{ {potential.format(0, "w")}
        k0 = Mul(g0, 0.05)  rh = Sub(r, k0)  dr = Mul(rh, 0.1)  w_next = Add(w, dr)  {potential.format(1, "w_next")}
        k1 = Mul(g1, 0.05)  r_next = Sub(rh, k1)  ks = ReduceSumSquare<keepdims=0>(r_next)  kin = Mul(ks, 0.5)
        energy = Add(u1, kin) }}"""
    yield written("plain", text, states="w:w_next r:r_next", losses="u0 u1 energy")


@kind("fresh-hand-reversible", "hand")
def reversible() -> Iterator[Step]:
    """Two reversible couplings: the backward pass computes the inputs of each from its outputs."""
    text = """(float[5,3] x1, float[5,3] x2, float[5,3] y, float[3,3] f, float[3,3] g) =>
        (float[3,3] g_next, float loss, float[3,3] f_next) {
        a = MatMul(x2, f)  fa = Tanh(a)  y1 = Add(x1, fa)  b = MatMul(y1, g)  gb = Tanh(b)  y2 = Add(x2, gb)
        o = Add(y1, y2)  e = Sub(o, y)  s = Mul(e, e)  loss = ReduceMean<keepdims=0>(s)  d = Mul(e, 0.13333334)
        rb = MatMul(y1, g)  rg = Tanh(rb)  back2 = Sub(y2, rg)  gg = Mul(rg, rg)  kg = Sub(1.0, gg)  db = Mul(d, kg)
        gradg = Gemm<transA=1>(y1, db)  d1b = Gemm<transB=1>(db, g)  d1 = Add(d, d1b)
        ra = MatMul(back2, f)  rf = Tanh(ra)  ff = Mul(rf, rf)  kf = Sub(1.0, ff)  da = Mul(d1, kf)
        gradf = Gemm<transA=1>(back2, da)  uf = Mul(gradf, 0.1)  ug = Mul(gradg, 0.1)  f_next = Sub(f, uf)
        g_next = Sub(g, ug) }"""
    yield written("plain", text, states="f:f_next g:g_next", checks={"f": "gradf", "g": "gradg"}, style=PLAIN)


@kind("fresh-hand-forward-forward", "hand")
def forward_forward() -> Iterator[Step]:
    """Two layers, each with its own goodness loss on positive and negative rows; nothing flows between the layers."""
    layer = """z{0} = MatMul({1}, w{0})  h{0} = Relu(z{0})  sq{0} = Mul(h{0}, h{0})  good{0} = ReduceSum(sq{0}, [1])
        m{0} = Sub(good{0}, 2.0)  t{0} = Mul(m{0}, sign)  n{0} = Neg(t{0})  l{0} = Softplus(n{0})
        loss{0} = ReduceMean<keepdims=0>(l{0})  q{0} = Sigmoid(n{0})  c{0} = Mul(q{0}, sign)  k{0} = Mul(c{0}, -0.25)
        d{0} = Mul(h{0}, k{0})  g{0} = Gemm<transA=1>({1}, d{0})  u{0} = Mul(g{0}, 0.05)  w{0}_next = Sub(w{0}, u{0})"""
    text = f"""(float[8,5] x, float[8,1] sign, float[5,6] w1, float[6,4] w2) =>
        (float loss1, float loss2, float[6,4] w2_next, float[5,6] w1_next) {{ {layer.format(1, "x")}
        size = ReduceL2<axes=[1]>(h1)  se = Add(size, 0.001)  hn = Div(h1, se)  {layer.format(2, "hn")} }}"""
    roles = {"states": "w1:w1_next w2:w2_next", "losses": "loss1 loss2", "checks": {"w2": "g2"}}
    yield written("plain", text, **roles, feeds={"sign": np.array([[1.0], [-1.0]] * 4).reshape(8, 1)})


@kind("fresh-hand-label-chain", "hand")
def label_chain() -> Iterator[Step]:
    """Transitions of a label chain of three: log sum of all paths minus the right one, marginals by the chain rule."""
    text = """(float[3,4] score, float[4,4] seen1, float[4,4] seen2, float[4,4] trans) =>
        (float[4,4] trans_next, float loss) {
        s1, s2, s3 = Split<axis=0>(score)  c1 = Transpose<perm=[1, 0]>(s1)  a1 = Add(c1, trans)
        t1 = ReduceLogSumExp<axes=[0]>(a1)  f2 = Add(t1, s2)  c2 = Transpose<perm=[1, 0]>(f2)  a2 = Add(c2, trans)
        b2 = Add(a2, s3)  z = ReduceLogSumExp<keepdims=0>(b2)  both = Add(seen1, seen2)  hit = Mul(both, trans)
        right = ReduceSum<keepdims=0>(hit)  loss = Sub(z, right)  p2l = Sub(b2, z)  p2 = Exp(p2l)
        m2 = ReduceSum(p2, [1])  m2r = Transpose<perm=[1, 0]>(m2)  p1l = Sub(a1, t1)  p1c = Exp(p1l)  p1 = Mul(p1c, m2r)
        ps = Add(p1, p2)  g = Sub(ps, both)  u = Mul(g, 0.1)  trans_next = Sub(trans, u) }"""
    seen = np.zeros((2, 4, 4))
    seen[0, 1, 2] = seen[1, 2, 2] = 1
    roles = {"states": "trans:trans_next", "checks": {"trans": "g"}, "feeds": {"seen1": seen[0], "seen2": seen[1]}}
    yield written("plain", text, **roles, style=Style(states="initializers", names="scrambled"))


@kind("fresh-hand-kernel-ridge", "hand")
def kernel_ridge() -> Iterator[Step]:
    """Kernel ridge regression, gradient steps on the dual weights; the kernel matrix is computed in the step."""
    text = """(float[7,3] x, float[7,1] y, float[7,1] alpha) => (float mse, float[7,1] alpha_next, float loss) {
        sq = ReduceSumSquare<axes=[1]>(x)  st = Transpose<perm=[1, 0]>(sq)  xx = Gemm<transB=1, alpha=-2.0>(x, x)
        d1 = Add(xx, sq)  d2 = Add(d1, st)  dn = Mul(d2, -0.5)  k = Exp(dn)  f = MatMul(k, alpha)  e = Sub(f, y)
        se = Mul(e, e)  mse = ReduceMean<keepdims=0>(se)  s = ReduceSum<keepdims=0>(se)  af = Mul(alpha, f)
        reg = ReduceSum<keepdims=0>(af)  r = Mul(reg, 0.1)  sr = Add(s, r)  loss = Mul(sr, 0.5)
        la = Mul(alpha, 0.1)  in = Add(e, la)  g = MatMul(k, in)  u = Mul(g, 0.05)  alpha_next = Sub(alpha, u) }"""
    yield written("plain", text, states="alpha:alpha_next", metrics="mse", checks={"alpha": "g"})


@kind("fresh-hand-fast-weights", "hand")
def fast_weights() -> Iterator[Step]:
    """Fast weights learn pairs of keys and values by the delta rule while tokens pass: two descents in one step, each
    of its own squared error. Two-sided: their mean, and the error of the last token.
    """
    token = """k{0} = Gather<axis=0>(keys, i{0})  v{0} = Gather<axis=0>(vals, i{0})  p{0} = MatMul({1}, k{0})
        e{0} = Sub(p{0}, v{0})  l{0} = ReduceSumSquare<keepdims=0>(e{0})  g{0} = MatMul(e{0}, r{0})
        u{0} = Mul(g{0}, 0.1)"""
    token = token.replace("g{0} = MatMul", "r{0} = Transpose<perm=[1, 0]>(k{0})  g{0} = MatMul")
    text = f"""(float[2,4,1] keys, float[2,3,1] vals, float[3,4] m) => (float last, float loss, float[3,4] m_next) {{
        i0 = Constant<value_int=0>()  i1 = Constant<value_int=1>()  {token.format(0, "m")}  m1 = Sub(m, u0)
        {token.format(1, "m1")}  m_next = Sub(m1, u1)  both = Add(l0, l1)  loss = Mul(both, 0.5)
        last = Identity(l1) }}"""
    yield written("plain", text, states="m:m_next", losses="loss last")


@kind("fresh-hand-local-rules", "hand")
def local_rules() -> Iterator[Step]:
    """Oja's rule, the perceptron, and k-means: no loss, no backward pass, though states move. Not to be scaled."""
    oja = """(float[6,4] x, float[4,1] w) => (float variance, float[4,1] w_next) { y = MatMul(x, w)
        h = Gemm<transA=1>(x, y)  variance = ReduceSumSquare<keepdims=0>(y)  back = Mul(w, variance)  d = Sub(h, back)
        u = Mul(d, 0.02)  w_next = Add(w, u) }"""
    yield written("oja", oja, states="w:w_next", losses="", metrics="variance")
    perceptron = """(float[6,4] x, float[6,1] y, float[4,1] w) => (float mistakes, float[4,1] w_next) { z = MatMul(x, w)
        s = Sign(z)  e = Sub(y, s)  a = Abs(e)  mistakes = ReduceSum<keepdims=0>(a)  h = Gemm<transA=1, alpha=0.1>(x, e)
        w_next = Add(w, h) }"""
    feeds = {"y": np.sign(np.random.randn(6, 1))}
    yield written("perceptron", perceptron, states="w:w_next", losses="", metrics="mistakes", feeds=feeds, warm=0)
    means = """(float[9,2] x, float[3,2] c, float[3,1] n) => (float[3,1] n_next, float inertia, float[3,2] c_next) {
        xe = Unsqueeze(x, [1])  ce = Unsqueeze(c, [0])  d = Sub(xe, ce)  dd = Mul(d, d)
        far = ReduceSum<keepdims=0>(dd, [2])  least = ReduceMin<axes=[1]>(far)  inertia = ReduceMean<keepdims=0>(least)
        is = Equal(far, least)  z = Cast<to=1>(is)  zt = Transpose<perm=[1, 0]>(z)  count = ReduceSum(zt, [1])
        sum = MatMul(zt, x)  n_next = Add(n, count)  cn = Mul(c, count)  gap = Sub(sum, cn)  part = Div(gap, n_next)
        c_next = Add(c, part) }"""
    roles = {"states": "c:c_next n:n_next", "losses": "", "metrics": "inertia"}
    yield written("k-means", means, **roles, feeds={"n": 1}, style=BARE)
