"""The export of trained weights to an inference model, or to a checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import GraphscaleError, ModelFileError, reporting
from graphscale.files import model_files, saving, writing
from graphscale.files.contents import suffix_of
from graphscale.files.kinds import describe_file
from graphscale.files.ort_checkpoint import (
    Array,
    Checkpoint,
    OptimizerGroup,
    is_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from graphscale.files.tensor_files import read_npz, read_safetensors
from graphscale.files.writing import MARK_KEY
from graphscale.graph.damage import name_damage
from graphscale.ort.artifacts.folder import fits_shape
from graphscale.ort.fusing.step import MOMENTS, STEP, set_value

__all__ = ["ExportedWeights", "WeightsError", "export_weights", "read_weights"]

Arrays = Mapping[str, Array]
# ONNX Runtime's name for its only group of parameters, and its default learning rate.
_FIRST_GROUP = ("group0", OptimizerGroup(step=0, initial_learning_rate=0.001, moments={}))


class WeightsError(GraphscaleError):
    """The trained weights do not fit their destination."""


@dataclasses.dataclass(frozen=True)
class ExportedWeights:
    """The result of `export_weights`.

    Attributes:
        written: the names of the written weights and moments.
        kept: weights of the destination that the source lacks; empty without `partial`.
        unused: arrays of the source without a use in the destination, such as moments and the loss scale.
        destination: the model or the checkpoint with the trained weights.
    """

    written: tuple[str, ...]
    kept: tuple[str, ...]
    unused: tuple[str, ...]
    destination: ir.Model | Checkpoint

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model or the checkpoint atomically.

        Raises:
            OutputError: the folder does not exist, or cannot be written.
        """
        if isinstance(self.destination, Checkpoint):
            write_checkpoint(writing.check_output(path), self.destination)
        else:
            saving.save(self.destination, path)


@name_damage
def export_weights(
    source: str | os.PathLike[str] | Mapping[str, Any], destination: str | os.PathLike[str], *, partial: bool = False
) -> ExportedWeights:
    """Write trained weights into an inference model or a checkpoint. The given files are not changed.

    Weights are matched by name. In a model, initializers get new values, and inputs with a weight in the source (the
    parameters of an eval model) become initializers. In a checkpoint, the parameters get new values, and, if the source
    has the moments and the step counter of a fused step, so does the optimizer's state, so that a training session
    continues from there.

    Args:
        source: `{name: array}`, such as `Session.state_dict()`; a .npz or .safetensors file of it; or a training step
            with the weights as initializers.
        destination: an inference model, or a checkpoint of a training session.
        partial: True to keep the values of weights that the source lacks.

    Raises:
        WeightsError: names, shapes or dtypes do not match.
        ModelFileError: a file is missing, damaged, or of another format.
    """
    if isinstance(source, Mapping):
        arrays, name = {key: np.asarray(value) for key, value in source.items()}, "the weights given"
    else:
        arrays, name = read_weights(source), os.fspath(source)
    try:
        found = is_checkpoint(destination)
    except OSError as error:
        raise ModelFileError(f"cannot read {destination}: {error.strerror or error}") from error
    target = os.fspath(destination)
    if found:
        return _into_checkpoint(arrays, read_checkpoint(destination), name, target, partial)
    return _into_model(arrays, model_files.load(destination), name, target, partial)


def _into_model(arrays: Arrays, model: ir.Model, source: str, target: str, partial: bool) -> ExportedWeights:
    graph = model.graph
    weights = {key: v for key, v in graph.initializers.items() if key in arrays or _is_weight(v)}
    weights.update({v.name: v for v in graph.inputs if v.name is not None and v.name in arrays})
    kept = _find_kept(weights, arrays, source, target, partial)
    written = [key for key in weights if key in arrays]
    for key in written:
        value, array = weights[key], arrays[key]
        _check(key, value.dtype, value.shape, ir.tensor(array).dtype, array, source, target)
        set_value(value, array)
        if not value.is_initializer():
            graph.inputs.remove(value)
            graph.register_initializer(value)
    model.metadata_props[MARK_KEY] = version("graphscale")
    return _report(arrays, written, kept, model)


