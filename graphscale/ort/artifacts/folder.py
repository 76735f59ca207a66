"""Artifact folders, and a check that their files belong together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from graphscale.analysis.hints import Hints
from graphscale.analysis.roles.answers import Answers
from graphscale.errors import GradientError, ModelFileError, UnsupportedModelError
from graphscale.files import model_files
from graphscale.files.external_data import external_tensors, leaves_folder
from graphscale.files.limits import current_limits
from graphscale.files.ort_checkpoint import Array, Checkpoint, is_checkpoint, read_checkpoint
from graphscale.graph.stamp import refuse_scaled
from graphscale.step.understanding import understand

__all__ = [
    "ARTIFACTS",
    "CHECKPOINT",
    "EVAL_MODEL",
    "LAZY_RESET_GRAD",
    "MODELS",
    "OPTIMIZER_MODEL",
    "TRAINING_MODEL",
    "ArtifactFolder",
    "buffer_of",
    "check_complete",
    "check_parameters",
    "fits_shape",
    "holds_artifacts",
    "read_folder",
    "watched_outputs",
]

TRAINING_MODEL, EVAL_MODEL, OPTIMIZER_MODEL = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT = "checkpoint"
MODELS = (TRAINING_MODEL, EVAL_MODEL, OPTIMIZER_MODEL)
ARTIFACTS = (*MODELS, CHECKPOINT)

# The names of a training model's special inputs in a training session.
LAZY_RESET_GRAD = "lazy_reset_grad"
_BUFFER = "_grad.accumulation.buffer"

# The inputs of an optimizer model, which a training session feeds by position; some optimizers have fewer moments.
_OPTIMIZER_INPUTS = ("learning_rate", "step", "params", "gradients")
_MOMENTS = ("first_order_moments", "second_order_moments")


@dataclasses.dataclass
class ArtifactFolder:
    """The contents of an artifact folder; the models by their file names, read for scaling with their ModelProtos."""

    path: Path
    models: dict[str, ir.Model]
    checkpoint: Checkpoint
    protos: Mapping[str, onnx.ModelProto] = dataclasses.field(default_factory=dict)

    def others(self) -> Iterator[Path]:
        """Yield the other files of the folder, without external weights of the models.

        Raises:
            ModelFileError: a file lies outside of the folder, by a link, or has holes.
        """
        weights = {
            Path(tensor.base_dir, tensor.location).resolve()
            for model in self.models.values()
            for tensor in external_tensors(model).values()
        }
        for file in sorted(self.path.iterdir()):
            if file.is_file() and file.name not in ARTIFACTS and file.resolve() not in weights:
                _refuse_strange(file, self.path)
                yield file

    def further_checkpoint(self, file: Path) -> Checkpoint | None:
        """Read a checkpoint of this model; None for another file."""
        try:
            checkpoint = read_checkpoint(file) if is_checkpoint(file) else None
        except (ModelFileError, OSError):
            return None
        same = checkpoint is not None and checkpoint.trainable.keys() == self.checkpoint.trainable.keys()
        return checkpoint if same else None


def _refuse_strange(file: Path, folder: Path) -> None:
    found = file.stat()
    if leaves_folder(file, folder) or found.st_nlink > 1:
        raise ModelFileError(f"{file} lies outside of its folder as well, by a link; put a copy there")
    if found.st_size > max(current_limits().max_bytes, 512 * found.st_blocks):
        raise ModelFileError(f"{file} has holes, and its copy may fill the disk ({found.st_size} bytes); remove it")


def holds_artifacts(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder with at least one model of a training session."""
    # os.path also answers for names that no file system accepts.
    return any(os.path.isfile(os.path.join(path, name)) for name in MODELS)


def watched_outputs(model: ir.Model, loss: str | Sequence[str] | None) -> Answers:
    """Return roles for outputs that look like carried state: the checkpoint of a session has all state."""
    open_roles = understand(model, Hints(loss), asking=False).roles.table().open
    return Answers(metrics=tuple(entry.name for entry in open_roles))


def buffer_of(parameter: str) -> str:
    """Return the name of the buffer for a parameter's accumulated gradient."""
    return parameter + _BUFFER


