"""Scaled training, eval and optimizer models in the real runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.hazards import find_in_place_writes, find_unordered_readers
from graphscale.errors import UnsupportedModelError
from graphscale.files.ort_checkpoint import read_checkpoint, write_checkpoint
from graphscale.ort.artifacts import scale_artifacts
from graphscale.ort.artifacts.optimizer_guard import GuardOptimizer
from graphscale.targets import get_target
from tests.conftest import FLOAT32_MAX, Arrays, assert_all_same_bits, assert_same_bits
from tests.ort.artifacts.conftest import Scaled
from tests.ort.artifacts.training_session import FOLDERS, LOADABLE, STATES, TrainingSession, edited, sample, train

pytestmark = pytest.mark.sample(1)

BATCHES = ("first", "second") * 4
STATISTICS = ("norm1.running_mean", "norm1.running_var", "norm2.running_mean", "norm2.running_var")


def overflowing(name: str) -> Arrays:
    """A batch with an infinite pixel."""
    batch = sample(name)
    batch["input"] = batch["input"].copy()
    batch["input"].flat[0] = np.inf
    return batch


@pytest.mark.full
@pytest.mark.training
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", LOADABLE)
def test_finite_steps_are_those_of_the_original(name: str, window: int, scaled: Scaled) -> None:
    original, session = TrainingSession(FOLDERS / name), TrainingSession(scaled(name))
    scales = set()
    for _ in range(5):
        for batch in BATCHES[:window]:
            (expected,) = original.train(sample(name, batch))
            (loss,) = session.train(sample(name, batch))
            assert_same_bits(loss, expected, "loss")
            assert_all_same_bits(session.gradients(), original.gradients())
            scales.add(session.loss_scale()[0])
        original.step()
        session.step()
        if "clip" in name:  # the runtime sums the norm in an order that differs from session to session
            for parameter, value in original.weights().items():
                np.testing.assert_allclose(session.weights()[parameter], value, rtol=1e-4, atol=1e-7)
            break
        assert_all_same_bits(session.weights(), original.weights())
    assert scales == ({1024.0} if "clip" in name else {1024.0, 2048.0})
    if "clip" not in name:
        assert_same_bits(session.evaluate(sample(name))[0], original.evaluate(sample(name))[0], "loss")


@pytest.mark.training
@pytest.mark.parametrize("name", LOADABLE)
def test_a_skipped_step_changes_nothing(name: str, scaled: Scaled, tmp_path: Path) -> None:
    """A weight is infinite for one window: neither weights, moments, step count nor statistics move."""
    session = TrainingSession(scaled(name))
    weight = next(iter(read_checkpoint(FOLDERS / name / "checkpoint").trainable))
    train(session, [sample(name)] * 2)
    good = session.parameters()[weight]
    bad = good.copy()
    bad.flat[0] = np.inf
    session.set(weight, bad)
    statistics = {key: value for key, value in session.parameters().items() if key in STATISTICS}
    session.train(sample(name))
    assert session.loss_scale() == (1024, 2, 0)
    assert_all_same_bits(session.parameters(), statistics)
    before, gradients = session.save(tmp_path / "before").read_bytes(), session.gradients()
    assert not all(np.isfinite(gradient).all() for gradient in gradients.values())
    session.step()
    assert session.save(tmp_path / "after").read_bytes() == before
    assert_all_same_bits(session.gradients(), gradients)
    session.set(weight, good)
    session.train(sample(name))
    assert session.loss_scale() == (512, 0, 1)
    session.step()
    (group,) = read_checkpoint(session.save(tmp_path / "after")).groups.values()
    assert group.step == 3
    assert not np.array_equal(session.parameters()[weight], good)


@pytest.mark.training
def test_the_scale_comes_down_until_the_gradients_fit(scaled: Scaled) -> None:
    name = "digits_adamw"
    session = TrainingSession(scaled(name, gs.DynamicLossScale(FLOAT32_MAX, 2000, 2.0**20)))
    batch = sample(name)
    batch["input"] = batch["input"] * np.float32(1e6)
    scale, finite = np.float32(FLOAT32_MAX), []
    while len(finite) < 5:
        before = session.weights()
        session.train(batch)
        session.step()
        found, _, flag = session.loss_scale()
        assert found == scale
        changed = any(not np.array_equal(before[key], value) for key, value in session.weights().items())
        assert changed == flag
        finite.append(flag)
        scale = scale if flag else scale / np.float32(2.0**20)
    assert finite[0] == 0 and finite[-1] == 1


@pytest.mark.training
@pytest.mark.parametrize("position", [0, 1, 2])
def test_running_statistics_keep_their_values_on_a_non_finite_call(position: int, scaled: Scaled) -> None:
    name = "conv_adamw"
    original, session = TrainingSession(FOLDERS / name), TrainingSession(scaled(name))
    for i in range(3):
        if i == position:
            before = session.weights()
            session.train(overflowing(name))
            assert_all_same_bits(session.weights(), before)
        else:
            session.train(sample(name))
            original.train(sample(name))
            # Good calls of a window move the statistics, also after a bad one.
            assert_all_same_bits(
                {key: session.weights()[key] for key in STATISTICS},
                {key: original.weights()[key] for key in STATISTICS},
            )
    before = session.weights()
    session.step()
    assert_all_same_bits(session.weights(), before)
    assert session.loss_scale() == (1024, 0, 0)
    assert np.isfinite(session.evaluate(sample(name))[0])


@pytest.mark.training
def test_a_window_of_finite_gradients_whose_sum_overflows_is_skipped(scaled: Scaled, tmp_path: Path) -> None:
    folder = scaled("digits_sgd", gs.DynamicLossScale(1, 2000))
    session = TrainingSession(folder)
    huge = sample("digits_sgd")
    huge["input"] = np.full_like(huge["input"], 1e38)
    huge["input"][1:] = 0
    session.train(huge)
    first = session.gradients()
    if not all(np.isfinite(gradient).all() for gradient in first.values()):
        raise AssertionError("the first call alone overflows; the test needs smaller pixels")
    calls = 1
    while session.loss_scale()[2] and calls < 1000:
        session.train(huge)
        calls += 1
    assert 1 < calls < 1000
    before = session.save(tmp_path / "before").read_bytes()
    session.step()
    assert session.save(tmp_path / "after").read_bytes() == before


@pytest.mark.training
@pytest.mark.parametrize("name", ["digits_adamw", "conv_adamw"])
def test_a_fixed_scale_leaves_no_state_and_skips_nothing(name: str, scaled: Scaled) -> None:
    folder = scaled(name, 128)
    assert (
        read_checkpoint(folder / "checkpoint").frozen.keys()
        == read_checkpoint(FOLDERS / name / "checkpoint").frozen.keys()
    )
    original, session = TrainingSession(FOLDERS / name), TrainingSession(folder)
    feeds = [sample(name), overflowing(name), sample(name)]
    assert repr(train(session, feeds)) == repr(train(original, feeds))  # repr: NaN equals itself there
    assert np.isnan(session.weights()["fc.weight" if name == "conv_adamw" else "fc1.weight"]).any()


@pytest.mark.training
@pytest.mark.parametrize("name", ["digits_adamw_clip", "conv_adamw"])
def test_a_fixed_scale_skips_steps_if_asked_to(name: str, scaled: Scaled, tmp_path: Path) -> None:
    session = TrainingSession(scaled(name, 128, skip_nonfinite=True))
    before = session.save(tmp_path / "before").read_bytes()
    train(session, [overflowing(name)])
    assert session.save(tmp_path / "after").read_bytes() == before
    train(session, [sample(name)])
    assert session.save(tmp_path / "after").read_bytes() != before


@pytest.mark.training
@pytest.mark.parametrize("name", LOADABLE)
def test_the_module_looks_as_before(name: str, scaled: Scaled, tmp_path: Path) -> None:
    original, session = TrainingSession(FOLDERS / name), TrainingSession(scaled(name))
    for training in (True, False):
        assert session.module.input_names(training) == original.module.input_names(training)
        assert session.module.output_names(training) == original.module.output_names(training)
    assert session.module.get_parameters_size(True) == original.module.get_parameters_size(True)
    # The export for inference is the same graph with the same weights.
    graphs = []
    for path, module in ((tmp_path / "a.onnx", original.module), (tmp_path / "b.onnx", session.module)):
        module.export_model_for_inferencing(str(path), ["output"])
        graphs.append(onnx.load(path).graph)
    for field in ("input", "output", "node", "initializer"):
        assert getattr(graphs[0], field) == getattr(graphs[1], field), field


@pytest.mark.training
def test_every_state_can_be_set_and_read(scaled: Scaled, tmp_path: Path) -> None:
    folder = scaled("digits_adamw")
    checkpoint = read_checkpoint(folder / "checkpoint")
    assert [float(checkpoint.frozen[name]) for name in STATES] == [1024, 0, -1]
    assert {array.dtype for array in checkpoint.frozen.values()} == {np.dtype(np.float32)}
    for name, value in zip(STATES, (8.0, 2.0, 1.0), strict=True):
        checkpoint.frozen[name] = np.asarray(value, np.float32)
    write_checkpoint(tmp_path / "set", checkpoint)
    session = TrainingSession(folder, tmp_path / "set")
    session.train(sample("digits_adamw"))
    assert session.loss_scale() == (16, 0, 1)


@pytest.mark.parametrize("name", LOADABLE)
def test_no_reader_of_a_state_can_come_after_its_write(name: str, scaled: Scaled) -> None:
    model = ir.load(scaled(name) / "training_model.onnx")
    written = [node.inputs[0].name for node in find_in_place_writes(model.graph)]
    assert set(STATES) < set(written)
    assert list(find_unordered_readers(model.graph)) == []


@pytest.mark.training
def test_a_reader_outside_the_gradient_path_reads_the_old_value(tmp_path: Path) -> None:
    """An output that shows a running statistic, from a node that nothing orders before the write."""

    def watch(model: onnx.ModelProto) -> None:
        model.graph.node.append(onnx.helper.make_node("Neg", ["norm1.running_mean"], ["watched"], name="watch"))
        model.graph.output.append(onnx.helper.make_tensor_value_info("watched", onnx.TensorProto.FLOAT, [8]))

    folder = edited("conv_adamw", tmp_path, training_model=watch)
    scale_artifacts(folder, tmp_path / "out", gs.DynamicLossScale(4, 1))
    session = TrainingSession(tmp_path / "out", evaluates=False)
    for batch in BATCHES:
        before = session.parameters()["norm1.running_mean"]
        _, watched = session.train(sample("conv_adamw", batch))
        assert_same_bits(watched, -before, "watched")
        assert not np.array_equal(session.parameters()["norm1.running_mean"], before)
        session.step()


@pytest.mark.training
def test_taken_names_get_a_suffix(tmp_path: Path) -> None:
    """One of the state's names is a parameter, one a value of the eval model, one of the training model."""

    def renaming(old: str, new: str) -> Callable[[onnx.ModelProto], None]:
        def rename(model: onnx.ModelProto) -> None:
            for node in model.graph.node:
                for names in (node.input, node.output):
                    names[:] = [new if value == old else value for value in names]

        return rename

    name = "digits_adamw"
    taken = renaming("gemm_0_grad", "window_finite"), renaming("relu_1", "current_loss_scale")
    folder = edited(name, tmp_path, training_model=taken[0], eval_model=taken[1])
    checkpoint = read_checkpoint(folder / "checkpoint")
    checkpoint.frozen["good_steps"] = np.asarray(5, np.float32)
    write_checkpoint(folder / "checkpoint", checkpoint)
    result = scale_artifacts(folder, tmp_path / "out", gs.DynamicLossScale(1024, 3))
    given = ["current_loss_scale_1", "good_steps_1", "window_finite_1"]
    assert [state.input for state in result.report.state] == given
    assert sorted(result.report.renamed.values()) == given
    session, original = TrainingSession(tmp_path / "out"), TrainingSession(FOLDERS / name)
    assert train(session, [sample(name)] * 4) == train(original, [sample(name)] * 4)
    found = session.parameters()
    assert [found[key] for key in (*given, "good_steps")] == [2048, 0, 1, 5]
    assert_same_bits(session.evaluate(sample(name))[0], original.evaluate(sample(name))[0], "loss")


