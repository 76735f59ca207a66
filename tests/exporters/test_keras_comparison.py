"""The comparison of an exported step with Keras's: wrong steps are refused, rounding is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.errors import ExportError
from tests.exporters.test_keras_steps import Case, classifier, dense, keras, labels, numbers

pytestmark = pytest.mark.tensorflow

__all__ = ["keras"]  # the fixture


@pytest.fixture
def wrong_tanh(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of tanh that ignores its argument."""
    from graphscale.exporters.tensorflow.lowerings import lowering_writer

    monkeypatch.setitem(lowering_writer._LOWERINGS, "TanhGrad", lambda write, node: node.input[1])


def float_labels(keras: Any) -> Case:
    model, (x, y) = dense(keras)
    return model, (x, y.astype(np.float32))


def masked(mask: float) -> Callable[[Any], Case]:
    def make(keras: Any) -> Case:
        layers = [keras.Input((4, 8)), keras.layers.Masking(mask), keras.layers.Dense(9, activation="tanh", name="fc")]
        x = numbers(4, 8)
        x[:, 2:] = mask
        return classifier(keras, "sgd", *layers, keras.layers.GlobalAveragePooling1D()), (x, labels())

    return make


def with_layer(keras: Any, call: Callable[[Any], Any], optimizer: Any = "adam") -> Any:
    """Build a model with a layer of the user behind a hyperbolic tangent."""

    class Own(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return call(x)

    fc = keras.layers.Dense(9, activation="tanh", name="fc")
    return classifier(keras, optimizer, keras.Input((8,)), fc, Own())


def kinked(keras: Any) -> Case:
    """One number lies where the derivative jumps, and stays there: the learning rate is zero."""
    import tensorflow as tf

    edges = [np.float32(10)]

    def kink(x: Any) -> Any:
        return x + tf.where(tf.abs(x - edges[-1]) < 1e-5, 30 * tf.nn.relu(x - edges[-1]), 0)

    model = with_layer(keras, kink, keras.optimizers.SGD(0.0))
    edges.append(np.sort(model.layers[0](numbers(8)).numpy(), axis=None)[30])
    return model, (numbers(8), labels())


def checked(keras: Any) -> Case:
    """The layer asserts a bound that rounding crosses."""
    import tensorflow as tf

    bounds = [np.float32(10)]

    def check(x: Any) -> Any:
        if tf.executing_eagerly():
            tf.debugging.assert_less_equal(tf.reduce_max(x), bounds[-1])
        return x

    model = with_layer(keras, check, keras.optimizers.SGD(0.0))
    bounds.append(model.layers[0](numbers(8)).numpy().max())
    return model, (numbers(8), labels())


WRONG = {
    "dense": dense,
    "labels": float_labels,
    "mask": masked(-1.0),
    "mask with a fraction": masked(-0.3),
    "kink": kinked,
    "check": checked,
}


@pytest.mark.usefixtures("wrong_tanh")
@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_wrong_translation_is_noticed(make: Callable[[Any], Case], keras: Any, tmp_path: Path) -> None:
    model, batch = make(keras)
    with pytest.raises(ExportError, match=r"another sequential/fc/kernel\.gradient than Keras in step 1"):
        gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
    assert not list(tmp_path.iterdir())


def half(keras: Any, seed: int) -> Case:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((16,)), keras.layers.Dense(32, activation="relu", name="fc", dtype="mixed_float16")]
    model = keras.Sequential([*layers, keras.layers.Dense(10, name="head", dtype="mixed_float16")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    rng = np.random.default_rng(0)
    return model, (rng.standard_normal((8, 16)).astype(np.float32), rng.integers(0, 10, 8))


def test_a_rounded_gradient_near_zero_is_no_other_step(keras: Any, tmp_path: Path) -> None:
    """Adam makes a whole update of it: with these seeds, updates of free steps differ by more than float16 rounds."""
    for seed in (2, 6):
        model, batch = half(keras, seed)
        report = gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
        assert not any(".next" in note for note in report.notes)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_another_update_is_noticed_in_float16(
    epsilon: float, keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphscale.exporters.tensorflow import keras_export

    def change(model: Any) -> None:
        values = model.graph.initializers.values()
        changed = [value for value in values if np.array_equal(value.const_value.numpy(), np.float32(1e-7))]
        assert changed
        for value in changed:
            value.const_value = ir.tensor(np.float32(epsilon), name=value.name)

    monkeypatch.setattr(keras_export, "bound_indices", change)
    model, batch = half(keras, 0)
    with pytest.raises(ExportError, match=r"another sequential/fc/kernel\.next than Keras in step 1: .* change"):
        gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")


def not_finite(keras: Any) -> Case:
    model, (x, y) = dense(keras)
    x[0, 0] = np.nan
    return model, (x, y)


def infinite_slope(keras: Any) -> Case:
    """The loss is finite, and the optimizer clips the gradient."""
    import tensorflow as tf

    model = with_layer(keras, lambda x: tf.sqrt(tf.nn.relu(x)), keras.optimizers.SGD(0.01, clipvalue=1.0))
    return model, (0 * numbers(8), labels())


def tiny(keras: Any) -> Case:
    """All gradients are below the numbers of float16."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, dtype="mixed_float16")])
    model.compile("sgd", lambda y, found: 1e-8 * keras.ops.mean((y - found) ** 2))
    return model, (numbers(8), numbers(2))


def fitted(keras: Any) -> Case:
    """The loss is the rounding of its numbers."""
    model, x = keras.Sequential([keras.Input((999,)), keras.layers.Dense(2)]), numbers(999)
    model.compile("sgd", "mse")
    return model, (x, model(x).numpy() * np.float32(1 + 2e-7))


REFUSED = {
    not_finite: "^Keras's own step 1 makes loss infinite or NaN on the example batch; pass another batch",
    infinite_slope: "^Keras's own step 1 makes sequential/fc/kernel.gradient infinite or NaN on the example batch",
    fitted: "^rounding decides every gradient of the example batch, in Keras as well",
    tiny: "^rounding decides every gradient of the example batch, in Keras as well",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_batch_that_shows_nothing_is_refused(make: Callable[[Any], Case], keras: Any, tmp_path: Path) -> None:
    model, batch = make(keras)
    with pytest.raises(ExportError, match=REFUSED[make]):
        gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("always", [True, False])
def test_a_variable_of_the_user(always: bool, keras: Any, tmp_path: Path) -> None:
    """The least loss begins infinite; where a condition of Python assigns it, the traced step has no assignment."""
    import tensorflow as tf

    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)
            self.least = self.add_weight(name="least", initializer=keras.initializers.Constant(np.inf))

        def call(self, x: Any) -> Any:
            return self.layer(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            weights = self.layer.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            if always or tf.executing_eagerly():
                self.least.assign(tf.minimum(self.least, loss))
            return {"least": self.least + 0}

    model, batch, path = Custom(), (numbers(8), numbers(1)), tmp_path / "step.onnx"
    model(batch[0])
    model.compile(keras.optimizers.SGD(0.01))
    if always:
        assert "custom/least.next" in gs.exporters.tensorflow.export_step(model, batch, path=path).errors
    else:
        with pytest.raises(ExportError, match=r"^Keras's step changes custom/least, the exported step keeps it"):
            gs.exporters.tensorflow.export_step(model, batch, path=path)
        assert not path.exists()
