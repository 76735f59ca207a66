"""One training step of a Keras model as an ONNX file: forward, backward, optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common
import tensorflow as tf

from graphscale.errors import ExportError
from graphscale.exporters.comparison import Comparison, OwnStep
from graphscale.exporters.export_report import ExportReport
from graphscale.exporters.python_state import Values, notes_on, read_values
from graphscale.exporters.scattered_sums import rewrite_scattered_sums
from graphscale.exporters.step_file import complete_step, gradient_name, remove_outputs
from graphscale.exporters.tensorflow.conversion import convert
from graphscale.exporters.tensorflow.index_bounds import bound_indices
from graphscale.exporters.tensorflow.keras_step import LOSS, RATE, KerasStep, make_keras_step
from graphscale.exporters.tensorflow.pure_step import PureStep, make_pure
from graphscale.exporters.tensorflow.unrolling import unrolled
from graphscale.files import saving, writing
from graphscale.files.tensor_files import Arrays
from graphscale.process.summary import few

__all__ = ["export"]

_BATCH = "batch"
_STEPS = 2  # compared ones: moments, and biases that begin at zero, take part from the second on


def export(
    model: Any,
    example_batch: Any,
    loss: Any,
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    dynamic_batch: bool,
    metrics: bool,
) -> ExportReport:
    """Export the training step of a Keras model; see `graphscale.exporters.tensorflow.export_step`."""
    target = writing.check_output(path)
    _prepare(model, loss, optimizer)
    step = make_keras_step(model, example_batch, metrics)
    batches = [step.batch] if not dynamic_batch else [step.batch, _longer(step.batch)]
    before = _read_state(model)
    for batch in batches:
        with step.unchanged(), step.users_code(f"run on {_batch_size(batch)} rows"):
            _, gradients, _ = step.run_eagerly(batch)
    notes = notes_on(before, _read_state(model))
    with step.unchanged(), unrolled(model) as unrolled_layers, step.users_code("traced"):
        model.reset_metrics()
        pure = make_pure(step.run_with_gradients, _specs(step.batch, dynamic_batch), step.state, step.sums)
    exported = _to_onnx(pure, step)
    _keep_constants(exported, pure)
    complete_step(
        exported,
        pure.first,
        pure.pairs,
        losses=[LOSS],
        metrics=[name for name in pure.outputs if name not in (LOSS, *pure.pairs, *map(gradient_name, gradients))],
        documentation=f"Training step of {model.name}, exported from Keras {keras.__version__}.",
    )
    comparison = Comparison(exported, _own(step, pure, gradients))
    for batch in batches:
        comparison.compare([batch] * (_STEPS if batch is step.batch else 1), step.values())
    remove_outputs(exported, map(gradient_name, gradients))
    saving.save(exported, target)
    return ExportReport(
        path=os.fspath(path),
        framework=f"Keras {keras.__version__}",
        nodes=len(exported.graph),
        inputs=tuple(step.batch),
        states=len(pure.pairs),
        steps=_STEPS,
        errors=comparison.errors,
        notes=(*_notes(step, pure, unrolled_layers), *notes, *comparison.notes),
    )


def _own(step: KerasStep, pure: PureStep, weights: Iterable[str]) -> OwnStep:
    """Return Keras's step for the comparison."""

    output_of = {name: output for output, name in pure.pairs.items()}

    def run(number: int, batch: Arrays, state: Arrays, gradients: Arrays) -> Arrays:
        with step.unchanged(), step.users_code(f"run in step {number} of the comparison"):
            step.assign(state)
            outputs, own, after = step.run_eagerly(batch, gradients)
        own = {gradient_name(name): value for name, value in own.items()}
        return outputs | own | {output_of.get(name, name): value for name, value in after.items()}

    statistics = {output_of[v.path] for v in step.model.non_trainable_variables if v.path in output_of}
    coarse = {*pure.outputs} - {*pure.pairs} | statistics
    return OwnStep(
        "Keras",
        run,
        pure.pairs,
        [LOSS],
        {gradient_name(name): name for name in weights},
        dict.fromkeys(coarse, step.precision.name),
    )


def _prepare(model: Any, loss: Any, optimizer: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ExportError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow before keras is imported"
        )
    if not isinstance(model, keras.Model):
        raise ExportError(f"the model is a {type(model).__name__}; pass a keras.Model of Keras 3")
    if (loss is None) != (optimizer is None):
        raise ExportError("pass both loss and optimizer, or neither and a compiled model")
    if loss is not None:
        model.compile(optimizer, loss)


def _read_state(model: Any) -> Values:
    """Read the Python values of a model and of the losses of its user."""

    def attributes(value: Any) -> Mapping[str, Any] | None:
        if not isinstance(value, keras.Layer):
            return None
        of_keras = type(value).__module__.startswith("keras.")
        own = {} if of_keras else {key: inner for key, inner in vars(value).items() if key != "_layers"}
        return {layer.name: layer for layer in value._layers} | own

    return read_values({"": model, "loss": getattr(model, "loss", None)}, attributes)


def _longer(batch: Arrays) -> Arrays:
    """Return a batch with its first row once more at the end."""
    size = _batch_size(batch)
    return {
        name: np.concatenate([array, array[:1]]) if array.ndim and len(array) == size else array
        for name, array in batch.items()
    }


def _batch_size(batch: Arrays) -> int:
    first = next(iter(batch.values()))
    if first.ndim == 0 or len(first) == 0:
        raise ExportError("the first array of the example batch has no rows")
    return len(first)


def _specs(batch: Arrays, dynamic: bool) -> dict[str, Any]:
    """Return the shape and dtype of each array; a dynamic batch has no size along the first axis."""
    size = _batch_size(batch)
    specs = {}
    for name, array in batch.items():
        free = dynamic and array.ndim > 0 and len(array) == size
        specs[name] = tf.TensorSpec((None, *array.shape[1:]) if free else array.shape, array.dtype)
    return specs


def _to_onnx(pure: PureStep, step: KerasStep) -> ir.Model:
    """Convert a step, and give its inputs and outputs their names."""

    def flat(*values: Any) -> dict[str, Any]:
        return {f"output_{index}": tf.identity(value) for index, value in enumerate(pure.run(*values))}

    specs = [tf.TensorSpec(spec.shape, spec.dtype, f"input_{index}") for index, spec in enumerate(pure.specs.values())]
    model = ir.from_proto(convert(flat, specs, where=step.locate))
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    graph.inputs[:] = [inputs[f"input_{index}"] for index in range(len(pure.specs))]
    graph.outputs[:] = [outputs[f"output_{index}"] for index in range(len(pure.outputs))]
    for value, (name, spec) in zip(graph.inputs, pure.specs.items(), strict=True):
        value.name = name
        value.shape = ir.Shape([_BATCH if size is None else size for size in spec.shape])
    for value, name in zip(graph.outputs, pure.outputs, strict=True):
        value.name = name
    bound_indices(model)
    rewrite_scattered_sums(model)
    return model


def _keep_constants(model: ir.Model, pure: PureStep) -> None:
    """Put the values of variables into the file that the step does not assign.

    Frozen weights become initializers. The learning rate stays an input as well, so that it can be fed.
    """
    carried, graph = set(pure.pairs.values()), model.graph
    for value in tuple(graph.inputs):
        name = str(value.name)
        if name in carried or name not in pure.first:
            continue
        value.const_value = ir.tensor(pure.first[name], name=name)
        graph.register_initializer(value)
        if name != RATE:
            graph.inputs.remove(value)
        else:
            value.doc_string = "the learning rate: this value, unless another one is fed"


def _notes(step: KerasStep, pure: PureStep, layers: Sequence[str]) -> Iterator[str]:
    if RATE in pure.first:
        yield f"{RATE} is {float(pure.first[RATE]):g} unless it is fed"
    elif any(not isinstance(each.learning_rate, keras.Variable) for each in step.optimizers):
        yield "the learning rate follows its schedule inside the step"
    if step.rescaled:
        yield "Keras's LossScaleOptimizer is left out: gs.scale puts the loss scale into the graph"
    if layers:
        yield f"the time steps of {few(layers)} are written one after the other: their number is fixed"
    if any(name.endswith("seed_generator_state") for name in pure.pairs.values()):
        yield "random numbers are those that Keras draws: their seeds are carried state"