def _into_checkpoint(
    arrays: Arrays, checkpoint: Checkpoint, source: str, target: str, partial: bool
) -> ExportedWeights:
    kept = _find_kept(checkpoint.parameters, arrays, source, target, partial)
    states = {name: {key: f"{name}.{key}" for key in MOMENTS} for name in checkpoint.trainable}
    pairs = [(key, old) for key, old in checkpoint.parameters.items() if key in arrays]
    moments = [(key, checkpoint.trainable[name]) for name, keys in states.items() for key in keys.values()]
    has_state = STEP in arrays and arrays[STEP].size == 1 and all(key in arrays for key, _ in moments)
    if has_state:
        pairs += moments
    for key, old in pairs:
        _check(key, old.dtype, old.shape, arrays[key].dtype, arrays[key], source, target)
    written = [key for key, _ in pairs]
    if has_state:
        written.append(STEP)
        group_name, group = next(iter(checkpoint.groups.items()), _FIRST_GROUP)
        held = {name: {key: arrays[full] for key, full in keys.items()} for name, keys in states.items()}
        step = int(arrays[STEP].item())
        checkpoint.groups = {group_name: OptimizerGroup(step, group.initial_learning_rate, held)}
    for parameters in (checkpoint.trainable, checkpoint.frozen):
        parameters.update({key: arrays[key] for key in parameters if key in arrays})
    return _report(arrays, written, kept, checkpoint)


def _report(
    arrays: Arrays, written: Sequence[str], kept: tuple[str, ...], destination: ir.Model | Checkpoint
) -> ExportedWeights:
    taken = set(written)
    return ExportedWeights(tuple(written), kept, tuple(key for key in arrays if key not in taken), destination)


def _is_weight(value: ir.Value) -> bool:
    """Return whether an initializer may be a weight: floating-point numbers, more than one."""
    tensor = value.const_value
    return tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1


def _find_kept(weights: Iterable[str], arrays: Arrays, source: str, target: str, partial: bool) -> tuple[str, ...]:
    names = tuple(weights)
    lacking = tuple(name for name in names if name not in arrays)
    if len(lacking) == len(names):
        raise WeightsError(
            f"{source} and {target} have no weight in common: {_some(arrays)} there, {_some(names)} here; "
            "weights go by name"
        )
    if lacking and not partial:
        raise WeightsError(
            f"{source} has no {_some(lacking)}, a weight of {target}; to keep the value there, pass --partial"
        )
    return lacking


def _check(key: str, dtype: Any, shape: Any, new_dtype: Any, array: Array, source: str, target: str) -> None:
    if dtype not in (None, new_dtype) or not fits_shape(array, shape):
        raise WeightsError(
            f"{key!r} is {dtype}{list(shape or ())} in {target}, and {new_dtype}{list(array.shape)} in {source}; "
            "they must be the same"
        )


def _some(names: Iterable[str]) -> str:
    first = [repr(name) for name in names]
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "") if first else "none"


def read_weights(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read all arrays of a file by name.

    Args:
        path: a .npz or .safetensors file of `Session.state_dict()`, or an ONNX model with the weights as initializers.

    Raises:
        ModelFileError: the file is missing, damaged, or of another format.
    """
    with reporting(ModelFileError, f"cannot read {path}"):
        suffix = suffix_of(path)
    if suffix == ".npz":
        return read_npz(path)
    if suffix == ".safetensors":
        return read_safetensors(path)[0]
    if suffix != ".onnx":
        other = describe_file(path, "npz")
        raise ModelFileError(
            f"{path}: trained weights are read from .npz, .safetensors and .onnx files{other and f'; {other}'}"
        )
    initializers = model_files.load(path).graph.initializers
    return {name: v.const_value.numpy() for name, v in initializers.items() if v.const_value is not None}