# --- the guard of the optimizer model ---------------------------------------------------------------------------------

TARGET = get_target("ort-training")


def optimizer_model(name: str) -> ir.Model:
    return ir.load(FOLDERS / name / "optimizer_model.onnx")


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("name", LOADABLE)
def test_the_optimizer_is_told_whether_all_gradients_are_finite(name: str) -> None:
    model = optimizer_model(name)
    inputs, outputs = list(model.graph.inputs), list(model.graph.outputs)
    result = GuardOptimizer(3, TARGET)(model)
    assert result.modified
    assert (list(model.graph.inputs), list(model.graph.outputs)) == (inputs, outputs)
    (optimizer,) = [node for node in model.graph if node.op_type in ("AdamWOptimizer", "SGDOptimizerV2")]
    signal = optimizer.inputs[6 if optimizer.op_type == "AdamWOptimizer" else 3]
    assert signal is not None and signal.shape == [1] and signal.dtype is ir.DataType.BOOL
    assert operators(model).count("SequenceAt") == 3
    elements = [node for node in model.graph if node.op_type == "SequenceAt"]
    assert {node.inputs[0].name for node in elements} == {"gradients"}
    onnx.checker.check_model(onnx.ModelProto.FromString(ir.to_proto(model).SerializeToString()))


def test_clipping_is_put_into_a_branch() -> None:
    model = optimizer_model("digits_adamw_clip")
    GuardOptimizer(4, TARGET)(model)
    assert "InplaceClipGradNorm" not in operators(model)
    (choice,) = [node for node in model.graph if node.op_type == "If"]
    then, otherwise = (choice.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    (clip,), (keep,) = tuple(then), tuple(otherwise)
    assert (clip.op_type, clip.attributes["max_norm"].as_float()) == ("InplaceClipGradNorm", 1.0)
    assert keep.op_type == "Identity"
    # The check reads the gradients before they are clipped: the branch depends on every element.
    order = operators(model)
    assert max(i for i, op in enumerate(order) if op == "SequenceAt") < order.index("If")


def test_the_opset_without_sequences_in_branches_is_refused_for_clipping() -> None:
    model = optimizer_model("digits_adamw_clip")
    model.graph.opset_imports[""] = 13
    with pytest.raises(UnsupportedModelError, match="opset 14 or later"):
        GuardOptimizer(4, TARGET)(model)
    GuardOptimizer(4, TARGET)(optimizer_model("digits_adamw"))


def test_another_reader_of_the_gradients_is_refused() -> None:
    model = optimizer_model("digits_adamw")
    gradients = next(value for value in model.graph.inputs if value.name == "gradients")
    model.graph.append(ir.node("InplaceClipGradNorm", [gradients], domain="com.microsoft", name="aside"))
    with pytest.raises(UnsupportedModelError, match=r"'aside'.*could change the buffers"):
        GuardOptimizer(4, TARGET)(model)


@pytest.mark.training
@pytest.mark.parametrize("given", [True, False])
def test_a_signal_that_is_there_already_still_counts(given: bool, tmp_path: Path) -> None:
    def signal(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray([given]), "given"))
        model.graph.node[0].input.append("given")

    scale_artifacts(edited("digits_adamw", tmp_path, optimizer_model=signal), tmp_path / "out")
    session = TrainingSession(tmp_path / "out")
    before = session.parameters()
    train(session, [sample("digits_adamw")])
    assert np.array_equal(session.parameters()["fc1.weight"], before["fc1.weight"]) != given


