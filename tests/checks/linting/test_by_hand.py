"""Steps scaled by hand: no findings in correct ones, and each mistake in the others."""

from __future__ import annotations

import pytest

import graphscale as gs
from tests.build import LINEAR, LINEAR_BACKWARD, linear_step, parse
from tests.checks.linting.hand import GRADIENTS, HALF, STEP, changed, codes, report

pytestmark = pytest.mark.static


def checked(nodes: str) -> str:
    """The whole step with other nodes from the gradient to the flag."""
    return changed(STEP, zeroed=nodes, probe="", bad="", finite="")


RIGHT = {
    "the reciprocal of the scale": changed(STEP, dw="inverse = Reciprocal(scale) dw = Mul(dw_scaled, inverse)"),
    "one over the scale": changed(STEP, dw="inverse = Div(one, scale) dw = Mul(inverse, dw_scaled)"),
    "the learning rate over the scale": changed(STEP, change="small = Div(rate, scale) change = Mul(dw_scaled, small)"),
    "a scaled threshold": changed(
        STEP,
        dw="high = Mul(two, scale) low = Neg(high) cut = Clip(dw_scaled, low, high) dw = Div(cut, scale)",
        zeroed="zeroed = Mul(dw_scaled, zero)",
    ),
    "a scaled norm": changed(
        STEP,
        dw="squares = Mul(dw_scaled, dw_scaled) sum = ReduceSum<keepdims = 0>(squares) norm = Sqrt(sum)"
        "largest = Mul(two, scale) ratio = Div(largest, norm) factor = Min(ratio, one)"
        "cut = Mul(dw_scaled, factor) dw = Div(cut, scale)",
    ),
    "clipping by norm after unscaling": changed(
        STEP,
        change="norm = ReduceL2<keepdims = 0>(dw) ratio = Div(two, norm) factor = Min(ratio, one)"
        "cut = Mul(dw, factor) change = Mul(cut, rate)",
    ),
    "the check of the scaled gradient": changed(STEP, zeroed="zeroed = Mul(dw_scaled, zero)"),
    "the check of the step": changed(STEP, zeroed="change = Mul(dw, rate) zeroed = Mul(change, zero)", change=""),
    "IsNaN or IsInf": checked(
        "nan = IsNaN(dw) inf = IsInf(dw) either = Or(nan, inf) number = Cast<to = 1>(either)"
        "total = ReduceSum<keepdims = 0>(number) finite = Equal(total, zero)"
    ),
    "the size of the sum of squares": checked("sum = ReduceSumSquare<keepdims = 0>(dw) finite = Less(sum, two)"),
    "x - x": changed(STEP, zeroed="zeroed = Sub(dw, dw)"),
    "x == x on the difference": checked(
        "rest = Sub(dw, dw) sum = ReduceSum<keepdims = 0>(rest) finite = Equal(sum, zero)"
    ),
    "a norm that equals itself and is not infinite": changed(
        checked(
            "norm = ReduceL2<keepdims = 0>(dw) same = Equal(norm, norm) size = Abs(norm) large = Equal(size, infinity)"
            "small = Not(large) finite = And(same, small)"
        ),
        y="infinity = Constant<value_float = inf>() y = MatMul(x, w)",
    ),
    "a flag of overflow": changed(STEP, w_next="w_next = Where(bad, w, w_new)"),
    "a guard by If": changed(
        STEP,
        w_next="w_next = If (finite) <then_branch = new () => (float[4,3] a) { a = Identity(w_new) }, "
        "else_branch = old () => (float[4,3] c) { c = Identity(w) }>",
    ),
    "a flag from the branches of an If": changed(
        STEP,
        inputs="bool wanted",
        finite="finite = If(wanted) <then_branch = a () => (bool one) { one = Not(bad) }, "
        "else_branch = b () => (bool other) { other = Not(bad) }>",
    ),
    "a selected change": changed(STEP, w_new="safe = Where(finite, change, zero)", w_next="w_next = Sub(w, safe)"),
    "a guard with another condition": changed(
        STEP, inputs="bool wanted", w_next="both = And(wanted, finite) w_next = Where(both, w_new, w)"
    ),
    "a count of skips": changed(
        STEP,
        inputs="int64 skips",
        outputs="int64 skips_next",
        more="skipped = Add(skips, step) skips_next = Where(finite, skips, skipped)",
    ),
    "a scale from its logarithm": changed(
        STEP,
        ("float scale, int64 good)", "float log, int64 good)"),
        ("float scale_next,", "float log_next,"),
        ("float scale = {32768}", "float log = {15}"),
        y="scale = Pow(two, log) y = MatMul(x, w)",
        grown="grown = Add(log, one)",
        grown_or_not="grown_or_not = Where(few, log, grown)",
        halved="halved = Sub(log, one)",
        lowered="lowered = Max(halved, zero)",
        scale_next="log_next = Where(finite, grown_or_not, lowered)",
    ),
    "a scale that the caller adjusts": GRADIENTS,
    "a constant scale": changed(GRADIENTS, (", float scale)", ")"), constants="float scale = {1024}"),
    "a constant scale in float16": changed(
        HALF,
        (", float scale)", ")"),
        constants="float scale = {1024}",
        dy="scale16 = Cast<to = 10>(scale)",
        dy16="seed16 = Cast<to = 10>(seed) dy16 = Mul(seed16, scale16)",
    ),
    "the scale as the seed": changed(GRADIENTS, seed="factor = Mul(two_over_n, scale)", dy="dy = Mul(factor, d)"),
    "the scaled loss beside the loss": changed(
        GRADIENTS, outputs="float scaled_loss", more="scaled_loss = Mul(loss, scale)"
    ),
    "a recurrent state": changed(
        STEP,
        inputs="float[5] h",
        outputs="float[5] h_next",
        more="moved = Tanh(h) h_next = Where(finite, moved, h)",
    ),
    "a norm as a metric": changed(STEP, outputs="float norm", more="norm = ReduceL2<keepdims = 0>(dw)"),
    "accumulation": changed(
        GRADIENTS,
        ("float[4,3] dw,", "bool[1] added,"),
        inputs="float[4,3] total, bool[1] reset",
        more="added = com.microsoft.InPlaceAccumulatorV2(total, dw, reset)",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found(name: str) -> None:
    found = report(RIGHT[name])
    assert found.findings == ()
    assert found.loss_scale is not None and found.gradients > 0
    assert (found.check is not None) == ("good" in RIGHT[name])


def test_other_scalars_are_no_loss_scale() -> None:
    """Scalars that the loss depends on, although they multiply and divide, and a learning rate."""
    forward = LINEAR.replace("y = MatMul(x, w)", "z = MatMul(x, w) y = Div(z, heat)")
    backward = LINEAR_BACKWARD.replace("dw = MatMul(xt, dy)", "dz = Div(dy, heat) dw = MatMul(xt, dz)")
    for more in ("", "xs = Mul(x, heat)"):
        forward = more + (forward.replace("MatMul(x,", "MatMul(xs,") if more else forward)
        found = gs.lint(linear_step(inputs="float[4,3] w, float heat", forward=forward, backward=backward))
        assert found.loss_scale is None and (more or found.findings == ())
    rate = changed(STEP, ("float rate = {0.1},", ""), inputs="float rate")
    assert report(rate).loss_scale == "scale" and codes(rate) == []


# Each with a code that is found.
WRONG = {
    "a check that always holds": (
        "GS401",
        changed(STEP, finite="good_one = Not(bad) finite = Or(good_one, always)", constants="bool always = {1}"),
    ),
    "a weight that never changes": ("GS403", changed(STEP, w_next="w_next = Where(finite, w, w)")),
    "a weight is added to instead of assigned": (
        "GS401",
        changed(
            STEP,
            ("float[4,3] w_next,", "bool[1] written,"),
            more="written = com.microsoft.InPlaceAccumulatorV2(w, w_next)",
        ),
    ),
    "a count is added to instead of assigned": (
        "GS305",
        changed(
            STEP,
            ("float scale_next,", "bool[1] written,"),
            more="written = com.microsoft.InPlaceAccumulatorV2(scale, scale_next)",
        ),
    ),
    "weight decay before unscaling": ("GS201", changed(STEP, change="g = Add(dw_scaled, w) change = Mul(g, rate)")),
    "a moment of the scaled gradient": (
        "GS201",
        changed(
            STEP,
            inputs="float[4,3] m",
            outputs="float[4,3] m_next",
            constants="float half = {0.5}",
            more="kept = Mul(m, half) m_new = Add(kept, dw_scaled) m_next = Where(finite, m_new, m)",
        ),
    ),
    "clipping by the norm before unscaling": (
        "GS205",
        changed(
            STEP,
            dw="norm = ReduceL2<keepdims = 0>(dw_scaled) ratio = Div(two, norm) factor = Min(ratio, one)"
            "cut = Mul(dw_scaled, factor) dw = Div(cut, scale)",
        ),
    ),
    "a metric of the scaled gradient": (
        "GS201",
        changed(STEP, outputs="float norm", more="norm = ReduceL2<keepdims = 0>(dw_scaled)"),
    ),
    "max > limit": (
        "GS302",
        checked("squares = ReduceSumSquare<keepdims = 0>(dw) bad = Greater(squares, two) finite = Not(bad)"),
    ),
    "IsInf of one sign": ("GS303", changed(STEP, ("IsNaN(probe)", "IsInf<detect_negative = 0>(probe)"))),
    "a running statistic": (
        "GS401",
        changed(
            STEP,
            inputs="float[4] mean",
            outputs="float[4] mean_next",
            constants="int64[1] rows = {0}, float most = {0.9}, float rest = {0.1}",
            more="kept = Mul(mean, most) batch = ReduceMean<keepdims = 0>(x, rows) part = Mul(batch, rest)"
            "mean_next = Add(kept, part)",
        ),
    ),
    "a recurrent state": (
        "GS401",
        changed(STEP, inputs="float[5] h", outputs="float[5] h_next", more="h_next = Tanh(h)"),
    ),
    "a guard in place": (
        "GS401",
        changed(
            STEP,
            ("float[4,3] w_next,", "bool[1] written,"),
            constants="bool[1] yes = {1}",
            w_next="written = com.microsoft.InPlaceAccumulatorV2(w, w_new, yes)",
        ),
    ),
    "a loss in the scaled path": (
        "GS104",
        changed(GRADIENTS, square="e = Mul(d, scale) square = Mul(e, e)", seed="", dy="dy = Mul(e, two_over_n)"),
    ),
    "a scale below 1": ("GS107", changed(STEP, ("float scale = {32768}", "float scale = {0.5}"))),
    "gradients in float16 accumulate in place": (
        "GS602",
        changed(
            HALF,
            ("float[4,3] dw)", "float16[4,3] added)"),
            inputs="float16[4,3] total",
            more="small = Cast<to = 10>(dw) added = com.microsoft.InPlaceAccumulator(total, small)",
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_found(name: str) -> None:
    code, text = WRONG[name]
    # A loss that depends on the scale hides that it is one.
    options = {"scale": "scale"} if code == "GS104" else {}
    assert code in codes(text, **options)


TWICE = "once = Div(dw_scaled, scale) dw = Div(once, scale)"


def test_one_mistake_does_not_hide_the_next() -> None:
    probe = "probe = ReduceMax<keepdims = 0>(dw)"
    text = changed(STEP, dw=TWICE, w_next="w_next = Where(finite, w, w_new)", zeroed="", probe=probe)
    assert codes(text) == ["GS202", "GS302", "GS303", "GS403"]
    assert codes(changed(GRADIENTS, db="db = Identity(db_scaled)", dw=TWICE)) == ["GS201", "GS202"]


def test_a_mistake_in_a_body() -> None:
    """The gradient carries the scale in the rounds, and comes out unscaled, or twice."""
    rounds = """dw = Loop(times, always, none) <body = l (int64 i, bool more, float[4,3] sum)
        => (bool on, float[4,3] next) {
            on = Identity(more) part = Div(dw_scaled, scale) CHANGE next = Add(sum, last)
        }>"""
    constants = f"int64 times = {{2}}, bool always = {{1}}, float[4,3] none = {{{', '.join('0' * 12)}}}"

    def found(change: str) -> list[tuple[str, str | None]]:
        text = changed(GRADIENTS, dw=rounds.replace("CHANGE", change).replace("\n", " "), constants=constants)
        return [(finding.code, finding.value) for finding in report(text).findings]

    assert found("last = Identity(part)") == []
    assert found("last = Div(part, scale)") == [("GS202", "part")]
    assert found("last = Mul(part, scale)") == [("GS201", "dw")]
    assert found("last = Exp(dw_scaled)") == [("GS205", "dw_scaled")]


def test_the_scale_can_be_named() -> None:
    # Nothing is divided by it, so that nothing shows that it is one.
    bare = changed(GRADIENTS, dw="dw = Identity(dw_scaled)", db="db = Identity(db_scaled)")
    assert report(bare).loss_scale is None
    assert codes(bare) == []
    found = report(bare, scale="scale")
    assert [(finding.code, finding.value) for finding in found.findings] == [("GS201", "dw"), ("GS201", "db")]


@pytest.mark.parametrize(("name", "message"), [("nothing", "no value of this name"), ("w", "no floating-point scalar")])
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(gs.GraphscaleError, match=message):
        report(GRADIENTS, scale=name)


def test_a_graph_that_is_not_sorted_is_refused() -> None:
    model = parse(GRADIENTS)
    model.graph.node.insert(0, model.graph.node.pop())
    with pytest.raises(gs.GraphscaleError, match="topological order"):
        gs.lint(model)


def test_codes_are_selected_and_ignored() -> None:
    kept = "scale_next = Where(few, scale, grown)"
    model = parse(changed(STEP, w_next="w_next = Where(finite, w, w_new)", scale_next=kept))
    for options, expected in (
        ({}, ["GS403", "GS305"]),
        ({"select": ["gs4"]}, ["GS403"]),
        ({"select": ["guard-swapped"]}, ["GS403"]),
        ({"ignore": ["GS403"]}, ["GS305"]),
        ({"select": ["GS4"], "ignore": ["GS40"]}, []),
    ):
        assert [finding.code for finding in gs.lint(model, **options).findings] == expected
    with pytest.raises(gs.GraphscaleError, match="no lint code 'GS999'; did you mean GS"):
        gs.lint(model, select=["GS999"])
    with pytest.raises(gs.GraphscaleError, match="did you mean guard-swapped"):
        gs.lint(model, ignore=["guard-swaped"])
