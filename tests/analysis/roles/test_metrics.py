"""The evidence that an output is a metric or a constant, not carried state, and questions about outputs."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import SGD, evidence_of, roles_of, states, update_step

pytestmark = pytest.mark.static

SALIENCY = "dx = dy @ w.T\n"
FED_RATE = SGD.replace("rate", "lr")
TWO = "float[4,3] a, float[4,3] b"

# Beside the weight, which is updated in each.
METRICS = {
    "a prediction that meets the target": (
        update_step("", "float[8,3] given", "float[8,3] y", "float[8,3] d"),
        {"y": "metric"},
    ),
    "another output of the type of an input": (
        update_step("p = Tanh(y)", "float[8,3] given", "float[8,3] p", "float[8,3] d"),
        {"p": "metric?"},
    ),
    "outputs that fit no open input": (
        update_step(
            "length = ReduceL2(w_next, keepdims=0); sums = ReduceSum(w_next, axes, keepdims=0)",
            outputs="float length, float[3] sums",
        ),
        {"length": "metric", "sums": "metric"},
    ),
    # The initializer may be state that is replaced without being read.
    "a flag beside an initializer that nothing reads": (
        update_step(
            "good = Less(ReduceMax(w_next, keepdims=0), limit)",
            outputs="bool good",
            constants="bool stored = {0}, float limit = {10}",
        ),
        {"good": "next stored?"},
    ),
    # The norm depends on the rate by the weights, as all that is computed from them does.
    "a norm beside a rate that is an input": (
        update_step("length = ReduceL2(w_next, keepdims=0)", "float lr", "float length", update=FED_RATE),
        {"length": "metric"},
    ),
    "a rate that a schedule carries on": (
        update_step("lr_next = lr * beta", "float lr", update=FED_RATE),
        states("lr"),
    ),
    "a constant": (update_step("version = Identity(beta)", outputs="float version"), {"version": "constant"}),
    "two constants beside a number that nothing reads": (
        update_step(
            "a_next = Identity(nought); b = Identity(other)",
            "float[1] a",
            "float[1] b",
            constants="float[1] nought = {0}, float[1] other = {1}",
        ),
        {"a_next": "next a?", "b": "constant?"},
    ),
    # A rate may be set to a constant by the first step.
    "a constant beside a rate": (
        update_step("version = Identity(beta)", "float lr", "float version", update=FED_RATE),
        {"version": "constant?"},
    ),
    "a saliency map of sizes": (update_step(SALIENCY + "s = Abs(dx)", outputs="float[8,4] s"), {"s": "gradient"}),
    "a saliency map of products": (update_step(SALIENCY + "s = dx * x", outputs="float[8,4] s"), {"s": "gradient"}),
    # A value that a step hands through is not replaced by itself.
    "an input that is handed through under another name": (
        update_step("shown = Identity(a)", "float[4,3] a, float[4,3] b", "float[4,3] shown"),
        {"shown": "next a?"},
    ),
    "a copy of the next weight in float16": (
        update_step("small = Cast(w_next, to=10)", outputs="float16[4,3] small"),
        {"small": "metric"},
    ),
    # A target or the like has the type of a prediction.
    "an activation of the prediction": (update_step("p = Tanh(y)", outputs="float[8,3] p"), {"p": "metric"}),
    # --- proposals among several inputs
    "a sum of two inputs": (update_step("p = Tanh(a) + Tanh(b)", TWO, "float[4,3] p"), {"p": "next a?"}),
    "a sum beside an input whose name begins like it": (
        update_step("mean_new = Tanh(a) + Tanh(b)", f"{TWO}, float[4,3] mean_old", "float[4,3] mean_new"),
        {"mean_new": "next a?"},
    ),
    "a sum of an input whose name begins like it": (
        update_step("mean_new = Tanh(a) + Tanh(mean_old)", "float[4,3] a, float[4,3] mean_old", "float[4,3] mean_new"),
        {"mean_new": "next mean_old?"},
    ),
    "a sum of an input whose name ends like it": (
        update_step(
            "new_mean = Tanh(old_sum) + Tanh(old_mean)",
            "float[4,3] old_sum, float[4,3] old_mean",
            "float[4,3] new_mean",
        ),
        {"new_mean": "next old_mean?"},
    ),
    "a sum beside an input that is handed through": (
        update_step("shown = Identity(a); p = Tanh(a) + Tanh(b)", TWO, "float[4,3] shown, float[4,3] p"),
        {"shown": "next a", "p": "next b?"},
    ),
    "a product with the state before": (
        update_step("a_next = Tanh(a) + dw; p = a @ k", "float[4,3] a, float[3,3] k", "float[4,3] p"),
        {"a_next": "next a", "p": "metric"},
    ),
    "a number in float16": (
        update_step("k_next = k * beta; small = Cast(k_next, to=10)", "float k, float16 h", "float16 small"),
        {"k_next": "next k", "small": "metric"},
    ),
    # It has the type of the batch.
    "another saliency map": (update_step(SALIENCY + "s = Tanh(dx)", outputs="float[8,4] s"), {"s": "metric?"}),
}
STEPS = {name: (model, {**states("w"), **roles}) for name, (model, roles) in METRICS.items()}


@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected


@pytest.mark.parametrize(
    ("name", "output", "evidence"),
    [
        ("a prediction that meets the target", "y", "it is compared with a target"),
        ("outputs that fit no open input", "sums", "no open input has its type"),
    ],
)
def test_evidence(name: str, output: str, evidence: str) -> None:
    assert evidence_of(STEPS[name][0], output) == evidence
