"""A gradient of several shares, where only some carry the loss scale, is tested for finiteness as a whole."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import UpdateError
from tests.build import assert_same_step, linear_step, listed, numbers, parse
from tests.expressions import nodes

SIZE = "size = ReduceMax(Abs(near), keepdims=0)"


def test_an_overflow_in_the_weight_decay_alone_skips_the_step() -> None:
    """The gradient of mean((x w - t)^2) + sum(w^2): the second share carries no scale."""
    model = linear_step(
        nodes("w_next = w - (dw + w * two) * rate"),
        outputs="float[4,3] w_next",
        constants="float two = {2}, float rate = {0.1}",
    )
    x = np.ones((8, 4), np.float32)
    x[:, 0] = 0  # the batch does not touch the first row of the weights
    feeds = {"x": x, "t": np.ones((8, 3), np.float32)}
    weights = np.ones((4, 3), np.float32)
    result = gs.scale(model)
    assert gs.Session(result, state={"w": weights}).step(feeds)["all_finite"]

    weights[0] = 3e38  # twice that is no float32 any more
    session = gs.Session(result, state={"w": weights})
    outputs = session.step(feeds)
    assert np.isfinite(outputs["loss"])
    assert not outputs["all_finite"]
    assert session.loss_scale == 2**14
    np.testing.assert_array_equal(session.state_dict()["w"], weights)


def test_a_gradient_that_a_moment_is_taken_from_is_no_mere_share_of_the_difference() -> None:
    """m + 0.1 * (g - m): the sum of two batches reaches the square as well, and is checked itself."""
    text = """
        d1 = x1 @ w - t
        d2 = x2 @ w - t
        loss = ReduceMean(d1 * d1 + d2 * d2, keepdims=0)
        dw = (x1.T @ (d1 * quarter) + x2.T @ (d2 * quarter)) * half
        m_next = m + (dw - m) * tenth
        v_next = v * keep + dw * dw * small
        w_next = w - m_next
    """
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        accumulated (float[4,3] x1, float[4,3] x2, float[4,2] t, float[3,2] w, float[3,2] m, float[3,2] v) =>
            (float loss, float[3,2] w_next, float[3,2] m_next, float[3,2] v_next)
        <float half = {{0.5}}, float quarter = {{0.25}}, float tenth = {{0.1}},
         float keep = {{0.99}}, float small = {{0.01}}>
        {{ {nodes(text)} }}
    """)
    report = gs.scale(model).report
    assert report.proved
    assert {state.output for state in report.state} >= {"w_next", "m_next", "v_next"}


@pytest.mark.parametrize(("metric", "tested"), [("", {"whole"}), (SIZE, {"dw.unscaled", "whole"})], ids=["no", "yes"])
def test_a_multiple_of_a_gradient_that_a_metric_reads_is_tested_too(metric: str, tested: set[str]) -> None:
    model = linear_step(
        nodes(f"near = dw * two; whole = near + w * two; w_next = w - whole * rate; {metric}"),
        outputs=listed("float[4,3] w_next", metric and "float size"),
        constants="float two = {2}, float rate = {0.1}",
    )
    outputs = {name for node in gs.scale(model).model.graph.node for name in node.output}
    assert {name.removesuffix(".zeroed") for name in outputs if name.endswith(".zeroed")} == tested


def table_step(update: str) -> onnx.ModelProto:
    """A step without a contraction: the rows of a table that a batch reads learn."""
    text = f"""
        d = Gather(table, rows, axis=0) - t
        loss = ReduceMean(d * d, keepdims=0)
        index = Expand(Unsqueeze(rows, last), whole)
        dtable = ScatterElements(zeros, index, d * third, axis=0, reduction="add")
        table_next = {update}
    """
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 17]>
        lookup (float[4,2] table, int64[3] rows, float[3,2] t) => (float loss, float[4,2] table_next)
        <float third = {{0.3333333}}, float[4,2] zeros = {numbers(8)}, int64[1] last = {{1}}, int64[2] whole = {{3,2}},
         float rate = {{0.05}}, float keep = {{0.999}}, float low = {{-1}}, float high = {{1}}>
        {{ {nodes(text)} }}
    """)


@pytest.mark.parametrize(
    "update",
    [
        "table * keep - dtable * rate",
        "(table - dtable * rate) * keep",
        "(table * keep - dtable * rate) * keep + table * rate",
        "Clip(table - dtable * rate, low, high)",
    ],
)
def test_the_gradient_is_what_is_added_to_a_weight_where_no_contraction_tells(update: str) -> None:
    report = gs.scale(table_step(update)).report
    assert [place.value for place in report.places] == ["third"]
    assert [gradient.value for gradient in report.gradients] == ["dtable"]
    assert [state.output for state in report.state if state.input == "table"] == ["table_next"]


def test_a_next_weight_is_not_taken_for_a_gradient_where_no_contraction_tells() -> None:
    model = table_step("table * Exp(dtable * rate)")
    with pytest.raises(UpdateError, match="'table', or a gradient, and no contraction tells"):
        gs.scale(model)
    report = gs.scale(model, gradients=["dtable"]).report
    assert [state.output for state in report.state if state.input == "table"] == ["table_next"]


def test_a_float16_gradient_that_is_cast_and_read_as_it_is() -> None:
    """The cast reads the quotient in float32, and the metric a narrow copy: neither is scaled."""
    forward = "half_x = Cast(x, to=10); half_y = half_x @ Cast(w, to=10); d = Cast(half_y, to=1) - t"
    model = linear_step(
        nodes("w_next = w - Cast(dw, to=1) * rate; size = ReduceMax(Abs(dw), keepdims=0)"),
        forward=nodes(f"{forward}; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dw = half_x.T @ Cast(d * two_over_n, to=10)"),
        outputs="float[4,3] w_next, float16 size",
        constants="float rate = {0.1}",
    )
    assert_same_step(model)
