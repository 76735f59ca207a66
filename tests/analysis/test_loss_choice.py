"""Several scalar outputs that could be the loss."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from graphscale.errors import RolesError
from tests.analysis.roles.steps import roles_of, states, update_step
from tests.build import BACKWARD, FORWARD, LINEAR, assert_same_step, linear_step, listed, step
from tests.expressions import nodes

pytestmark = pytest.mark.static

FOUND = "the scalar output that the backward pass differentiates"
SAME = "the likeliest one, and each other one leads to the same scaled graph"
GRADIENTS = "float[4,5] dw1, float[5,3] dw2"
PENALIZED = FORWARD.replace("loss =", "fit =") + (
    "squares = Mul(w2, w2) penalty = ReduceMean<keepdims = 0>(squares) loss = Add(fit, penalty)"
)
# The total is only reported in one of these, and differentiated in the other.
REPORTED = step(forward=PENALIZED, outputs=f"float fit, {GRADIENTS}")
DIFFERENTIATED = step(
    forward=PENALIZED,
    backward=BACKWARD.replace("dw2 =", "of_fit =") + "of_penalty = Mul(w2, c) dw2 = Add(of_fit, of_penalty)",
    outputs=f"float fit, {GRADIENTS}",
    constants="float c = {0.13333334}",
)
ROOT = step(
    forward=FORWARD.replace("loss =", "mse =") + "loss = Sqrt(mse)",
    backward="seed = Div(half, loss) ds = Mul(d, seed)" + BACKWARD.replace("Mul(d,", "Mul(ds,"),
    outputs=f"float mse, {GRADIENTS}",
    constants="float half = {0.5}",
)
PERPLEXITY = step("p = Exp(loss)", outputs=f"float p, {GRADIENTS}")
STRAIGHT_THROUGH = step(
    "p = Exp(loss)", outputs=f"float p, {GRADIENTS}", backward=BACKWARD.replace("MatMul(xt, dh)", "MatMul(xt, da)")
)


# Both terms have a gradient.
DECAYED_WEIGHT = step(
    forward=FORWARD.replace("loss =", "fit =")
    + nodes("decay = ReduceSum(w1 * w1, keepdims=0) * c; loss = fit + decay"),
    backward=BACKWARD.replace("dw1 =", "of_fit =") + nodes("dw1 = of_fit + w1 * twice"),
    outputs=f"float fit, float decay, {GRADIENTS}",
    constants="float c = {0.01}, float twice = {0.02}",
)
ACTIVATION = step(nodes("size = ReduceMean(Abs(a), keepdims=0)"), outputs=f"float size, {GRADIENTS}")
MEAN_PREDICTION = linear_step(nodes("mean = ReduceMean(y, keepdims=0)"), outputs="float[4,3] dw, float mean")
MEAN_RESIDUAL = linear_step(nodes("mean = ReduceMean(d, keepdims=0)"), outputs="float[4,3] dw, float mean")


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        # The penalty has no gradient here; the scaled graph is the same by either name.
        pytest.param(REPORTED, "loss", id="reported total"),
        pytest.param(ROOT, "loss", id="root"),
        pytest.param(DIFFERENTIATED, "loss", id="differentiated total"),
        pytest.param(PERPLEXITY, "loss", id="perplexity"),
        pytest.param(STRAIGHT_THROUGH, "loss", id="most gradients agree"),
        pytest.param(DECAYED_WEIGHT, "loss", id="weight decay"),
        pytest.param(ACTIVATION, "loss", id="activation"),
        pytest.param(MEAN_PREDICTION, "loss", id="mean prediction"),
        pytest.param(MEAN_RESIDUAL, "loss", id="mean residual"),
    ],
)
def test_the_loss_among_other_scalars(model: onnx.ModelProto, loss: str) -> None:
    report = assert_same_step(model)
    assert report.loss == loss
    assert report.loss_found in (FOUND, SAME)
    assert all(entry.certain for entry in report.roles)


NORM = step(
    nodes("norm = Sqrt(ReduceSum(dw1 * dw1, keepdims=0) + ReduceSum(dw2 * dw2, keepdims=0))"),
    outputs=f"float norm, {GRADIENTS}",
)


def test_a_norm_of_gradients_is_no_loss() -> None:
    report = gs.inspect(NORM)
    assert (report.loss, report.loss_found) == ("loss", FOUND)


ZERO = "float nought = {0}, float share = {0.01}, float twice = {0.02}"
PART = LINEAR.replace("loss =", "fit =")
DECAYED = "w_next = w - (dw + w * twice) * rate"
SUMS = {
    "two losses": {
        "forward": PART + nodes("loss = (nought + fit) + ReduceSum(w * w, keepdims=0) * share"),
        "outputs": "float fit",
        "update": DECAYED,
    },
    "one loss": {"forward": PART + nodes("loss = nought + fit")},
}


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_that_a_stored_zero_is_added_to_may_be_a_running_sum(name: str) -> None:
    """Python's `sum` begins with a zero, and so does an epoch."""
    stored = update_step(constants=ZERO, stored=True, **SUMS[name])
    with pytest.raises(RolesError, match=r"'loss': loss\? it may be a running sum"):
        gs.scale(stored)
    assert gs.scale(stored, loss="loss").report.loss == "loss"


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_that_a_zero_is_added_to_beside_weights_that_are_fed(name: str) -> None:
    """A file that is fed its weights is fed its sums, too."""
    assert gs.scale(update_step(constants=ZERO, **SUMS[name])).report.loss == "loss"


