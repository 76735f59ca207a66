"""Steps with factors that only look like a loss scale."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from models.zoo import pack
from tests.analysis.own_scale_steps import (
    GUARD,
    NORM,
    ROUND_CONSTANTS,
    ROUNDS,
    RULE,
    SCALED,
    SGD,
    TEST,
    UNSCALE,
    brought,
    fed,
    find,
    with_constant,
)
from tests.build import BACKWARD, FORWARD, step
from tests.conftest import ROOT

pytestmark = pytest.mark.static


NORMALISED = f"{NORM.format('dw')} g1 = Div(dw1, n) g2 = Div(dw2, n)"
PLAIN = "g1 = Identity(dw1) g2 = Identity(dw2)"
FEATURES = FORWARD.replace("y = MatMul(a, w2)", "large = Mul(a, scale) wide = MatMul(large, w2) y = Div(wide, scale)")
FEATURES_BACKWARD = BACKWARD.replace(
    "at = Transpose<perm = [1, 0]>(a)", "small = Div(dy, scale) at = Transpose<perm = [1, 0]>(large)"
).replace("MatMul(at, dy)", "MatMul(at, small)")
FEATURES_BACKWARD = FEATURES_BACKWARD.replace("da = MatMul(dy, w2t)", "dl = MatMul(small, w2t) da = Mul(dl, scale)")
# A loss beside that of the step, which depends on no scale.
# Of a step that also gives out another loss.
BESIDE = {"inputs": "float scale", "outputs": "float size"}
SIZE = "size = ReduceL2<keepdims = 0>(w1)"
ELEMENTS = FORWARD.replace("d = Sub(y, t)", "large = Mul(y, scale) same = Div(large, scale) d = Sub(same, t)")
ELEMENTS_BACKWARD = BACKWARD.replace(
    "dy = Mul(d, two_over_n)", "dy0 = Mul(d, two_over_n) small = Div(dy0, scale) dy = Mul(small, scale)"
)
MEAN = """
    weighted = Mul(square, scale) total = ReduceSum<keepdims = 0>(weighted) count = Mul(half_n, scale)
    loss = Div(total, count)
"""
MEAN_BACKWARD = BACKWARD.replace("dy = Mul(d, two_over_n)", "dy0 = Mul(d, scale) dy = Div(dy0, count)")
MEASURED = """
    wide = Mul(dh, scale) q = MatMul(xt, wide) n = ReduceL2<keepdims = 0>(q) r = Div(n, scale)
    bad1 = IsInf(r) bad2 = IsNaN(r) bad = Or(bad1, bad2) ok = Not(bad)
"""
ONE_BRANCH = """
    large = Greater(loss, one)
    g1 = If(large) <
        then_branch = yes () => (float[4,5] a1) { a1 = Div(dw1, scale) },
        else_branch = no () => (float[4,5] b1) { b1 = Identity(dw1) }
    >
    g2 = Div(dw2, scale)
