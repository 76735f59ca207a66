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


def masked(keras: Any) -> Case:
    layers = [keras.Input((4, 8)), keras.layers.Masking(-1.0), keras.layers.Dense(9, activation="tanh", name="fc")]
    x = numbers(4, 8)
    x[:, 2:] = -1
    return classifier(keras, "sgd", *layers, keras.layers.GlobalAveragePooling1D()), (x, labels())


@pytest.mark.usefixtures("wrong_tanh")
@pytest.mark.parametrize("make", [dense, float_labels, masked], ids=lambda make: make.__name__)
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
        assert report.largest_error < 2e-2


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
