"""Cuts of steps unlike those of models/: each half has its own parts, or the step is refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import SplitError
from graphscale.replicas import SplitStep
from tests.build import EXACT, feeds_for, linear_step
from tests.conftest import assert_all_same_bits, make_session, run_session
from tests.replicas.steps import Chain

SGD = "lr = Constant<value_float = 0.1>() u = Mul(dw, lr) w_next = Sub(w, u)"
STATISTICS = (
    "mean = ReduceMean<keepdims = 0>(x, first) new = Mul(mean, tenth) old = Mul(r, rest) r_next = Add(new, old)"
)
WEIGHT = "float[4,3] w_next"


def split(model: onnx.ModelProto, **options: object) -> tuple[gs.ScaledModel, SplitStep]:
    scaled = gs.scale(model, **options)  # type: ignore[arg-type]
    return scaled, gs.split(scaled.model)


def assert_whole(scaled: gs.ScaledModel, parts: SplitStep, model: onnx.ModelProto) -> None:
    feeds = feeds_for(model)
    start = {"current_loss_scale": np.asarray(1024, np.float32), "good_steps": np.asarray(0)}
    feeds |= {name: value for name, value in start.items() if name in {v.name for v in scaled.model.graph.input}}  # type: ignore[union-attr]
    expected, _ = run_session(make_session(scaled.model, EXACT), feeds)  # type: ignore[arg-type]
    found = Chain((*parts.gradients, parts.update)).run(feeds)
    assert_all_same_bits(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024])
def test_running_statistics_are_handed_on_as_means(loss_scale: str | float) -> None:
    """Guarded or not."""
    model = linear_step(
        f"{SGD} {STATISTICS}",
        inputs="float[4,3] w, float[4] r",
        outputs=f"{WEIGHT}, float[4] r_next",
        constants="float tenth = {0.1}, float rest = {0.9}, int64[1] first = {0}",
    )
    scaled, parts = split(model, loss_scale=loss_scale, updates={"r_next": "r", "w_next": "w"})
    assert len(parts.report.average) == 2 and "loss" in parts.report.average
    assert loss_scale == "dynamic" or "r_next.given" in parts.report.average
    assert_whole(scaled, parts, model)


def test_integers_of_the_batch_cannot_reach_the_state() -> None:
    model = linear_step(
        f"{SGD} high = Greater(x, zero) ones = Cast<to = 7>(high) seen = ReduceSum<keepdims = 0>(ones)"
        " c_next = Add(c, seen)",
        inputs="float[4,3] w, int64 c",
        outputs=f"{WEIGHT}, int64 c_next",
        constants="float zero = {0}",
    )
    with pytest.raises(SplitError, match="differs from replica to replica, and is no floating-point number"):
        split(model, updates={"c_next": "c", "w_next": "w"})


def test_counters_are_in_the_second_half() -> None:
    model = linear_step(
        f"{SGD} c_next = Add(c, one)",
        inputs="float[4,3] w, int64 c",
        outputs=f"{WEIGHT}, int64 c_next",
        constants="int64 one = {1}",
    )
    scaled, parts = split(model, updates={"c_next": "c", "w_next": "w"})
    assert "c" not in {value.name for value in parts.gradients[0].graph.input}  # type: ignore[union-attr]
    assert_whole(scaled, parts, model)


@pytest.mark.parametrize("noise", ["RandomNormal<shape = [4, 3]>()", "RandomNormalLike(w)"])
def test_random_numbers_in_the_update_are_refused(noise: str) -> None:
    model = linear_step(
        f"noise = {noise} n = Mul(noise, tenth) u = Mul(dw, tenth) v = Sub(w, u) w_next = Add(v, n)",
        outputs=WEIGHT,
        constants="float tenth = {0.1}",
    )
    with pytest.raises(SplitError, match="draws random numbers in the update"):
        split(model, updates={"w_next": "w"})


def test_a_gradient_that_is_an_output_too_is_given_reduced() -> None:
    model = linear_step(SGD, outputs=f"{WEIGHT}, float[4,3] dw")
    scaled, parts = split(model, updates={"w_next": "w"})
    assert "dw" in {value.name for value in parts.update.graph.output}  # type: ignore[union-attr]
    assert_whole(scaled, parts, model)


def test_a_metric_of_gradients_and_the_loss() -> None:
    model = linear_step(
        f"{SGD} square2 = Mul(dw, dw) norm = ReduceSum<keepdims = 0>(square2) both = Add(norm, loss)",
        outputs=f"{WEIGHT}, float norm, float both",
    )
    scaled, parts = split(model, updates={"w_next": "w"})
    assert parts.report.average == ("loss",) and parts.report.outputs == ("loss",)
    assert_whole(scaled, parts, model)


def test_a_body_in_the_first_half() -> None:
    """The second half has no part of it, nor of what it reads."""
    branch = "xt_{0} = Transpose<perm = [1, 0]>(x) g_{0} = MatMul(xt_{0}, dy)"
    then, other = branch.format("a"), branch.format("b")
    backward = f"""
        dy = Mul(d, two_over_n)
        wanted = Greater(loss, two_over_n)
        dw = If(wanted) <then_branch = a () => (float[4,3] g_a) {{ {then} }},
            else_branch = b () => (float[4,3] g_b) {{ {other} }}>
    """
    model = linear_step(SGD, outputs=WEIGHT, backward=backward)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("dw", onnx.TensorProto.FLOAT, [4, 3]))
    scaled, parts = split(model)
    assert_whole(scaled, parts, model)
