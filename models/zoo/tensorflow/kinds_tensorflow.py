"""Kinds by TensorFlow: update rules as Keras computes them, its gradient operators, and small networks."""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf

from models.zoo.arrays import normal
from models.zoo.steps import STYLES, Arrays, Outputs, Step, Style, kind
from models.zoo.tensorflow.problems import (
    Problem,
    classification,
    dense,
    images,
    labels,
    language,
    layers,
    mean_square,
    regression,
    square,
)
from models.zoo.tensorflow.training import Rule, gradients_only, train

Tensor = tf.Tensor


def adam(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor, rate: Any) -> tuple[Tensor, ...]:
    m = m + (g - m) * 0.1
    v = v + (tf.square(g) - v) * 0.001
    alpha = rate * tf.sqrt(1 - tf.pow(0.999, t)) / (1 - tf.pow(0.9, t))
    return w - m * alpha / (tf.sqrt(v) + 1e-7), m, v


def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor, rate: Any) -> tuple[Tensor, ...]:
    return adam(w - w * 0.004 * rate, g, m, v, t, rate)


def amsgrad(w: Tensor, g: Tensor, m: Tensor, v: Tensor, most: Tensor, t: Tensor, rate: Any) -> tuple[Tensor, ...]:
    m = m + (g - m) * 0.1
    v = v + (tf.square(g) - v) * 0.001
    most = tf.maximum(most, v)
    alpha = rate * tf.sqrt(1 - tf.pow(0.999, t)) / (1 - tf.pow(0.9, t))
    return w - m * alpha / (tf.sqrt(most) + 1e-7), m, v, most


def adamax(w: Tensor, g: Tensor, m: Tensor, u: Tensor, t: Tensor, rate: Any) -> tuple[Tensor, ...]:
    m = m + (g - m) * 0.1
    u = tf.maximum(0.999 * u, tf.abs(g))
    return w - rate * m / ((1 - tf.pow(0.9, t)) * (u + 1e-7)), m, u


def nadam(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor, rate: Any) -> tuple[Tensor, ...]:
    m = m + (g - m) * 0.1
    v = v + (tf.square(g) - v) * 0.001
    ahead = 0.9 * m / (1 - tf.pow(0.9, t + 1)) + 0.1 * g / (1 - tf.pow(0.9, t))
    return w - ahead * rate / (tf.sqrt(v / (1 - tf.pow(0.999, t))) + 1e-7), m, v


def momentum(w: Tensor, g: Tensor, m: Tensor, rate: Any) -> tuple[Tensor, ...]:
    m = m * 0.9 - g * rate
    return w + m, m


def nesterov(w: Tensor, g: Tensor, m: Tensor, rate: Any) -> tuple[Tensor, ...]:
    m = m * 0.9 - g * rate
    return w + m * 0.9 - g * rate, m


def rmsprop(w: Tensor, g: Tensor, v: Tensor, rate: Any) -> tuple[Tensor, ...]:
    v = 0.9 * v + 0.1 * tf.square(g)
    return w - rate * g * tf.math.rsqrt(v + 1e-7), v


def centered(w: Tensor, g: Tensor, v: Tensor, a: Tensor, m: Tensor, rate: Any) -> tuple[Tensor, ...]:
    v = 0.9 * v + 0.1 * tf.square(g)
    a = 0.9 * a + 0.1 * g
    m = 0.9 * m + rate * g * tf.math.rsqrt(v - tf.square(a) + 1e-7)
    return w - m, v, a, m


def adagrad(w: Tensor, g: Tensor, h: Tensor, rate: Any) -> tuple[Tensor, ...]:
    h = h + tf.square(g)
    return w - rate * g / tf.sqrt(h + 1e-7), h


def adadelta(w: Tensor, g: Tensor, h: Tensor, d: Tensor, rate: Any) -> tuple[Tensor, ...]:
    h = 0.95 * h + 0.05 * tf.square(g)
    change = -tf.sqrt(d + 1e-6) * g / tf.sqrt(h + 1e-6)
    return w + rate * change, h, 0.95 * d + 0.05 * tf.square(change)


