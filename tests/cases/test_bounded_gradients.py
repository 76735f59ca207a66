"""Operators that make an infinite gradient finite: the gradient is unscaled and checked before them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import EXACT, feeds_for, parse
from tests.cases.steps import assert_skipped, read, scale, text_of
from tests.conftest import assert_all_same_bits, run_once

LARGEST = 2.0**40
BOUND = "da2 = Clip (da, zero)"
LOOP = """da2 = Loop (trip, go, da) <body: graph = body (int64 i, bool c, float[8,4] v) => (bool c2, float[8,4] v2) {
    c2 = Identity (c)
    v2 = Clip (v, zero)
}>"""
BRANCH = """da2 = If (go) <
    then_branch: graph = bounded () => (float[8,4] b) { b = Clip (da, zero) },
    else_branch: graph = free () => (float[8,4] f) { f = Identity (da) }
>"""
FUNCTION = """
<domain: "local", opset_import: ["" : 20]>
Bound (g, z) => (b) { b = Clip (g, z) }
"""
# The operator in place of `Clip(da, 0)`, and the sign of an infinite gradient that it makes finite.
BOUNDS = {
    "one bound": (BOUND, 1),
    "upper bound alone": ("da2 = Clip (da, , zero)", -1),
    "no bound": ("da2 = Clip (da)", 1),
    "relu": ("da2 = Relu (da)", -1),
    "max": ("da2 = Max (da, zero)", -1),
    "max of zero": ("da2 = Max (zero, da)", -1),
    "loop": (LOOP, 1),
    "branch": (BRANCH, 1),
    "function": ("da2 = local.Bound (da, zero)", 1),
}
OLD = {
    "lower bound, opset 10": ("da2 = Clip <min: float = 0> (da)", 1),
    "upper bound, opset 10": ("da2 = Clip <max: float = 0> (da)", -1),
    "no bound, opset 10": ("da2 = Clip (da)", 1),
}


def make(name: str) -> tuple[onnx.ModelProto, int]:
    operator, sign = {**BOUNDS, **OLD}[name]
    text = text_of("clip_one_bound").replace(BOUND, operator)
    text = text.replace("float rate =", "int64 trip =  {1}, bool go =  {1}, float rate =")
    if name in OLD:
        text = text.replace('"" : 20', '"" : 10')
    if name == "function":
        text = text.replace('"" : 20', '"" : 20, "local" : 1') + FUNCTION
    return parse(text), sign


@pytest.mark.parametrize("name", [*BOUNDS, *OLD])
def test_an_overflow_is_found(name: str) -> None:
    """At a scale of 2**40 one value of the step overflows: the gradient before the bound."""
    model, sign = make(name)
    assert_overflow_is_found(model, sign)


def assert_overflow_is_found(model: onnx.ModelProto, sign: int) -> None:
    feeds = feeds_for(model, x=np.full((8, 5), 0.1, np.float32), w1=np.zeros((5, 4), np.float32))
    feeds |= {"t": np.full((8, 3), -1e18, np.float32), "w2": np.full((4, 3), sign * 1e11, np.float32)}
    expected, _ = run_once(model, feeds, EXACT)
    assert all(np.isfinite(array).all() for array in expected.values())
    result = scale(model, gs.DynamicLossScale(LARGEST))
    assert_skipped(result, feeds, run_once(result.model, feeds, EXACT)[0])


@pytest.mark.parametrize("name", [*BOUNDS, *OLD])
def test_a_step_without_an_overflow_is_unchanged(name: str) -> None:
    model, _ = make(name)
    feeds = feeds_for(model)
    expected, _ = run_once(model, feeds, EXACT)
    for loss_scale in (1024, gs.DynamicLossScale(LARGEST)):
        result = scale(model, loss_scale)
        assert (result.report.coverage, result.report.missed) == (1.0, ())
        assert_all_same_bits(run_once(result.model, feeds, EXACT)[0], expected)


def test_relu_on_a_gradient() -> None:
    assert_overflow_is_found(read("relu_on_a_gradient"), -1)


def test_clip_one_bound() -> None:
    assert_overflow_is_found(read("clip_one_bound"), 1)


@pytest.mark.parametrize("name", ["clip_one_bound", "relu_on_a_gradient"])
def test_lint_and_verify_accept(name: str) -> None:
    model = read(name)
    scaled = scale(model).model
    assert gs.verify(model, scaled, runs=0).ok
    assert not gs.lint(scaled).findings
