"""The evidence that an output is a gradient, not carried state, and questions about gradients."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.analysis.roles.steps import (
    MOMENTUM,
    SGD,
    WEIGHT_DECAY,
    evidence_of,
    previous_gradient_step,
    roles_of,
    square_step,
    states,
    update_step,
)
from tests.build import LINEAR, linear_step, numbers, ramp, step
from tests.expressions import nodes

pytestmark = pytest.mark.static

FED_RATE = SGD.replace("rate", "lr")
TWO = "float[4,3] a, float[4,3] b"
SPARE = "float[4,3] w, float[4,3] a, float[4,3] b"
RATE = "float rate = {0.1}"
DECAYED = nodes("g = dw + w * share")

# One number times the prediction.
GAIN = {
    "forward": nodes("p = x @ w; y = p * k; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
    "backward": nodes("dy = d * two_over_n; dw = x.T @ (dy * k); dk = ReduceSum(dy * p, keepdims=0)"),
}


def stored_step(direction: str, values: str) -> onnx.ModelProto:
    """A step along a direction that is computed from the gradient, an output, and a stored tensor `prev`."""
    return update_step(
        outputs="float[4,3] dw", constants=f"float[4,3] prev = {values}", update=f"w_next = w - ({direction}) * rate"
    )


STEPS = {
    "a gradient": (linear_step(), {"dw": "gradient"}),
    "with noise": (
        linear_step(
            nodes("g = dw + noise * size"), inputs="float[4,3] w, float[4,3] noise, float size", outputs="float[4,3] g"
        ),
        {"g": "gradient"},
    ),
    "with noise of a known size": (
        linear_step(
            nodes("g = dw + noise * size"),
            inputs="float[4,3] w, float[4,3] noise",
            outputs="float[4,3] g",
            constants="float size = {1.5}",
        ),
        {"g": "next noise"},
    ),
    "accumulated": (
        linear_step(nodes("g = dw + sum"), inputs="float[4,3] w, float[4,3] sum", outputs="float[4,3] g"),
        {"g": "next sum"},
    ),
    "beside classes, where labels are whole numbers": (
        linear_step(
            nodes("found = ArgMax(y + places, axis=1, keepdims=0)"),
            inputs="float[4,3] w, int64[8] label",
            outputs="float[4,3] dw, int64[8] found",
            constants="float[3] places = {0, 1, 2}, int64[8] rows = {0, 1, 2, 3, 4, 5, 6, 7}",
            forward=LINEAR.replace("Sub(y, t)", "Sub(z, t)")
            .replace("d =", "k = Cast<to = 1>(label) k1 = Unsqueeze(k, last) z = Add(y, k1) d =")
            .replace("y =", "last = Constant<value_ints = [1]>() y ="),
        ),
        {"dw": "gradient", "found": "metric?"},
    ),
    "the gradient of a bias": (
        linear_step(
            nodes("db = ReduceSum(dy, axes, keepdims=0)"),
            outputs="float[4,3] dw, float[3] db",
            constants="int64[1] axes = {0}",
        ),
        {"dw": "gradient", "db": "gradient"},
    ),
    "with weight decay": (
        linear_step(DECAYED, outputs="float[4,3] g", constants="float share = {0.02}"),
        {"g": "gradient"},
    ),
    "with most of the weight: its next value": (
        linear_step(DECAYED, outputs="float[4,3] g", constants="float share = {0.9}"),
        {"g": "next w"},
    ),
    # The other rows may hold anything.
    "with weight decay of some rows": (
        linear_step(
            nodes("g = dw + ScatterND(w * share, rows, fresh)"),
            inputs="float[4,3] w, int64[2,1] rows, float[2,3] fresh",
            outputs="float[4,3] g",
            constants="float share = {0.02}",
        ),
        {"g": "next w?"},
    ),
    "with weight decay that is rounded": (
        linear_step(nodes("g = dw + Floor(w * share)"), outputs="float[4,3] g", constants="float share = {0.02}"),
        {"g": "next w?"},
    ),
    "a clipped gradient": (
        linear_step(
            nodes("g = Clip(dw, low, top)"), outputs="float[4,3] g", constants="float low = {-1}, float top = {1}"
        ),
        {"g": "gradient"},
    ),
    # Each gradient more than the weights may be the next value of one input.
    "one gradient more than weights, and two inputs": (
        linear_step(
            nodes("a1 = dw * two"), inputs=SPARE, outputs="float[4,3] dw, float[4,3] a1", constants="float two = {2}"
        ),
        {"dw": "next b?", "a1": "next a?"},
    ),
    "two gradients more than weights, and two inputs": (
        linear_step(
            nodes("a1 = dw * two; b1 = a1 * two"),
            inputs=SPARE,
            outputs="float[4,3] dw, float[4,3] a1, float[4,3] b1",
            constants="float two = {2}",
        ),
        {"dw": "gradient?", "a1": "next a?", "b1": "next b?"},
    ),
    # The bias enters the loss by its squared norm only.
    "of weight decay alone": (
        linear_step(
            nodes("db = b * twice"),
            inputs="float[4,3] w, float[5] b",
            outputs="float[4,3] dw, float[5] db",
            constants="float share = {0.01}, float twice = {0.02}",
            forward=WEIGHT_DECAY,
        ),
        {"dw": "gradient", "db": "gradient"},
    ),
    # --- beside weights whose gradients leave the graph
    "an activation of the weight": (
        linear_step(nodes("p = Tanh(w)"), outputs="float[4,3] dw, float[4,3] p"),
        {"dw": "gradient", "p": "metric?"},
    ),
    "an activation of the gradient": (
        linear_step(nodes("p = Tanh(dw)"), outputs="float[4,3] dw, float[4,3] p"),
        {"dw": "gradient", "p": "metric?"},
    ),
    "an activation of the gradient of a weight, beside one that is updated": (
        update_step(
            "p = Tanh(dw)",
            "float[4,3] v",
            "float[4,3] dw, float[4,3] p",
            forward=nodes("y = x @ (w + v); d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        ),
        {**states("w"), "dw": "gradient", "p": "metric?"},
    ),
    "an activation of a weight, with one gradient for two": (
        linear_step(
            nodes("p = Tanh(w)"),
            inputs="float[4,3] w, float[4,3] v",
            outputs="float[4,3] dw, float[4,3] p",
            forward=nodes("y = x @ (w + v); d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        ),
        {"dw": "gradient", "p": "metric?"},
    ),
    "the weight in float16": (
        linear_step(nodes("small = Cast(w, to=10)"), outputs="float[4,3] dw, float16[4,3] small"),
        {"dw": "gradient", "small": "metric"},
    ),
    "the next weight in float16 alone": (
        linear_step(nodes("small = Cast(w - dw * rate, to=10)"), outputs="float16[4,3] small", constants=RATE),
        {"small": "metric"},
    ),
    # The mask has the type of the weight, and is a batch.
    "a masked gradient": (
        linear_step(nodes("g = dw * mask"), inputs="float[4,3] w, float[4,3] mask", outputs="float[4,3] g"),
        {"g": "gradient"},
    ),
    "a product of a weight and another input": (
        linear_step(nodes("p = w * a - dw * dw"), inputs="float[4,3] a, float[4,3] w", outputs="float[4,3] p"),
        {"p": "next a?"},
    ),
    "a squared gradient beside a moment": (square_step(), states("w", "v?")),
    "the previous gradient": (previous_gradient_step(), {**states("w"), "dw": "next before", "length": "metric"}),
    "two inputs that a gradient is compared with": (
        update_step(
            "one_change = ReduceL2(dw - a, keepdims=0); change = ReduceL2(dw - b, keepdims=0)",
            TWO,
            "float[4,3] dw, float one_change, float change",
        ),
        {**states("w"), "dw": "next a?", "one_change": "metric", "change": "metric"},
    ),
    "a gradient that the update adds to the one before": (
        update_step("", "float[4,3] before", "float[4,3] dw", update="w_next = w - (dw + before) * rate"),
        {**states("w"), "dw": "next before"},
    ),
    "an activation of the weight, compared with the one before": (
        update_step(
            "p = Tanh(w_next); change = ReduceL2(p - before, keepdims=0)",
            "float[4,3] before",
            "float[4,3] p, float change",
        ),
        {**states("w"), "p": "next before?", "change": "metric"},
    ),
    # --- beside an update
    "a gradient beside momentum": (
        update_step("", "float[4,3] m", "float[4,3] dw", update=MOMENTUM),
        {**states("w", "m"), "dw": "gradient"},
    ),
    "the gradient of a gain beside a rate": (
        update_step("", "float k, float lr", "float dk", update=FED_RATE, **GAIN),
        {**states("w"), "dk": "gradient"},
    ),
    "a gradient beside a gain that moves, and a frozen weight": (
        update_step("", "float k, float[4,3] v", "float[4,3] dw", update="k_next = k - dk * rate", **GAIN),
        {**states("k"), "dw": "gradient"},
    ),
    "the gradient of a gain times the rate": (
        update_step("g = dk * lr", "float k, float lr", "float g", **GAIN),
        {**states("w"), "g": "next lr?"},
    ),
    "a clipped gradient where a mask keeps it": (
        update_step(
            "g = Where(keep, Clip(dw, low, top), nought)",
            "bool[4,3] keep",
            "float[4,3] g",
            "float low = {-1}, float top = {1}, float nought = {0}",
        ),
        {**states("w"), "g": "gradient"},
    ),
    "a clipped gradient in float16": (
        linear_step(
            nodes("g = Cast(Clip(dw, low, top), to=10)"),
            outputs="float16[4,3] g",
            constants="float low = {-1}, float top = {1}",
        ),
        {"g": "gradient"},
    ),
    "a gradient plus a row of numbers": (
        linear_step(nodes("g = dw + row"), outputs="float[4,3] g", constants="float[3] row = {0, 0.5, 1}"),
        {"g": "gradient"},
    ),
    "a gradient plus a share of the bias": (
        linear_step(
            nodes("g = dw + Floor(b * share)"),
            inputs="float[4,3] w, float[3] b",
            outputs="float[4,3] g",
            constants="float share = {0.02}",
            forward=nodes("y = x @ w + b; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        ),
        {"g": "gradient"},
    ),
    # --- beside a stored tensor of its type, which may be the gradient before
    "a gradient beside a mask": (stored_step("dw * prev", ramp(12)), {**states("w"), "dw": "gradient?"}),
    "a gradient beside one that it is compared with": (
        stored_step("Sign(Sign(prev) + Sign(dw))", ramp(12)),
        {**states("w"), "dw": "gradient?"},
    ),
    "a gradient beside one that it is compared with, zero at first": (
        stored_step("Sign(Sign(prev) + Sign(dw))", numbers(12)),
        {**states("w"), "dw": "gradient?"},
    ),
    "a gradient beside numbers that are looked up": (
        stored_step("dw + Gather(prev, places, axis=0)", ramp(12) + ", int64[4] places = {3, 2, 1, 0}"),
        {**states("w"), "dw": "gradient?"},
    ),
    "a gradient beside one whose product with it is compared": (
        stored_step("Sign(dw * prev)", ramp(12)),
        {**states("w"), "dw": "gradient?"},
    ),
    "a gradient beside numbers that are added to it": (
        stored_step("dw + prev", ramp(12)),
        {**states("w"), "dw": "gradient?"},
    ),
    "a gradient beside zeros that are added to it": (
        stored_step("dw + prev", numbers(12)),
        {**states("w"), "dw": "gradient"},
    ),
    "a gradient beside ones": (stored_step("dw - prev", numbers(12, "1")), {**states("w"), "dw": "gradient"}),
    "a multiple of a gradient beside the one before": (
        update_step(
            update="turned = Less(dw * prev, nought); g = dw * rate\nw_next = w - Sign(dw) * Where(turned, rate, one)",
            outputs="float[4,3] g",
            constants=f"float nought = {{0}}, float[4,3] prev = {numbers(12)}",
        ),
        {**states("w"), "g": "gradient?"},
    ),
    # As Rprop does; a mask is multiplied in the same way.
    "a gradient that the next step multiplies by its own": (
        update_step("", "float[4,3] before", "float[4,3] dw", update="w_next = w - Sign(dw * before) * rate"),
        {**states("w"), "dw": "next before?"},
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected


@pytest.mark.parametrize(
    ("name", "output", "evidence"),
    [
        ("a gradient", "dw", "it scales with the loss"),
        ("of weight decay alone", "db", "the gradient of weight decay alone"),
        ("the previous gradient", "dw", "the gradient that the next step compares with its own"),
    ],
)
def test_evidence(name: str, output: str, evidence: str) -> None:
    assert evidence_of(STEPS[name][0], output) == evidence


def test_a_masked_gradient_beside_an_update_is_asked_about() -> None:
    model = update_step("g = dw * mask", "float[4,3] mask", "float[4,3] g")
    assert roles_of(model)["g"] == "next mask?"


def test_inputs_whose_gradients_leave_the_graph_are_weights() -> None:
    inputs = {entry.name: entry.role for entry in gs.roles(step()) if entry.kind == "input"}
    assert inputs == {"x": "batch", "t": "batch", "w1": "weight", "w2": "weight"}


def test_inputs_that_stay_what_they_are() -> None:
    model = update_step(
        "", "float lr, float[3] turn", "", "float[3] turn = {1, 2, 3}", update="w_next = w - dw * turn * lr"
    )
    inputs = {entry.name: entry.role for entry in gs.roles(model) if entry.kind == "input"}
    assert inputs == {"x": "batch", "t": "batch", "w": "state", "lr": "hyperparameter", "turn": "constant"}
