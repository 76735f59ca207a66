"""Training steps of Keras models: export_step writes one, load_weights puts its trained weights back into the model."""

from __future__ import annotations

import os
from typing import Any

from graphscale.exporters.export_report import ExportReport
from graphscale.exporters.requirements import require

__all__ = ["export_step", "load_weights"]

_PACKAGES = (("tensorflow", "tensorflow-cpu"), ("keras", "keras"))


def export_step(
    model: Any,
    example_batch: tuple[Any, ...],
    loss: Any = None,
    optimizer: Any = None,
    path: str | os.PathLike[str] = "step.onnx",
    *,
    dynamic_batch: bool = True,
    metrics: bool = True,
) -> ExportReport:
    """Write the training step of a Keras model as one ONNX file, if ONNX Runtime computes the same from it as Keras.

    The step is the model's own `train_step`, a method of the user's included: forward and backward pass, regularizers,
    clipping, optimizer, statistics. Variables that it assigns are inputs with their values in the file, and their next
    values are outputs, under the paths of Keras: `dense/kernel` and `dense/kernel.next`, `adam/dense_kernel_momentum`
    and `adam/dense_kernel_momentum.next`. Frozen weights are constants. `learning_rate` (float32, one number) is an
    input whose value in the file is that of the optimizer; a schedule of Keras is a part of the step instead. Outputs
    are `loss`, the metrics of the batch, and the next values. The roles are in the metadata, so that `gs.scale(path)`
    needs no hint. The variables of the model and its optimizer are as before in the end.

    Args:
        model: a keras.Model (Keras 3 on TensorFlow), compiled, or to be compiled with `loss` and `optimizer`.
        example_batch: `(x, y)` or `(x, y, sample_weight)`, as `train_on_batch` takes them: arrays, or dictionaries or
            lists of arrays. The keys name the inputs of the step; a single array is `x`, `y` or `sample_weight`.
        loss: compiles the model, together with `optimizer`; as in `keras.Model.compile`.
        optimizer: as in `keras.Model.compile`. A LossScaleOptimizer is left out: graphscale puts the loss scale in.
        path: the file. Weights above 1 GB go to `NAME.data` beside it.
        dynamic_batch: let the first axis of the batch's arrays, as far as they have the length of the first one's,
            have any length.
        metrics: compute the metrics that the model was compiled with.

    Returns:
        The report of the comparison: two steps of ONNX Runtime against two of Keras, and one step with another number
        of rows where that is dynamic. Loss, metrics, gradients (`NAME.gradient`) and statistics are compared with those
        of Keras, and updates with those that Keras's optimizer makes of the exported step's gradients. Print it.

    Raises:
        ExportError: an operator has no ONNX equivalent, ONNX Runtime computes something else, or an argument does not
            fit. Nothing is written.
    """
    require("tensorflow", *_PACKAGES, ("tf2onnx", "tf2onnx"))
    from graphscale.exporters.tensorflow.keras_export import export

    return export(model, example_batch, loss, optimizer, path, dynamic_batch=dynamic_batch, metrics=metrics)


def load_weights(step_or_state: Any, model: Any) -> None:
    """Put the trained values of an exported step into the Keras model that it was made from, and into its optimizer.

    Args:
        step_or_state: a gs.Session, its `state_dict()`, a file of it (.npz, .safetensors), or a step whose initializers
            hold trained values.
        model: the keras.Model, changed in place: its variables of the same paths, and those of its optimizer as far as
            there are values for them.

    Raises:
        ExportError: a trained weight is missing, or has another shape or dtype; the model is not changed.
        ModelFileError: the file is missing, or of another format.
    """
    require("tensorflow", *_PACKAGES)
    from graphscale.exporters.tensorflow.keras_weights import load

    load(step_or_state, model)
