"""Runs TensorFlow's own loss scales, and records what they do for the tests that have no TensorFlow.

python -m tests.policy.record_tensorflow        # needs tensorflow; writes recorded/tensorflow.npz
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded" / "tensorflow.npz"
ARGUMENTS = ("initial_loss_scale", "increment_period", "multiplier")
FIXED = (1.0, 123.0, 2.0**15, 1.1, 3e38)
SEQUENCES, STEPS = 160, 24
MAX = float(np.finfo(np.float32).max)


def draw(random: np.random.Generator) -> tuple[float, int, float]:
    """Arguments of a DynamicLossScale: scales up to the largest, factors that float32 cannot hold."""
    initial = float(random.choice([1.0, 4.0, 30.1, 2.0**15, MAX / 1.05, MAX / 50]))
    return initial, int(random.integers(1, 5)), float(random.choice([2.0, 3.0, 1.1, 1.7]))


def gradients(index: int, finite: bool) -> list[Any]:
    """Gradients of a step, nested as TensorFlow allows, of which one is not finite, or none."""
    good, bad = np.ones(3, np.float32), np.asarray([0, (np.inf, np.nan, -np.inf)[index % 3]], np.float32)
    return [good, [None, good if finite else bad]]


def run(arguments: tuple[float, int, float] | None, steps: list[bool]) -> tuple[list[float], list[bool], list[int]]:
    """Run a new DynamicLossScale, eagerly, over finite (True) and non-finite steps; None for its defaults.

    Returns:
        after each step its scale, whether it is to be applied, and the count of good steps.
    """
    import tensorflow as tf

    loss_scale = tf.compat.v1.mixed_precision.DynamicLossScale(*(arguments or ()))
    scales, applied, good_steps = [], [], []
    for index, finite in enumerate(steps):
        _, should_apply = loss_scale.update(tf.nest.map_structure(_tensor, gradients(index, finite)))
        scales.append(float(loss_scale()))
        applied.append(bool(should_apply))
        good_steps.append(int(loss_scale._num_good_steps))  # it has no public name
    return scales, applied, good_steps


def _tensor(array: np.ndarray | None) -> Any:
    import tensorflow as tf

    return None if array is None else tf.constant(array)


def run_fixed(value: float) -> tuple[float, bool]:
    """The scale of a FixedLossScale after gradients that are NaN, and whether it has that step applied."""
    import tensorflow as tf

    loss_scale = tf.compat.v1.mixed_precision.FixedLossScale(value)
    should_apply = loss_scale.update([tf.constant([np.nan])])[1]
    return float(loss_scale()), bool(should_apply)


def many_dynamic(arguments: tuple[float, int, float]) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]:
    """A DynamicLossScale in a graph of TensorFlow, for many steps at a time: see `many`."""
    import tensorflow as tf

    loss_scale = tf.compat.v1.mixed_precision.DynamicLossScale(*arguments)

    def start() -> None:
        loss_scale._current_loss_scale.assign(arguments[0])
        loss_scale._num_good_steps.assign(0)

    def step(gradient: Any) -> tuple[Any, Any]:
        should_apply = loss_scale.update([gradient])[1]
        return loss_scale(), should_apply

    return many(start, step)


def many_keras(initial: float, growth_steps: int) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]:
    """A LossScaleOptimizer of Keras 3 in a graph of TensorFlow, for many steps at a time: see `many`."""
    import keras
    import tensorflow as tf

    weight = keras.Variable(tf.zeros(1))
    inner = keras.optimizers.SGD(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=initial, dynamic_growth_steps=growth_steps)
    optimizer.build([weight])

    def start() -> None:
        optimizer.dynamic_scale.assign(initial)
        optimizer.step_counter.assign(0)

    def step(gradient: Any) -> tuple[Any, Any]:
        before = tf.identity(inner.iterations.value)
        optimizer.apply([gradient], [weight])
        return tf.identity(optimizer.dynamic_scale.value), inner.iterations.value > before

    return many(start, step)


def many(
    start: Callable[[], None], step: Callable[[Any], tuple[Any, Any]]
) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]:
    """Make a function of (finite, starts), both bool [n]: sequences one after another, each beginning at a start.

    It returns the scales (float32 [n]) and whether each step was applied (bool [n]).
    """
    import tensorflow as tf

    # Else TensorFlow's graph optimizer turns the division by a constant into a product with its reciprocal, which
    # differs from what the class does eagerly where the multiplier is no power of two.
    tf.config.optimizer.set_experimental_options({"constant_folding": False})

    def one(_: Any, flags: tuple[Any, Any]) -> tuple[Any, Any]:
        finite, first = flags

        def begin() -> Any:
            start()
            return tf.constant(0)

        # In the graph, tf.function orders the reads and writes of the variables.
        tf.cond(first, begin, lambda: tf.constant(0))
        return step(tf.where(finite, tf.ones(1), tf.constant([np.nan], tf.float32)))

    @tf.function
    def graph(finite: Any, starts: Any) -> Any:
        return tf.scan(one, (finite, starts), initializer=(tf.constant(0.0), tf.constant(True)))

    return lambda finite, starts: tuple(value.numpy() for value in graph(finite, starts))


def main() -> None:
    import tensorflow as tf

    random = np.random.default_rng(6)
    drawn = [draw(random) for _ in range(SEQUENCES)]
    steps = random.random((SEQUENCES, STEPS)) < random.choice([0.3, 0.6, 0.8, 0.95], (SEQUENCES, 1))
    results = [run(arguments, sequence.tolist()) for arguments, sequence in zip(drawn, steps, strict=True)]
    scales, applied, good_steps = zip(*results, strict=True)
    default_steps = np.repeat([True, False, True, False, True], [5, 1, 2001, 2, 2000])
    default_scales, _, default_good_steps = run(None, default_steps.tolist())
    fixed_scales, fixed_applied = zip(*map(run_fixed, FIXED), strict=True)
    np.savez_compressed(
        RECORDED,
        version=tf.__version__,
        arguments=np.asarray(drawn, dtype=np.float64),
        steps=steps,
        scales=np.asarray(scales, dtype=np.float32),
        applied=np.asarray(applied),
        good_steps=np.asarray(good_steps, dtype=np.int8),
        default_steps=default_steps,
        default_scales=np.asarray(default_scales, dtype=np.float32),
        default_good_steps=np.asarray(default_good_steps, dtype=np.int16),
        fixed=np.asarray(FIXED),
        fixed_scales=np.asarray(fixed_scales, dtype=np.float32),
        fixed_applied=np.asarray(fixed_applied),
    )


if __name__ == "__main__":
    main()
