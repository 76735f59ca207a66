"""Export training steps that are written in TensorFlow, as graphs without values."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import tensorflow as tf

from graphscale.exporters.tensorflow.conversion import OPSET, convert
from graphscale.exporters.tensorflow.pure_step import PureStep, make_pure


def export_step(
    step: Callable[..., Mapping[str, tf.Tensor]],
    batch: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
    opset: int = OPSET,
) -> tuple[onnx.ModelProto, PureStep]:
    """Export a training step that changes variables.

    Args:
        step: takes the batch by position, returns its outputs by name, and assigns variables.
        batch: a sample of each input by name, of the size that the step is to have.
        state: the variables by name; `NAME.next` becomes the name of the next value of each.
        opset: the opset of the graph.

    Returns:
        the graph, and the same step in TensorFlow, with the present values of its variables.
    """
    pure = make_pure(step, batch, state)

    def named(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        return {name: tf.identity(value) for name, value in zip(pure.outputs, pure.run(*values), strict=True)}

    specs = [tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in pure.specs.items()]
    model = convert(named, specs, opset)
    # TensorFlow sorts a dictionary.
    in_order = sorted(model.graph.output, key=lambda output: pure.outputs.index(output.name))
    del model.graph.output[:]
    model.graph.output.extend(in_order)
    return model, pure
