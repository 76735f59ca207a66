"""Export training steps that are written in TensorFlow, by tf2onnx with the lowerings of `lowerings.py`."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import onnx
import tensorflow as tf
import tf2onnx.optimizer
import tf2onnx.tfonnx

from models.tensorflow.lowerings import handlers
from models.tensorflow.pure import PureStep, by_path, make_pure

logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)
# The newest that tf2onnx writes.
OPSET = 18


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
        the graph, and the same step in TensorFlow, with the present values of its inputs.
    """
    pure = make_pure(step, batch, state)

    def named(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        return {name: tf.identity(value) for name, value in zip(pure.outputs, pure.run(*values), strict=True)}

    specs = [tf.TensorSpec(value.shape, value.dtype, name) for name, value in pure.inputs.items()]
    with _without_harmful_passes():
        model = convert(named, specs, opset)
    # TensorFlow sorts a dictionary.
    in_order = sorted(model.graph.output, key=lambda output: pure.outputs.index(output.name))
    del model.graph.output[:]
    model.graph.output.extend(in_order)
    return model, pure


@contextmanager
def _without_harmful_passes() -> Iterator[None]:
    """Leave out two passes of tf2onnx 1.17.

    One changes the axes of a mean or sum behind a Transpose that other nodes read as well, and then leaves the
    Transpose where it is: the loss of `keras_convnet` was wrong by 1 %. The other makes one Gemm of a product and a
    sum, such as a weight's gradient and its momentum, where no loss scale can enter.
    """
    passes = tf2onnx.optimizer._get_optimizers()
    with mock.patch.dict(passes), mock.patch.object(tf2onnx.tfonnx, "rewrite_gemm", lambda _, ops: ops):
        del passes["optimize_transpose"]
        yield


def keras_state(*owners: Any) -> dict[str, tf.Variable]:
    """Return the variables of Keras models and optimizers by their paths, with dots."""
    return by_path(variable for owner in owners for variable in owner.variables)


def convert(function: Callable[..., Any], specs: Sequence[tf.TensorSpec], opset: int) -> onnx.ModelProto:
    """Convert a function without variables."""
    traced = tf.function(function, specs, autograph=False)
    model, _ = tf2onnx.convert.from_function(traced, specs, opset=opset, custom_op_handlers=handlers())
    unknown = {node.op_type for node in model.graph.node if not onnx.defs.has(node.op_type, node.domain)}
    if unknown:
        raise NotImplementedError(f"no lowering of {', '.join(sorted(unknown))}")
    return model
