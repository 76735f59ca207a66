"""Losses whose gradients move the weights of another loss, in one step."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.analysis.roles.steps import update_step
from tests.analysis.test_further_passes import backward, forward
from tests.analysis.test_several_losses import losses_of
from tests.build import assert_same_step, listed, step
from tests.expressions import nodes

pytestmark = pytest.mark.static


def actor_step(more: str = "") -> onnx.ModelProto:
    """A critic `w` and its actor `k`, whose loss is computed by the critic's next weights; `value` is a mean."""
    actor = """
        w_next = w - dw * rate; a = Tanh(z @ k); q = a @ w_next; second = ReduceMean(q * q, keepdims=0)
        da = ((q * seed) @ w_next.T) * (one - a * a); dk = z.T @ da; k_next = k - dk * rate
    """
    return update_step(
        more,
        update=actor,
        inputs="float[5,4] z, float[4,4] k",
        outputs=listed("float second", "float value" if more else ""),
        constants="float seed = {0.13333334}",
    )


MEAN = "value = ReduceMean(y, keepdims=0)"


@pytest.mark.parametrize("more", ["", MEAN], ids=["alone", "beside a mean"])
def test_the_loss_of_an_actor_is_computed_by_the_next_weights_of_its_critic(more: str) -> None:
    """Both have a scale, and both gradients are tested; a mean of predictions is no loss of the critic."""
    report = gs.scale(actor_step(more)).report
    assert [entry.name for entry in report.roles if entry.role == "loss"] == ["loss", "second"]
    assert {gradient.value for gradient in report.gradients} == {"dw", "dk"}
    assert (report.contractions, report.missed) == (3, ())


def test_the_loss_of_a_second_step_is_computed_by_the_weights_of_the_first() -> None:
    """The weights between the steps do not leave the graph."""
    first = "v1 = w1 - dw1 * rate; v2 = w2 - dw2 * rate\n"
    second = forward("_b", x="z", t="s") + backward("_b", x="z") + "w1_next = v1 - p1 * rate; w2_next = v2 - p2 * rate"
    model = step(
        nodes(first + second),
        inputs="float[8,4] z, float[8,3] s",
        outputs="float loss_b, float[4,5] w1_next, float[5,3] w2_next",
        constants="float rate = {0.1}, float[4,5] v1, float[5,3] v2",
    )
    report = assert_same_step(model)
    assert losses_of(report) == ["loss", "loss_b"]
    assert [place.value for place in report.places] == ["two_over_n", "two_over_n"]
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2", "p1", "p2"}
    assert (report.contractions, report.missed) == (6, ())
