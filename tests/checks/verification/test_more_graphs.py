"""Sound scaled graphs of other kinds are verified: optimizer operators, random graphs, weights in other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import LINEAR, feeds_for, linear_step, numbers, parse, step
from tests.conftest import load_example, with_initializers
from tests.pipeline.test_optimizers import CASES

pytestmark = pytest.mark.sample(2)


@pytest.mark.parametrize("target", ["onnx", pytest.param("ort-training", marks=pytest.mark.training)])
@pytest.mark.parametrize("name", CASES)
def test_optimizer_operators(name: str, target: str) -> None:
    case = CASES[name]
    model, feeds = case.model, feeds_for(case.model)
    if target == "ort-training":
        held = {state: feeds[state] for state in case.updates.values() if feeds[state].dtype == np.float32}
        model = with_initializers(model, held)
    updates = case.updates if case.named else None
    report = gs.verify(model, gs.scale(model, target=target, updates=updates), runs=1, updates=updates)
    assert report.ok, report.failures
    (guarded,) = (check for check in report.checks if check.name == "carried state guarded")
    assert guarded.detail == f"{len(case.updates)} states"


def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    model = step("w1n = Sub(w1, dw1)", inputs="", outputs="float[4,5] w1n, float[5,3] dw2")
    feeds = feeds_for(model)
    model = with_initializers(model, {name: feeds[name] for name in ("w1", "w2")})
    original, scaled = tmp_path / "original.onnx", tmp_path / "scaled.onnx"
    onnx.save(model, original, save_as_external_data=True, location="weights.bin", size_threshold=0)
    gs.scale(original).save(scaled)
    files = {path.name for path in tmp_path.iterdir()}
    assert gs.verify(original, scaled, runs=1).ok
    assert {path.name for path in tmp_path.iterdir()} == files


def test_a_named_gradient_and_a_named_loss() -> None:
    """The names given to the scaling are given again."""
    model = step("twice = Add(loss, loss)", outputs="float[4,5] dw1, float[5,3] dw2, float twice")
    scaled = gs.scale(model, loss="loss", gradients=["dw1"])
    assert gs.verify(model, scaled, runs=1, loss="loss", gradients=["dw1"]).ok


def test_a_weight_that_is_not_finite_in_a_sum_with_its_gradient() -> None:
    """The step is skipped then, though the original would have given finite values."""
    model = linear_step(
        "decay = Mul(w, tenth) sum = Add(dw, decay) large = Greater(sum, limit) chosen = Where(large, sum, dw) "
        "w_next = Sub(used, chosen)",
        forward="held = Greater(w, least) used = Where(held, w, least) " + LINEAR.replace("w)", "used)"),
        outputs="float[4,3] w_next",
        constants="float limit = {100}, float tenth = {0.1}, float least = {-2}",
    )
    scaled = gs.scale(model).model
    assert isinstance(scaled, onnx.ModelProto)
    assert [list(node.input) for node in scaled.graph.node if "sum.zeroed" in node.output]
    report = gs.verify(model, scaled, runs=1)
    assert report.ok, report.failures


def test_a_cotangent_that_is_a_constant() -> None:
    """It is a value in the scaled graph. ONNX Runtime multiplies matrices with a constant in another order."""
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        mean (float[12,6] x, float[6,6] w1, float[6,1] w2) => (float loss, float[6,6] w1_next, float[6,1] w2_next)
        <float[12,1] dy = {numbers(12, "0.083333336")}, float one = {{1}}> {{
            h = MatMul(x, w1) a = Tanh(h) y = MatMul(a, w2) loss = ReduceMean<keepdims = 0>(y)
            at = Transpose<perm = [1, 0]>(a) dw2 = MatMul(at, dy)
            w2t = Transpose<perm = [1, 0]>(w2) da = MatMul(dy, w2t) aa = Mul(a, a) slope = Sub(one, aa)
            dh = Mul(da, slope) xt = Transpose<perm = [1, 0]>(x) dw1 = MatMul(xt, dh)
            w1_next = Sub(w1, dw1) w2_next = Sub(w2, dw2)
        }}
    """)
    report = gs.verify(model, gs.scale(model), runs=1)
    assert report.ok, report.failures


def test_weights_that_must_be_positive() -> None:
    """The gradients are finite for any, and the sums with the logarithms of weights are not."""
    model = linear_step("logarithm = Log(w) sum = Sub(logarithm, dw) w_next = Exp(sum)", outputs="float[4,3] w_next")
    report = gs.verify(model, gs.scale(model), runs=2)
    assert report.ok, report.failures


@pytest.mark.full
def test_the_number_of_runs_has_a_limit() -> None:
    def runs(gradients: int) -> int:
        copies = (f"dw{i} = Neg(dw)" for i in range(gradients))
        outputs = (f"float[4,3] dw{i}" for i in range(gradients))
        model = linear_step("\n".join(copies), outputs=", ".join(outputs))
        report = gs.verify(model, gs.scale(model), runs=2)
        assert report.ok
        return report.runs

    batches, kinds, groups = 2, 3, 16
    others = runs(100) - batches * kinds * 100
    assert runs(101) == others + 51 + kinds * groups  # every second one alone
    assert runs(400) == others + 100 + kinds * groups


def test_bad_arguments() -> None:
    model = load_example("pytorch/mlp_momentum").model()
    for bad in ({"runs": -1}, {"tolerance": -0.1}, {"tolerance": float("nan")}, {"providers": ["GPUProvider"]}):
        with pytest.raises(gs.GraphscaleError):
            gs.verify(model, gs.scale(model), **bad)
    with pytest.raises(gs.GraphscaleError, match=r"^--seed-edge nope:0: there is no node"):
        gs.verify(model, gs.scale(model), place="nope:0")
