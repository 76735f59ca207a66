"""The export of trained weights to inference models and checkpoints; the commands for fusing and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors.numpy import save_file

import graphscale as gs
from graphscale.files.ort_checkpoint import read_checkpoint
from graphscale.ort.fusing import export_weights, fuse, join_models
from graphscale.ort.fusing.trained_weights import read_weights
from tests.cli.command import refuse, succeed
from tests.conftest import Arrays, assert_all_same_bits, initial_values, run_once
from tests.ort.artifacts.training_session import FOLDERS, RATE, batches, edited, start, train

FOLDER = FOLDERS / "digits_adamw"
EVAL_MODEL = FOLDER / "eval_model.onnx"


def trained(name: str = "digits_adamw", seed: int = 0) -> Arrays:
    """A state of the fused step of a folder, as `Session.state_dict()` gives it, with other numbers in it."""
    random = np.random.default_rng(seed)
    model = ir.serde.serialize_model(gs.scale(fuse(FOLDERS / name).model).model)
    states = {value.name for value in model.graph.input}
    values = {key: value for key, value in initial_values(model).items() if key in states}
    return {k: np.asarray(v + np.abs(random.standard_normal(v.shape)), v.dtype) for k, v in values.items()}


def weights_of(state: Arrays) -> Arrays:
    return {key: value for key, value in state.items() if key.startswith("fc") and "momentum" not in key}


def test_into_an_eval_model(tmp_path: Path) -> None:
    """Its parameters are inputs, and become constants: the loss is what feeding the weights gives."""
    state = trained()
    batch = batches("digits_adamw", 1)[0]
    expected, _ = run_once(EVAL_MODEL, {**batch, **weights_of(state)})
    result = export_weights(state, EVAL_MODEL)
    result.save(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert [value.name for value in model.graph.input] == ["input", "labels"]
    assert_all_same_bits(initial_values(model), weights_of(state))
    actual, _ = run_once(model, batch)
    assert_all_same_bits(actual, expected)
    assert set(result.written) == set(weights_of(state))
    assert set(result.unused) == set(state) - set(result.written)
    assert result.kept == ()


def test_into_an_inference_model(tmp_path: Path) -> None:
    """Its initializers get new values, once more, and the file given is as before."""
    path = tmp_path / "model.onnx"
    export_weights(trained(), EVAL_MODEL).save(path)
    before = path.read_bytes()
    state = trained(seed=1)
    result = export_weights(state, path)
    assert_all_same_bits(initial_values(ir.serde.serialize_model(result.destination)), weights_of(state))
    assert path.read_bytes() == before


def test_every_source(tmp_path: Path) -> None:
    """A mapping, .npz, .safetensors, and a step whose initializers hold the weights."""
    state = trained()
    np.savez(tmp_path / "state.npz", **state)
    save_file(state, tmp_path / "state.safetensors")
    step = ir.serde.serialize_model(fuse(FOLDER).model)
    for tensor in step.graph.initializer:
        if tensor.name in state:
            tensor.CopyFrom(onnx.numpy_helper.from_array(state[tensor.name], tensor.name))
    onnx.save(step, tmp_path / "step.onnx")
    for name in ("state.npz", "state.safetensors", "step.onnx"):
        result = export_weights(tmp_path / name, EVAL_MODEL)
        assert_all_same_bits(initial_values(ir.serde.serialize_model(result.destination)), weights_of(state))


def test_safetensors(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "count": np.asarray(3, dtype=np.int64),
        "half": np.asarray([1.5, -2], dtype=ml_dtypes.bfloat16),
    }
    save_file(arrays, tmp_path / "x.safetensors", {"format": "np"})
    assert_all_same_bits(read_weights(tmp_path / "x.safetensors"), arrays)


@pytest.mark.training
def test_into_a_checkpoint(tmp_path: Path) -> None:
    """Weights, running statistics, moments and the step count: a training session goes on as if it had trained."""
    name = "conv_adamw"
    folder, feeds = edited(name, tmp_path), batches(name, 12)
    session = gs.Session(gs.scale(join_models(folder).model, target="ort-training"))
    for batch in feeds[:5]:
        session.step({**batch, **RATE})
    np.savez(tmp_path / "state.npz", **session.state_dict())
    result = export_weights(tmp_path / "state.npz", folder / "checkpoint")
    assert set(result.unused) == {"current_loss_scale", "good_steps"}
    reference = start(folder)
    train(reference, feeds)
    result.save(folder / "checkpoint")
    resumed = start(folder)
    train(resumed, feeds[5:])
    assert_all_same_bits(resumed.parameters(), reference.parameters())


def test_a_checkpoint_without_moments() -> None:
    """Weights alone leave the optimizer's state unchanged."""
    state = weights_of(trained())
    result = export_weights(state, FOLDER / "checkpoint")
    assert_all_same_bits(result.destination.parameters, state)
    assert result.destination.groups == read_checkpoint(FOLDER / "checkpoint").groups


