"""Kinds by TensorFlow as people export them, with a rate that falls by itself: denoising with limited weights."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from models.zoo.arrays import normal
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, kind
from models.zoo.tensorflow.kinds_mixed_tensorflow import adam, apply_dense, dense_layer, derive, zeros


@kind("tf-plateau-denoiser", "tensorflow")
def plateau_denoiser() -> Iterator[Step]:
    """Yield a denoiser with limited columns whose rate is carried, and halved when an average of the loss stays."""

    def loss(w: Arrays, values: Arrays) -> tuple[tf.Tensor, Outputs]:
        clean = values["clean"]
        noisy = clean + values["noise_level"] * values["noise"]
        x = tf.nn.selu(apply_dense(w, "encode1", noisy))
        code = apply_dense(w, "encode2", x)
        rebuilt = apply_dense(w, "decode2", tf.nn.selu(apply_dense(w, "decode1", code)))
        error = tf.reduce_mean(tf.math.squared_difference(rebuilt, clean))
        sparsity = 0.01 * tf.reduce_mean(tf.abs(code))
        before = tf.reduce_mean(tf.square(noisy - clean))
        gain = tf.math.log(before / error) * (10 / np.log(10))
        return error + sparsity, Outputs(metrics={"mse": error, "sparsity": sparsity, "gain_in_decibels": gain})

    weights = dense_layer(18, 14, "encode1") | dense_layer(14, 6, "encode2")
    weights |= dense_layer(6, 12, "decode1") | dense_layer(12, 18, "decode2")
    batch = {"clean": normal(7, 18), "noise": normal(7, 18)}
    fed = {"noise_level": np.float32(0.3)}
    carried = {"learning_rate": np.float32(0.01), "average_loss": np.float32(1), "best": np.float32(10)}
    carried["wait"] = np.int32(0)

    def limited(weight: tf.Tensor) -> tf.Tensor:
        """Return the kernel with columns no longer than 2, as `keras.constraints.MaxNorm` does."""
        norms = tf.sqrt(tf.reduce_sum(tf.square(weight), 0, keepdims=True))
        return weight * (tf.clip_by_value(norms, 0.0, 2.0) / (1e-6 + norms))

    def run(values: Arrays, nadam: bool) -> Outputs:
        value, more, grads = derive(loss, weights, values)
        average = 0.9 * values["average_loss"] + 0.1 * value
        better = average < values["best"] - 1e-4
        wait = tf.where(better, 0, values["wait"] + 1)
        rate = tf.where(wait >= 8, tf.maximum(values["learning_rate"] * 0.5, 1e-5), values["learning_rate"])
        states = {"average_loss": average, "best": tf.minimum(values["best"], average), "learning_rate": rate}
        states["wait"] = tf.where(wait >= 8, 0, wait)
        count = values["iteration"] + 1 if nadam else None
        if nadam:
            states["iteration"] = count
        for name, grad in grads.items():
            if nadam:
                time = tf.cast(count, tf.float32)
                _, m, v = adam(values[name], grad, values[f"{name}_m"], values[f"{name}_v"], time, rate)
                ahead = 0.9 * m / (1 - tf.pow(0.9, time + 1)) + 0.1 * grad / (1 - tf.pow(0.9, time))
                moved = values[name] - rate * ahead / (tf.sqrt(v / (1 - tf.pow(0.99, time))) + 1e-6)
                states |= {f"{name}_m": m, f"{name}_v": v}
            else:
                square = 0.95 * values[f"{name}_square"] + 0.05 * tf.square(grad)
                change = tf.sqrt(values[f"{name}_change"] + 1e-4) * grad * tf.math.rsqrt(square + 1e-4)
                moved = values[name] - 100 * rate * change
                states |= {f"{name}_square": square}
                states |= {f"{name}_change": 0.95 * values[f"{name}_change"] + 0.05 * tf.square(change)}
            states[name] = limited(moved) if name.endswith("kernel") else moved
        return Outputs({"loss": value}, more.metrics, states=states)

    states = weights | zeros(weights, "m", "v") | carried | {"iteration": np.int64(0)}
    yield Step("nadam", Inputs(batch, states, fed), lambda values: run(values, True), PLAIN)
    states = weights | zeros(weights, "square", "change") | carried
    style = STYLES["scrambled-initializers"]
    yield Step("adadelta", Inputs(batch, states, fed), lambda values: run(values, False), style)
