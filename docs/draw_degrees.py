"""Draw docs/degrees.png, the README's example of the degree analysis. Its content is checked against the analysis.

python docs/draw_degrees.py    (with what `pip install -e '.[demo]'` brings)
"""

# ruff: noqa: D102, D103, RUF001

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import onnx.parser
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from PIL import Image

import graphscale as gs

STEP = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[8,4] x, float[8,3] t, float[4,5] w1, float[5,3] w2)
    => (float loss, float[4,5] w1_next, float[5,3] w2_next)
    <float two_over_n = {0.083333336}, float one = {1}, float lambda = {0.01}, float eta = {0.1}>
{
    h = MatMul(x, w1)
    a = Tanh(h)
    y = MatMul(a, w2)
    d = Sub(y, t)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
    dy = Mul(d, two_over_n)
    at = Transpose(a)
    dw2 = MatMul(at, dy)
    w2t = Transpose(w2)
    da = MatMul(dy, w2t)
    aa = Mul(a, a)
    slope = Sub(one, aa)
    dh = Mul(da, slope)
    xt = Transpose(x)
    dw1 = MatMul(xt, dh)
    w1_decay = Mul(lambda, w1)
    g1 = Add(dw1, w1_decay)
    w1_step = Mul(eta, g1)
    w1_next = Sub(w1, w1_step)
    w2_decay = Mul(lambda, w2)
    g2 = Add(dw2, w2_decay)
    w2_step = Mul(eta, g2)
    w2_next = Sub(w2, w2_step)
}
"""
INK, FAINT, WARM, NEW = "#2b2b2b", "#8b8b8b", "#d97a1a", "#2f6db5"
COLOURS = {"0": ("#f4f4f2", "#c4c4c0", 1.0), "1": ("#fbd9b0", WARM, 1.2), "new": ("#d8e6f8", NEW, 1.6)}
KINDS = {"0": "degree 0: does not change with S", "1": "degree 1: a multiple of S", "new": "put in by graphscale"}
HALF_WIDTH, HALF_HEIGHT = 0.62, 0.27

EXPLANATION = (
    ("1", "Every backward MatMul has one operand that\nis surely a cotangent. It must have degree 1."),
    (
        "2",
        "That demand is pushed up to where the\nbackward pass begins. The seed, 1, was folded\n"
        "into the constant 2/N: there the scale enters.",
    ),
    ("3", "Degrees go forward through the rules: degree 1\ntimes degree 0 is degree 1, and so on."),
    (
        "4",
        "Weight decay adds a weight, of degree 0, to\nwhat has degree 1: unscale just before. So too\n"
        "before an optimizer's square root, a clipping\nthreshold, an output. These are the gradients.",
    ),
    ("5", "All finite? Then the step counts, else all that\nis carried keeps its value; and S is updated."),
    (
        "6",
        "Proof, on the result: every output and every\ncarried state has degree 0, and every backward\n"
        "MatMul computes on degree 1.",
    ),
)


class Drawing:
    """Boxes and arrows."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(11.6, 7.0), facecolor="white")
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(-0.3, 14.2), ylim=(-1.5, 7.25))
        self.axes.axis("off")
        self.at: dict[str, tuple[float, float]] = {}
        self.patches: dict[str, FancyBboxPatch] = {}

    def box(self, name: str, x: float, y: float, text: str, kind: str = "0") -> None:
        fill, edge, width = COLOURS[kind]
        patch = FancyBboxPatch(
            (x - HALF_WIDTH, y - HALF_HEIGHT),
            2 * HALF_WIDTH,
            2 * HALF_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.12",
            fc=fill,
            ec=edge,
            lw=width,
            zorder=3,
        )
        self.axes.add_patch(patch)
        self.axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=INK, zorder=4)
        self.at[name], self.patches[name] = (x, y), patch

    def value(self, name: str, x: float, y: float, text: str) -> None:
        self.at[name] = (x, y)
        self.axes.text(x, y, text, ha="center", va="center", fontsize=10.5, color=INK, style="italic", zorder=4)

    def arrow(self, start: str, end: str, colour: str = FAINT, width: float = 1.2, path: str = "arc3") -> None:
        arrow = FancyArrowPatch(
            self.at[start],
            self.at[end],
            patchA=self.patches.get(start),
            patchB=self.patches.get(end),
            arrowstyle="-|>",
            mutation_scale=10,
            shrinkA=1 if start in self.patches else 11,
            shrinkB=2 if end in self.patches else 10,
            lw=width,
            color=colour,
            connectionstyle=path,
            zorder=2,
        )
        self.axes.add_patch(arrow)

    def label(self, text: str, box: str, dx: float, dy: float) -> None:
        """Draw a further operand of a box, with an arrow into it."""
        x, y = self.at[box]
        self.value(f"{box}.{text}", x + dx, y + dy, text)
        self.arrow(f"{box}.{text}", box)

    def mark(self, digit: str, box: str, side: int) -> None:
        """Put a number on a box's upper corner, left (-1) or right (1)."""
        x, y = self.at[box]
        self.number(digit, x + side * HALF_WIDTH, y + HALF_HEIGHT)

    def explain(self, x: float, y: float) -> None:
        for digit, text in EXPLANATION:
            lines = text.count("\n") + 1
            self.number(digit, x, y)
            self.axes.text(x + 0.35, y + 0.14, text, fontsize=8.8, color=INK, va="top", linespacing=1.35)
            y -= 0.27 * lines + 0.45

    def legend(self, x: float, y: float) -> None:
        for kind, text in KINDS.items():
            fill, edge, width = COLOURS[kind]
            patch = FancyBboxPatch(
                (x, y - 0.11), 0.3, 0.22, boxstyle="round,pad=0,rounding_size=0.06", fc=fill, ec=edge, lw=width
            )
            self.axes.add_patch(patch)
            self.axes.text(x + 0.42, y, text, fontsize=8.8, color=INK, va="center")
            y -= 0.36

    def number(self, text: str, x: float, y: float) -> None:
        self.axes.add_patch(Circle((x, y), 0.17, fc=INK, ec="white", lw=1, zorder=5))
        self.axes.text(x, y - 0.01, text, ha="center", va="center", fontsize=8.5, color="white", zorder=6)


