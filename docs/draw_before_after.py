"""Draw docs/before_after.png: one training step, plain and scaled. Its boxes are checked against the passes.

python docs/draw_before_after.py    (with the packages of `pip install -e '.[demo]'`)
"""

# ruff: noqa: D103, RUF001

from __future__ import annotations

from collections import Counter

import onnx.parser
from matplotlib.figure import Figure
from sketch import NEW, WARM, Sheet, save

import graphscale as gs

STEP = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[8,4] x, float[8,3] t, float[4,3] w) => (float loss, float[4,3] w_next)
<float two_over_n = {0.083333336}, float eta = {0.1}>
{
    y = MatMul(x, w)
    d = Sub(y, t)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
    dy = Mul(d, two_over_n)
    xt = Transpose(x)
    dw = MatMul(xt, dy)
    change = Mul(eta, dw)
    w_next = Sub(w, change)
}
"""
WIDTH, ROWS = 7.05, (3.75, 2.7, 1.75, 0.75)


def check() -> None:
    """Check that scaling adds the boxes of the picture: × S, ÷ S, the finite check, the update of S and a guard."""
    report = gs.scale(onnx.parser.parse_model(STEP)).report
    assert [place.value for place in report.places] == ["two_over_n"], report.places
    assert [gradient.value for gradient in report.gradients] == ["dw"], report.gradients
    added = {name: Counter(nodes) for name, nodes in report.inserted.items() if nodes}
    assert set(added) == {"scale-loss", "unscale-gradients", "check-finite", "update-loss-scale", "guard-updates"}, (
        added
    )
    assert added["scale-loss"] == {"Mul": 1} and added["unscale-gradients"] == {"Div": 1}, added
    assert added["guard-updates"] == {"Where": 1}, added


def draw() -> Figure:
    sheet = Sheet(2 * WIDTH + 0.6, 5.0)
    _step(sheet, 0.15, "Before", scaled=False)
    _step(sheet, WIDTH + 0.45, "After", scaled=True)
    return sheet.figure


def _step(sheet: Sheet, left: float, title: str, *, scaled: bool) -> None:
    forward, backward, unscaled, update = ROWS
    columns = [left + 1.6 + 1.75 * i for i in range(3)]
    degree, wide = ("1", 1.8) if scaled else ("0", 1.2)
    warm = {"colour": WARM, "width": wide} if scaled else {}

    def name(text: str) -> str:
        return f"{title} {text}"

    def arrow(start: str, end: str, **options: object) -> None:
        sheet.arrow(name(start), name(end), **options)  # type: ignore[arg-type]

    def result(text: str, row: float) -> None:
        sheet.at[name(text)] = (left + 6.2, row)
        sheet.note(left + 6.1, row, text, fontsize=10.5, style="italic", ha="left")

    sheet.panel(left, 0.15, WIDTH, 4.7)
    sheet.note(left + 0.25, 4.35, title, fontsize=11, weight="bold", va="baseline")
    sheet.value(name("x"), left + 0.5, forward, "x")
    for column, text in zip(columns, ("x · w", "y − t", "mean of d²"), strict=True):
        sheet.box(name(text), column, forward, text)
    result("loss", forward)
    for start, end in (("x", "x · w"), ("x · w", "y − t"), ("y − t", "mean of d²"), ("mean of d²", "loss")):
        arrow(start, end)

    sheet.box(name("dw"), columns[0], backward, "xᵀ · dy", degree)
    sheet.box(name("dy"), columns[1], backward, "d × 2/N", degree)
    arrow("y − t", "dy")
    arrow("dy", "dw", **warm)
    sheet.box(name("sgd"), columns[0], update, "w − η·g")
    result("next w", update)
    if not scaled:
        arrow("dw", "sgd")
        arrow("sgd", "next w")
        return
    for key, column, row, text in (
        ("S", columns[2], backward, "× S"),
        ("unscale", columns[0], unscaled, "÷ S"),
        ("finite", columns[1], unscaled, "all finite?"),
        ("rule", columns[2], unscaled, "update S"),
        ("where", columns[1], update, "select"),
    ):
        sheet.box(name(key), column, row, text, "new")
    result("next S", unscaled)
    for column, text, colour in ((2.0, "multiplied by S", WARM), (3.9, "inserted by graphscale", NEW)):
        sheet.note(left + column, 4.35, text, color=colour, style="italic", va="baseline")
    arrow("S", "dy", **warm)
    arrow("dw", "unscale", **warm)
    arrow("unscale", "sgd")
    arrow("sgd", "where")
    arrow("where", "next w")
    for start, end in (("unscale", "finite"), ("finite", "rule"), ("finite", "where"), ("rule", "next S")):
        arrow(start, end, colour=NEW)


def main() -> None:
    check()
    save(draw(), "before_after.png")


if __name__ == "__main__":
    main()
