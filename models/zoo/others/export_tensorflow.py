"""Export TensorFlow training steps to ONNX with tf2onnx, without a loss scale and with the rule of TensorFlow.

    pip install tensorflow-cpu==2.19.0 tf2onnx==1.17.0 onnx==1.22.0 onnxruntime
    python -m models.zoo.others.export_tensorflow

tensorflow_step.onnx is the original. In tensorflow_cond.onnx the rule of TensorFlow's DynamicLossScale is written on
tensors, with the same `tf.cond`: tf2onnx converts no variable that is assigned inside of a condition. In
tensorflow_where.onnx `tf.where` leaves out a growth that overflows: tf2onnx writes it as a sum of products with 0 and
1, and infinity times 0 is NaN.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import tensorflow as tf

from graphscale.exporters.tensorflow.conversion import OPSET, convert

HERE = Path(__file__).resolve().parent
RATE, MOMENTUM, PERIOD = 0.1, 0.9, 2000
SHAPES = {"w1": (3, 5), "b1": (5,), "w2": (5, 1)}


def loss_of(x: tf.Tensor, y: tf.Tensor, w1: tf.Tensor, b1: tf.Tensor, w2: tf.Tensor) -> tf.Tensor:
    """The loss of a network with one hidden layer."""
    return tf.reduce_mean(tf.square(tf.tanh(x @ w1 + b1) @ w2 - y))


def apply(weights: list[tf.Tensor], momenta: list[tf.Tensor], grads: list[tf.Tensor]) -> list[tf.Tensor]:
    """A step of gradient descent with momentum."""
    new = [MOMENTUM * m + g for m, g in zip(momenta, grads, strict=True)]
    return [w - RATE * m for w, m in zip(weights, new, strict=True)] + new


def plain(x: tf.Tensor, y: tf.Tensor, *state: tf.Tensor) -> dict[str, tf.Tensor]:
    """The step without a loss scale."""
    weights, momenta = state[:3], state[3:]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = loss_of(x, y, *weights)
    return {"loss": loss, **named(apply(weights, momenta, tape.gradient(loss, list(weights))))}


def select(flag: tf.Tensor, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Select by a condition."""
    return tf.cond(flag, lambda: tf.identity(one), lambda: tf.identity(other))


def scaled(select, x: tf.Tensor, y: tf.Tensor, *state: tf.Tensor) -> dict[str, tf.Tensor]:
    """The step with a dynamic loss scale; `select` leaves out a growth that overflows."""
    weights, momenta, (scale, good) = state[:3], state[3:6], state[6:]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = loss_of(x, y, *weights)
        scaled_loss = loss * scale
    grads = [g / scale for g in tape.gradient(scaled_loss, list(weights))]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads])

    def grow() -> tuple[tf.Tensor, tf.Tensor]:
        grown = scale * 2.0
        return tf.cond(
            good + 1 >= PERIOD,
            lambda: (select(tf.math.is_finite(grown), grown, scale), tf.zeros_like(good)),
            lambda: (tf.identity(scale), good + 1),
        )

    following = tf.cond(finite, grow, lambda: (tf.maximum(scale / 2.0, 1.0), tf.zeros_like(good)))
    new = tf.cond(
        finite,
        lambda: apply(weights, momenta, grads),
        lambda: [tf.identity(value) for value in (*weights, *momenta)],
    )
    more = dict(zip(("loss_scale.next", "good_steps.next"), following, strict=True))
    return {"loss": tf.identity(loss), **named(new), **more}


def named(values: list[tf.Tensor]) -> dict[str, tf.Tensor]:
    """Return next values by name."""
    names = (*SHAPES, *(f"{name}.momentum" for name in SHAPES))
    return {f"{name}.next": tf.identity(value) for name, value in zip(names, values, strict=True)}


def export(function, state: dict[str, np.ndarray], name: str) -> None:
    """Write a step as NAME.onnx, with its state as initial values."""
    batch = {"x": np.zeros((4, 3), np.float32), "y": np.zeros((4, 1), np.float32)}
    specs = [tf.TensorSpec(value.shape, value.dtype, key) for key, value in (batch | state).items()]
    model = convert(function, specs, OPSET)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, key) for key, value in state.items())
    path = HERE / f"{name}.onnx"
    onnx.save(model, path)
    print(f"{name}: {len(model.graph.node)} nodes, {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    random = np.random.default_rng(0)
    weights = {key: random.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}
    state = weights | {f"{key}.momentum": np.zeros_like(value) for key, value in weights.items()}
    export(plain, state, "tensorflow_step")
    own = {"loss_scale": np.array(2**15, np.float32), "good_steps": np.array(0, np.int64)}
    export(partial(scaled, select), state | own, "tensorflow_cond")
    export(partial(scaled, tf.where), state | own, "tensorflow_where")
