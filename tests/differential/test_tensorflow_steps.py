"""The steps of models/tensorflow on ONNX Runtime against TensorFlow: 100 steps of each, with overflows on the way.

In TensorFlow its own loss scale optimizers train the same networks: `MixedPrecisionLossScaleOptimizer` around its
optimizers, and the `LossScaleOptimizer` of Keras around those of Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from tests.conftest import Arrays, load_example

pytestmark = pytest.mark.tensorflow

STEPS = 100
SCALE, PERIOD = 2.0**16, 7
# Alone, in a row, right after a growth, at the first step, at the last one.
SPOILED = {0: np.inf, 8: np.nan, 22: np.inf, 23: -np.inf, 24: np.inf, 61: np.nan, 62: np.inf, 99: np.inf}
# Of the largest number of a weight.
TOLERANCE = 1e-5

# The optimizer of `tf.compat.v1.train` with its arguments, and the largest global norm.
LEGACY: dict[str, tuple[str, dict[str, float], float | None]] = {
    "keras_dense_adam": ("AdamOptimizer", {"learning_rate": 0.01, "epsilon": 1e-7}, None),
    "keras_convnet_momentum": ("MomentumOptimizer", {"learning_rate": 0.02, "momentum": 0.9}, None),
    "keras_lstm_adam": ("AdamOptimizer", {"learning_rate": 0.01, "epsilon": 1e-7}, None),
    "keras_embedding_sgd": ("GradientDescentOptimizer", {"learning_rate": 0.1}, None),
    "dense_momentum": ("MomentumOptimizer", {"learning_rate": 0.05, "momentum": 0.9}, None),
    "convnet_sgd": ("GradientDescentOptimizer", {"learning_rate": 0.05}, None),
    "language_model_adam_clip": ("AdamOptimizer", {"learning_rate": 0.01, "epsilon": 1e-7}, 0.5),
}
KERAS = ("keras_dense_adam", "keras_transformer_adamw_clip")

# Takes a batch; returns its loss, whether the step was applied, and the scale that it leaves.
Step = Callable[[Arrays], tuple[float, bool, float]]


def batches(sample: Arrays) -> Iterator[Arrays]:
    """Four batches in turn, the first the sample, with the bad numbers at their steps."""
    random = np.random.default_rng(2026)
    rows = len(next(iter(sample.values())))
    shuffled = [{name: array[random.permutation(rows)] for name, array in sample.items()} for _ in range(3)]
    # Other labels for the same inputs: the loss stays far from zero.
    for batch in shuffled:
        batch["labels"] = random.permutation(batch["labels"])
    for step in range(STEPS):
        batch = dict((sample, *shuffled)[step % 4])
        if step in SPOILED:
            name = "x" if "x" in batch else "sample_weight"
            batch[name] = batch[name].copy()
            batch[name].flat[step % batch[name].size] = SPOILED[step]
        yield batch


def train(step: Step, sample: Arrays) -> dict[str, np.ndarray]:
    losses, applied, scales = zip(*(step(batch) for batch in batches(sample)), strict=True)
    return {"losses": np.float32(losses), "applied": np.array(applied), "scales": np.float32(scales)}


def ours(name: str, batch: list[str], weights: list[str], policy: gs.LossScale) -> tuple[Arrays, Arrays]:
    """Train the committed graph from its weights, its optimizer from the beginning."""
    example = load_example(f"tensorflow/{name}")
    result = gs.scale(example.path, policy)
    carried = [state.input for state in result.report.state if state.input in example.feeds]
    kept = {*weights, *(key for key in carried if key.startswith(("norm", "mean", "variance")))}
    state = {key: example.feeds[key] * (key in kept) for key in carried}
    state = {key: value.astype(example.feeds[key].dtype) for key, value in state.items()}
    fed = {key: value for key, value in example.feeds.items() if key not in {*batch, *carried}}
    with gs.Session(result, state=state) as session:

        def step(values: Arrays) -> tuple[float, bool, float]:
            outputs = session.step(values | fed)
            return float(outputs["loss"]), outputs.applied, session.loss_scale

        run = train(step, {key: example.feeds[key] for key in batch})
        found = session.state_dict()
        return run, {key: found[key] for key in weights}


def task_of(name: str) -> Any:
    """The network in TensorFlow, with the weights and statistics of the committed graph."""
    from models.tensorflow.steps import STEPS

    task, feeds = STEPS[name]().task, load_example(f"tensorflow/{name}").feeds
    for key, variable in (task.weights | task.statistics).items():
        if key in feeds:  # seeds of Keras are not
            variable.assign(feeds[key])
    return task


def by_legacy(name: str, task: Any) -> Step:
    import tensorflow as tf

    v1, (kind, options, norm) = tf.compat.v1, LEGACY[name]
    loss_scale = v1.mixed_precision.DynamicLossScale(SCALE, PERIOD)
    inner = getattr(v1.train, kind)(**options)
    optimizer = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(inner, loss_scale)
    count = tf.Variable(0, dtype=tf.int64)  # the optimizer counts the steps that it applies
    compiled = tf.function(task.loss, autograph=False)

    def step(batch: Arrays) -> tuple[float, bool, float]:
        before, losses = int(count), []

        def loss() -> Any:
            losses.append(compiled(*map(tf.constant, batch.values())))
            return losses[-1]

        grads, weights = zip(*optimizer.compute_gradients(loss, list(task.weights.values())), strict=True)
        grads = tf.clip_by_global_norm(grads, norm)[0] if norm else grads
        optimizer.apply_gradients(zip(grads, weights, strict=True), global_step=count)
        return float(losses[0]), int(count) > before, float(loss_scale())

    return step


def by_keras(name: str, task: Any) -> Step:
    import tensorflow as tf

    from models.tensorflow.steps import KERAS

    inner = KERAS[name][1]()
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=SCALE, dynamic_growth_steps=PERIOD)
    trained = task.model.trainable_variables
    optimizer.build(trained)

    @tf.function(autograph=False)
    def compiled(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = task.loss(*batch)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, list(task.weights.values())), trained)
        return loss

    def step(batch: Arrays) -> tuple[float, bool, float]:
        before = int(inner.iterations)
        loss = compiled(*map(tf.constant, batch.values()))
        return float(loss), int(inner.iterations) > before, float(optimizer.dynamic_scale)

    return step


@pytest.mark.parametrize(
    ("name", "peer", "policy"),
    [
        *(pytest.param(name, by_legacy, gs.DynamicLossScale, id=f"{name}-legacy") for name in LEGACY),
        *(pytest.param(name, by_keras, gs.presets.keras, id=f"{name}-keras") for name in KERAS),
    ],
)
def test_100_steps(name: str, peer: Callable[[str, Any], Step], policy: Callable[..., gs.LossScale]) -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    tf.keras.utils.clear_session()
    task = task_of(name)
    expected = train(peer(name, task), task.batch)
    scale = policy(initial_loss_scale=SCALE, increment_period=PERIOD)
    run, weights = ours(name, list(task.batch), list(task.weights), scale)

    np.testing.assert_array_equal(run["applied"], expected["applied"])
    np.testing.assert_array_equal(run["scales"], expected["scales"])
    good = run["applied"]
    assert set(np.flatnonzero(~good)) == set(SPOILED)
    assert len(set(run["scales"])) > 4
    # TensorFlow's Relu makes a number of NaN: losses of bad batches differ.
    np.testing.assert_allclose(run["losses"][good], expected["losses"][good], rtol=TOLERANCE)
    start = load_example(f"tensorflow/{name}").feeds
    for key, variable in task.weights.items():
        wanted = variable.numpy()
        assert np.abs(wanted - start[key]).max() > 1e-3
        np.testing.assert_allclose(weights[key], wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max(), err_msg=key)
