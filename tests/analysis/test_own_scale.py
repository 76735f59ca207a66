"""Steps with a loss scale of their own."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

import graphscale as gs
from graphscale.errors import AlreadyScaledError
from models.zoo import pack
from tests.analysis.own_scale_steps import (
    CARRIED,
    GUARD,
    NORM,
    NUMBERS,
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
    keras_with_scaled_loss,
    with_constant,
)
from tests.build import BACKWARD, FORWARD, step

pytestmark = pytest.mark.static


BRANCHES = """
    w1_next, w2_next, scale_next, good_next = If(ok) <
        then_branch = yes () => (float[4,5] a1, float[5,3] a2, float a3, float a4) {
            i1 = Identity(dw1) i2 = Identity(dw2) i3 = Identity(scale)
            g1 = Div(i1, i3) g2 = Div(i2, i3) u1 = Mul(rate, g1) u2 = Mul(rate, g2)
            a1 = Sub(w1, u1) a2 = Sub(w2, u2) a3 = Mul(i3, two) a4 = Add(good, one)
        },
        else_branch = no () => (float[4,5] b1, float[5,3] b2, float b3, float b4) {
            b1 = Identity(w1) b2 = Identity(w2) b3 = Mul(scale, point5) b4 = Identity(zero)
        }
    >
"""
BACKWARD_IN_BRANCH = f"""
    wanted = Greater(good, zero)
    g1, g2 = If(wanted) <
        then_branch = yes () => (float[4,5] a1, float[5,3] a2) {{
            {SCALED} a1 = Div(dw1, scale) a2 = Div(dw2, scale)
        }},
        else_branch = no () => (float[4,5] b1, float[5,3] b2) {{ b1 = Sub(w1, w1) b2 = Mul(w2, zero) }}
    >
"""
EARLIER_ROUND = ROUNDS.replace(
    "sum1, sum2 = Loop(rounds, yes, zeros1", "sum1, before, sum2 = Loop(rounds, yes, zeros1, zeros1"
)
EARLIER_ROUND = EARLIER_ROUND.replace("in1, float[5,3] in2", "in1, float[4,5] old, float[5,3] in2")
EARLIER_ROUND = EARLIER_ROUND.replace("out1, float[5,3] out2)", "out1, float[4,5] last, float[5,3] out2)")
EARLIER_ROUND = EARLIER_ROUND.replace("c2 = Identity(c)", "c2 = Identity(c) last = Identity(in1)")
EARLIER_ROUND = EARLIER_ROUND.replace("Div(sum1, scale)", "Div(before, scale)")
INVERSE = "inverse = Reciprocal(scale) g1 = Mul(inverse, dw1) g2 = Mul(dw2, inverse)"
WIDE_INVERSE = """
    wide = Cast<to = 11>(scale) reciprocal = Reciprocal(wide) inverse = Cast<to = 1>(reciprocal)
    g1 = Mul(dw1, inverse) g2 = Mul(dw2, inverse)
"""
CLIPPED = f"""
    {NORM.format("dw")} norm = Div(n, scale) bounded = Max(one, norm) combined = Mul(bounded, scale)
    g1 = Div(dw1, combined) g2 = Div(dw2, combined) bad1 = IsInf(n) bad2 = IsNaN(n) bad = Or(bad1, bad2) ok = Not(bad)
"""
RATE = "small = Div(rate, scale) u1 = Mul(small, dw1) u2 = Mul(small, dw2) v1 = Sub(w1, u1) v2 = Sub(w2, u2)"
SUMS = """
    t1 = ReduceSum<keepdims = 0>(dw1) t2 = ReduceSum<keepdims = 0>(dw2) total = Add(t1, t2) size = Abs(total)
    ok1 = Less(size, infinity) ok2 = Equal(total, total) ok = And(ok1, ok2)
"""
EXPONENT = RULE.replace("Mul(scale, two)", "Add(exponent, one)").replace("Mul(scale, point5)", "Sub(exponent, one)")
EXPONENT = EXPONENT.replace(", scale)", ", exponent)").replace("scale_next", "exponent_next")
ENTROPY = re.sub(r"d = Sub.*\n.*\n.*\n", "loss, logs = SoftmaxCrossEntropyLoss(y, labels)\n", FORWARD)
ENTROPY_BACKWARD = BACKWARD.replace(
    "dy = Mul(d, two_over_n)", "dy = com.microsoft.SoftmaxCrossEntropyLossGrad(scale, logs, labels)"
)
SUMS_IN_PLACE = """
    added1 = com.microsoft.InPlaceAccumulatorV2(sum1, g1, yes)
    added2 = com.microsoft.InPlaceAccumulatorV2(sum2, g2, yes)
