"""Losses that leave an If: two losses to choose between, one with an extra term, one inside of another."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import EXACT, assert_skips, feeds_for, listed, parse
from tests.conftest import assert_all_same_bits, run_once
from tests.expressions import nodes

HEAD = "y = x @ w; d = y - t; c = Clip(d, minus, one)"
TAIL = "dw = x.T @ dy; w_next = w - dw * rate"
SQUARE = "lq = ReduceMean(d * d, keepdims=0);"
HUBER = "lh = ReduceMean(c * (d - c * half), keepdims=0);"
CONSTANTS = "float k = {0.125}, float kh = {0.0625}, float one = {1}, float minus = {-1}, float half = {0.5}"
FULL = "float[8,2]"


def branches(results: str, condition: str, then: tuple[str, str], other: tuple[str, str]) -> str:
    """An If: its results, its condition, and each branch as its declared outputs and its nodes."""
    texts = [f"graph = b{i} () => ({outputs}) {{ {text} }}" for i, (outputs, text) in enumerate((then, other))]
    tag = results.split(",", maxsplit=1)[0]
    first, second = (text.replace("graph = b", f"graph = {tag}_b") for text in texts)
    return f"{results} = If({condition}) <then_branch: {first}, else_branch: {second}>\n"


def step(text: str, inputs: str = "bool robust", outputs: str = "", constants: str = "") -> onnx.ModelProto:
    values = listed(CONSTANTS, "float rate = {0.125}", constants)
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step ({listed("float[8,6] x, float[8,2] t, float[6,2] w", inputs)})
        => ({listed("float loss, float[6,2] w_next", outputs)}) <{values}> {{ {text} }}
    """)


INNER = branches(
    "li, gi",
    "square",
    (f"float lq, {FULL} gq", nodes(SQUARE + "gq = d * k")),
    (f"float la, {FULL} ga", nodes("la = ReduceMean(Abs(d), keepdims=0); ga = Sign(d) * kh")),
)
STEPS = {
    "loss and cotangent": nodes(HEAD)
    + branches(
        "loss, dy",
        "robust",
        (f"float lh, {FULL} gh", nodes(HUBER + "gh = c * kh")),
        (f"float lq, {FULL} gq", nodes(SQUARE + "gq = d * k")),
    )
    + nodes(TAIL),
    # Both losses are there; two nodes choose by one condition.
    "the chosen loss": nodes(HEAD + ";" + SQUARE + HUBER)
    + branches("loss", "robust", ("float l1", "l1 = Identity(lh)"), ("float l2", "l2 = Identity(lq)"))
    + branches("dy", "robust", (f"{FULL} g1", nodes("g1 = c * kh")), (f"{FULL} g2", nodes("g2 = d * k")))
    + nodes(TAIL),
    "one in the other": nodes(HEAD)
    + branches(
        "loss, dy",
        "robust",
        (f"float lh, {FULL} gh", nodes(HUBER + "gh = c * kh")),
        (f"float li, {FULL} gi", INNER),
    )
    + nodes(TAIL),
    "an extra term": nodes(HEAD + ";" + SQUARE)
    + branches(
        "extra, de",
        "robust",
        (f"float lh, {FULL} gh", nodes(HUBER + "gh = c * kh")),
        (f"float l0, {FULL} g0", nodes("l0 = Identity(zero); g0 = d * zero")),
    )
    + nodes("loss = lq + extra; dy = d * k + de;" + TAIL),
    "whole backward passes": nodes(HEAD)
    + branches(
        "loss, dw",
        "robust",
        ("float lh, float[6,2] gh", nodes(HUBER + "gh = x.T @ (c * kh)")),
        ("float lq, float[6,2] gq", nodes(SQUARE + "gq = x.T @ (d * k)")),
    )
    + nodes("w_next = w - dw * rate"),
    "a loss behind the branches": nodes(HEAD)
    + branches(
        "e, de",
        "robust",
        (f"{FULL} e1, {FULL} g1", nodes("e1 = c * (d - c * half); g1 = Identity(c)")),
        (f"{FULL} e2, {FULL} g2", nodes("e2 = d * d; g2 = d + d")),
    )
    + nodes("loss = ReduceMean(e, keepdims=0); dy = de * kh;" + TAIL),
}


def make(name: str) -> onnx.ModelProto:
    more = "bool robust, bool square" if name == "one in the other" else "bool robust"
    return step(STEPS[name], more, constants="float zero = {0}" if name == "an extra term" else "")


def same_step(model: onnx.ModelProto) -> gs.Report:
    """In each branch the scaled step computes what the original does, and a NaN skips it."""
    flags = [value.name for value in model.graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.BOOL]
    for chosen in range(2 ** len(flags)):
        feeds = feeds_for(model, **{name: np.bool_(chosen >> i & 1) for i, name in enumerate(flags)})
        feeds["t"] *= np.float32(3)
        expected, _ = run_once(model, feeds, EXACT)
        for scale in (1, 1024):
            assert_all_same_bits(run_once(gs.scale(model, scale).model, feeds, EXACT)[0], expected)
        result = gs.scale(model)
        assert run_once(result.model, feeds, EXACT)[0]["all_finite"]
        assert_skips(result, feeds)
    assert gs.verify(model, result.model, runs=1).ok
    return result.report


@pytest.mark.parametrize("name", STEPS)
def test_a_loss_from_an_if(name: str) -> None:
    report = same_step(make(name))
    assert (report.loss, report.coverage, report.missed) == ("loss", 1, ())
    assert len(report.gradients) == 1


@pytest.mark.parametrize("name", ["lh", "extra", "right", "shown"])
def test_a_metric_from_an_if_is_no_loss(name: str) -> None:
    """A loss that is only shown in one case, an accuracy, and a rate that an If chooses."""
    text = {
        "lh": branches(
            "lh", "robust", ("float l1", nodes(HUBER.replace("lh", "l1"))), ("float l2", "l2 = Identity(zero)")
        ),
        "extra": branches("extra", "robust", ("float e1", "e1 = Identity(loss)"), ("float e2", "e2 = Identity(zero)")),
        "right": branches(
            "right",
            "robust",
            ("float r1", nodes("r1 = ReduceMean(Cast(Greater(y, zero), to=1), keepdims=0)")),
            ("float r2", "r2 = Identity(zero)"),
        ),
        "shown": branches("shown", "robust", ("float s1", "s1 = Identity(rate)"), ("float s2", "s2 = Identity(half)")),
    }[name]
    main = nodes(HEAD + ";" + SQUARE.replace("lq", "loss") + "dy = d * k;" + TAIL)
    report = same_step(step(main + text, outputs=f"float {name}", constants="float zero = {0}"))
    assert (report.loss, report.coverage) == ("loss", 1)
