"""Training steps of Keras models: what export_step writes against Keras's own training."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.errors import ExportError, SessionError
from tests.conftest import ROOT, Arrays

pytestmark = pytest.mark.tensorflow

ROWS = 6
Case = tuple[Any, tuple[Any, ...]]


@pytest.fixture(autouse=True)
def keras() -> Any:
    keras = pytest.importorskip("keras", reason="needs Keras")
    pytest.importorskip("tf2onnx", reason="needs tf2onnx")
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    return keras


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, *shape)).astype(np.float32)


def labels(count: int = 5, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, count, (ROWS, *shape))


def classifier(keras: Any, optimizer: Any, *layers: Any, **options: Any) -> Any:
    model = keras.Sequential([*layers, keras.layers.Dense(5, name="head")])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def dense(keras: Any, **options: Any) -> Case:
    layers = [keras.Input((8,)), keras.layers.Dense(9, activation="tanh", name="fc"), keras.layers.Dropout(0.3)]
    return classifier(keras, keras.optimizers.Adam(0.01), *layers, **options), (numbers(8), labels())


def images(keras: Any) -> Case:
    layers, optimizer = keras.layers, keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, global_clipnorm=1.0)
    net = [
        *(keras.Input((9, 9, 2)), layers.DepthwiseConv2D(3, strides=2, padding="same", depth_multiplier=2)),
        *(layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(3, 2, padding="same")),
        *(layers.Conv2D(6, 2, kernel_regularizer="l2"), layers.AveragePooling2D(2, 1, padding="same")),
        *(layers.Dense(4, trainable=False, name="frozen"), layers.Flatten()),
    ]
    return classifier(keras, optimizer, *net), (numbers(9, 9, 2), labels())


def text(keras: Any) -> Case:
    layers, schedule = keras.layers, keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)
    net = [
        *(keras.Input((3,), dtype="int32"), layers.Embedding(11, 6, mask_zero=True), layers.LSTM(5, name="lstm")),
        layers.LayerNormalization(),
    ]
    model = classifier(keras, keras.optimizers.AdamW(schedule), *net, weighted_metrics=["accuracy"])
    return model, (labels(11, 3), labels(), np.linspace(0.5, 2, ROWS, dtype=np.float32))


def two_inputs(keras: Any) -> Case:
    layers = keras.layers
    left, right = keras.Input((4, 6), name="left"), keras.Input((6,), name="right")
    x = layers.Flatten()(layers.MultiHeadAttention(2, 3, use_bias=False)(left, left))
    x = layers.Concatenate()([x, layers.Dense(3, activation="elu")(right)])
    outputs = {"kind": layers.Dense(5, name="kind")(x), "size": layers.Dense(1, name="size")(x)}
    model = keras.Model({"left": left, "right": right}, outputs)
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    model.compile("lion", losses, loss_weights={"kind": 1.0, "size": 0.3})
    return model, ({"left": numbers(4, 6), "right": numbers(6)}, {"kind": labels(), "size": numbers(1)})


def flatten(batch: Any) -> Arrays:
    named = {}
    for name, part in zip(("x", "y", "sample_weight"), batch, strict=False):
        named |= part if isinstance(part, dict) else {name: part}
    return named


def values_of(model: Any) -> Arrays:
    sums = {id(variable) for variable in model.metrics_variables}
    own = [variable for variable in model.variables if id(variable) not in sums]
    return {variable.path: variable.numpy().copy() for variable in (*own, *model.optimizer.variables)}


@pytest.mark.parametrize("make", [dense, images, text, two_inputs], ids=lambda make: make.__name__)
def test_a_scaled_step_trains_as_keras_does(make: Callable[[Any], Case], keras: Any, tmp_path: Path) -> None:
    model, batch = make(keras)
    model.optimizer.build(model.trainable_variables)
    before = values_of(model)
    report = gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
    assert report.largest_error < 1e-4
    for name, value in values_of(model).items():
        np.testing.assert_array_equal(value, before[name], err_msg="the export leaves the model as it was")

    scaled = gs.scale(tmp_path / "step.onnx")
    assert scaled.report.coverage == 1.0
    scaled.save(tmp_path / "scaled.onnx")
    assert gs.verify(tmp_path / "step.onnx", tmp_path / "scaled.onnx").ok
    session = gs.Session(tmp_path / "scaled.onnx")
    for step in range(5):
        loss = model.train_on_batch(*batch, return_dict=True)["loss"]
        outputs = session.step(flatten(batch))
        assert outputs.applied
        np.testing.assert_allclose(outputs["loss"], loss, 1e-5, err_msg=f"step {step}")
    noise = re.findall(r"(\S+)\.gradient", " ".join(report.notes))
    found = session.state_dict()
    for name, value in values_of(model).items():
        # The moments of a weight have its path in their names, by underscores.
        if name in found and not any(each in name or each.replace("/", "_") in name for each in noise):
            np.testing.assert_allclose(found[name], value, 0, 1e-4 * np.abs(value).max(), err_msg=name)


def test_the_page_loads_the_weights_back(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of the page exports; its last block builds the model anew, and puts the trained weights into it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    runpy.run_path("docs/examples/tensorflow_step.py", run_name="__main__")
    session = gs.Session(gs.scale("step.onnx"))
    session.step({"x": numbers(16), "y": labels(10)})
    session.save_state("trained.safetensors")
    keras.utils.clear_session()
    page = (ROOT / "docs" / "start" / "tensorflow.md").read_text(encoding="utf-8")
    block = re.findall(
        r"^```python\n(.*?)^```$", page.partition("## Load the weights back")[2], re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(compile(block[0], "tensorflow.md", "exec"), names)
    for name, value in values_of(names["model"]).items():
        np.testing.assert_array_equal(value, session.state_dict().get(name, value), err_msg=name)
    assert values_of(names["model"])["adam/iteration"] == 1


@pytest.mark.parametrize("name", ["Adafactor", "Adam"])
def test_state_of_every_optimizer_goes_back(name: str, keras: Any, tmp_path: Path) -> None:
    """Adafactor gives two variables one path; averages of weights are state of the optimizer."""
    optimizer = getattr(keras.optimizers, name)(0.01, use_ema=name == "Adam")
    model, batch = classifier(keras, optimizer, keras.Input((8,)), keras.layers.Dense(8)), (numbers(8), labels())
    optimizer.build(model.trainable_variables)
    gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
    before = [variable.numpy().copy() for variable in optimizer.variables]
    session = gs.Session(gs.scale(tmp_path / "step.onnx"))
    for _ in range(2):
        session.step(flatten(batch))
    for _ in range(2):
        model.train_on_batch(*batch)
    expected = [variable.numpy().copy() for variable in optimizer.variables]
    for variable, value in zip(optimizer.variables, before, strict=True):
        variable.assign(value)
    gs.exporters.tensorflow.load_weights(session, model)
    for variable, value in zip(optimizer.variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, 0, 1e-4 * np.abs(value).max(), err_msg=variable.path)
    if name == "Adafactor":
        assert {"adafactor/kernel", "adafactor/kernel_1", "adafactor/kernel_2", "adafactor/kernel_3"} < set(
            session.state_dict()
        )


def test_trained_weights_go_back_into_the_model_and_its_optimizer(keras: Any, tmp_path: Path) -> None:
    model, batch = dense(keras)
    gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
    session = gs.Session(gs.scale(tmp_path / "step.onnx"))
    before = values_of(model)
    for _ in range(3):
        session.step(flatten(batch))
    session.save_state(tmp_path / "state.safetensors")
    for source in (session, session.state_dict(), tmp_path / "state.safetensors"):
        for variable in (*model.variables, *model.optimizer.variables):
            if variable.path in before:
                variable.assign(before[variable.path])
        gs.exporters.tensorflow.load_weights(source, model)
        loaded = values_of(model)
        assert loaded["adam/iteration"] == 3
        assert {name for name in before if np.array_equal(loaded[name], before[name])} == {"adam/learning_rate"}
    # Keras goes on where the session stopped.
    assert model.train_on_batch(*batch) == pytest.approx(float(session.step(flatten(batch))["loss"]), rel=1e-5)


def test_weights_that_do_not_fit_leave_the_model_as_it_was(keras: Any, tmp_path: Path) -> None:
    model, _ = dense(keras)
    load = gs.exporters.tensorflow.load_weights
    model.optimizer.build(model.trainable_variables)
    before = values_of(model)
    other = {name: value + 1 for name, value in before.items()}
    with pytest.raises(ExportError, match="'sequential/head/bias' has the shape"):
        load(other | {"sequential/head/bias": np.zeros(6, np.float32)}, model)
    with pytest.raises(ExportError, match="'sequential/head/bias' is int64, in the model float32"):
        load(other | {"sequential/head/bias": np.zeros(5, np.int64)}, model)
    del other["sequential/fc/kernel"]
    with pytest.raises(ExportError, match="no trained value of 'sequential/fc/kernel', a weight of sequential; 3 of 4"):
        load(other, model)
    with pytest.raises(ExportError, match="got a int"):
        load(3, model)
    with pytest.raises(ExportError, match="is not built"):
        load({}, keras.Sequential([keras.layers.Dense(3)]))
    for name, value in values_of(model).items():
        np.testing.assert_array_equal(value, before[name])


def test_the_file_needs_no_feeds_but_the_batch(keras: Any, tmp_path: Path) -> None:
    """Any number of rows, metrics of the batch alone, and the learning rate of the optimizer unless it is fed."""
    model, batch = dense(keras, metrics=["accuracy"])
    report = gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
    assert report.inputs == ("x", "y")
    assert "learning_rate is 0.01 unless it is fed" in report.notes
    stored = onnx.load(tmp_path / "step.onnx")
    roles = json.loads({entry.key: entry.value for entry in stored.metadata_props}["graphscale.roles"])
    assert (roles["losses"], roles["metrics"]) == (["loss"], ["accuracy"])
    assert roles["states"]["sequential/fc/kernel.next"] == "sequential/fc/kernel"

    session = ort.InferenceSession(tmp_path / "step.onnx")
    assert [value.name for value in session.get_inputs()] == ["x", "y"]
    few = {"x": batch[0][:2], "y": batch[1][:2]}
    names = ["accuracy", "sequential/fc/kernel.next"]
    first, again, still = (
        session.run(names, few | rate) for rate in ({}, {}, {"learning_rate": np.array(0, np.float32)})
    )
    assert first[0] == again[0]
    np.testing.assert_array_equal(still[1], model.layers[0].kernel.numpy())
    assert (first[1] != still[1]).any()


def test_a_model_is_compiled_with_the_loss_and_the_optimizer_given(keras: Any, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, dtype="mixed_float16")])
    batch = (numbers(8), numbers(1))
    inner = keras.optimizers.RMSprop(0.01, ema_overwrite_frequency=2)  # without averages, nothing is overwritten
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    report = gs.exporters.tensorflow.export_step(
        model, batch, "mse", optimizer, tmp_path / "step.onnx", dynamic_batch=False
    )
    assert any("LossScaleOptimizer" in note for note in report.notes)
    assert model.optimizer is optimizer
    assert onnx.load(tmp_path / "step.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_value == ROWS
    assert gs.scale(tmp_path / "step.onnx").report.coverage == 1.0


def test_a_step_of_the_user_is_exported(keras: Any, tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")

    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mean = keras.layers.Dense(1), keras.metrics.Mean(name="mean")

        def call(self, x: Any) -> Any:
            return self.layer(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.abs(self(x) - y) ** 3)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.mean.update_state(y)
            return {"mean": self.mean.result()}

    model, batch = Custom(), (numbers(8), numbers(1))
    model.compile(keras.optimizers.Adam(0.01))
    report = gs.exporters.tensorflow.export_step(model, batch, path=tmp_path / "step.onnx")
    assert {"loss", "mean"} < set(report.errors)
    assert gs.scale(tmp_path / "step.onnx").report.coverage == 1.0


def test_python_values_that_a_layer_changes_get_a_note(keras: Any, tmp_path: Path) -> None:
    class Counting(keras.layers.Layer):
        calls = 0

        def call(self, x: Any) -> Any:
            self.calls += 1
            return 2 * x if self.calls > 1000 else x

    model = keras.Sequential([keras.Input((8,)), Counting(name="counting"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    notes = gs.exporters.tensorflow.export_step(model, (numbers(8), numbers(1)), path=tmp_path / "step.onnx").notes
    assert (
        "each call changes counting.calls in Python; the graph keeps the decisions that the export made by them"
        in notes
    )


def test_a_batch_with_nan_is_skipped_where_a_metric_makes_indices_of_numbers(keras: Any, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    x, y = numbers(8), labels(2, 1).astype(np.float32)
    gs.exporters.tensorflow.export_step(model, (x, y), path=tmp_path / "step.onnx")
    session = gs.Session(gs.scale(tmp_path / "step.onnx"))
    assert session.step({"x": x, "y": y}).applied
    before = session.state_dict()
    spoilt = x.copy()
    spoilt[1, 2] = np.nan
    assert not session.step({"x": spoilt, "y": y}).applied
    after = session.state_dict()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed <= {"current_loss_scale", "good_steps"}
    assert session.step({"x": x, "y": y}).applied


def test_labels_and_words_out_of_range_do_not_train(keras: Any, tmp_path: Path) -> None:
    """Keras on a CPU refuses the batch; the step is skipped for a label, as the NaN of a GPU says, or cannot run."""
    layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(11, 4), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model.compile(keras.optimizers.SGD(0.1), loss)
    x, y = labels(11, 3), labels()
    gs.exporters.tensorflow.export_step(model, (x, y), path=tmp_path / "step.onnx")
    session = gs.Session(gs.scale(tmp_path / "step.onnx"))
    first = session.state_dict()

    def with_first(array: np.ndarray, number: int) -> np.ndarray:
        changed = array.copy()
        changed.flat[0] = number
        return changed

    refused = pytest.importorskip("tensorflow").errors.InvalidArgumentError
    for label in (-2, 5, 100):
        with pytest.raises(refused):
            model.train_on_batch(x, with_first(y, label))
        outputs = session.step({"x": x, "y": with_first(y, label)})
        assert np.isnan(outputs["loss"]) and not outputs.applied
    for word in (-12, 11):
        with pytest.raises(refused):
            model.train_on_batch(with_first(x, word), y)
        with pytest.raises(SessionError, match="out of data bounds"):
            session.step({"x": with_first(x, word), "y": y})
    for name, value in session.state_dict().items():
        assert name in ("current_loss_scale", "good_steps") or np.array_equal(value, first[name]), name
    # A word of Keras may count from the end, and a class may be ignored.
    for batch in ((with_first(x, -11), y), (x, with_first(y, -1))):
        outputs = session.step({"x": batch[0], "y": batch[1]})
        assert outputs["loss"] == pytest.approx(model.train_on_batch(*batch), rel=1e-5) and outputs.applied
