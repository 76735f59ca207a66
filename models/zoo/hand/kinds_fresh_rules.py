"""Update rules by hand on one linear layer: the same rule in several algebraic forms, and states of other types."""

from collections.abc import Iterator

import numpy as np

from models.zoo.hand.exporter import BARE, LAYER, SQUARES, Written, written
from models.zoo.steps import PLAIN, Step, Style, kind

MOMENTS = "float[4,2] w_next, float[4,2] m_next, float[4,2] v_next"
CHECK = {"w": "g"}


def adam(variant: str, more: str, following: str, body: str, states: str, style: Style, **fed: object) -> Written:
    """Return a step with the moments m and v; `more` and `following` are its other inputs and outputs."""
    text = f"({LAYER}, float[4,2] m, float[4,2] v{more}) => (float loss, {MOMENTS}{following}) {{ {SQUARES} {body} }}"
    roles = {"states": f"w:w_next m:m_next v:v_next {states}", "checks": CHECK, "style": style, "warm": 3}
    return written(variant, text, **roles, feeds={"m": 0, "v": 0, **fed}, opset=18)


@kind("fresh-hand-adam-forms", "hand")
def adam_forms() -> Iterator[Step]:
    """Adam as a textbook, with the corrections in the rate, with carried powers, as interpolations, without any."""
    textbook = """t_next = Add(t, 1.0)  ma = Mul(m, 0.9)  mb = Mul(g, 0.1)  m_next = Add(ma, mb)
        gg = Mul(g, g)  va = Mul(v, 0.999)  vb = Mul(gg, 0.001)  v_next = Add(va, vb)
        pa = Pow(0.9, t_next)  pb = Pow(0.999, t_next)  ca = Sub(1.0, pa)  cb = Sub(1.0, pb)
        mh = Div(m_next, ca)  vh = Div(v_next, cb)  r = Sqrt(vh)  re = Add(r, 1e-8)  q = Div(mh, re)
        u = Mul(lr, q)  w_next = Sub(w, u)""".replace("1e-8", "0.00000001")
    yield adam("textbook", ", float t, float lr", ", float t_next", textbook, "t:t_next", BARE, t=0, lr=0.01)
    carried = """pa_next = Mul(pa, 0.9)  pb_next = Mul(pb, 0.999)  dm = Sub(g, m)  sm = Mul(dm, 0.1)
        m_next = Add(m, sm)  gg = Pow(g, 2.0)  dv = Sub(gg, v)  sv = Mul(dv, 0.001)  v_next = Add(v, sv)
        cb = Sub(1.0, pb_next)  rb = Sqrt(cb)  ca = Sub(1.0, pa_next)  f = Div(rb, ca)  rate = Mul(f, -0.01)
        r = Sqrt(v_next)  re = Add(r, 0.000001)  i = Reciprocal(re)  q = Mul(m_next, i)  u = Mul(q, rate)
        w_next = Add(w, u)"""
    more, following = ", float pa, float pb", ", float pb_next, float pa_next"
    yield adam("carried-powers", more, following, carried, "pa:pa_next pb:pb_next", PLAIN, pa=1, pb=1)
    counted = """t_next = Add(t, one)  tf = Cast<to=1>(t_next)  la = Mul(tf, -0.10536052)  pa = Exp(la)
        ca = Sub(1.0, pa)  pb = Pow(0.99, tf)  cb = Sub(1.0, pb)  ma = Mul(m, 0.9)  mb = Mul(g, 0.1)
        m_next = Sum(ma, mb)  vm = Mul(v, 0.99)  ga = Mul(g, g)  gb = Mul(ga, 0.01)  v_next = Add(gb, vm)
        vh = Div(v_next, cb)  top = Max(best, vh)  best_next = Identity(top)  ve = Add(top, 0.0001)  i = Pow(ve, -0.5)
        mh = Div(m_next, ca)  q = Mul(i, mh)  wd = Mul(w, 0.01)  dir = Add(q, wd)  u = Mul(dir, 0.02)
        w_next = Sub(w, u)"""
    counted = f"one = Constant<value_int=1>() {counted}"
    more, following = ", int64 t, float[4,2] best", ", float[4,2] best_next, int64 t_next"
    scrambled = Style(names="scrambled", shapes="interface")
    yield adam("amsgrad", more, following, counted, "t:t_next best:best_next", scrambled, t=0, best=0)
    bare = """ma = Mul(m, 0.95)  mb = Mul(g, 0.05)  m_next = Add(ma, mb)  gg = Mul(g, g)
        hi = Max(v, gg)  va = Mul(hi, 0.98)  v_next = Add(va, 0.0000001)  r = Sqrt(v_next)  q = Div(m_next, r)
        c = Clip(q, -1.0, 1.0)  u = Mul(c, 0.01)  w_next = Sub(w, u)"""
    yield adam("no-correction", "", "", bare, "", Style(states="initializers", shapes="interface"))


