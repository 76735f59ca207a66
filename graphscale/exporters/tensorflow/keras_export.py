"""Exporting the training step of a Keras model."""

from __future__ import annotations

import os
from typing import Any

import keras
import onnx_ir as ir
import tensorflow as tf

from graphscale.errors import ExportError
from graphscale.exporters.export_report import ExportReport, compare_steps
from graphscale.exporters.step_file import complete_step
from graphscale.exporters.tensorflow.conversion import convert
from graphscale.exporters.tensorflow.keras_step import LOSS, RATE, make_keras_step
from graphscale.exporters.tensorflow.pure_step import PureStep, make_pure
from graphscale.exporters.tensorflow.unrolling import unrolled
from graphscale.files import model_files, writing
from graphscale.files.tensor_files import Arrays

__all__ = ["export"]

BATCH = "batch"


def export(
    model: Any, example_batch: Any, path: str | os.PathLike[str], loss: Any, optimizer: Any, dynamic_batch: bool
) -> ExportReport:
    """Export the training step of a Keras model; see `graphscale.exporters.tensorflow.export_step`."""
    target = writing.check_new_output(path)
    _check_model(model)
    if loss is not None or optimizer is not None:
        model.compile(optimizer=optimizer if optimizer is not None else model.optimizer, loss=loss)
    step = make_keras_step(model, example_batch)
    with step.unchanged():
        expected = [step.run_eagerly(step.batch) for _ in range(2)]
    with step.unchanged():
        disturbed = step.disturb(step.batch)
        nearby = [step.run_eagerly(disturbed) for _ in range(2)]
    with step.unchanged(), unrolled(model) as layers:
        model.reset_metrics()
        pure = make_pure(step.run, _specs(step.batch, dynamic_batch), step.state, step.sums)
    exported = _to_onnx(pure)
    _fix_constants(exported, pure)
    complete_step(
        exported,
        pure.first,
        pure.pairs,
        losses=[LOSS],
        metrics=[name for name in pure.outputs if name != LOSS and name not in pure.pairs],
        documentation="training step",
    )
    wanted, also = ([_outputs_of(pure, values) for values in each] for each in (expected, nearby))
    errors = compare_steps(exported, step.batch, pure.first, pure.pairs, wanted, also)
    model_files.save(exported, target)
    return ExportReport(os.fspath(path), "Keras", len(exported.graph), tuple(step.batch), len(pure.pairs), 2, errors)


def _check_model(model: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ExportError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow before keras is imported"
        )
    if not isinstance(model, keras.Model):
        raise ExportError(f"{type(model).__name__} is no model of Keras 3 (keras.Model)")


def _specs(batch: Arrays, dynamic: bool) -> dict[str, Any]:
    """Return the shape and dtype of each array; a dynamic batch has no size along the first axis."""
    size = next(iter(batch.values())).shape[:1]
    specs = {}
    for name, array in batch.items():
        free = dynamic and array.ndim > 0 and array.shape[:1] == size
        shape = (None, *array.shape[1:]) if free else array.shape
        specs[name] = tf.TensorSpec(shape, array.dtype)
    return specs


def _outputs_of(pure: PureStep, values: Arrays) -> Arrays:
    """Return the values of a step's outputs."""
    return {name: values[pure.pairs.get(name, name)] for name in pure.outputs}


def _fix_constants(model: ir.Model, pure: PureStep) -> None:
    """Put the values of variables into the file that no step assigns: frozen weights, and the rate, which can be fed."""
    graph = model.graph
    for value in tuple(graph.inputs):
        if value.name in pure.first and value.name not in pure.pairs.values():
            array = pure.first[value.name]
            value.const_value = ir.tensor(array, name=value.name)
            graph.register_initializer(value)
            if value.name != RATE:
                graph.inputs.remove(value)


def _to_onnx(pure: PureStep) -> ir.Model:
    def flat(*values: Any) -> dict[str, Any]:
        return {f"output_{index}": tf.identity(value) for index, value in enumerate(pure.run(*values))}

    specs = [
        tf.TensorSpec(spec.shape, spec.dtype, f"input_{index}") for index, spec in enumerate(pure.specs.values())
    ]
    model = ir.from_proto(convert(flat, specs))
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    graph.inputs[:] = [inputs[f"input_{index}"] for index in range(len(pure.specs))]
    graph.outputs[:] = [outputs[f"output_{index}"] for index in range(len(pure.outputs))]
    for value, (name, spec) in zip(graph.inputs, pure.specs.items(), strict=True):
        value.name = name
        value.shape = ir.Shape([BATCH if size is None else size for size in spec.shape])
    for value, name in zip(graph.outputs, pure.outputs, strict=True):
        value.name = name
    return model
