"""Export the training step of a Keras model."""

import keras
import numpy as np

import graphscale as gs

keras.utils.set_random_seed(0)
inputs = keras.Input((16,))
hidden = keras.layers.Dense(32, activation="relu", name="fc1")(inputs)
model = keras.Model(inputs, keras.layers.Dense(10, name="fc2")(hidden))
model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

rng = np.random.default_rng(0)
batch = (rng.standard_normal((8, 16)).astype(np.float32), rng.integers(0, 10, 8))
print(gs.exporters.tensorflow.export_step(model, batch, path="step.onnx"))
