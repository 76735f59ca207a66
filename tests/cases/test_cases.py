"""Small steps that were misunderstood: each file stands for a kind of step, and its test for the right behaviour.

A test that fails today is a strict xfail, whose reason is the behaviour of today.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import AlreadyScaledError, ProofError, SeedNotFoundError
from tests.build import feeds_for, parse
from tests.cases.steps import (
    assert_enters,
    assert_nan_is_skipped,
    assert_skipped,
    assert_trains,
    losses_of,
    pairs_of,
    proposals,
    read,
    run_faithfully,
    scale,
    text_of,
)
from tests.conftest import make_session, run_once


def fails(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=reason)


def checked(result: gs.ScaledModel, count: int) -> None:
    """All of the backward pass is covered, and so many gradients are unscaled and checked."""
    report = result.report
    assert (report.coverage, report.missed, len(report.gradients)) == (1.0, (), count)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_linear_head_beside_network() -> None:
    model = read("linear_head_beside_network")
    assert losses_of(model) == {"loss0", "loss1"}
    result, feeds = scale(model), feeds_for(model)
    checked(result, 3)
    assert_nan_is_skipped(result, feeds, "t0", "t1")
    backward = ("m0gw", "m0ga", "m1gw")
    assert_enters(model, feeds, ("m0h", "m0p", "m0d", "m1p", "m1d"), backward)


def test_two_equal_networks() -> None:
    model = read("two_equal_networks")
    assert losses_of(model) == {"loss0", "loss1"}
    result, feeds = scale(model), feeds_for(model)
    checked(result, 4)
    assert_nan_is_skipped(result, feeds, "t0", "a0", "a1")
    assert_enters(model, feeds, ("m0h", "m0p", "m0d", "m1h", "m1p", "m1d"), ("m0gw", "m0ga", "m1gw", "m1ga"))


def test_best_loss_stored() -> None:
    model = read("best_loss_stored")
    assert losses_of(model) == {"loss"}
    assert pairs_of(model) == {"w_next": "w", "m_next": "m", "best_next": "best", "bad_next": "bad"}
    result = scale(model)
    checked(result, 1)
    assert_nan_is_skipped(result, feeds_for(model), "x", "t")


def test_loss_from_an_if() -> None:
    model = read("loss_from_an_if")
    assert losses_of(model) == {"loss"}
    result = scale(model)
    checked(result, 1)
    for robust in (True, False):
        feeds = feeds_for(model, robust=robust)
        assert_nan_is_skipped(result, feeds, "x", "t")
        assert_enters(model, feeds, ("y", "d"), ("g",))


# --- places -----------------------------------------------------------------------------------------------------------


def test_svrg_snapshot_network() -> None:
    model = read("svrg_snapshot_network")
    forward = [f"tanh_{i}" for i in (3, 74)] + [f"matmul_{i}" for i in (1, 5, 72, 76)] + ["exp_42", "exp_104"]
    forward += ["logsoftmax_7", "logsoftmax_78", "sub_60", "sub_122"]
    backward = [f"matmul_{i}" for i in (52, 56, 70, 114, 118, 132)]
    assert_enters(model, feeds_for(model, y=np.arange(8) % 3), forward, backward)
    report = scale(model).report
    assert (report.coverage, report.missed) == (1.0, ())


def test_implicit_layer() -> None:
    model = read("implicit_layer")
    feeds = feeds_for(model)
    assert_enters(model, feeds, ("xw", "z", "e", "zw", "za", "h", "sl", "zT"), ("gw",))
    assert_nan_is_skipped(scale(model), feeds, "x", "target")


def test_reversible_two_blocks() -> None:
    model = read("reversible_two_blocks")
    feeds = feeds_for(model)
    checked(scale(model), 4)
    recomputed = [f"tanh_{i}" for i in (38, 59, 81, 103)] + ["sub_40", "sub_61", "sub_83", "sub_45", "sub_109"]
    backward = [f"matmul_{i}" for i in (51, 55, 71, 75, 93, 97, 115)] + ["add_99"]
    assert_enters(model, feeds, ["add_17", "add_23", *recomputed], backward)


def test_logsigmoid_no_value_info() -> None:
    model = read("logsigmoid_no_value_info")
    feeds = feeds_for(model)
    checked(scale(model), 1)
    assert_enters(model, feeds, ("y", "ls", "lg", "mean", "md", "sign"), ("g",))


def test_no_backward_pass() -> None:
    with pytest.raises(gs.GraphscaleError, match="differentiate") as caught:
        scale(read("no_backward_pass"))
    assert not isinstance(caught.value, ProofError)


def test_the_edge_that_a_refusal_asks_for_is_taken() -> None:
    model = read("no_backward_pass")
    for node in model.graph.node:
        node.name = f"make {node.output[0]}"
    with pytest.raises(SeedNotFoundError, match="--seed-edge NODE:INDEX"):
        gs.inspect(model)
    assert [(place.node, place.input) for place in gs.inspect(model, seed="make ym:1").places] == [("make ym", 1)]


def test_own_scale_in_the_loss() -> None:
    with pytest.raises(AlreadyScaledError):
        scale(read("own_scale_in_the_loss"))


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("nesterov_two_sequences", {"x_next": "x", "y_next": "y"}),
        ("leapfrog", {"w_next": "w", "w_prev_next": "w_prev"}),
    ],
)
def test_two_states_of_one_type(name: str, pairs: dict[str, str]) -> None:
    model = read(name)
    assert pairs_of(model) == pairs
    assert_trains(model, pairs, feeds_for(model))


def test_lora_merged() -> None:
    model, pairs = read("lora_merged"), {"A_next": "A", "B_next": "B"}
    assert pairs_of(model) == pairs
    assert losses_of(model) == {"loss"}
    assert_trains(model, pairs, feeds_for(model))


def test_logged_adversarial_example() -> None:
    model, pairs = read("logged_adversarial_example"), {"w_next": "w"}
    assert pairs_of(model) == pairs
    assert_trains(model, pairs, feeds_for(model))


def test_handed_through() -> None:
    model = read("handed_through")
    result, feeds = scale(model), feeds_for(model)
    for field in ("input", "output"):
        before, after = ([value.name for value in getattr(each.graph, field)] for each in (model, result.model))
        assert after[: len(before)] == before
    assert gs.verify(model, result.model).ok
    for poisoned in (feeds, {**feeds, "t": np.full_like(feeds["t"], np.nan)}):
        np.testing.assert_array_equal(run_once(result.model, poisoned)[0]["anchor_next"], feeds["anchor_next"])
    assert_trains(model, {"w_next": "w", "anchor_next": "anchor_next"}, feeds)


# --- types ------------------------------------------------------------------------------------------------------------


def test_bf16_state() -> None:
    model = read("bf16_state")
    make_session(model)  # the original loads
    result = scale(model)
    assert pairs_of(model) == {"w_next": "w", "mom_next": "mom"}
    make_session(result.model)
    assert gs.verify(model, result.model, runs=0).ok


def test_float16_accumulator() -> None:
    model = read("float16_accumulator")
    feeds = feeds_for(model, x=np.ones((8, 4), np.float32), t=np.full((8, 3), -1.2e4, np.float32))
    feeds |= {"w": np.zeros((4, 3), np.float32), "acc": np.full((4, 3), 6e4, np.float16), "n": np.array(1)}
    assert np.isinf(run_faithfully(model, feeds)["acc_next"]).all()
    result = scale(model, gs.DynamicLossScale(1.0))
    assert_skipped(result, feeds, run_faithfully(result.model, feeds))
    fitting = {**feeds, "acc": np.full((4, 3), 5e4, np.float16)}
    assert run_faithfully(result.model, fitting)["all_finite"]


def test_float16_gradient_outputs() -> None:
    result = scale(read("float16_gradient_outputs"))
    assert any("gw" in warning and "float16" in warning.lower() for warning in result.report.warnings)
    assert any(finding.value == "gw" for finding in gs.lint(result.model).findings)


@pytest.mark.parametrize("preset", ["torch", "keras", "apex", "flax"])
def test_float16_gradients_with_a_scale_below_1(preset: str) -> None:
    model = read("float16_update")
    feeds = feeds_for(model, x=np.full((8, 4), 4, np.float16), t=np.full((8, 3), -4e4, np.float16))
    feeds |= {"w": np.zeros((4, 3), np.float16)}
    result = scale(model, getattr(gs.presets, preset)())
    small = {**feeds, "current_loss_scale": np.float32(2.0**-10)}
    assert_skipped(result, feeds, run_faithfully(result.model, small))
    fitting = {**small, "t": np.full((8, 3), -2e4, np.float16)}
    outputs = run_faithfully(result.model, fitting)
    assert outputs["all_finite"] and np.isfinite(outputs["w_next"]).all()


def test_a_fixed_scale_that_makes_a_constant_seed_infinite() -> None:
    model = read("float16_update")
    assert scale(model, 2.0**16).report.proved
    with pytest.raises(gs.GraphscaleError):
        scale(model, 2.0**20)


# --- gradients inside of updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("gradient_fused_into_update", 2), ("gradient_fused_into_momentum", 1)])
def test_gradient_fused_into_update(name: str, count: int) -> None:
    model = read(name)
    result, feeds = scale(model, gs.DynamicLossScale(1.0)), feeds_for(model)
    checked(result, count)
    assert gs.verify(model, result.model).ok
    expected, actual = run_once(model, feeds)[0], run_once(result.model, feeds)[0]
    for output in expected:
        np.testing.assert_allclose(actual[output], expected[output], rtol=1e-5, atol=1e-6, err_msg=output)
    # The product alone overflows: each of its operands is finite.
    feeds = {key: np.full_like(array, {"x": 100, "w": 1e-4, "v": 1}.get(key, 0)) for key, array in feeds.items()}
    feeds["t"] -= np.float32(8e37)
    assert not np.isfinite(run_once(model, feeds)[0]["w_next"]).any()
    assert_skipped(result, feeds, run_once(result.model, feeds)[0])


@pytest.mark.parametrize("opset", [18, 10])
def test_a_gradient_and_a_moment_with_factors(opset: int) -> None:
    text = text_of("gradient_fused_into_momentum").replace('"" : 18', f'"" : {opset}')
    text = text.replace(
        "<transA: int = 1> (x, e, bm)", "<transA: int = 1, alpha: float = 0.5, beta: float = 0.9> (x, e, m)"
    )
    model = parse(text)
    result, feeds = scale(model), feeds_for(model)
    checked(result, 1)
    expected, actual = run_once(model, feeds)[0], run_once(result.model, feeds)[0]
    for output in expected:
        np.testing.assert_allclose(actual[output], expected[output], rtol=1e-5, atol=1e-6, err_msg=output)


def test_a_reciprocal_of_the_scale_is_clean() -> None:
    """As in steps that PyTorch or jmp scaled: the gradient is multiplied by 1/S."""
    original = read("best_loss_stored")
    model = scale(original, gs.DynamicLossScale()).model
    assert isinstance(model, onnx.ModelProto)
    roles = proposals(original)
    divisions = [node for node in model.graph.node if node.op_type == "Div" and "current_loss_scale" in node.input]
    assert divisions
    for i, node in enumerate(divisions):
        inverse = onnx.helper.make_node("Reciprocal", ["current_loss_scale"], [f"inverse.{i}"])
        model.graph.node.insert(list(model.graph.node).index(node), inverse)
        node.op_type, node.input[1] = "Mul", f"inverse.{i}"
    assert not gs.lint(model).findings
    report = gs.verify(original, model, runs=1, roles=roles)
    proofs = {check.name: check.status for check in report.checks}
    assert proofs["equal to the original"] == proofs["every gradient checked"] == "holds", report
