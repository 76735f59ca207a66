"""Draw the pictures of docs/concepts/analysis.md. Their content is checked against the analysis.

python docs/draw_analysis.py    (with what `pip install -e '.[demo]'` brings)
"""

# ruff: noqa: D103, RUF001

from __future__ import annotations

from typing import Any

import onnx.parser
from matplotlib.figure import Figure
from sketch import BEND, NEW, WARM, Sheet, save

import graphscale as gs

HEAD = '<ir_version: 10, opset_import: ["" : 20]>'

# The 1.0 that seeds the backward pass is the 1.0 of GELU's 1 + erf.
SHARED = f"""{HEAD}
step (float[8,4] x, float[8,5] t, float[4,5] w) => (float loss, float[4,5] dw)
<float one = {{1}}, float two_over_n = {{0.05}}, float slope = {{1.1283792}}>
{{
    h = MatMul(x, w)
    e = Erf(h)
    y = Add(one, e)
    d = Sub(y, t)
    d2 = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(d2)
    seed = Mul(one, two_over_n)
    dy = Mul(d, seed)
    hh = Mul(h, h)
    minus = Neg(hh)
    bell = Exp(minus)
    de = Mul(bell, slope)
    dh = Mul(dy, de)
    xt = Transpose(x)
    dw = MatMul(xt, dh)
}}
"""
# Cross-entropy: its derivative is softmax - onehot, over the size of the batch.
RESIDUAL = f"""{HEAD}
step (float[8,4] x, float[8,3] onehot, float[4,3] w) => (float loss, float[4,3] dw)
<float minus_eighth = {{-0.125}}, float eighth = {{0.125}}>
{{
    y = MatMul(x, w)
    log_p = LogSoftmax<axis = 1>(y)
    picked = Mul(onehot, log_p)
    total = ReduceSum<keepdims = 0>(picked)
    loss = Mul(total, minus_eighth)
    p = Exp(log_p)
    residual = Sub(p, onehot)
    dy = Mul(residual, eighth)
    xt = Transpose(x)
    dw = MatMul(xt, dy)
}}
"""
# Two losses on two heads; their cotangents meet at the body.
TWO = f"""{HEAD}
step (float[8,4] x, float[8,3] s, float[8,3] t, float[4,5] w, float[5,3] u, float[5,3] v)
    => (float loss, float[4,5] dw)
<float a = {{0.0833333}}, float b = {{0.0416667}}, float half = {{0.5}}>
{{
    h = MatMul(x, w)
    y = MatMul(h, u)
    z = MatMul(h, v)
    dy0 = Sub(y, s)
    dz0 = Sub(z, t)
    y2 = Mul(dy0, dy0)
    z2 = Mul(dz0, dz0)
    ly = ReduceMean<keepdims = 0>(y2)
    lz0 = ReduceMean<keepdims = 0>(z2)
    lz = Mul(lz0, half)
    loss = Add(ly, lz)
    dy = Mul(dy0, a)
    dz = Mul(dz0, b)
    ut = Transpose(u)
    vt = Transpose(v)
    dhy = MatMul(dy, ut)
    dhz = MatMul(dz, vt)
    dh = Add(dhy, dhz)
    xt = Transpose(x)
    dw = MatMul(xt, dh)
}}
"""
# Clipping by the global norm, then Adam's second moment and its square root.
OPTIMIZER = f"""{HEAD}
step (float[8,4] x, float[8,3] t, float[4,3] w, float[4,3] v)
    => (float loss, float norm, float[4,3] w_next, float[4,3] v_next)
<float a = {{0.0833333}}, float beta = {{0.99}}, float rest = {{0.01}}, float eta = {{0.1}}, float eps = {{0.001}}>
{{
    y = MatMul(x, w)
    d = Sub(y, t)
    d2 = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(d2)
    dy = Mul(d, a)
    xt = Transpose(x)
    dw = MatMul(xt, dy)
    norm = ReduceL2<keepdims = 0>(dw)
    g2 = Mul(dw, dw)
    fresh = Mul(rest, g2)
    kept = Mul(beta, v)
    v_next = Add(kept, fresh)
    root = Sqrt(v_next)
    below = Add(root, eps)
    direction = Div(dw, below)
    change = Mul(eta, direction)
    w_next = Sub(w, change)
}}
"""

