"""Control by hand: If, Loop, Scan and functions around parts of a step, and what a trainer keeps besides weights."""

from collections.abc import Iterator

import numpy as np

from models.zoo.hand.exporter import BARE, LAYER, SQUARES, written
from models.zoo.steps import PLAIN, Step, Style, kind

CHECK = {"w": "g"}


@kind("fresh-hand-if-guard", "hand")
def if_guard() -> Iterator[Step]:
    """An If applies the update where the gradient is small, and counts the others; or clips a large one."""
    skip = f"""({LAYER}, int64 skipped) => (float[4,2] w_next, float loss, int64 skipped_next, float norm) {{ {SQUARES}
        norm = ReduceL2<keepdims=0>(g)  ok = Less(norm, 25.0)  one = Constant<value_int=1>()
        w_next, skipped_next = If (ok) <
          then_branch = yes () => (float[4,2] wa, int64 sa) {{ u = Mul(g, 0.1) wa = Sub(w, u) sa = Identity(skipped) }},
          else_branch = no () => (float[4,2] wb, int64 sb) {{ wb = Identity(w) sb = Add(skipped, one) }}> }}"""
    states = "w:w_next skipped:skipped_next"
    yield written("skip", skip, states=states, metrics="norm", feeds={"skipped": 0}, checks=CHECK)
    clip = f"""({LAYER}, float lr) => (float loss, float[4,2] w_next) {{ {SQUARES}
        norm = ReduceL2<keepdims=0>(g)  large = Greater(norm, 0.5)
        c = If (large) <
          then_branch = yes () => (float[4,2] ca) {{ q = Div(g, norm) ca = Mul(q, 0.5) }},
          else_branch = no () => (float[4,2] cb) {{ cb = Identity(g) }}>
        u = Mul(c, lr)  w_next = Sub(w, u) }}"""
    yield written("clip", clip, states="w:w_next", hyper="lr", feeds={"lr": 0.1}, checks=CHECK, style=PLAIN)


@kind("fresh-hand-if-robust-loss", "hand")
def if_robust_loss() -> Iterator[Step]:
    """An If gives squared errors while young, absolute ones later, with the seed of the gradient beside the loss."""
    text = f"""(int64 age, {LAYER}) => (int64 age_next, float loss, float[4,2] w_next) {{
        p = MatMul(x, w)  e = Sub(p, y)  limit = Constant<value_int=4>()  young = Less(age, limit)
        loss, d = If (young) <
          then_branch = squares () => (float la, float[6,2] da) {{ s = Mul(e, e) la = ReduceMean<keepdims=0>(s)
            da = Mul(e, 0.16666667) }},
          else_branch = sizes () => (float lb, float[6,2] db) {{ a = Abs(e) lb = ReduceMean<keepdims=0>(a)
            sg = Sign(e) db = Mul(sg, 0.083333336) }}>
        g = Gemm<transA=1>(x, d)  u = Mul(g, 0.1)  w_next = Sub(w, u)  one = Constant<value_int=1>()
        age_next = Add(age, one) }}"""
    for variant, age in (("squares", 0), ("sizes", 7)):
        yield written(variant, text, states="w:w_next age:age_next", feeds={"age": age}, checks=CHECK)


@kind("fresh-hand-loop-epochs", "hand")
def loop_epochs() -> Iterator[Step]:
    """A Loop takes five steps on one batch; the loss is the last one, or the mean of all, which are a metric."""
    for variant, loss in (("last", "loss = Gather<axis=0>(all, four)"), ("mean", "loss = ReduceMean<keepdims=0>(all)")):
        text = f"""({LAYER}) => (float[5] all, float[4,2] w_next, float loss) {{
            trips = Constant<value_int=5>()  go = Constant<value = bool {{1}}>()  xt = Transpose<perm=[1, 0]>(x)
            w_next, all = Loop (trips, go, w) <body = one (int64 i, bool on, float[4,2] wi)
              => (bool still, float[4,2] wo, float li) {{
                p = MatMul(x, wi)  e = Sub(p, y)  s = Mul(e, e)  li = ReduceMean<keepdims=0>(s)
                d = Mul(e, 0.016666667)  u = MatMul(xt, d)  wo = Sub(wi, u)  still = Identity(on) }}>
            four = Constant<value_int=4>()  {loss} }}"""
        yield written(variant, text, states="w:w_next", metrics="all")


@kind("fresh-hand-scan-rows", "hand")
def scan_rows() -> Iterator[Step]:
    """A Scan sums losses and gradients over micro-batches, then one update."""
    text = """(float[3,6,4] x, float[3,6,2] y, float[4,2] w, float[4,2] m) =>
        (float[4,2] w_next, float[4,2] m_next, float loss) {
        zero = Mul(w, 0.0)
        total, g = Scan (0.0, zero, x, y) <num_scan_inputs=2, body = micro
          (float a, float[4,2] ga, float[6,4] xi, float[6,2] yi) => (float b, float[4,2] gb) {
            p = MatMul(xi, w)  e = Sub(p, yi)  s = Mul(e, e)  l = ReduceMean<keepdims=0>(s)  b = Add(a, l)
            d = Mul(e, 0.16666667)  gi = Gemm<transA=1>(xi, d)  gb = Add(ga, gi) }>
        loss = Div(total, 3.0)  gm = Div(g, 3.0)  ma = Mul(m, 0.9)  m_next = Add(ma, gm)  u = Mul(m_next, 0.1)
        w_next = Sub(w, u) }"""
    yield written("plain", text, states="w:w_next m:m_next", feeds={"m": 0}, checks={"w": "gm"})
    yield written("initializers", text, states="w:w_next m:m_next", opset=20, style=Style(states="initializers"))