@kind("fresh-hand-packed-adam", "hand")
def packed_adam() -> Iterator[Step]:
    """Weights, means and squares lie in one tensor; a browser uploads one buffer. Only `pack` is carried."""
    text = f"""(float[3,4,2] pack, float[6,4] x, float[6,2] y) => (float[3,4,2] pack_next, float loss) {{
        i0 = Constant<value_int=0>()  w = Gather<axis=0>(pack, i0)
        parts0, parts1, parts2 = Split<axis=0, num_outputs=3>(pack)
        m = Squeeze(parts1, [0])  v = Squeeze(parts2, [0])  {SQUARES}
        ma = Mul(m, 0.9)  mb = Mul(g, 0.1)  mn = Add(ma, mb)  gg = Mul(g, g)  va = Mul(v, 0.99)  vb = Mul(gg, 0.01)
        vn = Add(va, vb)  r = Sqrt(vn)  re = Add(r, 0.001)  q = Div(mn, re)  u = Mul(q, 0.02)  wn = Sub(w, u)
        wu = Unsqueeze(wn, [0])  mu = Unsqueeze(mn, [0])  vu = Unsqueeze(vn, [0])
        pack_next = Concat<axis=0>(wu, mu, vu) }}"""
    pack = np.stack([np.random.randn(4, 2), np.zeros((4, 2)), np.zeros((4, 2))])
    yield written("plain", text, states="pack:pack_next", feeds={"pack": pack}, opset=18)


@kind("fresh-hand-gemm-momentum", "hand")
def gemm_momentum() -> Iterator[Step]:
    """The momentum, or the weight, is the addend of the Gemm: nothing else is a gradient."""
    front = f"({LAYER}"
    core = SQUARES.partition("xt =")[0]
    heavy = f"""{front}, float[4,2] m) => (float[4,2] w_next, float loss, float[4,2] m_next) {{ {core}
        m_next = Gemm<transA=1, alpha=1.0, beta=0.9>(x, d, m)  u = Mul(m_next, -0.05)  w_next = Add(w, u) }}"""
    yield written("heavy-ball", heavy, states="w:w_next m:m_next", feeds={"m": 0}, opset=11)
    nesterov = heavy.replace("u = Mul(m_next, -0.05)", "n = Gemm<transA=1, beta=0.9>(x, d, m_next) u = Mul(n, -0.05)")
    yield written("nesterov", nesterov, states="w:w_next m:m_next", feeds={"m": 0}, opset=23)
    fused = f"""{front}) => (float loss, float[4,2] w_next) {{ {core}
        w_next = Gemm<transA=1, alpha=-0.05, beta=1.0>(x, d, w) }}"""
    yield written("fused", fused, states="w:w_next", opset=14, checks={"w": 0.05}, style=Style(states="overridable"))


@kind("fresh-hand-sign-rules", "hand")
def sign_rules() -> Iterator[Step]:
    """Lion, and Rprop with its sizes and the gradient before: the update depends on the gradient's sign alone."""
    lion = f"""({LAYER}, float[4,2] m) => (float loss, float[4,2] m_next, float[4,2] w_next) {{ {SQUARES}
        a = Mul(m, 0.9)  b = Mul(g, 0.1)  c = Add(a, b)  sg = Sign(c)  wd = Mul(w, 0.1)  dir = Add(sg, wd)
        u = Mul(dir, 0.003)  w_next = Sub(w, u)  ma = Mul(m, 0.99)  mb = Mul(g, 0.01)  m_next = Add(ma, mb) }}"""
    yield written("lion", lion, states="w:w_next m:m_next", feeds={"m": 0}, checks=CHECK)
    rprop = f"""({LAYER}, float[4,2] size, float[4,2] before) =>
        (float[4,2] size_next, float[4,2] w_next, float[4,2] before_next, float loss) {{ {SQUARES}
        same = Mul(g, before)  up = Greater(same, 0.0)  down = Less(same, 0.0)  low = Where(down, 0.5, 1.0)
        factor = Where(up, 1.2, low)  sized = Mul(size, factor)  size_next = Clip(sized, 0.0001, 1.0)
        before_next = Where(down, 0.0, g)  sg = Sign(before_next)  u = Mul(sg, size_next)  w_next = Sub(w, u) }}"""
    states = "w:w_next size:size_next before:before_next"
    yield written("rprop", rprop, states=states, feeds={"size": 0.01, "before": 0}, checks=CHECK, warm=4)