def test_weights_that_are_kept() -> None:
    state = weights_of(trained())
    del state["fc1.bias"]
    result = export_weights(state, FOLDER / "checkpoint", partial=True)
    assert result.kept == ("fc1.bias",)
    kept = read_checkpoint(FOLDER / "checkpoint").trainable["fc1.bias"]
    assert_all_same_bits(result.destination.parameters, {**state, "fc1.bias": kept})


# --- the commands fuse and export-weights -----------------------------------------------------------------------------


def test_fuse(tmp_path: Path) -> None:
    printed = succeed(tmp_path, "fuse", FOLDERS / "digits_adamw", "-o", "step.onnx", "-v")
    assert "fc1.weight -> fc1.weight.next" in printed and "100 %" in printed
    expected = fuse(FOLDERS / "digits_adamw")
    expected.save(tmp_path / "expected.onnx")
    assert (tmp_path / "step.onnx").read_bytes() == (tmp_path / "expected.onnx").read_bytes()
    # And it is an ordinary training step to the other commands.
    found = json.loads(succeed(tmp_path, "inspect", "step.onnx", "--json"))
    assert {state["output"]: state["input"] for state in found["state"]} == expected.updates


@pytest.mark.full
@pytest.mark.parametrize("target", ["onnx", "ort-training"])
def test_fuse_and_scale(target: str, tmp_path: Path) -> None:
    """In one go, the same model as in two steps."""
    words = ("--loss-scale", "dynamic", "--increment-period", "10", "--target", target)
    report = json.loads(succeed(tmp_path, "fuse", FOLDERS / "conv_adamw", "-o", "one.onnx", *words, "--json"))
    assert report["policy"]["config"]["increment_period"] == 10
    assert report["target"] == target
    assert report["coverage"] == 1.0
    if target == "onnx":  # a step in one file has standard operators, and one for training builds keeps theirs
        succeed(tmp_path, "fuse", FOLDERS / "conv_adamw", "-o", "step.onnx")
    else:
        join_models(FOLDERS / "conv_adamw").save(tmp_path / "step.onnx")
    succeed(tmp_path, "scale", "step.onnx", "-o", "two.onnx", *words)
    one, two = onnx.load(tmp_path / "one.onnx"), onnx.load(tmp_path / "two.onnx")
    assert onnx.printer.to_text(one.graph) == onnx.printer.to_text(two.graph)
    assert bool(report["replaced"]) == (target == "onnx")
    in_place = {node.input[0] for node in one.graph.node if node.op_type == "InPlaceAccumulatorV2"}
    states = {state["input"] for state in report["state"]}
    assert {"conv1.weight", "fc.bias.momentum1", "norm1.running_var", "step", "good_steps"} <= states
    assert in_place == (states if target == "ort-training" else set())


def test_fuse_in_place(tmp_path: Path) -> None:
    succeed(tmp_path, "fuse", FOLDERS / "digits_sgd", "-o", "step.onnx", "--target", "ort-training")
    model = onnx.load(tmp_path / "step.onnx")
    assert [value.name for value in model.graph.output] == ["onnx::loss::2"]
    written = {node.input[0] for node in model.graph.node if node.op_type == "InPlaceAccumulatorV2"}
    assert written == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "step"}