def test_a_running_sum_is_no_loss() -> None:
    model = update_step("total_next = total + loss", constants="float total = {0}")
    assert roles_of(model) == {**states("w", "total?")}


AVERAGE = "mean_next = mean * mu + loss * (one - mu)"


def test_an_average_of_the_loss_is_no_loss() -> None:
    """The derivative of the average is the share of the gradient that the moment takes."""
    update = f"{AVERAGE}; m_new = m * mu + dw * (one - mu); w_next = w - m_new * Min(mean_next, rate)"
    model = update_step(update=update, inputs="float mean, float mu, float[4,3] m", outputs="float[4,3] m_new")
    assert roles_of(model) == {**states("w", "mean?"), "m_new": "next m"}


def test_an_average_that_alone_leaves_the_graph_is_asked_about() -> None:
    model = update_step(
        AVERAGE.replace("loss", "fit").replace("mean_next", "loss"), "float mean, float mu", forward=PART
    )
    assert gs.inspect(model).loss_found == "it may be a running sum or average, and the next value of 'mean'"


def test_a_named_loss_of_unknown_shape_is_a_scalar_by_its_operators() -> None:
    forward = "u = nobody.Shift(t)" + FORWARD.replace("Sub(y, t)", "Sub(y, u)").replace("loss =", "error =")
    model = step(forward=forward + "whole = Mul(error, one) loss = Identity(whole)", domains=["nobody"])
    assert gs.inspect(model, loss="whole").loss == "whole"


def test_a_graph_that_nothing_runs() -> None:
    model = step(
        "p = Exp(loss)",
        outputs=f"float p, {GRADIENTS}",
        forward="e = nobody.Embed(x)" + FORWARD.replace("(x, w1)", "(e, w1)"),
        backward=BACKWARD.replace("(x)", "(e)"),
        domains=["nobody"],
    )
    assert gs.scale(model).report.loss == "loss"


# One less a coefficient is a term of the loss: the one is a constant, however it is stored.
DICE = "dice = one - ReduceSum(p * t, keepdims=0); loss = fit + dice * half"


def test_one_less_a_coefficient_is_no_average() -> None:
    model = update_step(
        outputs="float fit, float dice",
        forward=nodes(f"p = x @ w; d = p - t; fit = ReduceMean(d * d, keepdims=0); {DICE}"),
        backward=nodes("dp = (d * two_over_n - t * half) * one; dw = x.T @ dp"),
        constants="float one = {1}, float half = {0.5}",
        stored=True,
    )
    report = gs.inspect(model)
    assert (report.loss, report.loss_found) == ("loss", FOUND)
    assert roles_of(model) == {**states("w"), "fit": "metric", "dice": "metric"}


# A second head reads what the first one predicts, but its gradient stops there.
HEADS = {
    "forward": nodes(
        """
        y = x @ w; d = y - t; first = ReduceMean(d * d, keepdims=0)
        e = y @ v - t; second = ReduceMean(e * e, keepdims=0); loss = first + second
        """
    ),
    "backward": nodes("dw = x.T @ (d * two_over_n); dv = y.T @ (e * two_over_n)"),
    "update": "w_next = w - dw * rate; v_next = v - dv * rate\n",
    "inputs": "float[3,3] v",
}
SCORE = (
    "hits = Cast(Greater(e, t), to=1); both = ReduceSum(hits * t, keepdims=0)\n"
    "score = both * two_over_n / (ReduceSum(hits, keepdims=0) + ReduceSum(t, keepdims=0))"
)


@pytest.mark.full
@pytest.mark.parametrize("outputs", ["float first, float second", "float second, float first"])
@pytest.mark.parametrize("score", ["", SCORE], ids=["alone", "beside a score"])
def test_the_total_of_terms_whose_gradients_stop(outputs: str, score: str) -> None:
    """Each term has a gradient that is its derivative alone, and no score of predictions that are rounded is a loss."""
    model = update_step(score, outputs=listed(outputs, "float score" if score else ""), **HEADS)
    report = gs.inspect(model)
    assert (report.loss, report.loss_found) == ("loss", FOUND)
    assert all(entry.certain for entry in report.roles)


def test_a_total_of_a_term_that_is_not_differentiated() -> None:
    """The scaled graph is the same by the name of the total and of the term."""
    only = {**HEADS, "backward": nodes("dw = x.T @ (d * two_over_n)"), "update": "w_next = w - dw * rate"}
    report = gs.inspect(update_step(outputs="float first, float second", **only))
    assert [(place.value, report.missed) for place in report.places] == [("two_over_n", ())]
    assert [gradient.value for gradient in report.gradients] == ["dw"]
