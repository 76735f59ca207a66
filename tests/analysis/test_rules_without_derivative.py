"""Updates that are no derivatives of a scalar output, though their products look like gradients; and statistics."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from graphscale.errors import SeedNotFoundError
from tests.analysis.roles.steps import update_step
from tests.build import LINEAR, assert_same_step, linear_step
from tests.expressions import nodes

pytestmark = pytest.mark.static

MOVED = "float[4,3] w_next"
RATE = "float rate = {0.1}"
STATES = {
    "a sign in the way": linear_step(
        nodes("w_next = w + dw * rate"),
        outputs=MOVED,
        constants=RATE,
        forward=nodes("y = x @ w; d = t - Sign(y); loss = ReduceSum(Abs(d), keepdims=0)"),
        backward=nodes("dw = x.T @ d"),
    ),
    "the value of the loss": linear_step(
        nodes("w_next = w + (x.T @ y - w * loss) * rate"),
        outputs=MOVED,
        constants=RATE,
        forward=nodes("y = x @ w; loss = ReduceSumSquare(y, keepdims=0)"),
        backward="",
    ),
    "a layer that the loss does not have": linear_step(
        nodes("z = Cast(Equal(far, least), to=1); w_next = w + ((z.T @ x) - w * ReduceSum(z.T, axes)) * rate"),
        inputs="float[3,4] w",
        outputs="float[3,4] w_next",
        constants=f"{RATE}, int64[1] first = {{0}}, int64[1] axes = {{1}}, int64[1] last = {{2}}",
        forward=nodes(
            """
            gap = Unsqueeze(x, axes) - Unsqueeze(w, first); far = ReduceSum(gap * gap, last, keepdims=0)
            least = ReduceMin(far, axes); loss = ReduceMean(least, keepdims=0)
            """
        ),
        backward="",
    ),
    "the difference of two losses": linear_step(
        nodes("w_next = w - noise * ((up - down) * rate)"),
        inputs="float[4,3] w, float[4,3] noise",
        outputs=MOVED,
        constants=f"{RATE}, float half = {{0.5}}",
        forward=nodes(
            """
            a = x @ (w + noise) - t; b = x @ (w - noise) - t
            up = ReduceMean(a * a, keepdims=0); down = ReduceMean(b * b, keepdims=0); loss = (up + down) * half
            """
        ),
        backward="",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_rules(name: str) -> None:
    with pytest.raises(SeedNotFoundError, match="the graph does not differentiate the loss 'loss'"):
        gs.scale(STATES[name])


def penalised(update: str, backward: str = "") -> onnx.ModelProto:
    return update_step(
        outputs="float error",
        constants="float share = {0.01}, float low = {0.02}, float rest = {0.99}",
        forward=LINEAR.replace("loss =", "error =") + nodes("loss = error + ReduceSumSquare(w, keepdims=0) * share"),
        update=backward + update,
    )


def test_a_penalty_that_is_only_logged_is_no_part_of_the_loss() -> None:
    assert gs.inspect(penalised("w_next = w * rest - dw * rate\n")).loss == "error"
    assert gs.inspect(penalised("w_next = w - g * rate\n", "g = dw + w * low; ")).loss == "loss"


def test_the_covariance_of_cotangents_is_a_statistic() -> None:
    """Its inverse multiplies the gradient, as in K-FAC: the cotangent is unscaled for it, and goes on."""
    text = "s_next = s * beta + dy.T @ dy; g = dw @ (s_next @ s_next); w_next = w - g * rate"
    model = update_step("", "float[3,3] s", update=text)
    report = assert_same_step(model)
    assert report.coverage == 1 and "dy" in {gradient.value for gradient in report.gradients}