def test_the_command(tmp_path: Path) -> None:
    state = {key: value + 1 for key, value in _weights().items()}
    np.savez(tmp_path / "state.npz", **state)
    words = ("export-weights", "state.npz", FOLDERS / "digits_adamw" / "eval_model.onnx")
    printed = succeed(tmp_path, *words, "-o", "model.onnx")
    first, second = printed.splitlines()
    assert first == "4 arrays from state.npz -> model.onnx"
    assert second == "no use there for 8 others, such as moments and constants (-v shows them)"
    assert "fc1.weight.momentum0" in succeed(tmp_path, *words, "-o", "third.onnx", "-v")
    written = initial_values(onnx.load(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(written["fc1.weight"], state["fc1.weight"])
    found = json.loads(succeed(tmp_path, *words, "-o", "again.onnx", "--json"))
    assert set(found["written"]) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert len(found["unused"]) == 8


def _weights() -> dict[str, np.ndarray]:
    """The weights and moments of a fused step."""
    values = initial_values(ir.serde.serialize_model(fuse(FOLDERS / "digits_adamw").model))
    return {key: value for key, value in values.items() if key.startswith("fc")}


def _rename(op_type: str, new: str) -> Callable[[onnx.ModelProto], None]:
    """Another operator in place of the first one of a kind."""
    return lambda model: setattr(next(node for node in model.graph.node if node.op_type == op_type), "op_type", new)


def _add(op_type: str, source: str, name: str) -> Callable[[onnx.ModelProto], None]:
    return lambda model: model.graph.node.append(onnx.helper.make_node(op_type, [source], ["more"], name=name))


def _between(model: onnx.ModelProto) -> None:
    """A second optimizer beside the first."""
    model.graph.node.append(model.graph.node[-1])
    model.graph.node[-1].output[0] = "again"


def _signal(model: onnx.ModelProto) -> None:
    model.graph.node[-1].input.append("signal")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray([True]), "signal"))


def _replaced(model: onnx.ModelProto) -> None:
    """Gradients from elsewhere."""
    model.graph.node.insert(0, onnx.helper.make_node("Identity", ["gradients"], ["mine"], name="same"))
    model.graph.node[-1].input[3] = "mine"


def _mode(model: onnx.ModelProto) -> None:
    next(attribute for attribute in model.graph.node[-1].attribute if attribute.name == "adam_mode").i = 3