def check() -> None:
    """Check that the picture shows what the analysis finds."""
    report = gs.scale(onnx.parser.parse_model(STEP)).report
    assert [place.value for place in report.places] == ["two_over_n"], report.places
    assert sorted(gradient.value for gradient in report.gradients) == ["dw1", "dw2"], report.gradients
    assert report.coverage == 1.0
    assert report.contractions == 3


def draw() -> Figure:
    drawing = Drawing()
    draw_forward(drawing)
    draw_backward(drawing)
    draw_update(drawing)
    drawing.legend(6.6, 0.3)
    drawing.explain(9.35, 6.65)
    return drawing.figure


def draw_forward(drawing: Drawing) -> None:
    y = 6.1
    for name, x in (("w₁", 1.9), ("w₂", 5.1), ("t", 6.7)):
        drawing.value(name, x, y + 0.85, name)
    drawing.value("x", 0.75, y, "x")
    drawing.value("loss", 8.3, y + 0.85, "loss")
    boxes = {"h": "MatMul", "a": "Tanh", "y": "MatMul", "d": "Sub", "mean": "mean of d²"}
    for i, (name, text) in enumerate(boxes.items()):
        drawing.box(name, 1.9 + 1.6 * i, y, text)
    for arrow in ("x h", "h a", "a y", "y d", "d mean", "mean loss", "w₁ h", "w₂ y", "t d"):
        drawing.arrow(*arrow.split())


def draw_backward(drawing: Drawing) -> None:
    y = 4.45
    drawing.box("seed", 8.3, y, "2/N × S", "new")
    drawing.box("dy", 6.7, y, "Mul", "1")
    drawing.box("da", 5.1, y, "MatMul", "1")
    drawing.box("dh", 3.5, y, "Mul", "1")
    drawing.box("dw1", 1.9, y - 1, "MatMul", "1")
    drawing.box("dw2", 5.1, y - 1, "MatMul", "1")
    drawing.arrow("d", "dy")
    for arrow in ("seed dy", "dy da", "da dh"):
        drawing.arrow(*arrow.split(), WARM, 1.8)
    for arrow in ("dh dw1", "dy dw2"):
        drawing.arrow(*arrow.split(), WARM, 1.8, "angle3,angleA=90,angleB=0")
    drawing.label("w₂ᵀ", "da", 0.0, 0.75)
    drawing.label("1 − a²", "dh", 0.0, 0.75)
    drawing.label("xᵀ", "dw1", -1.15, 0.0)
    drawing.label("aᵀ", "dw2", -1.15, 0.0)
    for digit, box, side in (("1", "da", -1), ("1", "dw1", -1), ("1", "dw2", -1), ("2", "seed", 1), ("3", "dh", -1)):
        drawing.mark(digit, box, side)


def draw_update(drawing: Drawing) -> None:
    drawing.box("finite", 3.5, -0.2, "all finite?", "new")
    drawing.box("S", 3.5, -1.1, "next S", "new")
    drawing.arrow("finite", "S", NEW)
    for i, x in ((1, 1.9), (2, 5.1)):
        drawing.box(f"unscale{i}", x, 2.5, "÷ S", "new")
        drawing.box(f"decay{i}", x, 1.6, "+ λ·w")
        drawing.box(f"sgd{i}", x, 0.7, "w − η·g")
        drawing.box(f"where{i}", x, -0.2, "Where", "new")
        drawing.value(f"next{i}", x, -1.1, ("w₁", "w₂")[i - 1] + " next")
        drawing.arrow(f"dw{i}", f"unscale{i}", WARM, 1.8)
        for start, end in (("unscale", "decay"), ("decay", "sgd"), ("sgd", "where"), ("where", "next")):
            drawing.arrow(f"{start}{i}", f"{end}{i}")
        drawing.arrow(f"unscale{i}", "finite", NEW, path="angle3,angleA=0,angleB=90")
        drawing.arrow("finite", f"where{i}", NEW)
        drawing.mark("4", f"unscale{i}", -1)
        drawing.mark("6", f"where{i}", -1)
    drawing.mark("5", "finite", -1)


def main() -> None:
    check()
    file = io.BytesIO()
    draw().savefig(file, format="png", dpi=150)
    Image.open(file).convert("RGB").quantize(64).save(Path(__file__).with_name("degrees.png"), optimize=True)


if __name__ == "__main__":
    main()