"""
IN_PLACE = "scale_next = com.microsoft.InPlaceAccumulatorV2(scale, following, yes)"

ELEMENTWISE = step(
    """
    g = Div(dv, scale) bad1 = IsInf(g) bad2 = IsNaN(g) bad = Or(bad1, bad2) wide = Cast<to = 1>(bad)
    most = ReduceMax<keepdims = 0>(wide) any = Cast<to = 9>(most) u = Mul(rate, g) moved = Sub(v, u)
    v_next = Where(any, v, moved)
    """,
    forward="y = Mul(t, v) d = Sub(y, t) square = Mul(d, d) loss = ReduceMean<keepdims = 0>(square)",
    backward="dy0 = Mul(d, two_over_n) dy = Mul(dy0, scale) each = Mul(t, dy) dv = ReduceSum<keepdims = 0>(each, rows)",
    weights="float[3] v",
    inputs="float scale",
    outputs="float[3] v_next",
    constants="float rate = {0.1}, int64[1] rows = {0}",
)
# The step, whether it tests for finiteness, and the next value of the scale.
DYNAMIC = {
    "divided": (brought(UNSCALE, TEST.format("g"), SGD, GUARD, RULE), True, "scale_next"),
    "tested before": (brought(TEST.format("dw"), UNSCALE, SGD, GUARD, RULE), True, "scale_next"),
    "times the reciprocal": (brought(INVERSE, TEST.format("g"), SGD, GUARD, RULE), True, "scale_next"),
    "reciprocal in float64": (brought(WIDE_INVERSE, TEST.format("g"), SGD, GUARD, RULE), True, "scale_next"),
    "in the rate": (brought(TEST.format("dw"), RATE, GUARD, RULE), True, "scale_next"),
    "clipped while scaled": (brought(CLIPPED, SGD, GUARD, RULE), True, "scale_next"),
    "tested by sums": (
        brought(SUMS, UNSCALE, SGD, GUARD, RULE, constants="float infinity = {inf}"),
        True,
        "scale_next",
    ),
    "compared with a bound": (
        brought(NORM.format("dw"), "ok = Less(n, bound)", UNSCALE, SGD, GUARD, RULE, constants="float bound = {1e6}"),
        False,
        "scale_next",
    ),
    "in a branch": (brought(TEST.format("dw"), BRANCHES), True, "scale_next"),
    "in rounds": (
        brought(ROUNDS, TEST.format("g"), SGD, GUARD, RULE, backward=BACKWARD, constants=ROUND_CONSTANTS),
        True,
        "scale_next",
    ),
    "in rounds, the sum before the last": (
        brought(EARLIER_ROUND, TEST.format("g"), SGD, GUARD, RULE, backward=BACKWARD, constants=ROUND_CONSTANTS),
        True,
        "scale_next",
    ),
    "by its exponent": (
        brought(
            UNSCALE,
            TEST.format("g"),
            SGD,
            GUARD,
            EXPONENT,
            inputs="float exponent, float good",
            outputs="float exponent_next, float good_next",
            backward="scale = Pow(two, exponent)" + SCALED,
        ),
        True,
        "exponent_next",
    ),
    "of a gradient operator": (
        brought(
            UNSCALE,
            TEST.format("g"),
            SGD,
            GUARD,
            RULE,
            inputs=f"{CARRIED}, int64[8] labels",
            forward=ENTROPY,
            backward=ENTROPY_BACKWARD,
            domains=["com.microsoft"],  # type: ignore[arg-type]
        ),
        True,
        "scale_next",
    ),
    "stored": (
        with_constant(brought(UNSCALE, TEST.format("g"), SGD, GUARD, RULE), scale=4),
        True,
        "scale_next",
    ),
    "written in place": (
        with_constant(
            brought(
                UNSCALE,
                TEST.format("g"),
                SGD,
                GUARD,
                RULE.replace("scale_next", "following"),
                IN_PLACE,
                outputs="float good_next",
                constants="bool yes = {1}",
                domains=["com.microsoft"],  # type: ignore[arg-type]
            ),
            scale=4,
        ),
        True,
        "scale_next",
    ),
    "added up in place": (
        step(
            "\n".join((UNSCALE, TEST.format("g"), RULE, SUMS_IN_PLACE)),
            inputs=f"{CARRIED}, float[4,5] sum1, float[5,3] sum2",
            outputs="float scale_next, float good_next",
            backward=SCALED,
            constants=f"{NUMBERS}, bool yes = {{1}}",
            domains=["com.microsoft"],
        ),
        True,
        "scale_next",
    ),
    "a gradient of numbers alone": (
        brought(
            UNSCALE,
            "seed = Mul(two, scale) db = Expand(seed, three) gb = Div(db, scale) b_next = Sub(b, gb)",
            TEST.format("g"),
            SGD,
            GUARD,
            RULE,
            inputs=f"{CARRIED}, float[3] b",
            outputs="float[3] b_next, float scale_next, float good_next",
            constants="int64[1] three = {3}",
        ),
        True,
        "scale_next",
    ),
    "the loss leaves divided again": (
        brought(
            UNSCALE,
            TEST.format("g"),
            SGD,
            GUARD,
            RULE,
            forward=FORWARD.replace("loss =", "mean =") + "large = Mul(mean, scale) loss = Div(large, scale)",
        ),
        True,
        "scale_next",
    ),
    "fed": (fed(UNSCALE, SGD), False, None),
    "fed, with a rate that leaves": (
        brought(
            UNSCALE,
            SGD,
            "w1_next = Identity(v1) w2_next = Identity(v2) small = Div(rate, scale)",
            inputs="float scale",
            outputs="float small",
        ),
        False,
        None,
    ),
    "without a contraction": (onnx.shape_inference.infer_shapes(ELEMENTWISE), True, None),
    "fed, gradients out": (
        step(UNSCALE, inputs="float scale", outputs="float[4,5] g1, float[5,3] g2", backward=SCALED),
        False,
        None,
    ),
    "the loss leaves scaled": (
        fed(UNSCALE, SGD, forward=FORWARD.replace("loss =", "mean =") + "loss = Mul(mean, scale)"),
        False,
        None,
    ),
    "the loss leaves scaled, as one row": (
        fed(
            UNSCALE,
            SGD,
            forward=FORWARD.replace("loss =", "mean =") + "many = Mul(mean, scale) loss = Reshape(many, row)",
            constants="int64[1] row = {1}",
        ),
        False,
        None,
    ),
    "a backward pass in a branch": (
        brought(BACKWARD_IN_BRANCH, TEST.format("g"), SGD, GUARD, RULE, backward=""),
        True,
        "scale_next",
    ),
    "a mixer in half precision": (
        onnx.load_from_string(pack.read("half-precision-mixer.adamw")[0]),
        True,
        "loss_scale_next",
    ),
    "credit scoring with a fed scale": (
        onnx.load_from_string(pack.read("field-credit-scoring.masters")[0]),
        False,
        None,
    ),
    "Keras": (keras_with_scaled_loss(), True, "loss_scale_optimizer_dynamic_scale_next"),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_scale_that_changes_is_refused(name: str) -> None:
    model, is_tested, following = DYNAMIC[name]
    own = find(model)
    assert own is not None
    assert (own.tested, None if own.next is None else own.next.name) == (is_tested, following)
    with pytest.raises(AlreadyScaledError, match=re.escape(own.describe())):
        gs.scale(model, target="ort-training" if name == "written in place" else "onnx")


def test_the_message_has_the_evidence_and_what_to_do(tmp_path: Path) -> None:
    onnx.save(DYNAMIC["stored"][0], tmp_path / "step.onnx")
    with pytest.raises(AlreadyScaledError) as error:
        gs.scale(tmp_path / "step.onnx", 1024.0)
    assert str(error.value).endswith(
        "step.onnx already carries a loss scale of its own: initializer 'scale' = 4 multiplies the gradients of "
        "loss 'loss', divides 2 of them again, 'g1' first, they are tested for finiteness, 'scale_next' is its next "
        "value; train it without graphscale, or export the step without loss scaling"
    )


def test_inspect_warns() -> None:
    report = gs.inspect(DYNAMIC["fed"][0])
    assert any("scale refuses it: input 'scale' multiplies" in warning for warning in report.warnings)


CONSTANT = {
    "divided by itself": with_constant(fed(UNSCALE, SGD), scale=1000),
    "times the reciprocal": with_constant(
        fed("g1 = Mul(dw1, inverse) g2 = Mul(dw2, inverse)", SGD), scale=1024, inverse=2**-10
    ),
    "divided by another constant": with_constant(
        fed("g1 = Div(dw1, same) g2 = Div(dw2, same)", SGD), scale=1024, same=1024
    ),
    "tested": with_constant(
        brought(UNSCALE, TEST.format("g"), SGD, GUARD, inputs="float scale", outputs=""), scale=1024
    ),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_a_constant_scale_is_multiplied_with_a_warning(name: str) -> None:
    own = find(CONSTANT[name])
    assert own is not None and own.is_constant
    report = gs.scale(CONSTANT[name]).report
    assert own.warn() in report.warnings and own.warn() in gs.inspect(CONSTANT[name]).warnings
    assert report.coverage == 1