# Scaled by hand, and unscaled at once.
AT_ONCE = f"""{HEAD}
step (float[8,4] x, float[8,3] t, float[4,3] w, float S) => (float loss, float[4,3] dw)
<float two_over_n = {{0.083333336}}>
{{
    y = MatMul(x, w)
    d = Sub(y, t)
    d2 = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(d2)
    dy = Mul(d, two_over_n)
    xt = Transpose(x)
    dw0 = MatMul(xt, dy)
    dw1 = Mul(dw0, S)
    dw = Div(dw1, S)
}}
"""


def report(text: str, **options: Any) -> gs.Report:
    return gs.scale(onnx.parser.parse_model(text), **options).report


def check() -> None:
    """Check that the picture shows what the analysis finds."""
    shared, residual, two, optimizer = map(report, (SHARED, RESIDUAL, TWO, OPTIMIZER))
    assert [(place.value, place.node is None) for place in shared.places] == [("one", False)], shared.places
    assert [place.value for place in residual.places] == ["residual"], residual.places
    assert sorted(place.value for place in two.places) == ["a", "b"], two.places
    assert [gradient.value for gradient in optimizer.gradients] == ["dw"], optimizer.gradients
    assert {(s.input, s.output) for s in optimizer.state} >= {("w", "w_next"), ("v", "v_next")}
    assert all(found.coverage == 1.0 for found in (shared, residual, two, optimizer))
    assert two.contractions == 3
    at_once = gs.lint(onnx.parser.parse_model(AT_ONCE), scale="S")
    assert "GS102" in {finding.code for finding in at_once.findings}, at_once.findings


def flow() -> Figure:
    """From an exporter to a runtime."""
    sheet = Sheet(14.2, 3.9)
    y = 2.25
    frameworks, users = ("PyTorch", "JAX", "ONNX Runtime"), ("any ONNX runtime", "gs.Session", "graphscale train")
    for i, name in enumerate(frameworks):
        sheet.wide(name, 1.15, y + 0.75 - 0.75 * i, name, half=0.85)
    sheet.wide("step", 3.4, y, "training step\n.onnx", half=0.8)
    sheet.panel(4.7, 1.45, 4.75, 2.25)
    sheet.note(4.9, 3.42, "gs.scale", fontsize=11, weight="bold")
    sheet.note(4.9, 3.05, "scale · unscale · check · update · guard · order", color=NEW, style="italic", fontsize=8.5)
    sheet.wide("analysis", 5.65, y, "analysis:\ndegrees", "1", half=0.75)
    sheet.wide("passes", 7.4, y, "passes,\nin order", "new", half=0.7)
    sheet.wide("proof", 8.8, y, "proof", "new", half=0.45)
    sheet.wide("scaled", 10.6, y, "scaled step\n.onnx", "new", half=0.75)
    sheet.wide("report", 8.8, 0.55, "report", half=0.75)
    sheet.wide("verify", 10.6, 0.55, "verify · lint\ndiff · strip", half=0.75)
    for i, name in enumerate(users):
        sheet.wide(name, 13.05, y + 0.75 - 0.75 * i, name, half=1.05)
    for name in frameworks:
        sheet.arrow(name, "step")
    sheet.arrow("step", "analysis", width=1.6)
    sheet.arrow("analysis", "passes", WARM, 1.6)
    sheet.arrow("passes", "proof", NEW, 1.6)
    sheet.arrow("proof", "scaled", NEW, 1.6)
    for name in users:
        sheet.arrow("scaled", name)
    sheet.arrow("scaled", "verify")
    sheet.arrow("proof", "report")
    return sheet.figure


def places() -> Figure:
    """Draw the places where the scale enters: three seeds that no pattern finds."""
    sheet = Sheet(14.2, 6.0)
    for x in (0.15, 4.85, 9.55):
        sheet.panel(x, 0.15, 4.5, 5.7)
    _shared(sheet, 0.15)
    _residual(sheet, 4.85)
    _two(sheet, 9.55)
    return sheet.figure


def _shared(sheet: Sheet, x: float) -> None:
    below = "The 1 of the seed is also the 1 of GELU's\n1 + erf: one edge is scaled, not the value."
    sheet.title(x + 0.25, 5.5, "A shared seed", below)
    sheet.value("one", x + 1.05, 3.9, "1")
    sheet.box("gelu", x + 2.75, 3.9, "1 + erf")
    sheet.box("S", x + 1.05, 2.95, "× S", "new")
    sheet.box("seed", x + 2.75, 2.95, "× 2/N", "1")
    sheet.box("dh", x + 2.75, 1.95, "× (y − t)", "1")
    sheet.box("dw", x + 2.75, 0.95, "MatMul", "1")
    sheet.value("y", x + 4.1, 3.9, "loss")
    sheet.value("xt", x + 1.05, 0.95, "xᵀ")
    sheet.value("g", x + 4.1, 0.95, "dw")
    sheet.arrow("one", "gelu")
    sheet.arrow("one", "S", NEW)
    sheet.arrow("gelu", "y")
    for arrow in ("S seed", "seed dh", "dh dw", "dw g"):
        sheet.arrow(*arrow.split(), WARM, 1.8)
    sheet.arrow("xt", "dw")


