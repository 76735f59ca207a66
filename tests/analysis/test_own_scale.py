"""Steps that bring a loss scale along, and steps that only look like it."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.own_scale import OwnScale, find_own_scale
from graphscale.errors import AlreadyScaledError
from models.zoo import pack
from tests.build import BACKWARD, FORWARD, step
from tests.conftest import ROOT

pytestmark = pytest.mark.static

SCALED = BACKWARD.replace("dy = Mul(d, two_over_n)", "dy0 = Mul(d, two_over_n) dy = Mul(dy0, scale)")
UNSCALE = "g1 = Div(dw1, scale) g2 = Div(dw2, scale)"
NORM = "s1 = ReduceSumSquare<keepdims = 0>({0}1) s2 = ReduceSumSquare<keepdims = 0>({0}2) ss = Add(s1, s2) n = Sqrt(ss)"
TEST = f"{NORM} bad1 = IsInf(n) bad2 = IsNaN(n) bad = Or(bad1, bad2) ok = Not(bad)"
SGD = "u1 = Mul(rate, g1) u2 = Mul(rate, g2) v1 = Sub(w1, u1) v2 = Sub(w2, u2)"
GUARD = "w1_next = Where(ok, v1, w1) w2_next = Where(ok, v2, w2)"
RULE = """
    more = Add(good, one) full = GreaterOrEqual(more, period) double = Mul(scale, two) half = Mul(scale, point5)
    grown = Where(full, double, scale) scale_next = Where(ok, grown, half)
    reset = Where(full, zero, more) good_next = Where(ok, reset, zero)
"""
NUMBERS = "float rate = {0.1}, float two = {2}, float point5 = {0.5}, float zero = {0}, float period = {2000}"
WEIGHTS = "float[4,5] w1_next, float[5,3] w2_next"
CARRIED = "float scale, float good"


def brought(
    *more: str, inputs: str = CARRIED, outputs: str = "float scale_next, float good_next", **options: str
) -> onnx.ModelProto:
    """A step whose seed is multiplied by `scale`, which `more` divides out again."""
    constants = f"{NUMBERS}, {options.pop('constants')}" if "constants" in options else NUMBERS
    outputs = f"{WEIGHTS}, {outputs}" if outputs else WEIGHTS
    options = {"backward": SCALED, **options}
    return step("\n".join(more), inputs=inputs, outputs=outputs, constants=constants, **options)  # type: ignore[arg-type]


def fed(*more: str, inputs: str = "float scale", **options: str) -> onnx.ModelProto:
    """A step whose seed is multiplied by the input `scale`, without an update rule."""
    return brought(*more, "w1_next = Identity(v1) w2_next = Identity(v2)", inputs=inputs, outputs="", **options)


def find(model: onnx.ModelProto) -> OwnScale | None:
    return find_own_scale(ir.from_proto(model).graph)


def with_constant(model: onnx.ModelProto, **numbers: float) -> onnx.ModelProto:
    """Store numbers in place of inputs."""
    for name, number in numbers.items():
        value = next((value for value in model.graph.input if value.name == name), None)
        if value is not None:
            model.graph.input.remove(value)
        model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [], [number]))
    return model


def keras_with_scaled_loss() -> onnx.ModelProto:
    """The packed step of Keras's LossScaleOptimizer, whose script does not scale the loss, with `scale_loss`."""
    model = onnx.load_from_string(pack.read("keras-loss-scale.momentum")[0])
    scale = next(value.name for value in model.graph.input if value.name.endswith("dynamic_scale"))
    index, node = next((i, node) for i, node in enumerate(model.graph.node) if "div_out_1" in node.output)
    node.output[0] = "unscaled_seed"
    model.graph.node.insert(index + 1, onnx.helper.make_node("Mul", ["unscaled_seed", scale], ["div_out_1"]))
    return model


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
ROUNDS = """
    sum1, sum2 = Loop(rounds, yes, zeros1, zeros2) <body = round (int64 i, bool c, float[4,5] in1, float[5,3] in2)
        => (bool c2, float[4,5] out1, float[5,3] out2) {
            c2 = Identity(c) wide = Mul(dh, scale) p1 = MatMul(xt, wide) out1 = Add(in1, p1)
            wide2 = Mul(dy, scale) p2 = MatMul(at, wide2) out2 = Add(in2, p2)
        }
    >
    g1 = Div(sum1, scale) g2 = Div(sum2, scale)
"""
ROUND_CONSTANTS = (
    f"int64 rounds = {{2}}, bool yes = {{1}}, float[4,5] zeros1 = {{{', '.join('0' * 20)}}}, "
    f"float[5,3] zeros2 = {{{', '.join('0' * 15)}}}"
)
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
        "value; train it as it is, or export the step without loss scaling"
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


NORMALISED = f"{NORM.format('dw')} g1 = Div(dw1, n) g2 = Div(dw2, n)"
PLAIN = "g1 = Identity(dw1) g2 = Identity(dw2)"
FEATURES = FORWARD.replace("y = MatMul(a, w2)", "large = Mul(a, scale) wide = MatMul(large, w2) y = Div(wide, scale)")
FEATURES_BACKWARD = BACKWARD.replace(
    "at = Transpose<perm = [1, 0]>(a)", "small = Div(dy, scale) at = Transpose<perm = [1, 0]>(large)"
).replace("MatMul(at, dy)", "MatMul(at, small)")
FEATURES_BACKWARD = FEATURES_BACKWARD.replace("da = MatMul(dy, w2t)", "dl = MatMul(small, w2t) da = Mul(dl, scale)")
# A loss beside that of the step, which depends on no scale.
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
        inputs="float scale",
        outputs="float size",
        forward=FEATURES,
        backward=FEATURES_BACKWARD,
    ),
    "a scale of predictions beside another loss": brought(
        PLAIN,
        TEST.format("g"),
        SGD,
        GUARD,
        SIZE,
        inputs="float scale",
        outputs="float size",
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
