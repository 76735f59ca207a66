"""Proposals among inputs of one type: the nearest input in the graph, for any order and names."""

from __future__ import annotations

import onnx
import pytest

from tests.analysis.roles.steps import roles_of, states, update_step

pytestmark = pytest.mark.static

TWO = "float[4,3] a, float[4,3] b"
NORM = "n = ReduceL2({}, keepdims=0);"
BRANCH = """
    p = If(flag) <
        then_branch = keep () => (float[4,3] kept) { kept = Div(b, n) },
        else_branch = stay () => (float[4,3] same) { same = Tanh(b) }
    >
"""

PROPOSALS = {
    "fewer nodes between": (
        update_step(
            NORM.format("b") + "p = Tanh(a) / n; q = Tanh(p) + Tanh(Tanh(Tanh(b)))", TWO, "float[4,3] q, float[4,3] p"
        ),
        {"q": "next b?", "p": "next a?"},
    ),
    "a sum is nearer than a product": (
        update_step("p = Tanh(a * Tanh(dw) + b)", TWO, "float[4,3] p"),
        {"p": "next b?"},
    ),
    "a product with an unknown number is as near": (
        update_step(
            "p = Tanh(a + Tanh(b)); q = Tanh(b * k + Tanh(p))",
            f"{TWO}, float k",
            "float[4,3] q, float[4,3] p",
        ),
        {"q": "next b?", "p": "next a?"},
    ),
    "by its shape, not by a norm": (
        update_step(NORM.format("a") + "p = Tanh(Tanh(b)) * Tanh(n)", TWO, "float[4,3] p"),
        {"p": "next b?"},
    ),
    "through a branch": (
        update_step(
            NORM.format("a") + "c = Tanh(a) - Tanh(b)",
            f"{TWO}, bool flag",
            "float[4,3] p, float[4,3] c",
            control=BRANCH,
        ),
        {"p": "next b?", "c": "next a?"},
    ),
    "compared with the one before": (
        update_step("p = Tanh(dw); change = ReduceL2(p - b, keepdims=0)", TWO, "float[4,3] p, float change"),
        {"p": "next b?", "change": "metric"},
    ),
    "a gradient that is chosen instead of the one before": (
        update_step(
            "used = Where(first, dw, b); n = ReduceL2(used - a, keepdims=0)",
            f"{TWO}, bool first",
            "float[4,3] dw, float n",
        ),
        {"dw": "next b?", "n": "metric"},
    ),
    "read by nothing": (
        update_step(NORM.format("a") + "p = Tanh(dw)", TWO, "float[4,3] p, float n"),
        {"p": "next b?", "n": "metric"},
    ),
    "handed through": (update_step("p = Identity(b)", TWO, "float[4,3] p"), {"p": "next b?"}),
    "numbers in names say nothing": (
        update_step("out_2 = Tanh(in_1) * Tanh(Tanh(in_2))", "float[4,3] in_1, float[4,3] in_2", "float[4,3] out_2"),
        {"out_2": "next in_1?"},
    ),
    "numbers in names say nothing of two that are as near": (
        update_step("out_2 = Tanh(in_1) + Tanh(in_2)", "float[4,3] in_1, float[4,3] in_2", "float[4,3] out_2"),
        {"out_2": "next in_1?"},
    ),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_proposals(name: str) -> None:
    model, expected = PROPOSALS[name]
    assert roles_of(model) == {**states("w"), **expected}


@pytest.mark.parametrize(("axis", "expected"), [("second", "a"), ("axes", "b"), ("last", "a")])
def test_numbers_of_rows_and_columns(axis: str, expected: str) -> None:
    """The moments of rows are repeated along the columns, and reduced over them."""
    text = f"c = Transpose(dw) @ dw + Min(Reshape(a, column), Reshape(b, row)); p = ReduceMax(c, {axis}, keepdims=0)"
    model = update_step(
        text,
        "float[3] b, float[3] a" if expected == "a" else "float[3] a, float[3] b",
        "float[3] p",
        "int64[2] column = {3, 1}, int64[2] row = {1, 3}, int64[1] second = {1}, int64[1] last = {-1}",
    )
    assert roles_of(onnx.shape_inference.infer_shapes(model, data_prop=True))["p"] == f"next {expected}?"


def test_order_chooses_between_inputs_as_near_as_each_other() -> None:
    text = "m_new = m * beta + dw; p = Tanh(a) + Tanh(b) + dw; n_new = n + unit; q = Tanh(b) * ReduceL2(w, keepdims=0)"
    inputs = "float[4,3] m, float[4,3] {}, int64 n, float[4,3] {}".format
    outputs = "float[4,3] m_new, float[4,3] p, int64 n_new"
    assert [roles_of(update_step(text, inputs(*order), outputs))["p"] for order in ("ab", "ba")] == [
        "next a?",
        "next b?",
    ]
