"""Candidates for the loss that another candidate excludes by structure, where derivatives decide nothing."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.analysis.roles.steps import roles_of, states, update_step
from tests.analysis.test_several_losses import losses_of
from tests.build import LINEAR, assert_same_step, linear_step
from tests.expressions import nodes

pytestmark = pytest.mark.static

DIFFERENTIATES = "the scalar output that the backward pass differentiates"
# Vector quantisation: the gradient of the fit goes past the rounding, and the commitment pulls at what is rounded.
QUANTISED = {
    "forward": nodes(
        """
        z = x @ w; q = Round(z); d = q - t; fit = ReduceMean(d * d, keepdims=0)
        c = z - q; commitment = ReduceMean(c * c, keepdims=0); loss = fit + commitment * share
        """
    ),
    "backward": nodes("dz = d * two_over_n + c * beta; dw = x.T @ dz"),
    "constants": "float share = {0.25}, float beta = {0.020833334}",
}
PARTS = "float fit, float commitment"


def quantised(outputs: str = PARTS, text: str = "", **edits: str) -> onnx.ModelProto:
    return update_step(text, outputs=outputs, **{**QUANTISED, **edits})


@pytest.mark.parametrize("parts", [PARTS, "float commitment, float fit", "float fit"])
def test_a_total_whose_derivatives_are_stopped_contains_its_parts(parts: str) -> None:
    report = gs.inspect(quantised(parts))
    assert (report.loss, report.loss_found) == ("loss", DIFFERENTIATES)
    assert all(entry.certain for entry in report.roles)


@pytest.mark.parametrize("share", ["share", "two_over_n"])
def test_a_total_that_is_only_shown(share: str) -> None:
    """No cotangent depends on the commitment, be it on its share: the scaled graph is the same, the name is not."""
    forward = QUANTISED["forward"].replace("share", share)
    report = assert_same_step(quantised(forward=forward, backward=nodes("dz = d * two_over_n; dw = x.T @ dz")))
    assert [gradient.value for gradient in report.gradients] == ["dw"]
    assert [place.value for place in report.places] == ["two_over_n"]


METRICS = {
    "a spread": "m = ReduceMean(z * z, axes, keepdims=0); metric = ReduceMean(Sqrt(m), keepdims=0)",
    "an error in other units": "e = q * two_over_n - t; metric = ReduceMean(Abs(e), keepdims=0)",
    "an entropy": "p = Sigmoid(z); p1 = p * one; metric = ReduceMean(p1 * Log(p1), keepdims=0)",
}


@pytest.mark.parametrize("name", METRICS)
def test_a_function_that_no_cotangent_depends_on_is_no_loss(name: str) -> None:
    model = quantised("float fit, float metric", METRICS[name])
    assert roles_of(model) == {**states("w"), "fit": "metric", "metric": "metric"}


def test_a_linear_function_that_no_cotangent_depends_on() -> None:
    """The gradient of a mean reads nothing, but the scale would not enter at constants alone."""
    model = quantised("float fit, float metric", "metric = ReduceMean(q * one, keepdims=0)")
    assert roles_of(model) == {**states("w"), "fit": "metric", "metric": "metric"}


NORM = "norm = ReduceL2(g, keepdims=0); w_next = w - g * rate; half_next = Cast(w_next, to=10)\n"
MASTERS = {
    "inputs": "float16[4,3] half",
    "outputs": "float norm, float16[4,3] half_next",
    "forward": nodes("xh = Cast(x, to=10); y = Cast(xh @ half, to=1)") + LINEAR.replace("y = MatMul(x, w)", ""),
    "backward": nodes("dy = Cast(d * seed, to=10); dw = Transpose(xh, perm=[1, 0]) @ dy; g = Cast(dw, to=1) / seed"),
    "constants": "float seed = {512}",
}


def test_the_norm_of_gradients_behind_a_static_loss_scale_is_no_loss() -> None:
    """No gradient has the type of a weight that the loss reads, so that no derivative can be compared."""
    model = update_step(update=NORM, **MASTERS)
    report = gs.inspect(model)
    assert (report.loss, report.loss_found) == ("loss", DIFFERENTIATES)


def test_a_running_sum_of_the_loss_has_its_derivatives() -> None:
    model = quantised(
        "float fit, float shown", "shown = total + loss", constants=QUANTISED["constants"] + ", float total = {3}"
    )
    report = gs.inspect(model)
    assert (report.loss, losses_of(report)) == ("loss", ["loss"])


def test_a_rate_is_no_part_of_the_loss() -> None:
    """Neither one that follows from numbers: a rate may be a smooth function of others."""
    model = quantised(
        "float fit, float shown", "shown = lr * Exp(lr)", inputs="float lr", constants=QUANTISED["constants"]
    )
    assert gs.inspect(model).loss == "loss"


def test_a_factor_of_a_cotangent_is_no_gradient() -> None:
    """The derivative of a sigmoid has a one of its own, where the scale would enter and come out again."""
    model = linear_step(
        nodes("metric = loss * half"),
        outputs="float[4,3] dw, float metric",
        forward=nodes("p = x @ w; s = one / (one + Exp(Neg(p))); d = s - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dp = (d * two_over_n) * (one / (one + Exp(Neg(p)))) * (one - s); dw = x.T @ dp"),
        constants="float one = {1}, float half = {0.5}",
    )
    report = gs.inspect(model)
    assert (report.loss, report.loss_found) == ("loss", DIFFERENTIATES)


def test_a_root_of_statistics_is_drawn_until_it_is_real() -> None:
    model = update_step(
        inputs="float[3] square, float[3] mean",
        outputs="float fit",
        forward=nodes(
            """
            y = x @ w; scale = Sqrt(square - mean * mean); d = y - t / scale; fit = ReduceMean(d * d, keepdims=0)
            loss = fit + ReduceSum(w * w, keepdims=0) * share
            """
        ),
        backward=nodes("dy = d * two_over_n; dw = x.T @ dy + w * twice"),
        constants="float share = {0.01}, float twice = {0.02}",
    )
    report = gs.inspect(model)
    assert (report.loss, report.loss_found) == ("loss", DIFFERENTIATES)


# --- forward passes at next weights
VALIDATION = (
    "flag = Less(checked, least); best_next = Where(flag, w_next, best); least_next = Where(flag, checked, least)"
)
CHECKED = "off = z @ w_next - s; checked = ReduceMean(off * off, keepdims=0)\n"
STATES = "float[5,4] z, float[5,3] s, float[4,3] best, float least"


@pytest.mark.parametrize(
    "update",
    [
        pytest.param("w_next = w - dw * rate\n" + CHECKED + VALIDATION, id="the best weights"),
        pytest.param(
            "moved = w - dw * rate\n"
            + CHECKED.replace("w_next", "moved")
            + VALIDATION.replace("w_next", "moved")
            + "; w_next = Where(flag, moved, best)",
            id="weights that fall back",
        ),
    ],
)
def test_a_validation_at_the_next_weights_is_no_backward_pass(update: str) -> None:
    model = update_step(update=update, inputs=STATES, outputs="float checked")
    report = gs.inspect(model)
    assert (report.loss, report.contractions, report.missed) == ("loss", 1, ())
    assert roles_of(model)["checked"] == "metric"


def test_a_second_loss_at_the_next_weights_of_the_first_is_backward() -> None:
    model = update_step(
        update="w_next = w - dw * rate; a = Tanh(z @ k); e = a @ w_next - s; second = ReduceMean(e * e, keepdims=0); "
        "da = ((e * seed) @ w_next.T) * (one - a * a); dk = z.T @ da; k_next = k - dk * rate",
        inputs="float[5,4] z, float[5,3] s, float[4,4] k",
        outputs="float second",
        constants="float seed = {0.13333334}",
    )
    report = gs.scale(model).report
    assert {gradient.value for gradient in report.gradients} == {"dw", "dk"}
    assert losses_of(gs.inspect(model)) == ["loss", "second"]
    assert (report.contractions, report.missed) == (3, ())


SAME = "the likeliest one, and each other one leads to the same scaled graph"
# The gradient goes past the rounding: it is the derivative of neither mean.
ROUNDED = nodes(
    "z = x @ w; d = Round(z) - t; e = ReduceMean(d * d, axes, keepdims=0); loss = ReduceMean(e, keepdims=0)"
)


@pytest.mark.parametrize(
    ("other", "how"),
    [
        pytest.param("other = ReduceMin(e, keepdims=0)", SAME, id="of the same errors"),
        pytest.param("other = loss * Sqrt(loss)", DIFFERENTIATES, id="of the loss"),
    ],
)
def test_one_scaled_graph_needs_no_question(other: str, how: str) -> None:
    model = update_step(
        other,
        outputs="float other",
        forward=ROUNDED,
        backward=nodes("dz = d * two_over_n; dw = x.T @ dz"),
        constants="int64[1] axes = {1}",
    )
    report = gs.inspect(model)
    assert (report.loss, report.loss_found) == ("loss", how)
    assert all(entry.certain for entry in report.roles)
