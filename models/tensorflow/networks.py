"""Small networks with their losses, as Keras models and in raw TensorFlow."""

from collections.abc import Callable
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from graphscale.exporters.tensorflow.pure_step import by_path

Arrays = dict[str, np.ndarray]
CLASSES, VOCABULARY, BATCH = 10, 11, 8


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        batch: a sample of each input, in the order of the loss's arguments.
        loss: the mean loss of a batch; it assigns the statistics.
        weights: the trained variables by name.
        statistics: the other variables by name.
        model: the Keras model, where it is one.
    """

    batch: Arrays
    loss: Callable[..., tf.Tensor]
    weights: dict[str, tf.Variable]
    statistics: dict[str, tf.Variable] = field(default_factory=dict)
    model: keras.Model | None = None


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Return normal numbers, float32."""
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def features(*shape: int) -> Arrays:
    """Return a batch of features and labels."""
    rng = np.random.default_rng(0)
    return {"x": normal(rng, BATCH, *shape), "labels": rng.integers(0, CLASSES, BATCH)}


def text(length: int) -> Arrays:
    """Return a batch of texts, each with a label and a weight."""
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, VOCABULARY, (BATCH, length)), rng.integers(0, CLASSES, BATCH)
    return {"tokens": tokens, "labels": labels, "sample_weight": rng.uniform(0.5, 1.5, BATCH).astype(np.float32)}


# --- Keras ------------------------------------------------------------------------------------------------------------


def keras_task(model: keras.Model, batch: Arrays) -> Task:
    """Return a Keras classifier with its cross-entropy; a third input weights the samples."""
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(x: tf.Tensor, labels: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        return cross_entropy(labels, model(x, training=True), sample_weight)

    weights, statistics = (by_path(each, ".") for each in (model.trainable_variables, model.non_trainable_variables))
    return Task(batch, loss, weights, statistics, model)


def keras_dense() -> Task:
    """MLP 16-32-10 with ReLU."""
    x = keras.Input((16,))
    hidden = layers.Dense(32, activation="relu", name="fc1")(x)
    return keras_task(keras.Model(x, layers.Dense(CLASSES, name="fc2")(hidden)), features(16))


def keras_convnet() -> Task:
    """Two convolutions with batch normalization and ReLU, max pooling between them."""
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, padding="same", use_bias=False, name="conv1")(images)
    x = layers.ReLU()(layers.BatchNormalization(name="norm1")(x))
    x = layers.Conv2D(8, 3, strides=2, use_bias=False, name="conv2")(layers.MaxPooling2D()(x))
    x = layers.ReLU()(layers.BatchNormalization(name="norm2")(x))
    return keras_task(keras.Model(images, layers.Dense(CLASSES, name="fc")(layers.Flatten()(x))), features(8, 8, 3))


def keras_lstm() -> Task:
    """LSTM over four steps, unrolled; its first state is a dense layer of the mean."""
    sequence = keras.Input((4, 6))
    start = layers.Dense(8, activation="tanh", name="start")(layers.GlobalAveragePooling1D()(sequence))
    last = layers.LSTM(8, unroll=True, name="lstm")(sequence, initial_state=[start, start])
    return keras_task(keras.Model(sequence, layers.Dense(CLASSES, name="fc")(last)), features(4, 6))


def keras_embedding() -> Task:
    """The mean of embeddings, then a tanh MLP."""
    tokens = keras.Input((5,), dtype="int64")
    mean = layers.GlobalAveragePooling1D()(layers.Embedding(VOCABULARY, 8, name="embedding")(tokens))
    hidden = layers.Dense(12, activation="tanh", name="fc1")(mean)
    return keras_task(keras.Model(tokens, layers.Dense(CLASSES, name="fc2")(hidden)), text(5))


def keras_transformer() -> Task:
    """A pre-norm transformer block with two heads and GELU."""
    tokens = keras.Input((5,), dtype="int64")
    x = layers.Embedding(VOCABULARY, 8, name="embedding")(tokens)
    normed = layers.LayerNormalization(name="norm1")(x)
    # The gradient of a key's bias is zero but for rounding, which Adam would enlarge.
    x = x + layers.MultiHeadAttention(2, 4, use_bias=False, name="attention")(normed, normed, use_causal_mask=True)
    hidden = layers.Dense(16, activation="gelu", name="fc1")(layers.LayerNormalization(name="norm2")(x))
    x = layers.GlobalAveragePooling1D()(x + layers.Dense(8, name="fc2")(hidden))
    return keras_task(keras.Model(tokens, layers.Dense(CLASSES, name="head")(x)), text(5))