@kind("fresh-hand-functions", "hand")
def functions() -> Iterator[Step]:
    """Forward, backward and update are functions of the model's own domain."""
    text = """(float[6,4] x, float[6,2] y, float[4,5] w1, float[5] b1, float[5,2] w2) =>
        (float loss, float[4,5] w1_next, float[5] b1_next, float[5,2] w2_next) {
        h = own.Hidden(x, w1, b1)  p = MatMul(h, w2)  loss, d = own.Squares(p, y)
        g2 = Gemm<transA=1>(h, d)  g1, gb = own.HiddenGradient(x, h, w2, d)
        w1_next = own.Descend(w1, g1)  b1_next = own.Descend(b1, gb)  w2_next = own.Descend(w2, g2) }
        <domain: "own", opset_import: ["" : 17]> Hidden (x, w, b) => (h) { z = MatMul(x, w)
          a = Add(z, b)  h = Tanh(a) }
        <domain: "own", opset_import: ["" : 17]> Squares (p, y) => (loss, d) { e = Sub(p, y)  s = Mul(e, e)
          loss = ReduceMean<keepdims=0>(s)  f = Constant<value_float=0.16666667>()  d = Mul(e, f) }
        <domain: "own", opset_import: ["" : 17]> HiddenGradient (x, h, w, d) => (g, gb) { dh = Gemm<transB=1>(d, w)
          o = Constant<value_float=1.0>()  hh = Mul(h, h)  k = Sub(o, hh)  da = Mul(dh, k)  g = Gemm<transA=1>(x, da)
          ax = Constant<value_ints=[0]>()  gb = ReduceSum<keepdims=0>(da, ax) }
        <domain: "own", opset_import: ["" : 17]> Descend (w, g) => (o) { r = Constant<value_float=0.1>()  u = Mul(g, r)
          o = Sub(w, u) }"""
    checks = {"w1": 0.1, "b1": 0.1, "w2": 0.1}
    yield written("plain", text, states="w1:w1_next b1:b1_next w2:w2_next", checks=checks)


@kind("fresh-hand-early-stop", "hand")
def early_stop() -> Iterator[Step]:
    """The best loss, the weights that had it, and patience are carried; a stop flag is given, nothing is stopped."""
    text = f"""({LAYER}, float best, float[4,2] best_w, int64 wait) => (bool stop, float best_next,
        float[4,2] best_w_next, int64 wait_next, float[4,2] w_next, float loss) {{ {SQUARES}
        better = Less(loss, best)  best_next = Min(best, loss)  best_w_next = Where(better, w, best_w)
        one = Constant<value_int=1>()  more = Add(wait, one)  zero = Constant<value_int=0>()
        wait_next = Where(better, zero, more)  five = Constant<value_int=5>()  stop = GreaterOrEqual(wait_next, five)
        u = Mul(g, 0.1)  w_next = Sub(w, u) }}"""
    states = "w:w_next best:best_next best_w:best_w_next wait:wait_next"
    yield written(
        "plain", text, states=states, metrics="stop", feeds={"best": 1e9, "wait": 0}, checks=CHECK, style=PLAIN
    )


@kind("fresh-hand-running-loss", "hand")
def running_loss() -> Iterator[Step]:
    """The mean loss so far and a smoothed one are carried; the loss is the batch's. The `mean` variant gives no other:
    its truth is two-sided, the summed and the mean loss of the batch are both right.
    """
    states = "w:w_next total:total_next seen:seen_next smooth:smooth_next"
    front = f"({LAYER}, float total, float seen, float smooth) => (float seen_next, float[4,2] w_next, float loss, "
    body = f"""{{ {SQUARES} n = Constant<value_float=6.0>()  part = Mul(loss, n)  total_next = Add(total, part)
        seen_next = Add(seen, n)  mean = Div(total_next, seen_next)  sa = Mul(smooth, 0.98)  sb = Mul(loss, 0.02)
        smooth_next = Add(sa, sb)  u = Mul(g, 0.1)  w_next = Sub(w, u) }}"""
    feeds = {"total": 0, "seen": 0, "smooth": 0}
    text = f"{front}float mean, float total_next, float smooth_next) {body}"
    yield written("logged", text, states=states, metrics="mean", feeds=feeds, checks=CHECK)
    both = f"{front}float part, float total_next, float smooth_next) {body}"
    yield written("mean", both, states=states, losses="loss part", feeds=feeds)


