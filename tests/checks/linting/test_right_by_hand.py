"""Ways to write a scaled step by hand that are right: nothing is found in them."""

from __future__ import annotations

import pytest

from tests.checks.linting.hand import GRADIENTS, HALF, STEP, changed, codes, report

pytestmark = pytest.mark.static

CHECK = """    zeroed = Mul(dw, zero)
    probe = ReduceSum<keepdims = 0>(zeroed)
    bad = IsNaN(probe)
    finite = Not(bad)
"""
GUARD = "    w_next = Where(finite, w_new, w)\n"
UNSCALE = "    dw = Div(dw_scaled, scale)\n"
SCALE = "    scale_next = Where(finite, grown_or_not, lowered)\n"

RIGHT = {
    "the reciprocal of the scale": changed(
        STEP, (UNSCALE, "    inverse = Reciprocal(scale)\n    dw = Mul(dw_scaled, inverse)\n")
    ),
    "one over the scale": changed(STEP, (UNSCALE, "    inverse = Div(one, scale)\n    dw = Mul(inverse, dw_scaled)\n")),
    "the learning rate over the scale": changed(
        STEP,
        ("    change = Mul(dw, rate)\n", "    small = Div(rate, scale)\n    change = Mul(dw_scaled, small)\n"),
    ),
    "a scaled threshold": changed(
        STEP,
        (
            UNSCALE,
            "    high = Mul(two, scale)\n    low = Neg(high)\n    cut = Clip(dw_scaled, low, high)\n"
            "    dw = Div(cut, scale)\n",
        ),
    ),
    "a scaled norm": changed(
        STEP,
        (
            UNSCALE,
            "    squares = Mul(dw_scaled, dw_scaled)\n    sum = ReduceSum<keepdims = 0>(squares)\n"
            "    norm = Sqrt(sum)\n"
            "    largest = Mul(two, scale)\n    ratio = Div(largest, norm)\n    factor = Min(ratio, one)\n"
            "    cut = Mul(dw_scaled, factor)\n    dw = Div(cut, scale)\n",
        ),
    ),
    "clipping by norm after unscaling": changed(
        STEP,
        (
            "    change = Mul(dw, rate)\n",
            "    norm = ReduceL2<keepdims = 0>(dw)\n    ratio = Div(two, norm)\n    factor = Min(ratio, one)\n"
            "    cut = Mul(dw, factor)\n    change = Mul(cut, rate)\n",
        ),
    ),
    "the check of the scaled gradient": changed(STEP, ("Mul(dw, zero)", "Mul(dw_scaled, zero)")),
    "the check of the step": changed(
        STEP, ("    zeroed = Mul(dw, zero)\n", "    change = Mul(dw, rate)\n    zeroed = Mul(change, zero)\n")
    ).replace("    finite = Not(bad)\n    change = Mul(dw, rate)\n", "    finite = Not(bad)\n"),
    "IsNaN or IsInf": changed(
        STEP,
        (
            CHECK,
            "    nan = IsNaN(dw)\n    inf = IsInf(dw)\n    either = Or(nan, inf)\n    number = Cast<to = 1>(either)\n"
            "    count = ReduceSum<keepdims = 0>(number)\n    finite = Equal(count, zero)\n",
        ),
        ("    count = Where(few", "    tally = Where(few"),
        ("Where(finite, count", "Where(finite, tally"),
    ),
    "the size of the sum of squares": changed(
        STEP, (CHECK, "    squares = ReduceSumSquare<keepdims = 0>(dw)\n    finite = Less(squares, two)\n")
    ),
    "x - x": changed(STEP, ("    zeroed = Mul(dw, zero)\n", "    zeroed = Sub(dw, dw)\n")),
    "x == x on the difference": changed(
        STEP,
        (
            CHECK,
            "    rest = Sub(dw, dw)\n    sum = ReduceSum<keepdims = 0>(rest)\n    finite = Equal(sum, zero)\n",
        ),
    ),
    "a flag of overflow": changed(STEP, (GUARD, "    w_next = Where(bad, w, w_new)\n")),
    "a guard by If": changed(
        STEP,
        (
            GUARD,
            "    w_next = If (finite) <then_branch = new () => (float[4,3] a) { a = Identity(w_new) }, "
            "else_branch = old () => (float[4,3] c) { c = Identity(w) }>\n",
        ),
    ),
    "a selected change": changed(
        STEP,
        (
            "    w_new = Sub(w, change)\n" + GUARD,
            "    safe = Where(finite, change, zero)\n    w_next = Sub(w, safe)\n",
        ),
    ),
    "a guard with another condition": changed(
        STEP,
        ("int64 good)", "int64 good, bool wanted)"),
        (GUARD, "    both = And(wanted, finite)\n    w_next = Where(both, w_new, w)\n"),
    ),
    "a count of skips": changed(
        STEP,
        ("int64 good)", "int64 good, int64 skips)"),
        ("int64 good_next)", "int64 good_next, int64 skips_next)"),
        (GUARD, GUARD + "    more = Add(skips, step)\n    skips_next = Where(finite, skips, more)\n"),
    ),
    "a scale from its logarithm": changed(
        STEP,
        ("float scale, int64 good)", "float log, int64 good)"),
        ("float scale_next,", "float log_next,"),
        ("float scale = {32768}", "float log = {15}"),
        ("    y = MatMul", "    scale = Pow(two, log)\n    y = MatMul"),
        ("    grown = Mul(scale, two)\n", "    grown = Add(log, one)\n"),
        ("Where(few, scale, grown)", "Where(few, log, grown)"),
        ("    halved = Div(scale, two)\n", "    halved = Sub(log, one)\n"),
        ("    lowered = Max(halved, one)\n", "    lowered = Max(halved, zero)\n"),
        ("    scale_next =", "    log_next ="),
    ),
    "a scale that the caller adjusts": GRADIENTS,
    "a constant scale": changed(
        GRADIENTS, (", float scale)", ")"), ("<float two_over_n", "<float scale = {1024}, float two_over_n")
    ),
    "a constant scale in float16": changed(
        HALF,
        (", float scale)", ")"),
        ("<float two_over_n", "<float scale = {1024}, float two_over_n"),
        (
            "    dy = Mul(seed, scale)\n    dy16 = Cast<to = 10>(dy)\n",
            "    scale16 = Cast<to = 10>(scale)\n    seed16 = Cast<to = 10>(seed)\n    dy16 = Mul(seed16, scale16)\n",
        ),
    ),
    "the scale as the seed": changed(
        GRADIENTS,
        (
            "    seed = Mul(d, two_over_n)\n    dy = Mul(seed, scale)\n",
            "    factor = Mul(two_over_n, scale)\n    dy = Mul(factor, d)\n",
        ),
    ),
    "the scaled loss beside the loss": changed(
        GRADIENTS,
        ("float[3] db)", "float[3] db, float scaled_loss)"),
        ("    seed =", "    scaled_loss = Mul(loss, scale)\n    seed ="),
    ),
    "a norm as a metric": changed(
        STEP,
        ("int64 good_next)", "int64 good_next, float norm)"),
        (GUARD, GUARD + "    norm = ReduceL2<keepdims = 0>(dw)\n"),
    ),
    "accumulation": changed(
        GRADIENTS,
        ('["" : 20]', '["" : 20, "com.microsoft" : 1]'),
        ("float scale)", "float scale, float[4,3] total, bool[1] reset)"),
        ("float[4,3] dw,", "bool[1] added,"),
        (UNSCALE, UNSCALE + "    added = com.microsoft.InPlaceAccumulatorV2(total, dw, reset)\n"),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found(name: str) -> None:
    found = report(RIGHT[name])
    assert found.findings == ()
    assert found.loss_scale is not None and found.gradients > 0
    assert (found.check is not None) == ("good" in RIGHT[name])


# A scalar that multiplies and divides is no loss scale if the loss depends on it.
TEMPERATURE = """<ir_version: 10, opset_import: ["" : 20]>
step (float[8,4] x, float[8,3] t, float[4,3] w, float heat) => (float loss, float[4,3] dw)
    <float two_over_n = {0.083333336}>
{
    z = MatMul(x, w)
    y = Div(z, heat)
    d = Sub(y, t)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
    dy = Mul(d, two_over_n)
    dz = Div(dy, heat)
    xt = Transpose<perm = [1, 0]>(x)
    dw = MatMul(xt, dz)
}
"""


def test_other_scalars_are_no_loss_scale() -> None:
    assert report(TEMPERATURE).loss_scale is None
    assert codes(TEMPERATURE) == []
    rate = changed(STEP, ("float rate = {0.1},", ""), ("int64 good)", "int64 good, float rate)"))
    assert report(rate).loss_scale == "scale" and codes(rate) == []
    normalized = changed(TEMPERATURE, ("    z = MatMul(x, w)\n", "    xs = Mul(x, heat)\n    z = MatMul(xs, w)\n"))
    assert report(normalized).loss_scale is None
