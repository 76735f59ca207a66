"""Gradients and cotangents in sequences of tensors, which can be neither multiplied nor divided."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import EXACT, feeds_for, linear_step
from tests.conftest import run_once

GRADIENT = """
    dy = Mul(d, two_over_n)
    xt = Transpose<perm = [1, 0]>(x)
    dw = MatMul(xt, dy)
    parts = SplitToSequence<axis = 0>(dw)
"""
ROWS = "SplitToSequence<axis = 0>(dw)"
BRANCHES = f"""
    dy = Mul(d, two_over_n)
    xt = Transpose<perm = [1, 0]>(x)
    dw = MatMul(xt, dy)
    parts = If(flag) <then_branch = a () => (seq(float[1,3]) p) {{ p = {ROWS} }},
        else_branch = b () => (seq(float[1,3]) q) {{ q = {ROWS} }}>
"""
TWICE = """
    parts = SequenceConstruct(d, d)
    joined = ConcatFromSequence<axis = 0>(parts)
    xs = Concat<axis = 0>(x, x)
    xt = Transpose<perm = [1, 0]>(xs)
    dw = MatMul(xt, joined)
"""


def scaled_values(model: onnx.ModelProto) -> tuple[set[str], set[str]]:
    """The values multiplied and divided by the scale; all outputs must be those of the unscaled step."""
    feeds = feeds_for(model)
    result = gs.scale(model, 1024)
    expected, _ = run_once(model, feeds, EXACT)
    actual, _ = run_once(result.model, feeds, EXACT)
    for name, array in expected.items():
        for one, other in zip(array, actual[name], strict=True) if isinstance(array, list) else [(array, actual[name])]:
            assert np.array_equal(one, other)
    return {place.value for place in result.report.places}, {gradient.value for gradient in result.report.gradients}


def test_an_output() -> None:
    """The gradient is divided before it is split."""
    model = linear_step(backward=GRADIENT, outputs="seq(float[1,3]) parts")
    assert scaled_values(model) == ({"two_over_n"}, {"dw"})


def test_a_sequence_with_one_member_more() -> None:
    more = "longer = SequenceInsert(parts, row) first = SequenceAt(longer, none) twice = Concat<axis = 0>(first, first)"
    constants = "int64 none = {0}, float[1,3] row = {1, 2, 3}"
    model = linear_step(more, backward=GRADIENT, outputs="float[2,3] twice", constants=constants)
    assert scaled_values(model)[1] == {"dw"}


def test_a_member_of_one_element() -> None:
    """It is divided itself, not the sequence that it is taken from."""
    more = "sum = ReduceSum(dw) sums = SplitToSequence<axis = 0>(sum) first = SequenceAt(sums, none) root = Tanh(first)"
    model = linear_step(more, backward=GRADIENT, outputs="float[1,1] root", constants="int64 none = {0}")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("first", onnx.TensorProto.FLOAT, [1, 1]))
    assert scaled_values(model)[1] == {"first"}


def test_a_cotangent_of_two_members() -> None:
    """The scale enters behind the sequence."""
    assert scaled_values(linear_step(backward=TWICE)) == ({"joined"}, {"dw"})


def test_an_output_of_branches() -> None:
    model = linear_step(backward=BRANCHES, inputs="float[4,3] w, bool flag", outputs="seq(float[1,3]) parts")
    with pytest.raises(gs.GraphscaleError, match="'parts' is a sequence of gradients"):
        gs.scale(model)


def test_cotangents_that_leave_and_go_on() -> None:
    """The sequence cannot be scaled for one reader and not for the other."""
    backward = """
        dy = Mul(d, two_over_n)
        parts = SplitToSequence<axis = 0>(dy)
        joined = ConcatFromSequence<axis = 0>(parts)
        xt = Transpose<perm = [1, 0]>(x)
        dw = MatMul(xt, joined)
    """
    with pytest.raises(gs.GraphscaleError, match="'dy'"):
        gs.scale(linear_step(backward=backward, outputs="seq(float[1,3]) parts, float[4,3] dw"))
