"""Lowerings of TensorFlow's operators against TensorFlow: values and gradients, for two sizes of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphscale.errors import ExportError

pytestmark = pytest.mark.tensorflow

Function = Callable[[Any, Any], Any]
CASES: dict[str, tuple[Function, tuple[int, ...]]] = {}


def case(name: str, function: Function, *shape: int) -> None:
    """Register a function of TensorFlow and of a batch of arrays of that shape."""
    CASES[name] = (function, shape)


case("activations", lambda tf, x: tf.nn.elu(x) + tf.nn.selu(x) + tf.nn.relu6(4 * x) + tf.nn.leaky_relu(x), 7)
case("softplus, softsign", lambda tf, x: tf.nn.softplus(x) * tf.nn.softsign(x) + tf.math.log1p(x * x), 7)
case("roots", lambda tf, x: tf.sqrt(x * x + 1) + tf.math.rsqrt(x * x + 2) + tf.math.reciprocal(x * x + 3), 7)
case("expm1, erfc", lambda tf, x: tf.math.expm1(x) + tf.math.erfc(x) + tf.math.xlogy(x, x * x + 1), 7)
case("mean over the batch", lambda tf, x: (x - tf.reduce_mean(x, 0, keepdims=True)) * tf.reduce_mean(x, 1)[:, None], 7)
case("broadcast", lambda tf, x: x * tf.reduce_sum(x, [0, 2], keepdims=True) + x[0, 0] * x[..., :1], 3, 4)
case("concat", lambda tf, x: tf.concat([x, x[:, 1:] * 3, tf.tanh(x)], 1) * 2, 5)
case("concat of batches", lambda tf, x: tf.square(tf.concat([x, 2 * x], 0)), 5)
case("slice", lambda tf, x: x[:, 1:-1] * x[:, -3:], 5)
case("slice with steps", lambda tf, x: x[:, ::2] * x[:, ::-2], 7)
case("slice with uneven steps", lambda tf, x: x[:, 1:6:3] * x[:, -2:0:-3], 7)
case("slice that begins behind", lambda tf, x: x[:, -1] * x[:, 0] * x[..., 2], 5)
case("slice with new axes", lambda tf, x: x[:, None, 1, ..., 2:] * x[:, tf.newaxis, :, 0, None, :1], 3, 4, 5)
case("slice of the batch", lambda tf, x: x[1:] * x[-1] * tf.reduce_sum(x[0] * x[-2:], 0), 5)
case("gather", lambda tf, x: tf.gather(x, [2, 0, 2], axis=1) * tf.gather(x, 1, axis=1)[:, None], 5)
case("max pool", lambda tf, x: tf.nn.max_pool2d(x, 3, 2, "SAME") * 2, 8, 7, 3)
case("max pool of valid windows", lambda tf, x: tf.nn.max_pool2d(x, [2, 3], [2, 1], "VALID"), 7, 7, 2)
case("average pool", lambda tf, x: tf.square(tf.nn.avg_pool2d(x, 3, 2, "SAME")), 8, 7, 3)
case("average pool of whole windows", lambda tf, x: tf.square(tf.nn.avg_pool2d(x, 2, 2, "VALID")), 8, 6, 3)
case("average pool of uneven windows", lambda tf, x: tf.square(tf.nn.avg_pool2d(x, 2, 2, "SAME")), 7, 5, 3)
case("nearest pixels", lambda tf, x: tf.square(tf.compat.v1.image.resize_nearest_neighbor(x, [8, 9])), 4, 3, 2)
case("bilinear pixels", lambda tf, x: tf.square(tf.image.resize(x, [7, 9])), 4, 3, 2)

case("one-hot codes of a batch", lambda tf, x: tf.one_hot(tf.cast(3 * x, tf.int32), tf.shape(x)[0]) * x[..., None], 5)
case(
    "sums by indices", lambda tf, x: tf.math.unsorted_segment_sum(x, tf.cast(4 * x[:, 0], tf.int32) % 5 - 2, 3) ** 2, 5
)
case("softmax", lambda tf, x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(2 * x), x), 5)
case("l2 loss", lambda tf, x: tf.nn.l2_loss(x) * x, 5)


def kernel(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def convolution(tf: Any, x: Any, **options: Any) -> Any:
    """Convolve by a kernel that depends on the batch, so that it has a gradient."""
    w = kernel(*options.pop("kernel")) * tf.reduce_mean(x)
    return getattr(tf.nn, options.pop("kind", "conv2d"))(x, w, **options)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "strides": {"kernel": (3, 2, 4, 3), "strides": 2, "padding": "SAME"},
    "valid strides": {"kernel": (2, 2, 4, 3), "strides": 3, "padding": "VALID"},
    "dilations": {"kernel": (3, 2, 4, 3), "strides": 1, "padding": "SAME", "dilations": 2},
    "depthwise": {"kernel": (3, 3, 4, 2), "strides": [1, 2, 2, 1], "padding": "SAME", "kind": "depthwise_conv2d"},
    "explicit pads": {"kernel": (3, 3, 4, 2), "strides": 2, "padding": [[0, 0], [1, 0], [0, 2], [0, 0]]},
}
for name, options in CONVOLUTIONS.items():
    case(f"convolution, {name}", lambda tf, x, options=options: convolution(tf, x, **options), 8, 7, 4)


def in_float16(tf: Any, x: Any) -> Any:
    """Pool and gather whole numbers, which float16 adds exactly: the gradients add numbers by their places."""
    half = tf.cast(x + tf.stop_gradient(tf.round(4 * x) - x), tf.float16)
    pooled = tf.nn.max_pool2d(half, 2, 2, "VALID")
    return tf.cast(pooled * tf.gather(half, [1, 0], axis=1)[:, :, :2], tf.float32)


def one_hot(tf: Any, x: Any) -> Any:
    """Write indices as one-hot codes: some are negative, and some too large."""
    index = tf.cast(tf.round(4 * x), tf.int64)
    first = tf.one_hot(index, 3, 2.0, 1.0, axis=1) + tf.one_hot(index, 3, axis=1)
    flags = tf.one_hot(tf.cast(index, tf.int8), 3, True, False, dtype=tf.bool)
    return tf.reduce_sum(x) * (first + tf.where(tf.transpose(flags, [0, 2, 1]), 0.5, 0.25))


def transposed(tf: Any, x: Any) -> Any:
    w = kernel(3, 3, 2, 4) * tf.reduce_mean(x)
    return tf.square(tf.nn.conv2d_transpose(x, w, [tf.shape(x)[0], 9, 9, 2], 2, "SAME"))


def volumes(tf: Any, x: Any) -> Any:
    y = tf.nn.conv3d(x, kernel(2, 2, 2, 2, 3) * tf.reduce_mean(x), [1, 2, 1, 1, 1], "SAME")
    return tf.nn.max_pool3d(y, 2, 1, "VALID") * tf.nn.avg_pool3d(y, 2, 1, "VALID")


def normalized(tf: Any, x: Any) -> Any:
    scale, offset = tf.reduce_sum(x, [0, 1, 2]), tf.reduce_mean(x, [0, 1, 2])
    y, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, epsilon=1e-3)
    return y * y + tf.stop_gradient(mean + variance)


case("one-hot codes", one_hot, 5)
case("sums of float16", in_float16, 4, 4, 3)
case("convolution, transposed", transposed, 5, 5, 4)
case("convolution, three axes", volumes, 5, 4, 4, 2)
case("fused batch normalization", normalized, 4, 3, 2)


def run_both(function: Callable[[Any], dict[str, Any]], x: np.ndarray, *sizes: int) -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    pytest.importorskip("tf2onnx", reason="needs tf2onnx")
    import onnxruntime as ort

    from graphscale.exporters.scattered_sums import rewrite_scattered_sums
    from graphscale.exporters.tensorflow.conversion import convert
    from graphscale.exporters.tensorflow.pure_step import make_pure

    pure = make_pure(function, {"x": tf.TensorSpec([None, *x.shape[1:]], x.dtype)}, {})

    def named(value: Any) -> dict[str, Any]:
        return dict(zip(pure.outputs, pure.run(value), strict=True))

    model = ir.from_proto(convert(named, [tf.TensorSpec([None, *x.shape[1:]], x.dtype, "x")]))
    rewrite_scattered_sums(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for size in sizes:
        wanted = function(tf.constant(x[:size]))
        for name, actual in zip(names, session.run(names, {"x": x[:size]}), strict=True):
            expected = wanted[name].numpy()
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
            tolerance = 1e-5 * max(np.abs(expected).max(initial=0), 1)
            np.testing.assert_allclose(actual, expected, 0, tolerance, err_msg=f"{name}, {size} rows")


def gradient(tf: Any, x: Any, function: Callable[[Any], Any]) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tf.convert_to_tensor(tape.gradient(y, x))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    function, shape = CASES[name]

    def step(x: Any) -> dict[str, Any]:
        return {"y": function(tf, x), "gradient": gradient(tf, x, lambda value: function(tf, value))}

    x = np.random.default_rng(1).standard_normal((4, *shape)).astype(np.float32)
    run_both(step, x, 4, 3)


def test_random_numbers_are_those_of_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

    def draw(seeds: Any) -> dict[str, Any]:
        shape, random = [tf.shape(seeds)[0], 5], tf.random
        return {
            "uniform": random.stateless_uniform(shape, seeds[0]),
            "half": random.stateless_uniform(shape, seeds[1], dtype=tf.float16),
            "normal": random.stateless_normal(shape, seeds[0] + 1),
            "whole": random.stateless_uniform(shape, seeds[1], -3, 17, tf.int32),
            "dropped": tf.nn.experimental.stateless_dropout(tf.ones(shape), 0.4, seeds[0]),
        }

    run_both(draw, np.array([[0, 0], [2**31 - 5, 7], [123456, 2**30]], np.int32), 3, 2)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda tf, x: tf.raw_ops.Bitcast(input=x, type=tf.int32), "Bitcast with the bits of a number"),
        (
            lambda tf, x: tf.random.stateless_uniform([3], tf.cast(x[0], tf.int32), dtype=tf.float64),
            "numbers of float64",
        ),
        (lambda tf, x: gradient(tf, x, lambda y: y[::2]), "StridedSliceGrad with steps along the batch"),
        (lambda tf, x: tf.math.lgamma(x), "the operator Lgamma has no ONNX equivalent yet: node Lgamma"),
    ],
)
def test_refusals_name_the_operator(function: Function, reason: str) -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    with pytest.raises(ExportError, match=reason):
        run_both(lambda x: {"y": function(tf, x)}, np.ones((2, 2), np.float32), 2)