"""
SQUARED_SUM = ROUNDS.replace("out1 = Add(in1, p1)", "q1 = Mul(in1, in1) out1 = Add(q1, p1)")
SHARE = SCALED.replace("dy = Mul(dy0, scale)", "share = Mul(d, scale) dy = Add(dy0, share)")
ANNEALED = "smaller = Mul(scale, point5) scale_next = Where(ok, smaller, scale) good_next = Identity(good)"
NONE = {
    "a loss weight": fed(PLAIN, SGD),
    "a loss weight, gradients out": step(backward=SCALED, inputs="float scale"),
    "a loss weight with gradients of norm 1": fed(NORMALISED, SGD),
    "a loss weight with gradients of norm 1, and a metric": brought(
        NORMALISED,
        SGD,
        "w1_next = Identity(v1) w2_next = Identity(v2) r = Div(n, scale)",
        inputs="float scale",
        outputs="float r",
    ),
    "a loss weight with signs, and a metric for each layer": brought(
        "g1 = Sign(dw1) g2 = Sign(dw2)",
        NORM.format("dw"),
        SGD,
        "w1_next = Identity(v1) w2_next = Identity(v2)",
        "each = Unsqueeze(n, first) both = Concat<axis = 0>(each, each) r = Div(both, scale)",
        inputs="float scale",
        outputs="float[2] r",
        constants="int64[1] first = {0}",
    ),
    "a loss weight over the gradients": fed("g1 = Div(scale, dw1) g2 = Div(scale, dw2)", SGD),
    "a loss weight with signs": fed("g1 = Sign(dw1) g2 = Sign(dw2)", SGD),
    "a loss weight that is annealed": brought(TEST.format("dw"), PLAIN, SGD, GUARD, ANNEALED),
    "a loss weight and another number": fed(
        UNSCALE.replace("scale", "weight"), SGD, inputs="float scale, float weight"
    ),
    "a loss weight that clips": fed(
        NORM.format("dw"), "r = Div(scale, n) c = Min(one, r) g1 = Mul(dw1, c) g2 = Mul(dw2, c)", SGD
    ),
    "a loss weight of a part": fed(UNSCALE, SGD, backward=SHARE),
    "one gradient stays scaled": fed("g1 = Div(dw1, scale) g2 = Identity(dw2)", SGD),
    "a batch size": fed(
        "g1 = Mul(dw1, scale) g2 = Mul(dw2, scale)", SGD, backward=SCALED.replace("Mul(dy0, scale)", "Div(dy0, scale)")
    ),
    "a batch size as a reciprocal": fed(
        "inverse = Reciprocal(scale) g1 = Div(dw1, inverse) g2 = Div(dw2, inverse)",
        SGD,
        backward=SCALED.replace("Mul(dy0, scale)", "Div(dy0, scale)"),
    ),
    "a rate that is halved": brought(
        PLAIN, TEST.format("g"), SGD.replace("rate", "scale"), GUARD, RULE, backward=BACKWARD
    ),
    "a rate that is divided": fed(PLAIN, "slow = Div(rate, scale)", SGD.replace("rate", "slow"), backward=BACKWARD),
    "a threshold of the norm": fed(
        NORM.format("dw"),
        "r = Div(scale, n) c = Min(one, r) nan = IsNaN(c) k = Where(nan, zero, c) g1 = Mul(dw1, k) g2 = Mul(dw2, k)",
        SGD,
        backward=BACKWARD,
    ),
    "a scale of features": fed(PLAIN, SGD, forward=FEATURES, backward=FEATURES_BACKWARD),
    "a scale of features beside another loss": brought(
        PLAIN,
        SGD,
        "w1_next = Identity(v1) w2_next = Identity(v2)",
        SIZE,
        **BESIDE,
        forward=FEATURES,
        backward=FEATURES_BACKWARD,
    ),
    "a scale of predictions beside another loss": brought(
        PLAIN,
        TEST.format("g"),
        SGD,
        GUARD,
        SIZE,
        **BESIDE,
        forward=ELEMENTS,
        backward=ELEMENTS_BACKWARD,
    ),
    "a weight of a weighted mean": brought(
        PLAIN,
        TEST.format("g"),
        SGD,
        GUARD,
        inputs="float scale",
        outputs="",
        forward=FORWARD.replace("loss = ReduceMean<keepdims = 0>(square)", MEAN),
        backward=MEAN_BACKWARD,
        constants="float half_n = {12}",
    ),
    "a measure of gradients that nothing else reads": brought(
        MEASURED,
        PLAIN,
        SGD,
        GUARD,
        inputs="float scale",
        outputs="float r",
        backward=BACKWARD,
    ),
    "a prediction beside the step": brought(
        PLAIN,
        SGD,
        "w1_next = Identity(v1) w2_next = Identity(v2)",
        "large = Mul(x, scale) wide = MatMul(large, w1) p = Div(wide, scale)",
        inputs="float scale",
        outputs="float[8,5] p",
        backward=BACKWARD,
    ),
    "one branch stays scaled": fed(ONE_BRANCH, SGD),
    "rounds that square their sum": fed(SQUARED_SUM, SGD, backward=BACKWARD, constants=ROUND_CONSTANTS),
    "a buffer of scaled gradients": fed(
        UNSCALE,
        SGD,
        "kept = com.microsoft.InPlaceAccumulatorV2(buffer, dw1, yes)",
        inputs="float scale, float[4,5] buffer",
        constants="bool yes = {1}",
        domains=["com.microsoft"],  # type: ignore[arg-type]
    ),
    "a temperature": fed(
        "sharp = Mul(dw1, scale) g1 = Div(sharp, scale) g2 = Div(dw2, scale)",
        SGD,
        forward=FORWARD.replace("d = Sub(y, t)", "cold = Div(y, scale) p = Sigmoid(cold) d = Sub(p, t)"),
    ),
    "a decay of weights by the scale": fed(
        UNSCALE.replace("g", "q"), "f1 = Mul(w1, scale) g1 = Add(q1, f1) g2 = Identity(q2)", SGD
    ),
    "gradients of Keras that are only divided": onnx.load_from_string(pack.read("keras-loss-scale.momentum")[0]),
    "a factor of two": with_constant(fed(UNSCALE, SGD), scale=2),
    "a constant weight and a rate": with_constant(fed(PLAIN, SGD, constants="float unused = {1}"), scale=10),
}


@pytest.mark.parametrize("name", NONE)
def test_other_factors_are_none(name: str) -> None:
    assert find(NONE[name]) is None
    assert find(onnx.shape_inference.infer_shapes(NONE[name])) is None


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*/*.onnx")), ids=lambda path: path.stem)
def test_the_graphs_of_models_have_none(path: Path) -> None:
    assert find(onnx.load(path)) is None