BAD_FOLDERS: dict[str, tuple[str, Callable[[onnx.ModelProto], None], str]] = {
    "foreign optimizer": ("optimizer_model", _rename("AdamWOptimizer", "LambOptimizer"), "0 optimizer operators"),
    "two optimizers": ("optimizer_model", _between, "2 optimizer operators"),
    "more nodes": ("optimizer_model", _add("Identity", "learning_rate", "extra"), "Identity (node 'extra')"),
    "update signal": ("optimizer_model", _signal, "update signal 'signal'"),
    "other gradients": ("optimizer_model", _replaced, "come from Identity (node 'same')"),
    "unknown mode": ("optimizer_model", _mode, "adam_mode 3"),
    "not accumulated": (
        "training_model",
        _rename("InPlaceAccumulatorV2", "InPlaceAccumulator"),
        "is not accumulated in an input",
    ),
    "flag read elsewhere": (
        "training_model",
        _add("Not", "lazy_reset_grad", "not"),
        "'lazy_reset_grad' is read by more",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders(case: str, tmp_path: Path) -> None:
    file, change, expected = BAD_FOLDERS[case]
    edited("digits_adamw", tmp_path, **{file: change})
    refuse(tmp_path, "fuse", "digits_adamw", "-o", "step.onnx", words=(expected,))


@pytest.mark.parametrize("file", ["training_model.onnx", "optimizer_model.onnx", "checkpoint"])
def test_missing_and_damaged_files(file: str, tmp_path: Path) -> None:
    path = edited("digits_adamw", tmp_path) / file
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refuse(tmp_path, "fuse", "digits_adamw", "-o", "step.onnx", words=(file,))
    path.unlink()
    refuse(tmp_path, "fuse", "digits_adamw", "-o", "step.onnx", words=(file,))


def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    folder = edited("digits_adamw", tmp_path)
    (folder / "checkpoint").write_bytes((FOLDERS / "conv_adamw" / "checkpoint").read_bytes())
    refuse(tmp_path, "fuse", "digits_adamw", "-o", "step.onnx", words=("conv1.weight",))


FUSE_OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "no folder": (("nowhere", "-o", "step.onnx"), "nowhere is not a folder"),
    "a file": (("step", "-o", "step.onnx"), "step is not a folder"),
    "output folder": (("digits", "-o", "no/step.onnx"), "does not exist; create it"),
    "target": (("digits", "-o", "x.onnx", "--target", "cuda"), "there is no target 'cuda'"),
    "scale below 1": (("digits", "-o", "x.onnx", "--loss-scale", "0.5"), "at least 1"),
    "period alone": (("digits", "-o", "x.onnx", "--increment-period", "5"), "--increment-period goes with"),
    "no output": (("digits",), "-o"),
}


@pytest.mark.parametrize("case", FUSE_OPTIONS)
def test_bad_options(case: str, tmp_path: Path) -> None:
    words, expected = FUSE_OPTIONS[case]
    (tmp_path / "step").write_text("a file")
    words = tuple(str(FOLDERS / "digits_adamw") if word == "digits" else word for word in words)
    refuse(tmp_path, "fuse", *words, words=(expected,))


BAD_WEIGHTS = {
    "shape": (np.zeros(3, np.float32), "'fc1.bias' is FLOAT[64] in eval_model.onnx"),
    "rank": (np.zeros((64, 1), np.float32), "'fc1.bias' is FLOAT[64] in eval_model.onnx"),
    "dtype": (np.zeros(64, np.float64), "DOUBLE[64] in state.npz"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
@pytest.mark.parametrize("destination", ["eval_model.onnx", "checkpoint"])
def test_weights_that_do_not_fit(case: str, destination: str, tmp_path: Path) -> None:
    bias, expected = BAD_WEIGHTS[case]
    np.savez(tmp_path / "state.npz", **{**_weights(), "fc1.bias": bias})
    (tmp_path / destination).write_bytes((FOLDERS / "digits_adamw" / destination).read_bytes())
    told = ("'fc1.bias' is ", expected if destination == "eval_model.onnx" else "")
    refuse(tmp_path, "export-weights", "state.npz", destination, "-o", "out", words=told)


def test_names_that_do_not_match(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes((FOLDERS / "digits_adamw" / "checkpoint").read_bytes())
    np.savez(tmp_path / "other.npz", w=np.zeros(3, np.float32))
    np.savez(tmp_path / "state.npz", **{name: value for name, value in _weights().items() if name != "fc1.bias"})
    for name, told in (
        ("other.npz", "other.npz and checkpoint have no weight in common: 'w' there, 'fc"),
        ("state.npz", "state.npz has no 'fc1.bias', a weight of checkpoint; to keep the value there, pass --partial"),
    ):
        refuse(tmp_path, "export-weights", name, "checkpoint", "-o", "out", words=(told,))
    assert "kept: fc1.bias" in succeed(tmp_path, "export-weights", "state.npz", "checkpoint", "-o", "out", "--partial")


@pytest.mark.parametrize("name", ["state.npz", "state.safetensors", "step.onnx", "state.bin", "missing.npz"])
def test_unreadable_sources(name: str, tmp_path: Path) -> None:
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"\x20\0\0\0\0\0\0\0{}")
    destination = FOLDERS / "digits_adamw" / "checkpoint"
    refuse(tmp_path, "export-weights", name, destination, "-o", "out", words=(name,))