@kind("fresh-hand-merged-adapter", "hand")
def merged_adapter() -> Iterator[Step]:
    """A low-rank adapter on a frozen matrix: the merged matrix and norms are logged, only `a` and `b` are carried."""
    text = """(float[6,4] x, float[6,3] y, float[4,3] frozen, float[4,2] a, float[2,3] b) =>
        (float[4,3] merged, float size, float[2,3] b_next, float[4,2] a_next, float loss) {
        ab = MatMul(a, b)  sc = Mul(ab, 0.5)  full = Add(frozen, sc)  p = MatMul(x, full)  e = Sub(p, y)
        loss = ReduceSumSquare<keepdims=0>(e)  d = Add(e, e)  gf = Gemm<transA=1, alpha=0.5>(x, d)
        ga = Gemm<transB=1>(gf, b)  gb = Gemm<transA=1>(a, gf)  ua = Mul(ga, 0.02)  ub = Mul(gb, 0.02)
        a_next = Sub(a, ua)  b_next = Sub(b, ub)  nab = MatMul(a_next, b_next)  nsc = Mul(nab, 0.5)
        merged = Add(frozen, nsc)  size = ReduceL2<keepdims=0>(nsc) }"""
    roles = {"states": "a:a_next b:b_next", "metrics": "merged size", "constants": "frozen", "checks": {"a": "ga"}}
    yield written("plain", text, **roles)
    yield written("embedded", text, **roles, style=Style(embedded_constants=True, names="scrambled"))


@kind("fresh-hand-weight-soup", "hand")
def weight_soup() -> Iterator[Step]:
    """Means of weights and deltas: an equal-weighted soup, a difference for a server, a gossip with two neighbours."""
    soup = f"""({LAYER}, float[4,2] soup, float count) => (float count_next, float[4,2] soup_next, float loss,
        float[4,2] w_next) {{ {SQUARES} u = Mul(g, 0.1)  w_next = Sub(w, u)  count_next = Add(count, 1.0)
        gap = Sub(w_next, soup)  part = Div(gap, count_next)  soup_next = Add(soup, part) }}"""
    states = "w:w_next soup:soup_next count:count_next"
    yield written("soup", soup, states=states, feeds={"count": 1}, checks=CHECK)
    delta = f"""({LAYER}, float[4,2] server) => (float[4,2] delta, float loss, float[4,2] w_next) {{ {SQUARES}
        away = Sub(w, server)  pull = Mul(away, 0.01)  all = Add(g, pull)  u = Mul(all, 0.1)  w_next = Sub(w, u)
        delta = Sub(server, w_next) }}"""
    yield written("federated", delta, states="w:w_next", metrics="delta", constants="server", checks=CHECK)
    gossip = f"""({LAYER}, float[2,4,2] neighbours) => (float[4,2] w_next, float loss, float apart) {{ {SQUARES}
        u = Mul(g, 0.1)  own = Sub(w, u)  near = ReduceSum<keepdims=0>(neighbours, [0])  all = Add(own, near)
        w_next = Div(all, 3.0)  gap = Sub(w_next, own)  apart = ReduceMax<keepdims=0>(gap) }}"""
    yield written("gossip", gossip, states="w:w_next", metrics="apart", checks=CHECK, style=BARE)


@kind("fresh-hand-fixed-point", "hand")
def fixed_point() -> Iterator[Step]:
    """An implicit layer: a Loop iterates to the fixed point, a second one solves for the cotangent."""
    text = """(float[6,3] x, float[6,3] y, float[3,3] w) => (float loss, float[3,3] w_next, float residual) {
        trips = Constant<value_int=30>()  go = Constant<value = bool {1}>()  start = Mul(x, 0.0)
        z = Loop (trips, go, start) <body = settle (int64 i, bool on, float[6,3] zi) => (bool still, float[6,3] zo) {
          a = MatMul(zi, w)  b = Add(a, x)  t = Tanh(b)  zo = Mul(t, 0.5)  still = Identity(on) }>
        a = MatMul(z, w)  b = Add(a, x)  t = Tanh(b)  f = Mul(t, 0.5)  r = Sub(f, z)  residual = ReduceL2<keepdims=0>(r)
        e = Sub(f, y)  s = Mul(e, e)  loss = ReduceMean<keepdims=0>(s)  d = Mul(e, 0.11111111)
        tt = Mul(t, t)  k = Sub(1.0, tt)  slope = Mul(k, 0.5)
        v = Loop (trips, go, d) <body = solve (int64 i, bool on, float[6,3] vi) => (bool still, float[6,3] vo) {
          q = Mul(vi, slope)  c = Gemm<transB=1>(q, w)  vo = Add(d, c)  still = Identity(on) }>
        q = Mul(v, slope)  g = Gemm<transA=1>(z, q)  u = Mul(g, 0.1)  w_next = Sub(w, u) }"""
    feeds = {"w": 0.4 * np.random.randn(3, 3)}
    yield written("plain", text, states="w:w_next", metrics="residual", feeds=feeds, checks=CHECK)
