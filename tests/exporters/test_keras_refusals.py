"""Models, optimizers and batches that the Keras exporter refuses: one line each, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import ExportError
from tests.exporters.test_keras_steps import ROWS, classifier, dense, keras, labels, numbers

pytestmark = pytest.mark.tensorflow

__all__ = ["keras"]  # the fixture


def no_lowering(keras: Any) -> tuple[Any, Any]:
    class Sorted(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return pytest.importorskip("tensorflow").math.igamma(2.0, x * x)

    layers = [keras.Input((8,)), Sorted(name="gamma")]
    return classifier(keras, "sgd", *layers), (numbers(8), labels())


def accumulating(keras: Any) -> tuple[Any, Any]:
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    return classifier(keras, optimizer, keras.Input((8,))), (numbers(8), labels())


def overwriting(keras: Any) -> tuple[Any, Any]:
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)
    return classifier(keras, optimizer, keras.Input((8,))), (numbers(8), labels())


def not_compiled(keras: Any) -> tuple[Any, Any]:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), (numbers(8), numbers(1))


def of_another_shape(keras: Any) -> tuple[Any, Any]:
    return dense(keras)[0], (numbers(7), labels())


def words(keras: Any) -> tuple[Any, Any]:
    return dense(keras)[0], (np.array(["a"] * ROWS), labels())


def no_batch(keras: Any) -> tuple[Any, Any]:
    return dense(keras)[0], numbers(8)


def no_model(keras: Any) -> tuple[Any, Any]:
    return keras.layers.Dense(3), (numbers(8), labels())


REFUSED = {
    no_lowering: "the operator Igamma has no ONNX equivalent yet: layer gamma",
    accumulating: "optimizer adam has gradient_accumulation_steps=2, so it .* feed the rows of 2 batches",
    overwriting: "optimizer adam has ema_overwrite_frequency=2, so it .* leave it out: .*finalize_variable",
    not_compiled: "sequential has no optimizer; pass loss and optimizer, or compile the model",
    of_another_shape: "train_step of sequential cannot be run on 6 rows: .*expected axis -1 of input shape",
    words: "x of the example batch is of dtype <U1; pass numbers",
    no_batch: r"the example batch is a tuple \(x, y\)",
    no_model: "the model is a Dense; pass a keras.Model",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_refusal_is_one_line_and_writes_nothing(make: Callable[[Any], Any], keras: Any, tmp_path: Path) -> None:
    model, batch = make(keras)
    with pytest.raises(ExportError, match=REFUSED[make]) as raised:
        gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_loss_without_an_optimizer_is_refused(keras: Any, tmp_path: Path) -> None:
    model, batch = not_compiled(keras)
    with pytest.raises(ExportError, match="pass both loss and optimizer"):
        gs.exporters.tensorflow.export_step(model, batch, "mse", path=tmp_path / "step.onnx")
