"""A wrong scaled graph: verify's report, the counterexample, and its repetition."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from benchmarks.mutation import KINDS
from benchmarks.mutation.damaged import Damaged
from graphscale.checks.verification import numeric
from graphscale.checks.verification.counterexample import load_case, save_case
from graphscale.checks.verification.verify_report import Case, Difference
from graphscale.errors import ModelFileError, VerifyError
from tests.conftest import load_example

pytestmark = pytest.mark.sample(1)

MOMENTUM = "pytorch/mlp_momentum"
# A kind of damage, and the checks that fail.
FAILING = {
    "drop an unscaling": {"values as in the original"},
    "unguard a moment": {"carried state guarded", "a non-finite gradient is skipped"},
    "leave a gradient out of the check": {"every gradient checked", "a non-finite gradient is skipped"},
    "another period": {"the loss scale follows its rule"},
    "unscale where the scale enters": {"backward contractions scaled"},
    "forget a state in the metadata": {"metadata of the scaling"},
}


def damaged(kind: str, name: str = MOMENTUM, site: int = -1) -> ir.Model:
    (found,) = (k for k in KINDS if k.name == kind)
    model = Damaged(gs.scale(ir.from_proto(load_example(name).model())).model)
    found.damage(model, list(found.sites(model))[site])
    model.tidy()
    return model.model


@pytest.mark.parametrize("kind", FAILING)
def test_the_checks_that_fail(kind: str) -> None:
    report = gs.verify(load_example(MOMENTUM).model(), damaged(kind), runs=2)
    assert not report.ok
    assert FAILING[kind] <= {check.name for check in report.failures}, report.failures
    assert all("\n" not in check.detail for check in report.checks)
    measured = any(not check.proof for check in report.failures)
    assert (report.counterexample is not None) == measured == bool(report.differences)
    json.dumps(report.to_dict())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["unguard a weight", "another period", "multiply instead of unscaling"])
def test_a_counterexample_can_be_run_again(kind: str, tmp_path: Path) -> None:
    original, model, path = load_example(MOMENTUM).model(), damaged(kind), tmp_path / "case.npz"
    found = gs.verify(original, model, runs=1)
    assert found.counterexample is not None
    save_case(found.counterexample, path)
    again = gs.verify(original, model, replay=path)
    assert not again.ok
    assert [str(d) for d in again.differences] == [str(d) for d in found.differences]
    # The sound graph takes the same case.
    assert gs.verify(original, gs.scale(original), replay=found.counterexample).ok


def test_a_case_names_the_gradient_and_what_was_put_into_it() -> None:
    report = gs.verify(load_example(MOMENTUM).model(), damaged("unguard a weight"), runs=1)
    (failure,) = (check for check in report.failures if check.name == "a non-finite gradient is skipped")
    case = report.counterexample
    assert case is not None
    assert case.gradient in {g.value for g in gs.inspect(load_example(MOMENTUM).model()).gradients}
    assert f"{case.number} at element {case.position} of gradient {case.gradient!r}" in failure.detail


@pytest.mark.full
def test_a_case_of_several_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A state becomes NaN with the last gradient, which is not forced alone."""
    monkeypatch.setattr(numeric, "_MANY", 1)
    monkeypatch.setattr(numeric, "_GROUPS", 1)
    original, path = load_example(MOMENTUM).model(), tmp_path / "case.npz"
    wrong = onnx.ModelProto()
    wrong.CopyFrom(gs.scale(original).model)
    quotient = [node for node in wrong.graph.node if node.op_type == "Div" and "unscale" in node.name][-1].output[0]
    guard = next(node for node in wrong.graph.node if node.op_type == "Where" and "guard" in node.name)
    output, index = guard.output[0], list(wrong.graph.node).index(guard)
    guard.output[0] = "kept"
    wrong.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0), "nothing"))
    leak = [
        ("Mul", [quotient, "nothing"], "zeros"),
        ("ReduceSum", ["zeros"], "leak"),
        ("Add", ["kept", "leak"], output),
    ]
    for i, (kind, operands, result) in enumerate(leak, 1):
        more = {"keepdims": 0} if kind == "ReduceSum" else {}
        wrong.graph.node.insert(index + i, onnx.helper.make_node(kind, operands, [result], **more))
    report = gs.verify(original, wrong, runs=1, numeric=True)
    (failure,) = (check for check in report.failures if check.name == "a non-finite gradient is skipped")
    assert "and in 3 others: " in failure.detail
    gradients = [gradient.value for gradient in gs.inspect(original).gradients]
    assert report.counterexample is not None
    feeds = {**report.counterexample.feeds, "current_loss_scale": np.asarray(1024, np.float32)}
    alone = Case("skip", feeds, gradients[0], float("nan"), 0)
    case = dataclasses.replace(alone, others=tuple(gradients[1:]))
    save_case(case, path)
    assert load_case(path).others == case.others
    assert gs.verify(original, wrong, replay=alone).ok
    assert not gs.verify(original, wrong, replay=path).ok
    assert gs.verify(original, gs.scale(original), replay=path).ok
    with pytest.raises(VerifyError, match="forces a gradient 'nope'"):
        gs.verify(original, wrong, replay=dataclasses.replace(alone, others=("nope",)))