@kind("fresh-hand-narrow-states", "hand")
def narrow_states() -> Iterator[Step]:
    """States that are not float32: float16 weights with a master, a momentum in int8 with its step, one that bfloat16
    rounds."""
    half = f"""(float[6,4] x, float[6,2] y, float16[4,2] w16, float[4,2] master) =>
        (float loss, float16[4,2] w16_next, float[4,2] master_next) {{ w = Cast<to=1>(w16)  {SQUARES}
        u = Mul(g, 0.05)  master_next = Sub(master, u)  w16_next = Cast<to=10>(master_next) }}"""
    yield written("half", half, states="w16:w16_next master:master_next", checks={"w16": "g"}, warm=1)
    eight = f"""({LAYER}, int8[4,2] m8, float step) =>
        (float loss, int8[4,2] m8_next, float step_next, float[4,2] w_next) {{ {SQUARES}
        m = DequantizeLinear(m8, step)  ma = Mul(m, 0.9)  mn = Add(ma, g)  size = Abs(mn)
        top = ReduceMax<keepdims=0>(size)  st = Div(top, 127.0)  step_next = Add(st, 0.0000001)
        zero = Constant<value = int8 {{0}}>()  m8_next = QuantizeLinear(mn, step_next, zero)  u = Mul(mn, 0.05)
        w_next = Sub(w, u) }}"""
    feeds = {"m8": 0, "step": 0.01}
    yield written("int8", eight, states="w:w_next m8:m8_next step:step_next", feeds=feeds, checks=CHECK, opset=21)
    brain = f"""({LAYER}, float[4,2] m) => (float loss, float[4,2] w_next, float[4,2] m_next) {{ {SQUARES}
        ma = Mul(m, 0.9)  mn = Add(ma, g)  narrow = Cast<to=16>(mn)  m_next = Cast<to=1>(narrow)  u = Mul(m_next, 0.05)
        w_next = Sub(w, u) }}"""
    yield written("bfloat16", brain, states="w:w_next m:m_next", feeds={"m": 0}, checks=CHECK)


@kind("fresh-hand-proximal", "hand")
def proximal() -> Iterator[Step]:
    """Accelerated shrinkage: a scalar's momentum sequence, an extrapolated point `z`; the loss is that of z."""
    text = f"""(float[6,4] x, float[6,2] y, float[4,2] w, float[4,2] z, float t) =>
        (float t_next, float[4,2] z_next, float[4,2] w_next, float loss) {{ {SQUARES.replace("(x, w)", "(x, z)")}
        u = Mul(g, 0.1)  a = Sub(z, u)  size = Abs(a)  sh = Sub(size, 0.005)  re = Relu(sh)  sg = Sign(a)
        w_next = Mul(re, sg)  tt = Mul(t, t)  t4 = Mul(tt, 4.0)  t5 = Add(t4, 1.0)  ts = Sqrt(t5)  t1 = Add(ts, 1.0)
        t_next = Mul(t1, 0.5)  tm = Sub(t, 1.0)  f = Div(tm, t_next)  dw = Sub(w_next, w)  ex = Mul(f, dw)
        z_next = Add(w_next, ex) }}"""
    yield written("fista", text, states="w:w_next z:z_next t:t_next", feeds={"t": 1}, checks={"z": "g"})


@kind("fresh-hand-update-alone", "hand")
def update_alone() -> Iterator[Step]:
    """No backward pass: C++ computes the gradient and feeds it, the graph clips it and updates. Not to be scaled."""
    text = """(float[4,2] grad, float[4,2] w, float[4,2] m) => (float[4,2] w_next, float[4,2] m_next, float norm) {
        sq = Mul(grad, grad)  ss = ReduceSum<keepdims=0>(sq)  norm = Sqrt(ss)  lim = Max(norm, 1.0)  c = Div(grad, lim)
        ma = Mul(m, 0.9)  m_next = Add(ma, c)  u = Mul(m_next, 0.05)  w_next = Sub(w, u) }"""
    yield written("plain", text, states="w:w_next m:m_next", losses="", metrics="norm", feeds={"m": 0})
