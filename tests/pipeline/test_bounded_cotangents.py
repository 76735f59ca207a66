"""Gradients are tested before their bounds: an overflow must not become a finite number."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import BACKWARD, feeds_for, step
from tests.conftest import run_once

BOUNDS = {
    "both": "bounded = Clip(da, low, high)",
    "one after the other": "above = Max(da, low) bounded = Min(high, above)",
    "from below": "bounded = Max(da, low)",
    "from above": "bounded = Min(da, high)",
}
OPS = ("Clip", "Max", "Min")


@pytest.mark.parametrize("where", ["in the backward pass", "behind it"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_an_overflow_is_noticed(bound: str, where: str) -> None:
    nodes, gradient = BOUNDS[bound], "da"
    backward, more = BACKWARD.replace("dh = Mul(da, slope)", f"{nodes} dh = Mul(bounded, slope)"), ""
    if where == "behind it":
        gradient, backward, more = "dw1", BACKWARD, nodes.replace("da", "dw1")
    model = step(
        f"{more} w1_next = Sub(w1, {'bounded' if more else 'dw1'}) w2_next = Sub(w2, dw2)",
        outputs="float[4,5] w1_next, float[5,3] w2_next",
        constants="float low = {-0.01}, float high = {0.01}",
        backward=backward,
    )
    result = gs.scale(model, gs.DynamicLossScale(2.0**115))
    scaled = result.model
    assert isinstance(scaled, onnx.ModelProto)
    assert result.report.coverage == 1 and not gs.lint(scaled).findings
    assert gs.verify(model, scaled, runs=1).ok
    (bounding,) = [n for n in scaled.graph.node if f"{gradient}.unscaled" in n.input and n.op_type in OPS]
    assert bounding.op_type == BOUNDS[bound].split("= ")[1].partition("(")[0]
    feeds = feeds_for(model)
    feeds["w1"], feeds["w2"] = np.float32(1e-6) * feeds["w1"], np.float32(1e6) * feeds["w2"]
    outputs, _ = run_once(scaled, feeds)
    assert not outputs["all_finite"]
    assert np.array_equal(outputs["w1_next"], feeds["w1"])


@pytest.mark.parametrize("bound", ["Clip(inner, low, high)", "Max(inner, low)", "Relu(inner)"])
def test_the_scale_enters_again_between_a_bound_and_a_product(bound: str) -> None:
    """The bounded cotangent is an operand of the next contraction itself."""
    nodes = f"inner = Mul(da, slope) dh = {bound}"
    model = step(
        "w1_next = Sub(w1, dw1) w2_next = Sub(w2, dw2)",
        outputs="float[4,5] w1_next, float[5,3] w2_next",
        constants="float low = {-0.01}, float high = {0.01}",
        backward=BACKWARD.replace("dh = Mul(da, slope)", nodes),
    )
    report = gs.scale(model).report
    assert (report.coverage, {place.value for place in report.places}) == (1.0, {"two_over_n", "dh"})
    assert {gradient.value for gradient in report.gradients} == {"inner", "dw1", "dw2"}