def test_wrong_numbers_within_a_tolerance() -> None:
    """The tolerance is of the largest element: 3e-4 of a change passes 1e-3, not 1e-4."""
    original = load_example("pytorch/mse_tanh").model()
    wrong = onnx.ModelProto()
    wrong.CopyFrom(gs.scale(original).model)
    divisor = next(node for node in wrong.graph.node if node.op_type == "Div" and "unscale" in node.name)
    wrong.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1.0003), "off"))
    output = divisor.output[0]
    divisor.output[0] = f"{output}.before"
    index = list(wrong.graph.node).index(divisor)
    wrong.graph.node.insert(index + 1, onnx.helper.make_node("Mul", [f"{output}.before", "off"], [output]))
    for tolerance, status in ((0.0, "fails"), (1e-4, "fails"), (1e-3, "holds")):
        report = gs.verify(original, wrong, runs=1, tolerance=tolerance)
        assert {c.name: c.status for c in report.checks}["values as in the original"] == status


def test_a_scale_that_is_no_power_of_two() -> None:
    """The file's own scale rounds: it is compared within a tolerance only, and that is said."""
    original = load_example("pytorch/mse_tanh").model()
    scaled = gs.scale(original, 1000)
    exact, close = (gs.verify(original, scaled, runs=1, tolerance=tolerance) for tolerance in (0.0, 1e-5))
    assert exact.ok
    assert close.ok
    assert any("no power of two" in note for note in exact.notes)
    details = [next(c.detail for c in r.checks if c.name == "values as in the original") for r in (exact, close)]
    assert "32768, 1000" not in details[0]
    assert "32768, 1000" in details[1]


@pytest.mark.parametrize("name", ["pytorch/mlp_momentum", "jax/mlp_sgd"])
def test_other_weights_are_noticed(name: str) -> None:
    """A constant of another value, such as a learning rate, is another graph."""
    original = load_example(name).model()
    other = gs.scale(original).model
    for tensor in other.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.size == 1 and 0 < abs(float(array.reshape(-1)[0])) < 0.9:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(array * 1.5, np.float32), tensor.name))
    assert not gs.verify(original, other, runs=1).ok


def test_graphs_that_do_not_belong_together() -> None:
    first, second = load_example("pytorch/mlp_momentum").model(), load_example("pytorch/mse_tanh").model()
    with pytest.raises(VerifyError, match="pass the original that it was made from"):
        gs.verify(first, gs.scale(second))
    with pytest.raises(gs.GraphscaleError, match="the original comes first"):
        gs.verify(gs.scale(first).model, first)
    with pytest.raises(ModelFileError, match="carries no loss scale"):
        gs.verify(first, first)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("names", "[]"),
        ("names", '{"loss_scale": 7}'),
        ("names", '{"loss_scale": "nothing"}'),
        ("state", '["w"]'),
        ("state", "{}"),
        ("report", "[]"),
        ("report", '{"state": [7]}'),
        ("report", '{"state": [{"name": "w"}]}'),
        ("report", '{"autocast": {"dtype": "float16"}}'),
        ("policy", "{}"),
        ("policy", "null"),
        ("policy", '{"class_name": "FixedLossScale", "config": {"loss_scale_value": 8}}'),
        ("telemetry", '{"gradients": [1]}'),
        ("target", "moon"),
    ],
)
def test_metadata_are_not_believed(key: str, text: str) -> None:
    """Damaged metadata are refused with one line, or fail."""
    original = load_example(MOMENTUM).model()
    model = gs.scale(ir.from_proto(original)).model
    model.metadata_props[f"graphscale.{key}"] = text
    caught = None
    try:
        report = gs.verify(original, model, runs=1)
        caught = not report.ok
    except gs.GraphscaleError as error:
        caught = "\n" not in str(error)
    assert caught


def test_bfloat16_in_a_file(tmp_path: Path) -> None:
    report = gs.verify(load_example(MOMENTUM).model(), damaged("another period"), runs=1)
    import ml_dtypes

    case = report.counterexample
    assert case is not None
    odd = dataclasses.replace(case, feeds={**case.feeds, "odd/name:0": np.arange(3).astype(ml_dtypes.bfloat16)})
    save_case(odd, tmp_path / "case.npz")
    again = load_case(tmp_path / "case.npz")
    assert again.feeds["odd/name:0"].dtype == ml_dtypes.bfloat16
    assert {name: array.tobytes() for name, array in again.feeds.items()} == {
        name: array.tobytes() for name, array in odd.feeds.items()
    }
    assert dataclasses.replace(again, feeds={}) == dataclasses.replace(odd, feeds={})


def test_differences_in_words() -> None:
    one, other = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    other[1, 2] = np.nan
    assert (
        str(Difference("w", one, other, "as before")) == "w[1, 2] is nan, not 0.0 (as before); 1 of 6 elements differ"
    )
    assert "float64[3]" in str(Difference("w", one, np.zeros(3), "as before"))
    assert str(Difference("flag", np.asarray(True), np.asarray(False), "x")) == "flag is False, not True (x)"
    # By bits: -0.0 is not 0.0, and a NaN is itself.
    assert Difference("w", one, -one, "x").places().size == 6
    assert Difference("w", other, other.copy(), "x").places().size == 0