# --- raw TensorFlow ---------------------------------------------------------------------------------------------------


def variables(**arrays: np.ndarray) -> dict[str, tf.Variable]:
    """Return a variable of each array."""
    return {name: tf.Variable(array, name=name) for name, array in arrays.items()}


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, sample_weight: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Return the mean cross-entropy, each row times its weight."""
    return tf.reduce_mean(sample_weight * tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def dense() -> Task:
    """MLP 16-32-10 with tanh."""
    rng = np.random.default_rng(1)
    w = variables(
        w1=normal(rng, 16, 32, scale=0.25), b1=normal(rng, 32), w2=normal(rng, 32, 10, scale=0.2), b2=normal(rng, 10)
    )

    def loss(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        hidden = tf.tanh(tf.nn.bias_add(x @ w["w1"], w["b1"]))
        return cross_entropy(tf.nn.bias_add(hidden @ w["w2"], w["b2"]), labels)

    return Task(features(16), loss, w)


def convnet() -> Task:
    """Two convolutions with fused batch normalization and leaky ReLU, overlapping max pooling, average pooling."""
    rng = np.random.default_rng(1)
    w = variables(conv1=normal(rng, 3, 3, 3, 6, scale=0.3), gamma1=1 + normal(rng, 6, scale=0.1), beta1=normal(rng, 6))
    w |= variables(conv2=normal(rng, 3, 3, 6, 8, scale=0.2), gamma2=1 + normal(rng, 8, scale=0.1), beta2=normal(rng, 8))
    w |= variables(head=normal(rng, 8, CLASSES, scale=0.3))
    running = variables(mean1=np.zeros(6, np.float32), variance1=np.ones(6, np.float32))
    running |= variables(mean2=np.zeros(8, np.float32), variance2=np.ones(8, np.float32))

    def normalize(x: tf.Tensor, index: int) -> tf.Tensor:
        gamma, beta = w[f"gamma{index}"], w[f"beta{index}"]
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3)
        for name, value in ((f"mean{index}", mean), (f"variance{index}", variance)):
            running[name].assign_sub(0.1 * (running[name] - value))
        return tf.nn.leaky_relu(y)

    def loss(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        x = normalize(tf.nn.conv2d(x, w["conv1"], 1, "SAME"), 1)
        x = normalize(tf.nn.conv2d(tf.nn.max_pool2d(x, 3, 2, "SAME"), w["conv2"], 1, "SAME"), 2)
        x = tf.reshape(tf.nn.avg_pool2d(x, 4, 4, "VALID"), [BATCH, 8])
        return cross_entropy(x @ w["head"], labels)

    return Task(features(8, 8, 3), loss, w, running)


def language_model() -> Task:
    """Causal attention between tied embeddings, weighted cross-entropy of the next token."""
    rng, width, length = np.random.default_rng(1), 8, 5
    w = variables(embedding=normal(rng, VOCABULARY, width, scale=0.3), positions=normal(rng, length, width, scale=0.3))
    w |= variables(gain=np.ones(width, np.float32))
    w |= variables(**{name: normal(rng, width, width, scale=width**-0.5) for name in ("query", "key", "value", "out")})
    mask = np.triu(np.full((length, length), -1e9, np.float32), 1)

    def loss(tokens: tf.Tensor, labels: tf.Tensor, sample_weight: tf.Tensor) -> tf.Tensor:
        x = tf.gather(w["embedding"], tokens) + w["positions"]
        normed = x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-5) * w["gain"]
        query, key, value = (tf.einsum("bti,ij->btj", normed, w[name]) for name in ("query", "key", "value"))
        scores = tf.matmul(query, key, transpose_b=True) / width**0.5 + mask
        x += tf.einsum("bti,ij->btj", tf.nn.softmax(scores) @ value, w["out"])
        return cross_entropy(tf.einsum("bti,vi->btv", x, w["embedding"]), labels, sample_weight)

    tokens = rng.integers(0, VOCABULARY, (BATCH, length + 1))
    # The last tokens of some texts are padding.
    kept = (np.arange(length) < rng.integers(2, length + 1, (BATCH, 1))).astype(np.float32)
    return Task({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "sample_weight": kept}, loss, w)
