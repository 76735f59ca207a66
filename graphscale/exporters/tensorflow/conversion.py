"""From a function of TensorFlow without variables to ONNX, by tf2onnx with the lowerings of this package."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import onnx
import tensorflow as tf
import tf2onnx.optimizer
import tf2onnx.tfonnx

from graphscale.errors import ExportError, one_line
from graphscale.exporters.tensorflow.lowerings import handlers

__all__ = ["OPSET", "convert"]

# The newest that tf2onnx writes.
OPSET = 18


def convert(
    function: Callable[..., Any],
    specs: Sequence[Any],
    opset: int = OPSET,
    where: Callable[[str], str] = "node {}".format,
) -> onnx.ModelProto:
    """Convert a function without variables.

    Args:
        function: from tensors to tensors, or to a dictionary of them, whose keys become the names of the outputs.
        specs: a `tf.TensorSpec` for each argument.
        opset: the opset of the graph.
        where: describes the place of a node by its name.

    Raises:
        ExportError: an operator has no lowering.
    """
    traced, failed = tf.function(function, specs, autograph=False), dict[str, str]()
    with _quiet(), _without_harmful_passes():
        try:
            model: onnx.ModelProto
            model, _ = tf2onnx.convert.from_function(traced, specs, opset=opset, custom_op_handlers=handlers(failed))
        except Exception as error:  # tf2onnx raises what it comes across
            raise ExportError(f"tf2onnx cannot convert the step: {one_line(error)}") from error
    unknown = [node for node in model.graph.node if not onnx.defs.has(node.op_type, node.domain)]
    # One with a reason first: others may be there for its sake.
    for node in sorted(unknown, key=lambda node: node.name not in failed):
        operator = failed.get(node.name, node.op_type)
        raise ExportError(f"the operator {operator} has no ONNX equivalent yet: {where(node.name)}")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("tf2onnx")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


# Rewriters that fuse nodes of a forward pass, whose values the backward pass reads as well: a dilated convolution lost
# the images that its gradient needs. One makes one Gemm of a product and a sum, such as a weight's gradient and its
# momentum, where no loss scale can enter.
_FUSING = (
    *("rewrite_gemm", "rewrite_conv_dilations", "rewrite_conv2d_with_pad", "rewrite_biasadd_with_conv2d"),
    *("rewrite_layer_normalization", "rewrite_leakyrelu", "rewrite_thresholded_relu", "rewrite_flatten"),
    *("rewrite_dropout", "rewrite_random_uniform", "rewrite_random_uniform_fold_const", "rewrite_random_normal"),
)


@contextmanager
def _without_harmful_passes() -> Iterator[None]:
    """Leave out passes of tf2onnx 1.17 that damage training steps.

    `optimize_transpose` changes the axes of a mean or sum behind a Transpose that other nodes read as well, and then
    leaves the Transpose where it is: the loss of a convolutional network was wrong by 1 %.
    """
    passes = tf2onnx.optimizer._get_optimizers()
    fusing: dict[str, Any] = dict.fromkeys(_FUSING, lambda _, ops: ops)
    # It copies the graph before each pass, to have it where the pass fails: three quarters of its time.
    no_copies = mock.patch.dict(os.environ, {"TF2ONNX_CATCH_ERRORS": "FALSE"})
    with mock.patch.dict(passes), mock.patch.multiple(tf2onnx.tfonnx, **fusing), no_copies:
        del passes["optimize_transpose"]
        yield
