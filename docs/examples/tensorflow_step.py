"""Export the training step of a Keras model."""

import keras
import numpy as np

import graphscale as gs


def make_model() -> keras.Model:
    """Any compiled model will do."""
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(32, activation="relu", name="fc1")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(10, name="fc2")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    batch = (rng.standard_normal((8, 16)).astype(np.float32), rng.integers(0, 10, 8))
    print(gs.exporters.tensorflow.export_step(make_model(), batch, path="step.onnx"))
