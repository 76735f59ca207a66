"""Kinds from the field by TensorFlow: lines of text, super-resolution, named entities, depth."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from models.zoo.arrays import normal
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind
from models.zoo.tensorflow.problems import labels

Tensor = tf.Tensor
EXPORTER = Style(names="exporter")
# (weights, all inputs) -> loss, metrics, next states
Objective = Callable[[Arrays, Arrays], tuple[Tensor, Arrays, Arrays]]
# (name, weight, gradient, slots, number of the step, rate) -> next weight, next slots
Update = Callable[..., tuple[Tensor, list[Tensor]]]


def conv(name: str, size: int, channels: int, filters: int) -> Arrays:
    kernel = normal(size, size, channels, filters, scale=(size * size * channels) ** -0.5)
    return {f"{name}/kernel": kernel, f"{name}/bias": normal(filters, scale=0.05)}


def linear(name: str, rows: int, columns: int) -> Arrays:
    return {f"{name}/kernel": normal(rows, columns, scale=rows**-0.5), f"{name}/bias": np.zeros(columns, np.float32)}


def convolve(w: Arrays, name: str, x: Tensor, stride: int = 1) -> Tensor:
    return tf.nn.bias_add(tf.nn.conv2d(x, w[f"{name}/kernel"], stride, "SAME"), w[f"{name}/bias"])


def apply(w: Arrays, name: str, x: Tensor) -> Tensor:
    return tf.nn.bias_add(tf.matmul(x, w[f"{name}/kernel"]), w[f"{name}/bias"])


def adam(name: str, w: Tensor, g: Tensor, slots: list[Tensor], t: Tensor, rate: Any) -> tuple[Tensor, list[Tensor]]:
    m, v = slots[0] * 0.9 + g * 0.1, slots[1] * 0.999 + tf.square(g) * 0.001
    rate = rate * tf.sqrt(1.0 - tf.pow(0.999, t)) / (1.0 - tf.pow(0.9, t))
    return w - rate * m / (tf.sqrt(v) + 1e-7), [m, v]


def adamw(name: str, w: Tensor, g: Tensor, slots: list[Tensor], t: Tensor, rate: Any) -> tuple[Tensor, list[Tensor]]:
    moved, slots = adam(name, w, g, slots, t, rate)
    return moved - (rate * 0.01 * w if "kernel" in name else 0.0), slots


def adadelta(name: str, w: Tensor, g: Tensor, slots: list[Tensor], t: Tensor, rate: Any) -> tuple[Tensor, list[Tensor]]:
    grown = 0.95 * slots[0] + 0.05 * tf.square(g)
    change = tf.sqrt(slots[1] + 1e-5) * tf.math.rsqrt(grown + 1e-5) * g
    return w - rate * change, [grown, 0.95 * slots[1] + 0.05 * tf.square(change)]


def momentum(name: str, w: Tensor, g: Tensor, slots: list[Tensor], t: Tensor, rate: Any) -> tuple[Tensor, list[Tensor]]:
    velocity = 0.9 * slots[0] - rate * g
    return w + velocity, [velocity]


def rmsprop(name: str, w: Tensor, g: Tensor, slots: list[Tensor], t: Tensor, rate: Any) -> tuple[Tensor, list[Tensor]]:
    square = 0.9 * slots[0] + 0.1 * tf.square(g)
    return w - rate * g / (tf.sqrt(square) + 1e-6), [square]


def one_step(
    variant: str,
    weights: Arrays,
    batch: Arrays,
    objective: Objective,
    update: Update,
    slots: tuple[str, ...],
    style: Style = PLAIN,
    *,
    rate: Callable[[Arrays, Tensor], Any] = lambda values, t: 0.001,
    states: Arrays | None = None,
    fed: Arrays | None = None,
    constants: Arrays | None = None,
    clip: Callable[[list[Tensor]], tuple[list[Tensor], Arrays]] = lambda grads: (grads, {}),
    rate_shown: bool = False,
) -> Step:
    """Return a step with a counter of iterations, as Keras has it."""
    own = {f"{slot}/{name}": np.zeros_like(weight) for name, weight in weights.items() for slot in slots}

    def run(values: Arrays) -> Outputs:
        present = {name: values[name] for name in weights}
        with tf.GradientTape() as tape:
            tape.watch(list(present.values()))
            loss, metrics, following = objective(present, values)
        grads = [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, list(present.values()))]
        grads, more = clip(grads)
        count = values["iterations"] + 1
        t = tf.cast(count, tf.float32)
        size, moved = rate(values, t), {}
        for (name, weight), grad in zip(present.items(), grads, strict=True):
            moved[name], after = update(name, weight, grad, [values[f"{slot}/{name}"] for slot in slots], t, size)
            moved |= {f"{slot}/{name}": value for slot, value in zip(slots, after, strict=True)}
        if rate_shown:
            more = more | {"learning_rate_used": size}
        return Outputs({"loss": loss}, metrics | more, states=moved | following | {"iterations": count})

    carried = weights | own | (states or {}) | {"iterations": np.int64(0)}
    return Step(variant, Inputs(batch, carried, fed or {}, constants or {}), run, style)


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Return the loss of each row."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)


@kind("field-line-reader", "tensorflow")
def line_reader() -> Iterator[Step]:
    """Characters of a line of text, one a column, aligned beforehand: Adadelta clipped by value; Adam at a fed rate."""
    weights = conv("conv1", 3, 1, 6) | conv("conv2", 3, 6, 9) | linear("columns", 27, 16) | linear("characters", 16, 13)
    batch = {"line": normal(2, 6, 20, 1), "text": labels(13, 2, 10), "is_text": np.ones((2, 10), np.float32)}
    batch["is_text"][1, 7:] = 0

    def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        x = tf.nn.max_pool2d(tf.nn.relu(convolve(w, "conv1", values["line"])), 2, 2, "VALID")
        x = tf.transpose(tf.nn.relu(convolve(w, "conv2", x)), [0, 2, 1, 3])
        logits = apply(w, "characters", tf.tanh(apply(w, "columns", tf.reshape(x, [-1, 27]))))
        real, text = tf.reshape(values["is_text"], [-1]), tf.reshape(values["text"], [-1])
        each = cross_entropy(logits, text) * real
        wrong = tf.cast(tf.not_equal(tf.argmax(logits, 1, tf.int32), text), tf.float32) * real
        total = tf.reduce_sum(real)
        line = tf.reduce_sum(tf.reshape(each, [2, 10]), 1)
        return (
            tf.reduce_sum(each) / total,
            {"character_errors": tf.reduce_sum(wrong) / total, "loss_per_line": line},
            {},
        )

    def clip(grads: list[Tensor]) -> tuple[list[Tensor], Arrays]:
        return [tf.clip_by_value(grad, -0.1, 0.1) for grad in grads], {}

    slots = ("accumulated_grads", "accumulated_deltas")
    yield one_step("adadelta", weights, batch, objective, adadelta, slots, clip=clip, rate=lambda values, t: 1.0)
    fed = {"learning_rate": np.float32(0.002)}

    def given(values: Arrays, t: Tensor) -> Tensor:
        return values["learning_rate"]

    yield one_step("adam", weights, batch, objective, adam, ("m", "v"), EXPORTER, rate=given, fed=fed)


@kind("field-super-resolution", "tensorflow")
def super_resolution() -> Iterator[Step]:
    """Images at twice the size by depth to space, a smooth absolute error, PSNR: Adam by pieces; RMSprop."""
    weights = conv("features", 5, 3, 12) | conv("mapping", 3, 12, 8) | conv("pixels", 3, 8, 12)
    batch = {"low": np.abs(normal(2, 6, 7, 3, scale=0.4)), "high": np.abs(normal(2, 12, 14, 3, scale=0.4))}

    def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        x = tf.tanh(convolve(w, "mapping", tf.tanh(convolve(w, "features", values["low"]))))
        error = tf.nn.depth_to_space(convolve(w, "pixels", x), 2) - values["high"]
        square = tf.reduce_mean(tf.square(error))
        psnr = -10.0 / np.log(10.0).astype(np.float32) * tf.math.log(square)
        return tf.reduce_mean(tf.sqrt(tf.square(error) + 1e-4)), {"psnr": psnr, "mse": square}, {}

    def pieces(values: Arrays, t: Tensor) -> Tensor:
        return tf.where(t < 100.0, 1e-3, tf.where(t < 200.0, 5e-4, 1e-4))

    yield one_step("adam", weights, batch, objective, adam, ("m", "v"), rate=pieces, rate_shown=True)

    def norm(grads: list[Tensor]) -> tuple[list[Tensor], Arrays]:
        size = tf.linalg.global_norm(grads)
        return [grad * tf.minimum(1.0, 0.5 / (size + 1e-6)) for grad in grads], {"gradient_norm": size}

    scrambled = Style(names="scrambled", states="overridable")
    yield one_step("rmsprop", weights, batch, objective, rmsprop, ("rms",), scrambled, clip=norm)


@kind("field-named-entities", "tensorflow")
def named_entities() -> Iterator[Step]:
    """Tags of words from a window around each, padded and weighted by class: AdamW without decay of vectors."""
    weights = {"embedding": normal(34, 10, scale=0.4)} | linear("window", 30, 18) | linear("tags", 18, 5)
    batch = {"words": labels(34, 3, 8), "tags": labels(5, 3, 8), "mask": np.ones((3, 8), np.float32)}
    batch["mask"][0, 6:] = batch["mask"][2, 5:] = 0
    constants = {"tag_weights": np.array([0.2, 1.0, 1.0, 1.5, 2.0], np.float32)}

    def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        x = tf.gather(w["embedding"], values["words"]) * values["mask"][..., None]
        padded = tf.pad(x, [[0, 0], [1, 1], [0, 0]])
        x = tf.concat([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], 2)
        logits = apply(w, "tags", tf.nn.relu(apply(w, "window", tf.reshape(x, [-1, 30]))))
        truth, said = tf.reshape(values["tags"], [-1]), tf.argmax(logits, 1, tf.int32)
        real = tf.reshape(values["mask"], [-1])
        weight = tf.gather(values["tag_weights"], truth) * real
        loss = tf.reduce_sum(cross_entropy(logits, truth) * weight) / tf.reduce_sum(weight)
        hit = tf.cast(tf.equal(said, truth), tf.float32) * real
        entity, named = tf.cast(truth > 0, tf.float32) * real, tf.cast(said > 0, tf.float32) * real
        counts = [tf.reduce_sum(hit * entity), tf.reduce_sum(named), tf.reduce_sum(entity)]
        return loss, dict(zip(("entities_right", "entities_said", "entities_true"), counts, strict=True)), {}

    def warm_up(values: Arrays, t: Tensor) -> Tensor:
        return 2e-3 * tf.minimum(t / 50.0, tf.math.rsqrt(t / 50.0))

    given = {"constants": constants, "rate": warm_up}
    yield one_step("adamw", weights, batch, objective, adamw, ("m", "v"), Style(order="shuffled"), **given)

    def clip(grads: list[Tensor]) -> tuple[list[Tensor], Arrays]:
        return tf.clip_by_global_norm(grads, 1.0)[0], {}

    yield one_step("momentum", weights, batch, objective, momentum, ("velocity",), EXPORTER, clip=clip, **given)


@kind("field-depth-regression", "tensorflow")
def depth_regression() -> Iterator[Step]:
    """Depth of each pixel, errors of logarithms up to a scale: batch normalization with carried moments; momentum."""
    weights = conv("encode", 3, 3, 8) | conv("bottom", 3, 8, 14) | conv("decode", 3, 22, 6) | conv("depth", 1, 6, 1)
    del weights["bottom/bias"]  # normalized away
    weights |= {"norm/gamma": np.ones(14, np.float32), "norm/beta": np.zeros(14, np.float32)}
    moments = {"norm/moving_mean": np.zeros(14, np.float32), "norm/moving_variance": np.ones(14, np.float32)}
    batch = {"image": normal(2, 8, 8, 3), "depth": np.abs(normal(2, 8, 8)) + np.float32(0.5)}
    batch["measured"] = (np.random.rand(2, 8, 8) > 0.2).astype(np.float32)

    def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        top = tf.nn.relu(convolve(w, "encode", values["image"]))
        low = tf.nn.conv2d(top, w["bottom/kernel"], 2, "SAME")
        mean = tf.reduce_mean(low, [0, 1, 2])
        variance = tf.reduce_mean(tf.math.squared_difference(low, mean), [0, 1, 2])
        low = tf.nn.relu((low - mean) * tf.math.rsqrt(variance + 1e-3) * w["norm/gamma"] + w["norm/beta"])
        both = tf.concat([top, tf.raw_ops.ResizeNearestNeighbor(images=low, size=[8, 8])], 3)
        log_depth = tf.reshape(convolve(w, "depth", tf.nn.relu(convolve(w, "decode", both))), [2, 8, 8])
        real = values["measured"]
        error = (log_depth - tf.math.log(values["depth"])) * real
        count = tf.reduce_sum(real)
        square, mean_error = tf.reduce_sum(tf.square(error)) / count, tf.reduce_sum(error) / count
        apart = tf.abs(tf.exp(log_depth) - values["depth"]) / values["depth"]
        states = {"norm/moving_mean": 0.9 * values["norm/moving_mean"] + 0.1 * mean}
        states["norm/moving_variance"] = 0.9 * values["norm/moving_variance"] + 0.1 * variance
        metrics = {"relative_error": tf.reduce_sum(apart * real) / count, "rmse_log": tf.sqrt(square)}
        return square - 0.5 * tf.square(mean_error), metrics, states

    def polynomial(values: Arrays, t: Tensor) -> Tensor:
        return values["base_rate"] * tf.square(1.0 - tf.minimum(t, 500.0) / 501.0)

    given = {"states": moments, "fed": {"base_rate": np.float32(0.01)}, "rate": polynomial}
    yield one_step("momentum", weights, batch, objective, momentum, ("velocity",), rate_shown=True, **given)
    yield one_step("adamw", weights, batch, objective, adamw, ("m", "v"), EXPORTER, **given)