def _residual(sheet: Sheet, x: float) -> None:
    below = "The derivative of cross-entropy is a forward\nvalue, softmax − onehot: the scale enters\nbehind it."
    sheet.title(x + 0.25, 5.5, "No seed at all", below)
    for i, (text, kind) in enumerate((("softmax", "0"), ("− onehot", "0"))):
        sheet.box(text, x + 0.95 + 2.0 * i, 3.9, text, kind)
    for i, (text, kind) in enumerate((("× S", "new"), ("× 1/N", "1"), ("MatMul", "1"))):
        sheet.box(text, x + 2.95, 2.95 - 1.0 * i, text, kind)
    sheet.value("loss", x + 0.95, 3.0, "loss")
    sheet.value("xt", x + 0.95, 0.95, "xᵀ")
    sheet.value("g", x + 4.15, 0.95, "dw")
    for start, end in (("softmax", "− onehot"), ("− onehot", "× S"), ("softmax", "loss"), ("xt", "MatMul")):
        sheet.arrow(start, end)
    for start, end in (("× S", "× 1/N"), ("× 1/N", "MatMul"), ("MatMul", "g")):
        sheet.arrow(start, end, WARM, 1.8)


def _two(sheet: Sheet, x: float) -> None:
    below = "Their cotangents meet in a sum, whose\noperands must agree: both are scaled."
    sheet.title(x + 0.25, 5.5, "Two losses", below)
    for name, at in (("1", x + 1.15), ("2", x + 3.35)):
        sheet.value(f"a{name}", at, 4.4, "1/N" if name == "1" else "½ · 1/N")
        sheet.box(f"S{name}", at, 3.55, "× S", "new")
        sheet.box(f"h{name}", at, 2.6, "MatMul", "1")
        sheet.arrow(f"a{name}", f"S{name}", NEW)
        sheet.arrow(f"S{name}", f"h{name}", WARM, 1.8)
    sheet.note(x + 1.15, 3.07, "head 1   ", fontsize=8.5, ha="right", color="#8b8b8b")
    sheet.note(x + 3.35, 3.07, "   head 2", fontsize=8.5, ha="left", color="#8b8b8b")
    sheet.box("add", x + 2.25, 1.75, "Add", "1")
    sheet.box("dw", x + 2.25, 0.95, "MatMul", "1")
    sheet.value("xt", x + 0.85, 0.95, "xᵀ")
    sheet.value("g", x + 3.7, 0.95, "dw")
    sheet.arrow("h1", "add", WARM, 1.8, BEND.format(-90, 0))
    sheet.arrow("h2", "add", WARM, 1.8, BEND.format(-90, 180))
    for arrow in ("add dw", "dw g"):
        sheet.arrow(*arrow.split(), WARM, 1.8)
    sheet.arrow("xt", "dw")


def unscaling() -> Figure:
    """Draw the place where the scale comes out: one division, before the first use that is not linear."""
    sheet = Sheet(14.2, 4.6)
    sheet.note(0.35, 4.25, "Clipping and Adam on one gradient", fontsize=11, weight="bold")
    sheet.box("da", 1.0, 2.5, "backward", "1")
    sheet.box("dw", 3.0, 2.5, "MatMul", "1")
    sheet.box("S", 5.0, 2.5, "÷ S", "new")
    sheet.box("norm", 7.4, 3.6, "‖g‖ > c ?")
    sheet.box("g2", 7.4, 2.5, "g · g")
    sheet.box("moment", 9.2, 2.5, "+ β · v")
    sheet.box("sqrt", 11.0, 2.5, "Sqrt")
    sheet.box("div", 11.0, 1.2, "g ÷ √v")
    sheet.box("w", 13.0, 1.2, "w − η·u")
    sheet.box("finite", 5.0, 0.8, "all finite?", "new")
    sheet.arrow("da", "dw", WARM, 1.8)
    sheet.arrow("dw", "S", WARM, 1.8)
    sheet.arrow("S", "norm", path=BEND.format(0, 200))
    for arrow in ("S g2", "g2 moment", "moment sqrt", "sqrt div", "div w"):
        sheet.arrow(*arrow.split())
    sheet.arrow("S", "div", path="arc3,rad=0.18")
    sheet.arrow("S", "finite", NEW)
    sheet.note(8.2, 3.6, "a threshold is meant for gradients,\nnot for gradients times S")
    sheet.note(6.8, 3.02, "scaled, it would add degree 2 to a moment of degree 0", fontsize=8.5)
    sheet.note(3.0, 3.02, "degree 1", ha="center", fontsize=8.5)
    sheet.note(5.0, 3.02, "the gradient", ha="center", fontsize=8.5)
    return sheet.figure


