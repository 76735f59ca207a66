"""Evidence against pairs, under names that say nothing; where the names agree with a pair, it stands."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import evidence_of, exchanged_step, roles_of, states, update_step

pytestmark = pytest.mark.static

TWO = "float[4,3] a, float[4,3] b"
OUT = "float[4,3] p, float[4,3] q"
MIXED = "float low = {0.2}, float high = {0.8}, float minus = {-0.9}"
# A step of leapfrog, or of Nesterov's descent in two sequences; `w` is the weight of the network.
LEAPFROG = "p = v - dw * rate; q = Identity(w)"
NESTEROV = "p = w - dw * rate; q = p + (p - v) * beta"

STEPS = {
    "two outputs that hold each other's input": (
        exchanged_step(),
        {**states("w"), "p": "next a?", "q": "next b?"},
        ("p", "it could be exchanged with 'q': each holds the other's input"),
    ),
    "the next value of another state": (
        update_step("p = a * high + dw; q = b * k + p", f"{TWO}, float k", OUT, MIXED),
        {**states("w"), "p": "next a?", "q": "next b?"},
        ("q", "it holds 'p', the next value of another state"),
    ),
    "a negative coefficient": (
        update_step("", "float[4,3] a", OUT, MIXED, update="q = w - dw * rate; p = a * minus + dw"),
        {"q": "next w", "p": "metric?"},
        ("p", "it holds 'a' with a negative coefficient"),
    ),
    "leapfrog": (
        update_step("", "float[4,3] v", OUT, update=LEAPFROG),
        {"p": "next v?", "q": "next w?"},
        ("q", "it is 'w' itself, and 'p' may be its next value"),
    ),
    "Nesterov's two sequences": (
        update_step("", "float[4,3] v", OUT, update=NESTEROV),
        {"p": "next v?", "q": "next w?"},
        ("q", "it holds 'p', the next value of another state"),
    ),
    "a handed-through input beside another of its type": (
        update_step("p = Identity(a); n = ReduceL2(b, keepdims=0)", TWO, "float[4,3] p, float n"),
        {**states("w"), "p": "next a?", "n": "metric"},
        ("p", "it is 'a' itself, and may be the next value of 'b'"),
    ),
    "another output that holds the input": (
        update_step("", "float k", OUT, update="q = w - dw * rate; p = w * (one - k) + dw"),
        {"p": "metric?", "q": "next w?"},
        ("q", "'p' may be the next value of 'w', too"),
    ),
    "a batch as the network reads it": (
        update_step("p = Clip(x, low, high)", "", "float[8,4] p, float[4,3] q", MIXED, update="q = w - dw * rate\n"),
        {"p": "next x?", "q": "next w"},
        ("p", "it may be 'x', a batch, as the network reads it"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_doubts(name: str) -> None:
    model, expected, (output, evidence) = STEPS[name]
    assert roles_of(model) == expected
    assert evidence_of(model, output) == evidence
