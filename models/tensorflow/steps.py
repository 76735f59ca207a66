"""Training steps: a task of `networks.py`, and an optimizer, Keras's own or written out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from graphscale.exporters.tensorflow.pure_step import by_path
from models.tensorflow import networks
from models.tensorflow.networks import Task

Grads = list[tf.Tensor]


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        task: the weights, the batch and the loss.
        run: takes the batch, assigns the next values, returns the outputs by name.
        slots: the variables of the optimizer by name.
    """

    task: Task
    run: Callable[..., dict[str, tf.Tensor]]
    slots: dict[str, tf.Variable] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, tf.Variable]:
        """All variables by name."""
        return self.task.weights | self.task.statistics | self.slots


STEPS: dict[str, Callable[[], Step]] = {}
Optimizer = Callable[[], keras.optimizers.Optimizer]


def train(task: Task, apply: Callable[[Grads], None], slots: dict[str, tf.Variable]) -> Step:
    """Return the step that trains a task; `apply` changes the weights by their gradients."""

    def run(*batch: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = task.loss(*batch)
        apply(tape.gradient(loss, list(task.weights.values())))
        return {"loss": loss}

    return Step(task, run, slots)


def by_keras(make: Callable[[], Task], optimizer: Optimizer) -> Step:
    """Return the step of a Keras model and an optimizer of Keras."""
    task, made = make(), optimizer()
    trained = task.model.trainable_variables
    made.build(trained)
    return train(task, lambda grads: made.apply(grads, trained), by_path(made.variables, "."))


# The optimizers of Keras, each a function of no arguments.
KERAS = {
    "keras_dense_adam": (networks.keras_dense, partial(keras.optimizers.Adam, 0.01)),
    "keras_convnet_momentum": (networks.keras_convnet, partial(keras.optimizers.SGD, 0.02, momentum=0.9)),
    "keras_lstm_adam": (networks.keras_lstm, partial(keras.optimizers.Adam, 0.01)),
    "keras_embedding_sgd": (networks.keras_embedding, partial(keras.optimizers.SGD, 0.1)),
    "keras_transformer_adamw_clip": (
        networks.keras_transformer,
        partial(keras.optimizers.AdamW, 0.01, weight_decay=0.01, global_clipnorm=0.5),
    ),
}
for name, (make, optimizer) in KERAS.items():
    STEPS[name] = partial(by_keras, make, optimizer)


def zeros(task: Task, slot: str) -> dict[str, tf.Variable]:
    """Return a slot of zeros for each weight."""
    return {
        f"{name}.{slot}": tf.Variable(np.zeros(weight.shape, np.float32), name=f"{name}_{slot}")
        for name, weight in task.weights.items()
    }


def step(function: Callable[[], Step]) -> Callable[[], Step]:
    """Register a step under its function's name."""
    STEPS[function.__name__] = function
    return function


@step
def dense_gradients() -> Step:
    """Loss and gradients, no optimizer."""
    task = networks.dense()

    def run(*batch: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = task.loss(*batch)
        grads = tape.gradient(loss, task.weights)
        return {"loss": loss} | {f"{name}.grad": grad for name, grad in grads.items()}

    return Step(task, run)


@step
def dense_momentum() -> Step:
    """SGD with momentum, as `tf.compat.v1.train.MomentumOptimizer` computes it: m = 0.9 m + g, w -= rate m."""
    task = networks.dense()
    momenta = zeros(task, "momentum")

    def apply(grads: Grads) -> None:
        for weight, grad, momentum in zip(task.weights.values(), grads, momenta.values(), strict=True):
            weight.assign_sub(0.05 * momentum.assign(0.9 * momentum + grad))

    return train(task, apply, momenta)


@step
def convnet_sgd() -> Step:
    """SGD: w -= rate g."""
    task = networks.convnet()

    def apply(grads: Grads) -> None:
        for weight, grad in zip(task.weights.values(), grads, strict=True):
            weight.assign_sub(0.05 * grad)

    return train(task, apply, {})


@step
def language_model_adam_clip() -> Step:
    """Clipping by the global norm, then Adam with epsilon outside of the root, as TensorFlow computes it."""
    task = networks.language_model()
    first, second = zeros(task, "first"), zeros(task, "second")
    count = tf.Variable(0, dtype=tf.int64, name="count")

    def apply(grads: Grads) -> None:
        grads, _ = tf.clip_by_global_norm([tf.convert_to_tensor(grad) for grad in grads], 0.5)
        t = tf.cast(count.assign_add(1), tf.float32)
        rate = 0.01 * tf.sqrt(1 - tf.pow(0.999, t)) / (1 - tf.pow(0.9, t))
        slots: Any = zip(task.weights.values(), grads, first.values(), second.values(), strict=True)
        for weight, grad, m, v in slots:
            m.assign(0.9 * m + 0.1 * grad)
            v.assign(0.999 * v + 0.001 * tf.square(grad))
            weight.assign_sub(rate * m / (tf.sqrt(v) + 1e-7))

    return train(task, apply, first | second | {"count": count})
