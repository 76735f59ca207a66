"""Outputs that may be the next values of single numbers: counters, rates, means, limits, flags."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import MOMENTUM, roles_of, states, update_step
from tests.expressions import nodes

pytestmark = pytest.mark.static

FIRST = "u = dw * rate; w_next = Where(first, w - u - u, w - u)\n"
OFFSET = {
    "forward": nodes("y = x @ w + b; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
    "backward": nodes("c = d * two_over_n; dw = x.T @ c; db = ReduceSum(c, keepdims=0)"),
}
COUNTED = "int64 n, float p"
DECAYS = "n_next = n + unit; f = beta * Pow(beta, Cast(n_next, to=1)); p_next = p * f"
SHOWN = DECAYS.replace("p_next", "shown")
STEPS = {
    "a counter that starts again, typed": (
        update_step("more = n + unit; n_next = Mod(more, period)", "int64 n", "", "int64 period = {4}, int64 more"),
        states("w", "n"),
    ),
    "a counter that starts again, untyped": (
        update_step("more = n + unit; n_next = Mod(more, period)", "int64 n", "", "int64 period = {4}"),
        states("w", "n"),
    ),
    "a counter that is an input": (update_step("n_next = n + unit", "int64 n"), states("w", "n")),
    "a mean over the steps so far": (
        update_step("n_next = n + unit; k_next = (k * Cast(n, to=1) + loss) / Cast(n_next, to=1)", "int64 n, float k"),
        states("w", "n", "k"),
    ),
    "a stored mean by a share that is an input": (
        update_step("k_next = k * mu + loss * (one - mu)", "float mu", constants="float k = {0.3}"),
        states("w", "k?"),
    ),
    "a stored mean of zero by a share that is an input": (
        update_step("k_next = k * mu + loss * (one - mu)", "float mu", constants="float k = {0}"),
        states("w", "k?"),
    ),
    "a stored flag, or another one": (
        update_step("k_next = Or(k, Less(loss, rate))", constants="bool k = {0}"),
        states("w", "k?"),
    ),
    "a stored flag among others": (
        update_step("k_next = Not(Where(k, And(k, Less(loss, rate)), k))", constants="bool k = {0}"),
        states("w", "k?"),
    ),
    "a flag behind a number that a stored flag chooses": (
        update_step("far = Greater(Where(no, loss, rate), rate)", "", "bool far", "bool no = {0}"),
        {**states("w"), "far": "metric"},
    ),
    "a mean by a share that is an input": (
        update_step("k_next = k * (one - mu) + loss * mu", "float k, float mu"),
        states("w", "k"),
    ),
    # --- products of decays, and what decays
    "a product of decays that corrects a bias": (
        update_step(f"{DECAYS}; hat = m_next / (one - p_next)", f"{COUNTED}, float[4,3] m", update=MOMENTUM),
        states("w", "n", "m", "p"),
    ),
    "a product of decays, times another one": (
        update_step(f"{DECAYS}; hat = m_next / (one - p_next * f)", f"{COUNTED}, float[4,3] m", update=MOMENTUM),
        states("w", "n", "m", "p"),
    ),
    "a decay in use": (
        update_step(f"{SHOWN}; hat = dw / (one - shown) + v * shown", f"{COUNTED}, float[4,3] v", "float shown"),
        {**states("w", "n"), "shown": "metric"},
    ),
    "a share of the rest": (
        update_step(f"{SHOWN}; hat = dw * (one - shown)", COUNTED, "float shown"),
        {**states("w", "n"), "shown": "metric"},
    ),
    "the rest of another number": (
        update_step(f"{SHOWN}; hat = dw / (beta - shown)", COUNTED, "float shown"),
        {**states("w", "n"), "shown": "metric"},
    ),
    "a product of decays beside an update": (
        update_step(f"{SHOWN}; hat = dw / (one - shown)", COUNTED, "float shown"),
        {**states("w", "n"), "shown": "metric"},
    ),
    "the largest number so far, less and less": (
        update_step("largest = Max(k * beta, ReduceMax(Abs(dw), keepdims=0))", "float k", "float largest"),
        {**states("w"), "largest": "next k?"},
    ),
    "the largest number so far": (
        update_step("largest = Max(k, ReduceMax(Abs(dw), keepdims=0))", "float k", "float largest"),
        {**states("w"), "largest": "next k?"},
    ),
    "a small share of a limit": (
        update_step("limit = Max(k * rate, ReduceMax(Abs(dw), keepdims=0))", "float k", "float limit"),
        {**states("w"), "limit": "next k?"},
    ),
    # The gradient of the gain leaves the graph.
    "a sum of losses beside a gain": (
        update_step(
            "sum_next = sum + loss",
            "float k, float sum",
            "float dk",
            forward=nodes("p = x @ w; y = p * k; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
            backward=nodes("dy = d * two_over_n; dw = x.T @ (dy * k); dk = ReduceSum(dy * p, keepdims=0)"),
        ),
        {**states("w", "sum"), "dk": "gradient"},
    ),
    "a rate that is halved": (
        update_step(
            "rate_next = Where(flag, rate * half, rate)", "float rate, bool flag", constants="float half = {0.5}"
        ),
        states("w", "rate"),
    ),
    "a mean that begins anew": (
        update_step(
            "k_next = Where(flag, loss, k * beta + loss * tenth)", "float k, bool flag", "", "float tenth = {0.1}"
        ),
        states("w", "k"),
    ),
    "the least loss so far": (update_step("k_next = Min(k, loss)", "float k"), states("w", "k")),
    # --- bounds and conditions: a number that is held on every way is a next value
    "a number that shrinks to a floor": (
        update_step("k_next = Max(k * beta, low)", "float k", constants="float low = {0.1}"),
        states("w", "k"),
    ),
    "a number that grows to a limit": (
        update_step("k_next = Min(k * two, top)", "float k", constants="float two = {2}, float top = {9}"),
        states("w", "k"),
    ),
    "a number that grows between two limits": (
        update_step(
            "k_next = Clip(k * two, low, top)",
            "float k",
            constants="float two = {2}, float low = {0.1}, float top = {9}",
        ),
        states("w", "k"),
    ),
    "a number that shrinks and stays positive": (update_step("k_next = Relu(k * beta)", "float k"), states("w", "k")),
    "an average whose share comes last": (
        update_step("k_next = ReduceL2(dw, keepdims=0) * tenth + k * beta", "float k", constants="float tenth = {0.1}"),
        states("w", "k"),
    ),
    "a norm, or a number that shrinks": (
        update_step("k_next = Where(flag, ReduceL2(dw, keepdims=0), k * beta)", "bool flag, float k"),
        states("w", "k"),
    ),
    "a sum with a norm, or a number that shrinks": (
        update_step("k_next = Where(flag, loss + ReduceL2(dw, keepdims=0), k * beta)", "bool flag, float k"),
        states("w", "k"),
    ),
    "a number with a floor": (
        update_step("k_next = Max(k + loss * rate, low)", "float k", constants="float low = {0.1}"),
        states("w", "k"),
    ),
    "the norm of an update": (
        update_step("norm = ReduceL2(dw, keepdims=0) * lr", "float lr", "float norm", update="w_next = w - dw * lr\n"),
        {**states("w"), "norm": "next lr?"},
    ),
    "a clipped norm": (
        update_step("norm = Min(ReduceL2(dw, keepdims=0), limit)", "float limit", "float norm"),
        {**states("w"), "norm": "next limit?"},
    ),
    "a number in a condition": (
        update_step("norm = Where(Less(limit, rate), ReduceL2(dw, keepdims=0), rate)", "float limit", "float norm"),
        {**states("w"), "norm": "next limit?"},
    ),
    "a flag of the first step": (
        update_step("first_next = Identity(no)", "bool first", constants="bool no = {0}", update=FIRST),
        states("w", "first?"),
    ),
    "a number that nothing reads": (
        update_step("k_next = Identity(nought)", "float[1] k", constants="float[1] nought = {0}"),
        states("w", "k?"),
    ),
    "numbers that nothing reads": (
        update_step(
            "a_next = Identity(nought); b_next = Identity(nought)",
            "float[1] a, float[1] b",
            constants="float[1] nought = {0}",
        ),
        states("w", "a?", "b?"),
    ),
    "a norm in place of a number that nothing reads": (
        update_step("k_next = ReduceL2(dw, keepdims=0)", "float k"),
        states("w", "k?"),
    ),
    # The decays are inputs: a moment, or a gradient that leaves the graph.
    "a moment of a number": (
        update_step("m = n * mu + db; b_next = b - m * rate", "float b, float n, float mu", "float m", **OFFSET),
        {**states("w", "b"), "m": "metric"},
    ),
    "a moment of one element": (
        update_step(
            "n_next = n * mu + db; b_next = b - n_next * rate",
            "float[1] b, float[1] n, float mu",
            **{**OFFSET, "backward": OFFSET["backward"].replace("db =", "sum =") + nodes("db = Reshape(sum, last)")},
            constants="int64[1] last = {-1}",
        ),
        states("w", "b", "n"),
    ),
    "a gradient with decay of a number": (
        update_step("whole = db + b * mu", "float b, float mu", "float whole", **OFFSET),
        {**states("w"), "whole": "next b?"},
    ),
    "a gradient times a rate": (
        update_step("step = db * lr", "float b, float lr", "float step", **OFFSET),
        {**states("w"), "step": "next lr?"},
    ),
    "rates": (
        update_step(
            "lr_next = Identity(lr); mu_next = Identity(mu)", "float lr, float mu", update="w_next = w - dw * lr * mu\n"
        ),
        states("w", "lr", "mu"),
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected
