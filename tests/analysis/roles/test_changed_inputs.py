"""Changed inputs among the outputs: batches for a network, their averages, keys and buffers."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from tests.analysis.roles.steps import SGD, roles_of, states, update_step
from tests.build import LINEAR, linear_step, listed, ramp
from tests.expressions import nodes

pytestmark = pytest.mark.static

REST = LINEAR.partition("\n    y = MatMul(x, w)")[2]
READS_SHOWN = LINEAR.replace("x, w", "shown, w")
AVERAGE = "mean * high + ReduceMean(x, axes, keepdims=0) * low"
NOISE = "parts = Cast<to = 1>(key) noise = ReduceSum<keepdims = 0>(parts) z = Mul(y, noise) d ="


def shown_step(shown: str, inputs: str = "", forward: str = LINEAR, **more: Any) -> onnx.ModelProto:
    """A step with one more output, computed from the batch ahead of the network."""
    return update_step(
        inputs=inputs,
        outputs="float[8,4] shown",
        constants="float low = {0.3}, float high = {0.7}",
        forward=nodes(f"shown = {shown}") + "\n" + forward,
        **more,
    )


def mean_step(mean: str, more: str = "", outputs: str = "", reads: str = "mean_next") -> onnx.ModelProto:
    """A step with one more input `mean`, from which and from the batch its next value is computed."""
    return update_step(
        more,
        "float[4] mean",
        listed("float[4] mean_next", outputs),
        "float low = {0.01}, float high = {0.99}, int64[1] axes = {0}",
        forward=nodes(f"mean_next = {mean}; y = (x - {reads}) @ w") + REST,
    )


def following_step(bias: str = "", more: str = "", outputs: str = "") -> onnx.ModelProto:
    """A step whose target network moves towards the sum of the weight and a bias before it is read."""
    return linear_step(
        nodes(SGD) + more,
        inputs="float[4,3] w, float[4,3] target, float[3] b",
        outputs=listed("float[4,3] moved, float[4,3] w_next", outputs),
        forward=nodes(f"moved = target * high + (w * low + b * low); y = x @ w - x @ moved{bias}") + REST,
        constants="float low = {0.01}, float high = {0.99}, float rate = {0.1}, int64[1] axes = {0}",
    )


STEPS = {
    "a clipped batch": (shown_step("Clip(x, low, high)"), {**states("w"), "shown": "metric?"}),
    "a scaled batch": (shown_step("x * high"), {**states("w"), "shown": "metric?"}),
    "a batch times an input": (shown_step("x * share", "float share"), {**states("w"), "shown": "metric?"}),
    "a batch with a limit that is an input": (
        shown_step("Clip(x, low, top)", "float top"),
        {**states("w"), "shown": "metric?"},
    ),
    "a scaled batch that the network reads": (
        shown_step("x * high", forward=READS_SHOWN, backward=nodes("dy = d * two_over_n; dw = shown.T @ dy")),
        {**states("w"), "shown": "metric?"},
    ),
    "a normalised batch that the network reads": (
        update_step(
            inputs="float share",
            outputs="float[8,4] shown",
            constants=f"float[4] middle = {ramp(4)}",
            forward=nodes("shown = (x - middle) * share") + READS_SHOWN,
            backward=nodes("dy = d * two_over_n; dw = shown.T @ dy"),
        ),
        {**states("w"), "shown": "metric?"},
    ),
    "a number that changes before the network reads it": (
        update_step(
            inputs="float k",
            outputs="float k_next",
            constants="float high = {0.7}",
            forward=nodes("k_next = k * high; y = (x * k_next) @ w") + REST,
            backward=nodes("dy = d * two_over_n; dw = (x * k_next).T @ dy"),
        ),
        states("w", "k"),
    ),
    "a frozen weight that is projected before the network reads it": (
        update_step(
            outputs="float[4,3] v_next",
            constants=f"float[4,3] v = {ramp(12)}, float low = {{0.1}}, float high = {{0.9}}",
            forward=nodes("v_next = Clip(v, low, high); y = x @ (w + v_next)") + REST,
        ),
        states("w", "v"),
    ),
    "activations added to the batch": (
        shown_step("x + x @ mix", "float[4,4] mix", READS_SHOWN),
        {**states("w"), "shown": "metric?"},
    ),
    "a mixed batch that the network reads": (
        shown_step("x * high + other * low", "float[8,4] other", READS_SHOWN),
        {**states("w"), "shown": "metric?"},
    ),
    # The pair of the weight is known by the time that the target's is judged, whichever output comes first.
    "a target network that follows the weights": (
        linear_step(
            nodes(SGD),
            inputs="float[4,3] w, float[4,3] target",
            outputs="float[4,3] target_next, float[4,3] w_next",
            forward=nodes("target_next = target * high + w * low; y = x @ w - x @ target_next")
            + LINEAR.partition("\n    y = MatMul(x, w)")[2],
            constants="float low = {0.01}, float high = {0.99}, float rate = {0.1}",
        ),
        states("w", "target"),
    ),
    "a network that follows a weight and a bias": (following_step(), {**states("w"), "moved": "metric?"}),
    "a network that follows a weight and a bias that has a next value": (
        following_step(" + b", nodes("b_next = b - ReduceSum(dy, axes, keepdims=0) * rate"), "float[3] b_next"),
        {**states("w", "b"), "moved": "metric?"},
    ),
    # --- averages of a batch
    "an average that the network reads": (mean_step(AVERAGE), states("w", "mean")),
    "the average before": (mean_step(AVERAGE, reads="mean"), states("w", "mean")),
    "an average that a metric reads, too": (
        mean_step(AVERAGE, "size = ReduceL2(mean, keepdims=0)", "float size"),
        {**states("w", "mean"), "size": "metric"},
    ),
    # A layer that adds something to its input looks the same.
    "a sum that the network reads": (mean_step("mean + ReduceMean(x, axes, keepdims=0)"), states("w", "mean")),
    "a sum before": (mean_step("mean + ReduceMean(x, axes, keepdims=0)", reads="mean"), states("w", "mean")),
    "an average with an activation": (
        mean_step("mean * high + Tanh(mean) * ReduceMean(x, axes, keepdims=0)"),
        states("w", "mean"),
    ),
    # --- whole numbers
    "a random key that is counted on": (
        update_step(
            "key_next = key + unit",
            "int64[2] key",
            forward=LINEAR.replace("Sub(y, t)", "Sub(z, t)").replace("d =", NOISE),
            backward=nodes("dy = d * two_over_n; dw = x.T @ (dy * noise)"),
        ),
        states("w", "key"),
    ),
    "an unsigned random key": (
        update_step("key_next = Mod(key, period)", "uint32[2] key", constants="uint32[2] period = {7, 7}"),
        states("w", "key"),
    ),
    "indices that begin anew at seven": (
        update_step("shown = Mod(ids, period)", "int64[8] ids", "int64[8] shown", "int64 period = {7}"),
        {**states("w"), "shown": "metric?"},
    ),
    # --- initializers, which no batch is
    "a stored weight that shrinks": (
        update_step(
            "k_next = k * beta",
            constants=f"float[3,3] k = {ramp(9)}",
            forward=LINEAR.replace("Sub(y, t)", "Sub(z, t)").replace("d =", "z = MatMul(y, k) d ="),
            backward=nodes("dy = d * two_over_n; dw = x.T @ (dy @ k.T)"),
        ),
        states("w", "k"),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected
