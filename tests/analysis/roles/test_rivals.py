"""Pairs that are certain without a rival of their type, each beside a step with one."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import roles_of, states, update_step
from tests.build import LINEAR, numbers

pytestmark = pytest.mark.static

# The batch `k` has the type of the weight.
BESIDE_BATCH = LINEAR.replace("Sub(y, t)", "Sub(z, t)").replace("d =", "xk = MatMul(x, k) z = Add(y, xk) d =")
ANCHORED = "away = w - a; w_next = w - dw * rate - away * rate\n"
ANCHOR = "float[4,3] a, float[4,3] k"
AVERAGE = "s = nought + ReduceSum(dw, keepdims=0); k_next = "
ZERO = "float nought = {0}"

STEPS = {
    # --- a value that is handed through beside a batch of its type
    "weights that others are compared with": (
        update_step("p = Identity(a)", ANCHOR, "float[4,3] p", update=ANCHORED, forward=BESIDE_BATCH),
        {**states("w"), "p": "next a?"},
    ),
    "a value that nothing is compared with": (
        update_step("p = Identity(a)", ANCHOR, "float[4,3] p", forward=BESIDE_BATCH),
        {**states("w"), "p": "next a?"},
    ),
    "a value that a batch is compared with": (
        update_step(
            "p = Identity(a); far = ReduceL2(k - a, keepdims=0)",
            ANCHOR,
            "float[4,3] p, float far",
            forward=BESIDE_BATCH,
        ),
        {**states("w"), "p": "next a?", "far": "metric"},
    ),
    "compared with the weights of two steps": (
        update_step(
            "p = Identity(a); far = ReduceL2(w - b, keepdims=0)",
            f"{ANCHOR}, float[4,3] b",
            "float[4,3] p, float far",
            update=ANCHORED,
            forward=BESIDE_BATCH,
        ),
        {**states("w"), "p": "next a?", "far": "metric"},
    ),
    "weights that begin anew": (
        update_step(
            "p = Identity(a); far = ReduceL2(w - a, keepdims=0)",
            ANCHOR,
            "float[4,3] p, float far, float[4,3] dw",
            update="",
            forward=BESIDE_BATCH,
        ),
        {"p": "next a?", "far": "metric", "dw": "gradient"},
    ),
    # The gradient of `k` is computed, too: the weight may begin anew at `a`. The average `e` has none.
    "a weight more than next values": (
        update_step(
            "e_next = e * beta + w_next * tenth; dk = x.T @ dy; n = ReduceL2(dk, keepdims=0); p = Identity(a)",
            f"{ANCHOR}, float[4,3] e",
            "float[4,3] p, float n",
            "float tenth = {0.1}",
            update=ANCHORED,
            forward=BESIDE_BATCH.replace("z = Add(y, xk)", "xe = MatMul(x, e) ye = Add(y, xe) z = Add(ye, xk)"),
        ),
        {**states("w", "e"), "p": "next a?", "n": "metric"},
    ),
    # --- stored numbers
    "a filled moment that a constant multiplies": (
        update_step(
            constants=f"float[4,3] v = {numbers(12, '0.1')}",
            update="v_next = v * beta + dw * dw; w_next = w - dw / Sqrt(v_next) * rate",
        ),
        states("w", "v"),
    ),
    "a filled value that a rate multiplies": (
        update_step(
            inputs="float b",
            constants=f"float[4,3] v = {numbers(12, '0.1')}",
            update="v_next = v * b + dw * dw; w_next = w - dw / Sqrt(v_next) * rate",
        ),
        states("w", "v"),
    ),
    "a filled sum that a rate multiplies": (
        update_step(
            inputs="float b",
            constants=f"float[4,3] v = {numbers(12, '0.1')}",
            update="v_next = v + dw * dw; w_next = w - dw / Sqrt(v * b) * rate",
        ),
        states("w", "v"),
    ),
    "an average of a sum that begins at zero": (
        update_step(AVERAGE + "k * beta + s * rate", "float k", constants=ZERO),
        states("w", "k"),
    ),
    "a sum that begins at zero": (
        update_step(AVERAGE + "k + s", "float k", constants=ZERO),
        states("w", "k"),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected
