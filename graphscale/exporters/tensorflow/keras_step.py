"""The training step of a Keras model, `train_step`, with its batch and its variables by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from graphscale.errors import ExportError, one_line
from graphscale.exporters.step_file import gradient_name, unique_names
from graphscale.exporters.tensorflow.gradient_record import GradientRecord
from graphscale.files.tensor_files import Arrays
from graphscale.graph.builder import Names

__all__ = ["LOSS", "RATE", "KerasStep", "find_optimizers", "make_keras_step", "name_variables"]

LOSS, RATE = "loss", "learning_rate"
_PARTS = ("x", "y", "sample_weight")


@dataclass(frozen=True)
class KerasStep:
    """A training step of a Keras model.

    Attributes:
        model: the model.
        optimizers: its optimizers, without loss scaling around them.
        structure: the batch as `train_step` takes it, with a name for each array.
        batch: an array for each name.
        state: the variables of model and optimizers by name.
        metrics: compute the metrics as well.
    """

    model: Any
    optimizers: tuple[Any, ...]
    structure: Any
    batch: Arrays
    state: dict[str, Any]
    metrics: bool = True

    @property
    def rescaled(self) -> bool:
        """The model's own optimizer scales the loss."""
        return isinstance(getattr(self.model, "optimizer", None), keras.optimizers.LossScaleOptimizer)

    @property
    def sums(self) -> list[Any]:
        """The variables of the metrics, which begin each step anew."""
        return [variable.value for variable in self.model.metrics_variables]

    @property
    def precision(self) -> np.dtype[Any]:
        """The coarsest type that a layer computes in."""
        names = {str(layer.compute_dtype) for layer in self.model._flatten_layers()}
        return np.dtype(min(names & {"float16", "float32", "float64"}, default="float32"))

    def run(self, *values: Any, given: Arrays | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run `train_step` on a batch.

        Args:
            values: the arrays of the batch.
            given: gradients for the optimizer, in place of those of this batch, by name.

        Returns:
            The loss and the metrics of this batch by name, and the gradients of this batch by the paths of the weights.
        """
        tensors = dict(zip(self.batch, values, strict=True))
        record = GradientRecord(given)
        with record.watching():
            logs = self.model.train_step(_fill(self.structure, tensors))
        losses = record.losses
        if len(losses) != 1 or losses[0].shape.rank != 0:
            found = f"{len(losses)} losses" if len(losses) != 1 else f"a loss of shape {losses[0].shape}"
            raise ExportError(
                f"train_step of {self.model.name} takes the gradient of {found}; a step has one scalar loss, and one "
                "call of GradientTape.gradient or Optimizer.minimize"
            )
        metrics: dict[str, Any] = {}
        if self.metrics:
            flat = {"/".join(map(str, path)): value for path, value in keras.tree.flatten_with_path(logs or {})}
            metrics = {name: tf.convert_to_tensor(value) for name, value in flat.items() if name != LOSS}
        return {LOSS: losses[0]} | metrics, record.gradients

    def run_with_gradients(self, *values: Any) -> dict[str, Any]:
        """Run `train_step`, and return the gradients beside its results, as `NAME.gradient`."""
        outputs, gradients = self.run(*values)
        named = {gradient_name(name): value for name, value in gradients.items()}
        unique_names([*outputs, *named])
        return outputs | named

    def run_eagerly(self, batch: Arrays, given: Arrays | None = None) -> tuple[Arrays, Arrays, Arrays]:
        """Train on a batch in TensorFlow itself.

        Returns:
            The results and gradients of `run`, and the next values of all variables.
        """
        self.model.reset_metrics()
        found = self.run(*(tf.constant(value) for value in batch.values()), given=given)
        outputs, gradients = ({name: value.numpy() for name, value in each.items()} for each in found)
        return outputs, gradients, self.values()

    def values(self) -> Arrays:
        """Return a copy of the present value of each variable."""
        return {name: np.array(variable.numpy()) for name, variable in self.state.items()}

    def assign(self, values: Arrays) -> None:
        """Give some variables other values."""
        for name, value in values.items():
            self.state[name].assign(value)

    def locate(self, node: str) -> str:
        """Name the layer of a node of the traced step, or else the node."""
        names = {layer.name for layer in self.model._flatten_layers()}
        for part in reversed(node.split("/")):
            # Scopes that were used before are numbered.
            plain = re.sub(r"_\d+$", "", part)
            if part in names or plain in names:
                backward = " in its backward pass" if node.startswith("gradient_tape") else ""
                return f"layer {part if part in names else plain}{backward}"
        return f"node {node}" + ("; metrics=False leaves the metrics out" if self.metrics else "")

    @contextlib.contextmanager
    def users_code(self, what: str) -> Iterator[None]:
        """Turn an error of the user's code, or of Keras in it, into one line: `train_step` cannot be `what`."""
        try:
            yield
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(f"train_step of {self.model.name} cannot be {what}: {one_line(error)}") from error

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore all variables, and the model's own optimizer, at the end."""
        variables = [*self.state.values(), *self.sums]
        before = [variable.numpy().copy() for variable in variables]
        own = getattr(self.model, "optimizer", None)
        if own is not None:
            self.model.optimizer = _inner(own)
        try:
            yield
        finally:
            if own is not None:
                self.model.optimizer = own
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)


def make_keras_step(model: Any, example_batch: Any, metrics: bool = True) -> KerasStep:
    """Build a compiled model and its optimizer for a batch, and name its arrays and variables.

    Args:
        model: a compiled Keras model.
        example_batch: `(x, y)` or `(x, y, sample_weight)`, as `train_on_batch` takes them.
        metrics: compute the metrics as well.

    Raises:
        ExportError: the batch or the model does not fit.
    """
    structure, batch = _name_batch(model, example_batch)
    _build(model, _fill(structure, {name: tf.constant(value) for name, value in batch.items()}))
    optimizers = tuple(find_optimizers(model))
    if not optimizers:
        raise ExportError(f"{model.name} has no optimizer; pass loss and optimizer, or compile the model")
    for optimizer in optimizers:
        _refuse_conditions(optimizer)
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    state = {name: variable.value for name, variable in name_variables(model, optimizers).items()}
    unique_names([*batch, *state])
    rates = [optimizer.learning_rate for optimizer in optimizers]
    if len(rates) == 1 and isinstance(rates[0], keras.Variable):
        state = {RATE if value is rates[0].value else name: value for name, value in state.items()}
    return KerasStep(model, optimizers, structure, batch, state, metrics)


def name_variables(model: Any, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Name the variables of a model, those of its metrics aside, and of its optimizers.

    Returns:
        The variables by their paths in Keras. Where several of an optimizer have one path, such as the factors of
        Adafactor, the path of each but the first ends in a number, in the order of `Optimizer.variables`.

    Raises:
        ExportError: two variables of the model have one path.
    """
    sums = {id(variable) for variable in model.metrics_variables}
    named = [(variable.path, variable) for variable in model.variables if id(variable) not in sums]
    unique_names([name for name, _ in named])
    names = Names(name for name, _ in named)
    owned = [variable for optimizer in optimizers for variable in optimizer.variables]
    return dict([*named, *((names.reserve(variable.path), variable) for variable in owned)])


def find_optimizers(model: Any) -> list[Any]:
    """Return the optimizers of a model, without loss scaling around them."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    inner = [_inner(each) for each in found if isinstance(each, keras.optimizers.Optimizer)]
    return list({id(each): each for each in inner}.values())


def _inner(optimizer: Any) -> Any:
    """Return an optimizer without Keras's loss scaling, which graphscale puts into the graph."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def _refuse_conditions(optimizer: Any) -> None:
    """Refuse options with which an optimizer assigns variables only in some steps."""
    for option, advice in _CONDITIONAL.items():
        value = getattr(optimizer, option, None)
        # Without averages, Keras overwrites nothing.
        if value and (option != "ema_overwrite_frequency" or optimizer.use_ema):
            raise ExportError(
                f"the optimizer {optimizer.name} has {option}={value}, so it assigns variables only in some "
                f"steps; {advice.format(value)}"
            )


_CONDITIONAL = {
    "gradient_accumulation_steps": "leave it out, and feed the rows of {} batches in one step: their mean gradient is "
    "the same",
    "ema_overwrite_frequency": "leave it out: the averages of use_ema=True are carried, and after load_weights "
    "optimizer.finalize_variable_values(model.trainable_variables) puts them into the model",
}


def _build(model: Any, data: Any) -> None:
    if model.built:
        return
    try:
        model(data[0] if isinstance(data, tuple) else data)
    except Exception as error:  # the user's code, and Keras's own errors
        raise ExportError(
            f"{model.name} cannot be built on the example batch, call it once before the export: {one_line(error)}"
        ) from error


def _name_batch(model: Any, example: Any) -> tuple[Any, Arrays]:
    """Return the batch with a name in place of each array, and the arrays by name."""
    if not isinstance(example, tuple) or not 1 <= len(example) <= len(_PARTS):
        raise ExportError("the example batch is a tuple (x, y) or (x, y, sample_weight), as train_on_batch takes them")
    batch: Arrays = {}
    ordered = {"x": _input_names(model), "y": getattr(model, "output_names", None) or []}

    def walk(value: Any, name: str, part: str) -> Any:
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {key: walk(each, str(key), part) for key, each in value.items()}
        if isinstance(value, list | tuple):
            names = ordered.get(part, [])
            fitting = names if len(names) == len(value) else [f"{name}_{index}" for index in range(len(value))]
            return type(value)([walk(each, own, part) for each, own in zip(value, fitting, strict=True)])
        free = name if name not in batch else f"{part}/{name}"
        batch[free] = _to_array(value, free)
        return free

    structure = tuple(walk(value, part, part) for value, part in zip(example, _PARTS, strict=False))
    return structure, batch


def _input_names(model: Any) -> Sequence[str]:
    try:
        return [tensor.name for tensor in keras.tree.flatten(model.inputs)]
    except (AttributeError, ValueError):  # not a functional model
        return []


def _to_array(value: Any, name: str) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype == np.float64:  # as Keras's fit does
        array = array.astype(keras.config.floatx())
    if array.dtype.kind not in "biuf":
        raise ExportError(f"{name} of the example batch is of dtype {array.dtype}; pass numbers")
    return array


def _fill(structure: Any, tensors: Mapping[str, Any]) -> Any:
    """Put tensors in the places of their names."""
    if isinstance(structure, str):
        return tensors[structure]
    if isinstance(structure, Mapping):
        return {key: _fill(value, tensors) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)([_fill(value, tensors) for value in structure])
    return structure
