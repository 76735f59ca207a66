"""Lowerings of TensorFlow's operators that tf2onnx does not know, or gets wrong: standard operators for each."""

from graphscale.exporters.tensorflow.lowerings import (  # noqa: F401  # they register their lowerings
    activation_gradients,
    convolution_gradients,
    indexing_gradients,
    losses_and_norms,
    pooling_gradients,
    random_numbers,
)
from graphscale.exporters.tensorflow.lowerings.lowering_writer import handlers

__all__ = ["handlers"]
