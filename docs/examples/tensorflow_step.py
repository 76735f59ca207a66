"""Export a training step of Keras: forward, backward and Adam in one ONNX graph."""

import keras
import numpy as np
import onnx
import tensorflow as tf

from models.tensorflow.exporter import export_step, keras_state

keras.utils.set_random_seed(0)
inputs = keras.Input((16,))
hidden = keras.layers.Dense(32, activation="relu", name="fc1")(inputs)
model = keras.Model(inputs, keras.layers.Dense(10, name="fc2")(hidden))
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def step(x: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
    """One training step, as TensorFlow would run it; its outputs by name."""
    with tf.GradientTape() as tape:
        loss = cross_entropy(labels, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


rng = np.random.default_rng(0)
batch = {"x": rng.standard_normal((8, 16)).astype(np.float32), "labels": rng.integers(0, 10, 8)}
exported, pure = export_step(step, batch, keras_state(model, optimizer))
onnx.save(exported, "step.onnx")
np.savez("step.npz", **pure.inputs)