@pytest.mark.training
@pytest.mark.parametrize("form", ["plain"], indirect=True)
@pytest.mark.parametrize("position", range(4))
def test_any_one_non_finite_gradient_skips_the_step(position: int, scaled: Scaled) -> None:
    """The gradient of one parameter alone: its buffer is set by hand."""
    session = TrainingSession(scaled("digits_adamw_clip"))
    session.train(sample("digits_adamw_clip"))
    name = sorted(session.gradients())[position]
    gradient = session.state.get_parameter(name).grad.numpy()
    gradient.flat[-1] = (np.nan, np.inf, -np.inf, np.nan)[position]
    before = session.parameters()
    assert not np.isfinite(session.gradients()[name]).all()
    session.step()
    assert_all_same_bits(session.parameters(), before)


@pytest.mark.training
def test_the_report_counts_what_the_optimizer_model_got(tmp_path: Path) -> None:
    result = scale_artifacts(FOLDERS / "digits_adamw_clip", tmp_path / "out", gs.DynamicLossScale())
    written = ir.load(tmp_path / "out" / "optimizer_model.onnx")
    counted = {k: v for k, v in result.report.inserted.items() if k.startswith("optimizer model: ")}
    # The clipping itself is no new node.
    assert sum(sum(ops.values()) for ops in counted.values()) == len(written.graph) - 1