def ftrl(w: Tensor, g: Tensor, n: Tensor, z: Tensor, rate: Any) -> tuple[Tensor, ...]:
    following = n + tf.square(g)
    z = z + g - (tf.sqrt(following) - tf.sqrt(n)) / rate * w
    clipped = tf.clip_by_value(z, -0.01, 0.01)
    return (clipped - z) / (tf.sqrt(following) / rate + 0.02), following, z


def lion(w: Tensor, g: Tensor, m: Tensor, rate: Any) -> tuple[Tensor, ...]:
    return w - rate * tf.sign(m * 0.9 + g * 0.1), m * 0.99 + g * 0.01


def lamb(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor, rate: Any) -> tuple[Tensor, ...]:
    m = m + (g - m) * 0.1
    v = v + (tf.square(g) - v) * 0.001
    move = m / (1 - tf.pow(0.9, t)) / (tf.sqrt(v / (1 - tf.pow(0.999, t))) + 1e-7)
    size, length = tf.norm(w), tf.norm(move)
    trust = tf.where(size > 0, tf.where(length > 0, size / length, 1.0), 1.0)
    return w - trust * move * rate, m, v


TWO = {"m": 0.0, "v": 0.0}
RULES = {
    "sgd": Rule(lambda w, g, rate: w - rate * g),
    "momentum": Rule(momentum, {"m": 0.0}),
    "nesterov": Rule(nesterov, {"m": 0.0}),
    "adam": Rule(adam, TWO, counted=True),
    "adamw": Rule(adamw, TWO, counted=True),
    "amsgrad": Rule(amsgrad, {**TWO, "most": 0.0}, counted=True),
    "adamax": Rule(adamax, {"m": 0.0, "u": 0.0}, counted=True),
    "nadam": Rule(nadam, TWO, counted=True),
    "rmsprop": Rule(rmsprop, {"v": 0.0}),
    "rmsprop-centered": Rule(centered, {"v": 0.0, "a": 0.0, "m": 0.0}),
    "adagrad": Rule(adagrad, {"h": 0.1}),
    "adadelta": Rule(adadelta, {"h": 0.0, "d": 0.0}),
    "ftrl": Rule(ftrl, {"n": 0.1, "z": 0.0}),
    "lion": Rule(lion, {"m": 0.0}),
    "lamb": Rule(lamb, TWO, counted=True),
}
FORMS = ("exporter-names", "shuffled", "initializers", "scrambled", "overridable", "bare", "scrambled-bare", "opset-18")


def form_of(name: str) -> str:
    """Return the form of export that a kind takes, drawn by its name."""
    return FORMS[zlib.crc32(name.encode()) % len(FORMS)]


def on_problems(rule: Rule, form: str) -> Iterator[Step]:
    """Yield a rule on all problems, and with its rate fed."""
    yield train(regression(), rule, "regression")
    yield train(square(), rule, "square", Style(names="scrambled", order="shuffled"))
    yield train(classification(), rule, form, STYLES[form])
    yield train(regression(), rule, "rate-fed", fed=True)


def with_rules(make: Callable[[], Problem], form: str) -> Iterator[Step]:
    """Yield a problem's gradients, and steps on it."""
    yield gradients_only(make())
    yield train(make(), RULES["momentum"], "momentum")
    yield train(make(), RULES["adam"], form, STYLES[form])