def updates() -> Figure:
    """Draw the carried state, and how a skipped step leaves it alone."""
    sheet = Sheet(14.2, 4.9)
    sheet.panel(0.15, 0.2, 6.75, 4.55)
    sheet.title(0.4, 4.4, "Which output is the next value of which input?")
    rows = (
        ("0.9999·w − η·g", "depends on w, coefficient near 1", "next w"),
        ("0.9·m + g", "depends on m, likewise", "next m"),
        ("t + 1", "an input and a constant", "next t"),
        ("g + 0.002·w", "a small coefficient: weight decay", "gradient"),
        ("g", "degree 1: never an update", "gradient"),
    )
    for i, (formula, why, what) in enumerate(rows):
        y, gradient = 3.7 - 0.75 * i, what == "gradient"
        sheet.wide(f"row{i}", 1.35, y, formula, "1" if gradient else "0", half=0.95)
        sheet.note(2.55, y, why)
        sheet.note(6.7, y, what, fontsize=9.5, ha="right", weight="bold", color=WARM if gradient else NEW)
    sheet.panel(7.1, 0.2, 6.95, 4.55)
    sheet.title(7.35, 4.4, "Everything carried is guarded, counters too")
    sheet.box("finite", 10.4, 0.75, "all finite?", "new")
    for i, (old, text) in enumerate((("w", "w − η·g"), ("m", "0.9·m + g"), ("t", "t + 1"))):
        x = 8.35 + 2.05 * i
        sheet.value(f"old{i}", x - 0.9, 2.95, old)
        sheet.box(f"new{i}", x, 3.45, text)
        sheet.box(f"where{i}", x, 2.1, f"next {old}", "new")
        sheet.arrow(f"old{i}", f"where{i}")
        sheet.arrow(f"new{i}", f"where{i}")
        sheet.arrow("finite", f"where{i}", NEW, 1.6)
    sheet.note(7.35, 0.75, "Where(all finite, new, old)", color=NEW, style="italic", fontsize=8.5)
    return sheet.figure


def coverage() -> Figure:
    """Both give the right gradients; only one protects them."""
    sheet = Sheet(14.2, 4.4)
    for top, (title, below, kind) in zip(
        (3.95, 1.75),
        (
            ("Coverage 0 %", "correct, and worthless: every contraction computes on numbers that may underflow", "0"),
            ("Coverage 100 %", "every contraction computes on scaled numbers", "1"),
        ),
        strict=True,
    ):
        sheet.note(0.3, top, title, fontsize=11, weight="bold")
        sheet.note(2.6, top, below)
        y = top - 0.95
        chain = ["2/N", "Mul", "MatMul", "Mul", "MatMul"]
        late = kind == "0"
        steps = [*chain, "× S", "÷ S"] if late else [chain[0], "× S", *chain[1:], "÷ S"]
        for i, text in enumerate([*steps, "dw"]):
            name = f"{top}{i}"
            x = 0.9 + 1.75 * i
            if text in ("2/N", "dw"):
                sheet.value(name, x, y, text)
            else:
                sheet.box(name, x, y, text, "new" if "S" in text else kind)
            if i:
                scaled = steps[:i].count("× S") and text != "dw"
                sheet.arrow(f"{top}{i - 1}", name, WARM if scaled else "#8b8b8b", 1.8 if scaled else 1.2)
    return sheet.figure


PICTURES = {"flow": flow, "places": places, "unscaling": unscaling, "updates": updates, "coverage": coverage}


def main() -> None:
    check()
    for name, draw in PICTURES.items():
        save(draw(), f"{name}.png")


if __name__ == "__main__":
    main()
