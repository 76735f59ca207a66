"""Lowered folders against plain ones: the same training, bit for bit, and a flag in the smallest gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.files.ort_checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from graphscale.lowering.lower_model import is_lowered
from tests.cli.command import contents, refuse, succeed
from tests.conftest import Arrays, assert_all_same_bits, assert_same_bits
from tests.ort.artifacts.training_session import FOLDERS, LOADABLE, TrainingSession, sample, scale_as, train

pytestmark = pytest.mark.sample(1)

# The runtime sums the norm of clipped gradients in an order that differs from session to session.
NAMES = [name for name in LOADABLE if "clip" not in name]
LOWERED = ("lowered", "bounded")
# By these, logits are near each other or very far apart: none of the probabilities is a subnormal number.
FACTORS = (1, 1, 1, 1, 1e10, 1e20, 1e30, 1e38)
BAD = (np.inf, -np.inf, np.nan, 3e38)


def scale_both(name: str, form: str, path: Path, loss_scale: Any, **options: Any) -> list[Path]:
    """The plain folder and the lowered one."""
    folders = [path / each for each in ("plain", form)]
    for folder in folders:
        scale_as(folder.name, FOLDERS / name, folder, loss_scale, **options)
    return folders


def wild_batch(name: str, rng: np.random.Generator) -> Arrays:
    """A batch of any size, with a number in it that is none, now and then."""
    batch = sample(name, ("first", "second")[int(rng.integers(2))])
    for key, array in batch.items():
        if array.dtype == np.float32:
            array = array * np.float32(rng.choice(FACTORS))
            if rng.random() < 0.15:
                array.flat[int(rng.integers(array.size))] = rng.choice(BAD)
            batch[key] = array
    return batch


def spoil(session: TrainingSession, rng: np.random.Generator) -> None:
    """Put a number that is none into a weight: a batch of words has no place for it."""
    name = next(iter(session.gradients()))
    weight = session.parameters()[name]
    weight.flat[int(rng.integers(weight.size))] = rng.choice(BAD)
    session.set(name, weight)


def assert_same_checkpoints(found: Checkpoint, expected: Checkpoint) -> None:
    assert_all_same_bits(found.parameters, expected.parameters)
    assert found.groups.keys() == expected.groups.keys()
    for key, group in expected.groups.items():
        assert found.groups[key].step == group.step
        for parameter, moments in group.moments.items():
            assert_all_same_bits(found.groups[key].moments[parameter], moments)


def canonical(array: np.ndarray) -> np.ndarray:
    """An array with one kind of NaN: that of a metric depends on the order of its operands."""
    return np.where(np.isnan(array), np.float32(np.nan), array)


@pytest.mark.full
@pytest.mark.training
@pytest.mark.parametrize("initial", [2.0**10, 2.0**60, 2.0**127])
@pytest.mark.parametrize("form", LOWERED)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_training_as_with_the_plain_folder(name: str, form: str, initial: float, tmp_path: Path) -> None:
    """Windows of one to three calls of any batches: after each call and each step all is the same."""
    rng = np.random.default_rng(len(name))
    plain, lowered = map(TrainingSession, scale_both(name, form, tmp_path, gs.DynamicLossScale(initial, 3)))
    applied = []
    for _ in range(40):
        for _ in range(int(rng.integers(1, 4))):
            batch, kept = wild_batch(name, rng), plain.parameters()
            seed = int(rng.integers(1000)) if name == "transformer_adamw" and rng.random() < 0.2 else None
            results = []
            for session in (plain, lowered):
                if seed is not None:
                    spoil(session, np.random.default_rng(seed))
                results.append([canonical(value) for value in session.train(batch)])
                for weight in session.gradients() if seed is not None else ():
                    session.set(weight, kept[weight])
            for found, expected in zip(results[1], results[0], strict=True):
                assert_same_bits(found, expected, "output")
            assert lowered.loss_scale() == plain.loss_scale()
        applied.append(plain.loss_scale()[2])
        if applied[-1]:
            assert_all_same_bits(lowered.gradients(), plain.gradients())
        for session in (plain, lowered):
            session.step()
        found, expected = (read_checkpoint(session.save(tmp_path / "saved")) for session in (lowered, plain))
        assert_same_checkpoints(found, expected)
    assert {0.0, 1.0} == set(applied)


@pytest.mark.training
@pytest.mark.parametrize("loss_scale", [0.5, 3.0, 1e-3, 1000.1, 2.0**126, 2.0**127, 3e38])
@pytest.mark.parametrize("name", ["digits_sgd", "transformer_adamw"])
def test_a_loaded_scale_that_the_policy_does_not_reach(name: str, loss_scale: float, tmp_path: Path) -> None:
    folders = scale_both(name, "bounded", tmp_path, gs.DynamicLossScale(1024, 3))
    checkpoint = read_checkpoint(folders[0] / "checkpoint")
    checkpoint.frozen["current_loss_scale"] = np.asarray(loss_scale, np.float32)
    write_checkpoint(tmp_path / "set", checkpoint)
    plain, lowered = (TrainingSession(folder, tmp_path / "set") for folder in folders)
    for window in (1, 2, 1):
        for _ in range(window):
            for session in (plain, lowered):
                session.train(sample(name))
            assert lowered.loss_scale() == plain.loss_scale()
        if plain.loss_scale()[2]:
            assert_all_same_bits(lowered.gradients(), plain.gradients())
        plain.step(), lowered.step()
        assert_all_same_bits(lowered.parameters(), plain.parameters())


@pytest.mark.training
@pytest.mark.parametrize("form", LOWERED)
@pytest.mark.parametrize("name", LOADABLE)
def test_the_smallest_gradients_of_a_skipped_window_are_nan(name: str, form: str, tmp_path: Path) -> None:
    plain, lowered = map(TrainingSession, scale_both(name, form, tmp_path, gs.DynamicLossScale(1024, 3)))
    for session in (plain, lowered):
        spoil(session, np.random.default_rng(0))
        session.train(sample(name))
        session.train(sample(name))
    expected, found = plain.gradients(), lowered.gradients()
    least = min(gradient.size for gradient in expected.values())
    for parameter, gradient in expected.items():
        if gradient.size == least:
            assert np.isnan(found[parameter]).all()
        else:
            assert_same_bits(canonical(found[parameter]), canonical(gradient), parameter)


@pytest.mark.training
@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("form", LOWERED)
def test_any_one_non_finite_buffer_skips_the_step_of_its_window(form: str, position: int, tmp_path: Path) -> None:
    """The buffer of one parameter alone, set by hand between two calls."""
    name = "digits_adamw"
    session = TrainingSession(scale_both(name, form, tmp_path, gs.DynamicLossScale(1024, 3))[1])
    train(session, [sample(name)])  # the first step looks for the flag
    session.train(sample(name))
    parameter = sorted(session.gradients())[position]
    session.state.get_parameter(parameter).grad.numpy().flat[-1] = (np.nan, np.inf, -np.inf, np.nan)[position]
    session.train(sample(name))
    before = session.parameters()
    session.step()
    assert_all_same_bits(session.parameters(), before)
    assert session.loss_scale()[2] == 0
    train(session, [sample(name)])
    assert not np.array_equal(session.parameters()["fc1.weight"], before["fc1.weight"])


@pytest.mark.parametrize("name", LOADABLE)
def test_the_optimizer_model_reads_one_gradient(name: str, tmp_path: Path) -> None:
    folders = scale_both(name, "lowered", tmp_path, gs.DynamicLossScale(1024, 3))
    count = len(read_checkpoint(folders[0] / "checkpoint").trainable)
    found = []
    for folder in folders:
        graph = ir.load(folder / "optimizer_model.onnx").graph
        found.append(sum(node.op_type == "SequenceAt" for node in graph))
    assert found == [count, 1]


@pytest.mark.full
@pytest.mark.parametrize("name", ["digits_sgd", "transformer_adamw"])
def test_bounded_gradients_are_divided_and_read_in_branches_alone(name: str, tmp_path: Path) -> None:
    graph = ir.load(scale_both(name, "bounded", tmp_path, "dynamic")[1] / "training_model.onnx").graph
    marks = ("unscale-gradients", "bound-accumulation")
    count = {
        mark: [n for n in graph if n.metadata_props.get("graphscale.pass") == mark and n.op_type == op]
        for mark, op in zip(marks, ("Div", "If"), strict=True)
    }
    divided, branches = (len(count[mark]) for mark in marks)
    accumulated = len(read_checkpoint(FOLDERS / name / "checkpoint").trainable)
    assert branches >= 2 and divided + branches == accumulated
    for node in count["bound-accumulation"]:
        then, otherwise = (node.attributes[key].as_graph() for key in ("then_branch", "else_branch"))
        assert [inner.op_type for inner in then] == ["InPlaceAccumulatorV2", "Identity"]
        (inner,) = otherwise
        ops = [[n.op_type for n in inner.attributes[key].as_graph()] for key in ("then_branch", "else_branch")]
        assert ops[1] == ["Div", *ops[0]] and ops[0][0] == "InPlaceAccumulatorV2" and "MatMul" in ops[0]


OTHERS: dict[str, dict[str, Any]] = {
    "fixed": {"loss_scale": 64.0},
    "checked": {"loss_scale": 64.0, "skip_nonfinite": True},
    "cuda": {"target": "ort-training-cuda"},
}


@pytest.mark.parametrize("options", OTHERS)
def test_other_folders_stay_plain(options: str, tmp_path: Path) -> None:
    given = {"loss_scale": "dynamic", **OTHERS[options]}
    plain, other = scale_both("digits_adamw", "lowered", tmp_path, **given)
    assert contents(plain) == contents(other)


def test_the_models_that_change(tmp_path: Path) -> None:
    plain, lowered = scale_both("digits_adamw", "lowered", tmp_path, "dynamic")
    for name in ("training_model.onnx", "optimizer_model.onnx", "eval_model.onnx"):
        assert is_lowered(ir.load(lowered / name)) == (name != "eval_model.onnx")
        assert not is_lowered(ir.load(plain / name))
    assert (plain / "checkpoint").read_bytes() == (lowered / "checkpoint").read_bytes()


def test_the_command(tmp_path: Path) -> None:
    source = FOLDERS / "digits_adamw"
    succeed(tmp_path, "scale", source, "-o", "lowered")
    succeed(tmp_path, "scale", source, "-o", "plain", "--no-lower")
    plain, lowered = scale_both("digits_adamw", "lowered", tmp_path, "dynamic", force=True)
    assert contents(tmp_path / "plain") == contents(plain) and contents(tmp_path / "lowered") == contents(lowered)
    refuse(
        tmp_path, "scale", source / "training_model.onnx", "-o", "o.onnx", "--no-lower", words=["folder of artifacts"]
    )