def check_complete(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder with all artifacts.

    Raises:
        ModelFileError: an artifact is missing, or lies elsewhere.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise ModelFileError(f"{path} is not a folder; pass a folder that generate_artifacts has written")
    for name in ARTIFACTS:
        if not (folder / name).is_file():
            raise ModelFileError(f"{path} has no {name}; a folder of artifacts holds {', '.join(ARTIFACTS)}")
        if leaves_folder(folder / name, folder):
            raise ModelFileError(f"{folder / name} leads out of its folder; put a copy there")
    return folder


def read_folder(path: str | os.PathLike[str]) -> ArtifactFolder:
    """Read an artifact folder for scaling.

    Raises:
        ModelFileError: a file is missing, damaged, or of another model.
        AlreadyScaledError: the folder carries a loss scale.
        UnsupportedModelError: no parameter is trained.
        GradientError: a gradient is not accumulated.
    """
    folder = check_complete(path)
    read = {name: model_files.load_with_proto(folder / name) for name in MODELS}
    models = {name: model for name, (model, _) in read.items()}
    for name, model in models.items():
        refuse_scaled(model, str(folder / name))
    checkpoint = read_checkpoint(folder / CHECKPOINT)
    if checkpoint.nominal:
        raise UnsupportedModelError(
            f"{folder / CHECKPOINT} is nominal: it has no values, and cannot hold the loss scale; "
            "pass a folder with a complete checkpoint"
        )
    found = ArtifactFolder(folder, models, checkpoint, {name: proto for name, (_, proto) in read.items()})
    check_parameters(checkpoint, models[TRAINING_MODEL], str(folder / CHECKPOINT), str(folder / TRAINING_MODEL))
    _check_training(found)
    _check_evaluation(found)
    _check_optimizer(found)
    return found


def check_parameters(checkpoint: Checkpoint, training: ir.Model, name: str, training_name: str) -> None:
    """Refuse a checkpoint whose parameters are not those of a training model.

    Raises:
        ModelFileError: with the first parameter that differs.
    """
    inputs = {value.name: value for value in training.graph.inputs}
    for parameter in checkpoint.trainable:
        if parameter not in inputs:
            raise ModelFileError(
                f"{name} has the parameter {parameter!r}, and {training_name} does not; they are of different models"
            )
    for parameter, array in checkpoint.parameters.items():
        if parameter in inputs and not _fits(array, inputs[parameter]):
            raise ModelFileError(
                f"{name} has the parameter {parameter!r} with shape {list(array.shape)} and dtype {array.dtype}, "
                f"{training_name} has it with shape {inputs[parameter].shape} and dtype {inputs[parameter].dtype}"
            )
    for value in training.graph.inputs:
        parameter = (value.name or "").removesuffix(_BUFFER)
        if parameter != value.name and parameter not in checkpoint.trainable:
            raise ModelFileError(f"{training_name} trains {parameter!r}, which is no trainable parameter of {name}")


def fits_shape(array: Array, shape: Sequence[Any] | ir.Shape | None) -> bool:
    """Return whether an array fits a shape, as far as known."""
    return shape is None or (
        len(shape) == array.ndim
        and all(not isinstance(axis, int) or axis == size for axis, size in zip(shape, array.shape, strict=True))
    )


def _fits(array: Array, value: ir.Value) -> bool:
    return (value.dtype is None or value.dtype.numpy() == array.dtype) and fits_shape(array, value.shape)


def _check_training(folder: ArtifactFolder) -> None:
    name, trainable = folder.path / TRAINING_MODEL, folder.checkpoint.trainable
    if not trainable:
        raise UnsupportedModelError(f"{folder.path / CHECKPOINT} has frozen parameters only: there is no gradient")
    inputs = {value.name for value in folder.models[TRAINING_MODEL].graph.inputs}
    for parameter in trainable:
        if buffer_of(parameter) not in inputs:
            raise GradientError(
                f"{name} does not accumulate the gradient of {parameter!r}: it has no input {buffer_of(parameter)!r}; "
                "make the folder with onnxruntime.training.artifacts.generate_artifacts"
            )
    if LAZY_RESET_GRAD not in inputs:
        raise GradientError(f"{name} has no input {LAZY_RESET_GRAD!r}, which begins an accumulation of gradients")


def _check_evaluation(folder: ArtifactFolder) -> None:
    """Check the parameters of the eval model: a training session feeds the training model's to it, by position."""
    parameters = folder.checkpoint.parameters
    training, evaluation = (
        {value.name: value for value in folder.models[name].graph.inputs if value.name in parameters}
        for name in (TRAINING_MODEL, EVAL_MODEL)
    )
    if list(training) != list(evaluation):
        differing = sorted(map(str, set(training) ^ set(evaluation))) or list(training)
        raise ModelFileError(
            f"{folder.path / EVAL_MODEL} is of another model than {folder.path / TRAINING_MODEL}: their parameters "
            f"differ, as in {differing[0]!r}"
        )
    for value in folder.models[EVAL_MODEL].graph.inputs:
        if (value.name or "").endswith(_BUFFER) or value.name == LAZY_RESET_GRAD:
            raise ModelFileError(f"{folder.path / EVAL_MODEL} is a training model: it has the input {value.name!r}")
    for name, value in evaluation.items():
        if not _fits(parameters[str(name)], value):
            raise ModelFileError(
                f"{folder.path / EVAL_MODEL} is of another model than {folder.path / TRAINING_MODEL}: it has the "
                f"parameter {name!r} with shape {value.shape}"
            )


def _check_optimizer(folder: ArtifactFolder) -> None:
    path = folder.path / OPTIMIZER_MODEL
    names = tuple(value.name for value in folder.models[OPTIMIZER_MODEL].graph.inputs if not value.is_initializer())
    if names[:4] != _OPTIMIZER_INPUTS or names[4:] != _MOMENTS[: len(names) - 4]:
        raise ModelFileError(
            f"{path} is no optimizer model of a training session: its inputs are {', '.join(map(str, names[:6]))}, "
            f"not {', '.join(_OPTIMIZER_INPUTS)} and moments"
        )