ACTIVATIONS = {
    "sigmoid": tf.sigmoid,
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "leaky-relu": tf.nn.leaky_relu,
    "elu": tf.nn.elu,
    "selu": tf.nn.selu,
    "softplus": tf.nn.softplus,
    "softsign": tf.nn.softsign,
    "gelu": tf.nn.gelu,
    "swish": lambda x: x * tf.sigmoid(x),
    "square-root": lambda x: tf.sqrt(tf.square(x) + 0.1),
    "reciprocal": lambda x: tf.math.reciprocal(tf.square(x) + 1.0),
    "rsqrt": lambda x: x * tf.math.rsqrt(tf.square(x) + 1.0),
    "slices": lambda x: tf.concat([x[:, 2:], tf.tanh(x[:, :2])], 1),
    "split": lambda x: tf.concat(tf.split(tf.tanh(x), [3, 4], 1)[::-1], 1),
    "maximum": lambda x: tf.maximum(x, 0.1 * x),
    "softmax": tf.nn.softmax,
    "padded": lambda x: tf.pad(x, [[0, 0], [1, 0]])[:, :-1] + tf.tanh(x),
}
NETWORKS: dict[str, Callable[[], Problem]] = {
    "convolutions": partial(images, lambda x: x),
    "max-pool": partial(images, lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID")),
    "average-pool": partial(images, lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"), padding="VALID"),
    "strided": partial(images, lambda x: x, strides=2),
    "resized": partial(images, lambda x: tf.raw_ops.ResizeNearestNeighbor(images=x, size=[16, 16])),
    "language": language,
}

for name, rule in RULES.items():
    kind(f"tf-{name}", "tensorflow")(partial(on_problems, rule, form_of(name)))
for name, activation in ACTIVATIONS.items():
    kind(f"tf-{name}", "tensorflow")(partial(with_rules, partial(regression, activation=activation), form_of(name)))
for name, make in NETWORKS.items():
    kind(f"tf-{name}", "tensorflow")(partial(with_rules, make, form_of(name)))


@kind("tf-losses", "tensorflow")
def losses() -> Iterator[Step]:
    """Yield losses whose gradients TensorFlow has operators for, or computes by several."""

    def soft(weights: Arrays, values: Arrays) -> Tensor:
        target = tf.nn.softmax(values["y"])
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(target, dense(weights, values["x"])))

    def binary(weights: Arrays, values: Arrays) -> Tensor:
        target = tf.sigmoid(values["y"])
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(target, dense(weights, values["x"])))

    def huber(weights: Arrays, values: Arrays) -> Tensor:
        distance = tf.abs(dense(weights, values["x"]) - values["y"])
        return tf.reduce_mean(tf.where(distance < 1, 0.5 * tf.square(distance), distance - 0.5))

    def decayed(weights: Arrays, values: Arrays) -> Tensor:
        decay = tf.add_n([tf.nn.l2_loss(weight) for weight in weights.values()])
        return mean_square(dense(weights, values["x"]), values["y"]) + 0.01 * decay

    def weighted(weights: Arrays, values: Arrays) -> Tensor:
        target = tf.sigmoid(values["y"])
        return tf.reduce_mean(tf.nn.weighted_cross_entropy_with_logits(target, dense(weights, values["x"]), 2.0))

    for loss in (soft, binary, huber, decayed, weighted):
        problem = regression()
        made = Problem(problem.weights, problem.batch, loss)
        yield gradients_only(made, f"{loss.__name__}-gradients")
        yield train(made, RULES["adam"], loss.__name__)


@kind("tf-embedding", "tensorflow")
def embedding() -> Iterator[Step]:
    """Yield an embedding whose gradient TensorFlow keeps as slices."""

    def loss(weights: Arrays, values: Arrays) -> Tensor:
        rows = tf.reduce_mean(tf.gather(weights["table"], values["token"]), 1)
        return mean_square(dense(weights, rows), values["y"])

    def problem() -> Problem:
        weights = {"table": normal(9, 5)} | layers(5, 6, 3)
        return Problem(weights, {"token": labels(9, 4, 2), "y": normal(4, 3)}, loss)

    yield gradients_only(problem())
    yield train(problem(), RULES["momentum"], "momentum")
    yield train(problem(), RULES["adagrad"], "adagrad", STYLES["scrambled"])


@kind("tf-clipping", "tensorflow")
def clipping() -> Iterator[Step]:
    """Yield clipped gradients, by value and by norms, and their norm as a metric."""

    def by_global_norm(grads: Arrays) -> Arrays:
        return dict(zip(grads, tf.clip_by_global_norm(list(grads.values()), 0.5)[0], strict=True))

    def by_norm(grads: Arrays) -> Arrays:
        return {name: tf.clip_by_norm(grad, 0.5) for name, grad in grads.items()}

    def by_value(grads: Arrays) -> Arrays:
        return {name: tf.clip_by_value(grad, -0.1, 0.1) for name, grad in grads.items()}

    def norm(grads: Arrays) -> Outputs:
        return Outputs(metrics={"norm": tf.linalg.global_norm(list(grads.values()))})

    for transform in (by_global_norm, by_norm, by_value):
        yield train(regression(), RULES["momentum"], transform.__name__.replace("_", "-"), transform=transform)
        yield train(
            square(), RULES["adam"], f"{transform.__name__.replace('_', '-')}-norm", transform=transform, observe=norm
        )
