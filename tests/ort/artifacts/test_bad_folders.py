"""Folders that must be refused: exit code 2, one line on stderr, nothing written; from Python the same as an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from graphscale import errors
from graphscale.files.ort_checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from graphscale.ort.artifacts import scale_artifacts
from tests.cli.command import contents, refuse
from tests.ort.artifacts.training_session import FOLDERS, edited

SOURCE, OTHER = FOLDERS / "digits_adamw", FOLDERS / "conv_adamw"
WEIGHTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
TRAINING, EVAL, OPTIMIZER, CHECKPOINT = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"

File, Gradient, Unsupported = errors.ModelFileError, errors.GradientError, errors.UnsupportedModelError


def removed(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def exchanged(name: str, source: Path) -> Callable[[Path], object]:
    """A file is replaced by another one."""
    return lambda folder: shutil.copy(source, folder / name)


def cut(name: str, share: float) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return spoil


def changed_graph(name: str, change: Callable[[onnx.GraphProto], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        model = onnx.load(folder / name)
        change(model.graph)
        onnx.save(model, folder / name)

    return spoil


def changed_checkpoint(change: Callable[[Checkpoint], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        checkpoint = read_checkpoint(folder / CHECKPOINT)
        change(checkpoint)
        write_checkpoint(folder / CHECKPOINT, checkpoint)

    return spoil


def freeze(*names: str) -> Callable[[Path], object]:
    return changed_checkpoint(
        lambda checkpoint: checkpoint.frozen.update({n: checkpoint.trainable.pop(n) for n in names})
    )


def another_bias(array: np.ndarray) -> Callable[[Path], object]:
    return changed_checkpoint(lambda checkpoint: checkpoint.trainable.update({"fc1.bias": array}))


def renamed_parameter(graph: onnx.GraphProto) -> None:
    for names in [node.input for node in graph.node]:
        names[:] = ["fc9.bias" if name == "fc1.bias" else name for name in names]
    next(value for value in graph.input if value.name == "fc1.bias").name = "fc9.bias"


def gradients_as_outputs(graph: onnx.GraphProto) -> None:
    """Make it a training model before gradients are accumulated."""
    nodes = [node for node in graph.node if node.op_type != "InPlaceAccumulatorV2"]
    inputs = [value for value in graph.input if "accumulation" not in value.name and value.name != "lazy_reset_grad"]
    outputs = [onnx.helper.make_tensor_value_info(f"{name}_grad", 1, None) for name in ("fc1.weight", "fc1.bias")]
    outputs.insert(0, graph.output[0])
    for field, values in ((graph.node, nodes), (graph.input, inputs), (graph.output, outputs)):
        del field[:]
        field.extend(values)


def one_gradient_not_accumulated(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.input[0] == "fc1.bias_grad.accumulation.buffer")
    node.op_type, node.domain = "Add", ""
    del node.input[2:]


def show_gradient(graph: onnx.GraphProto) -> None:
    """A gradient of the input, shown to the user and accumulated nowhere."""
    graph.node.append(onnx.helper.make_node("MatMul", ["gemm_0_grad", "fc1.weight"], ["d_input"], name="d_input"))
    graph.output.append(onnx.helper.make_tensor_value_info("d_input", 1, None))


def constant_gradient(graph: onnx.GraphProto) -> None:
    """An accumulator reads something that the loss has no part in."""
    node = next(node for node in graph.node if node.input[0] == "fc1.bias_grad.accumulation.buffer")
    node.input[1] = "fc1.bias"


def without_lazy_reset(graph: onnx.GraphProto) -> None:
    graph.input.remove(next(value for value in graph.input if value.name == "lazy_reset_grad"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.asarray([True]), "lazy_reset_grad"))


def other_optimizer(graph: onnx.GraphProto) -> None:
    graph.node[0].op_type = "LambOptimizer"


def copied_gradients(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, onnx.helper.make_node("Identity", ["gradients"], ["copied"], name="copy"))
    graph.node[1].input[3] = "copied"


def scaled(folder: Path) -> None:
    scale_artifacts(SOURCE, folder, force=True)


CASES: dict[str, tuple[Callable[[Path], object], type[errors.GraphscaleError], tuple[str, ...]]] = {
    **{f"no-{name}": (removed(name), File, (name, "has no")) for name in (TRAINING, EVAL, OPTIMIZER, CHECKPOINT)},
    "cut-model": (cut(TRAINING, 0.9), File, (TRAINING, "truncated")),
    "cut-checkpoint": (cut(CHECKPOINT, 0.7), File, (CHECKPOINT, "truncated")),
    "model-as-checkpoint": (exchanged(CHECKPOINT, SOURCE / EVAL), File, (CHECKPOINT, "not a checkpoint")),
    "other-training": (exchanged(TRAINING, OTHER / TRAINING), File, ("'fc1.weight'", TRAINING, "different models")),
    "other-eval": (exchanged(EVAL, OTHER / EVAL), File, (EVAL, "another model")),
    "training-as-eval": (exchanged(EVAL, SOURCE / TRAINING), File, (EVAL, "is a training model")),
    "eval-as-training": (exchanged(TRAINING, SOURCE / EVAL), Gradient, (TRAINING, "does not accumulate")),
    "eval-as-optimizer": (exchanged(OPTIMIZER, SOURCE / EVAL), File, (OPTIMIZER, "no optimizer model")),
    "other-checkpoint": (exchanged(CHECKPOINT, OTHER / CHECKPOINT), File, ("'conv1.weight'", "different models")),
    "shape": (another_bias(np.zeros(65, np.float32)), File, ("'fc1.bias'", "[65]", "[64]")),
    "dtype": (another_bias(np.zeros(64)), File, ("'fc1.bias'", "float64", "FLOAT")),
    "frozen-in-checkpoint": (freeze("fc1.bias"), File, (TRAINING, "trains 'fc1.bias'")),
    "renamed": (changed_graph(EVAL, renamed_parameter), File, (EVAL, "another model", "'fc1.bias'")),
    "frozen-only": (freeze(*WEIGHTS), File, (TRAINING, "no trainable parameter")),
    "no-accumulators": (changed_graph(TRAINING, gradients_as_outputs), Gradient, ("'fc1.weight'", "accumulate")),
    "one-missing": (changed_graph(TRAINING, one_gradient_not_accumulated), Gradient, ("'fc1.bias'", "accumulate")),
    "beside": (
        changed_graph(TRAINING, show_gradient),
        Gradient,
        ("the gradient 'd_input'", "remove it from the outputs"),
    ),
    "no-gradient": (changed_graph(TRAINING, constant_gradient), Gradient, ("'fc1.bias'", "traced to the loss")),
    "no-reset": (changed_graph(TRAINING, without_lazy_reset), Gradient, ("lazy_reset_grad",)),
    "lamb": (changed_graph(OPTIMIZER, other_optimizer), Unsupported, (OPTIMIZER, "SGDOptimizerV2", "LambOptimizer")),
    "untraced": (changed_graph(OPTIMIZER, copied_gradients), Unsupported, (OPTIMIZER, "AdamW", "be traced")),
    "scaled": (scaled, errors.AlreadyScaledError, (TRAINING, "scale the original graph")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_folder_is_refused(case: str, tmp_path: Path) -> None:
    spoil, error, words = CASES[case]
    folder = edited(SOURCE.name, tmp_path)
    spoil(folder)
    before = contents(tmp_path)
    with pytest.raises(error) as caught:
        scale_artifacts(folder, tmp_path / "out")
    assert contents(tmp_path) == before
    refuse(tmp_path, "scale", SOURCE.name, "-o", "out", words=words)
    assert all(word in str(caught.value).replace("\n", " ") for word in words)


def test_a_further_output_is_no_state(tmp_path: Path) -> None:
    """The artifacts name what a step carries: their parameters and buffers."""

    def show_batch(model: onnx.ModelProto) -> None:
        graph, batch = model.graph, model.graph.input[0]
        graph.node.append(onnx.helper.make_node("Tanh", [batch.name], ["shown"], name="shown"))
        graph.output.append(onnx.helper.make_tensor_value_info("shown", 1, None))
        graph.output[-1].type.CopyFrom(batch.type)

    scale_artifacts(edited(SOURCE.name, tmp_path, training_model=show_batch), tmp_path / "out")


def test_a_model_whose_parameters_are_all_frozen(tmp_path: Path) -> None:
    """Not only the checkpoint: the training model has no buffers either."""
    folder = edited(SOURCE.name, tmp_path, training_model=lambda model: gradients_as_outputs(model.graph))
    freeze(*WEIGHTS)(folder)
    with pytest.raises(Unsupported, match="frozen parameters only"):
        scale_artifacts(folder, tmp_path / "out")


@pytest.mark.parametrize("name", ["missing", "training_model.onnx"])
def test_what_is_no_folder(name: str, tmp_path: Path) -> None:
    shutil.copy(SOURCE / TRAINING, tmp_path)
    with pytest.raises(File, match="is not a folder"):
        scale_artifacts(tmp_path / name, tmp_path / "out")


def test_folders_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("a file")
    for arguments, word in (
        ((SOURCE,), "-o"),
        ((SOURCE, "-o", "file"), "is a file"),
        ((SOURCE, "-o", "full"), "not empty"),
        ((SOURCE, "-o", "no/out"), "does not exist"),
        ((SOURCE, "-o", "x" * 300), "File name too long"),
        (("x" * 300, "-o", "out"), "File name too long"),
    ):
        refuse(tmp_path, "scale", *arguments, words=(word,))


@pytest.mark.parametrize(
    "option", [["--seed-edge=a:0"], ["--gradient=g"], ["--update=a=b"], ["--expose-scaled-loss"], ["--target=onnx"]]
)
def test_options_that_a_folder_does_not_take(option: list[str], tmp_path: Path) -> None:
    refuse(tmp_path, "scale", SOURCE, "-o", "out", *option)
