"""Kinds by TensorFlow as people export them: images, sentences, retrieval, carried text, denoising on a plateau."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from models.zoo.arrays import normal
from models.zoo.steps import STYLES, Arrays, Inputs, Outputs, Step, kind
from models.zoo.tensorflow.problems import labels

Tensor = tf.Tensor
Loss = Callable[[Arrays, Arrays], tuple[Tensor, Outputs]]
EXPORTER = STYLES["exporter-names"]


def derive(loss: Loss, weights: Arrays, values: Arrays) -> tuple[Tensor, Outputs, Arrays]:
    """Return the loss, further outputs, and the gradient of each weight."""
    own = {name: values[name] for name in weights}
    with tf.GradientTape() as tape:
        tape.watch(list(own.values()))
        value, more = loss(own, values)
    return value, more, {name: tf.convert_to_tensor(grad) for name, grad in tape.gradient(value, own).items()}


def dense_layer(rows: int, columns: int, name: str) -> Arrays:
    """Return kernel and bias of a dense layer, as Keras starts them."""
    kernel = normal(rows, columns, scale=(2 / (rows + columns)) ** 0.5)
    return {f"{name}_kernel": kernel, f"{name}_bias": np.zeros(columns, np.float32)}


def apply_dense(w: Arrays, name: str, x: Tensor) -> Tensor:
    """Apply a dense layer."""
    return tf.nn.bias_add(tf.matmul(x, w[f"{name}_kernel"]), w[f"{name}_bias"])


def zeros(weights: Arrays, *slots: str) -> Arrays:
    """Return zeros for each slot of each weight."""
    return {f"{name}_{slot}": np.zeros_like(weight) for slot in slots for name, weight in weights.items()}


def adam(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor, rate: Tensor | float) -> tuple[Tensor, ...]:
    """Return the next weight and moments as Keras computes them."""
    m = m + (g - m) * (1 - 0.9)
    v = v + (tf.square(g) - v) * (1 - 0.99)
    alpha = rate * tf.sqrt(1 - tf.pow(0.99, t)) / (1 - tf.pow(0.9, t))
    return w - m * alpha / (tf.sqrt(v) + 1e-6), m, v


@kind("tf-image-trainer", "tensorflow")
def image_trainer() -> Iterator[Step]:
    """Yield a convnet with batch normalization and smoothed labels; Nesterov by warm-up and cosine, or a fed rate."""

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x, states = values["images"], {}
        for name in ("conv1", "conv2"):
            x = tf.nn.conv2d(x, w[f"{name}_kernel"], 1, "SAME")
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            states[f"{name}_moving_mean"] = values[f"{name}_moving_mean"] * 0.95 + mean * 0.05
            states[f"{name}_moving_variance"] = values[f"{name}_moving_variance"] * 0.95 + variance * 0.05
            x = (x - mean) * tf.math.rsqrt(variance + 1e-3) * w[f"{name}_gamma"] + w[f"{name}_beta"]
            x = tf.nn.relu(x)
            x = tf.nn.max_pool2d(x, 2, 2, "VALID") if name == "conv1" else x
        x = tf.nn.relu(apply_dense(w, "hidden", tf.reduce_mean(x, [1, 2])))
        logits = apply_dense(w, "logits", x)
        target = tf.one_hot(values["labels"], 5) * 0.9 + 0.02
        each = tf.nn.softmax_cross_entropy_with_logits(target, logits)
        right = tf.cast(tf.equal(tf.argmax(logits, -1, tf.int32), values["labels"]), tf.float32)
        return tf.reduce_mean(each), Outputs(metrics={"accuracy": tf.reduce_mean(right)}, states=states)

    weights, moving = {}, {}
    for name, inputs, outputs in (("conv1", 3, 8), ("conv2", 8, 12)):
        weights[f"{name}_kernel"] = normal(3, 3, inputs, outputs, scale=(2 / (9 * inputs)) ** 0.5)
        weights |= {f"{name}_gamma": np.ones(outputs, np.float32), f"{name}_beta": np.zeros(outputs, np.float32)}
        moving |= {f"{name}_moving_mean": np.zeros(outputs, np.float32)}
        moving |= {f"{name}_moving_variance": np.ones(outputs, np.float32)}
    weights |= dense_layer(12, 20, "hidden") | dense_layer(20, 5, "logits")
    batch = {"images": normal(4, 8, 8, 3), "labels": labels(5, 4)}

    def run(values: Arrays, fed: bool) -> Outputs:
        value, more, grads = derive(loss, weights, values)
        if fed:
            rate, states = values["learning_rate"], {}
        else:
            time = tf.cast(values["iterations"], tf.float32)
            cosine = 0.05 * (1 + tf.cos(math.pi * tf.minimum((time - 5) / 95, 1.0)))
            rate = tf.where(time < 5, 0.1 * (time + 1) / 6, cosine)
            states = {"iterations": values["iterations"] + 1}
        for name, grad in grads.items():
            momentum = values[f"{name}_momentum"] * 0.9 - grad * rate
            states |= {name: values[name] + momentum * 0.9 - grad * rate, f"{name}_momentum": momentum}
            if fed:
                states[f"{name}_average"] = values[f"{name}_average"] * 0.99 + states[name] * 0.01
        shown = {"gradient_norm": tf.linalg.global_norm(list(grads.values()))} if fed else {"learning_rate": rate}
        return Outputs({"loss": value}, more.metrics | shown, states=states | more.states)

    states = weights | zeros(weights, "momentum") | moving
    inputs = Inputs(batch, states | {"iterations": np.int64(0)})
    yield Step("cosine", inputs, lambda values: run(values, False), EXPORTER)
    averages = {f"{name}_average": weight for name, weight in weights.items()}
    inputs = Inputs(batch, states | averages, {"learning_rate": np.float32(0.05)})
    yield Step("averaged", inputs, lambda values: run(values, True))


@kind("tf-sentence-classifier", "tensorflow")
def sentence_classifier() -> Iterator[Step]:
    """Yield convolutions over embedded words with weights of classes: Adam with decay and clipping, or RMSprop."""
    sizes = {"pairs": 2, "triples": 3}

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x = tf.expand_dims(tf.gather(w["embeddings"], values["words"]), 1)
        found = []
        for name in sizes:
            y = tf.nn.bias_add(tf.nn.conv2d(x, w[f"{name}_kernel"], 1, "VALID"), w[f"{name}_bias"])
            found.append(tf.reduce_max(tf.nn.relu(y), [1, 2]))
        logits = apply_dense(w, "out", tf.concat(found, -1))
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(values["topic"], logits)
        weight = tf.gather(values["class_weight"], values["topic"])
        right = tf.cast(tf.equal(tf.argmax(logits, -1, tf.int32), values["topic"]), tf.float32)
        confidence = tf.reduce_mean(tf.reduce_max(tf.nn.softmax(logits), -1))
        metrics = {"accuracy": tf.reduce_mean(right), "confidence": confidence}
        return tf.reduce_sum(each * weight) / tf.reduce_sum(weight), Outputs(metrics=metrics)

    weights = {"embeddings": normal(31, 12, scale=0.4)}
    for name, size in sizes.items():
        weights |= {f"{name}_kernel": normal(1, size, 12, 10, scale=0.25), f"{name}_bias": np.zeros(10, np.float32)}
    weights |= dense_layer(20, 4, "out")
    batch = {"words": labels(31, 5, 8), "topic": labels(4, 5)}
    fixed = {"class_weight": np.array([0.5, 1.0, 2.0, 1.5], np.float32)}

    def decayed(values: Arrays) -> Outputs:
        value, more, grads = derive(loss, weights, values)
        limited, norm = tf.clip_by_global_norm(list(grads.values()), 1.0)
        count = values["iteration"] + 1
        time, states = tf.cast(count, tf.float32), {"iteration": count}
        rate = 0.01 * tf.pow(0.9, time / 50)
        for name, grad in zip(grads, limited, strict=True):
            keys = [name, f"{name}_m", f"{name}_v"]
            moved = adam(values[name], grad, values[keys[1]], values[keys[2]], time, rate)
            states |= dict(zip(keys, moved, strict=True))
        return Outputs({"loss": value}, more.metrics | {"global_norm": norm, "rate": rate}, states=states)

    def rmsprop(values: Arrays) -> Outputs:
        value, more, grads = derive(loss, weights, values)
        states = {}
        for name, grad in grads.items():
            square = 0.9 * values[f"{name}_rms"] + 0.1 * tf.square(grad)
            step = 0.9 * values[f"{name}_mom"] + values["lr"] * grad * tf.math.rsqrt(square + 1e-5)
            states |= {name: values[name] - step, f"{name}_rms": square, f"{name}_mom": step}
        return Outputs({"loss": value}, more.metrics, states=states)

    states = weights | zeros(weights, "m", "v") | {"iteration": np.int64(0)}
    yield Step("adam", Inputs(batch, states, constants=fixed), decayed)
    inputs = Inputs(batch, weights | zeros(weights, "rms", "mom"), {"lr": np.float32(2e-3)}, fixed)
    yield Step("rmsprop", inputs, rmsprop, STYLES["opset-18"])


@kind("tf-two-tower-retrieval", "tensorflow")
def two_tower_retrieval() -> Iterator[Step]:
    """Yield users and items of the batch against each other, corrected by carried estimates of how often items come."""

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        seen = tf.reduce_max(tf.one_hot(values["item"], 17), 0)
        gap = (1 - seen) * values["item_gap"] + seen * (0.95 * values["item_gap"] + 0.05 * values["item_age"])
        age = (1 - seen) * (values["item_age"] + 1) + seen
        user = tf.concat([tf.gather(w["user_table"], values["user"]), values["context"]], -1)
        user = apply_dense(w, "user2", tf.nn.relu(apply_dense(w, "user1", user)))
        item = apply_dense(w, "item1", tf.gather(w["item_table"], values["item"]))
        user, item = (x * tf.math.rsqrt(tf.reduce_sum(tf.square(x), -1, keepdims=True) + 1e-6) for x in (user, item))
        logits = tf.exp(w["log_scale"]) * tf.matmul(user, item, transpose_b=True)
        corrected = logits + tf.math.log(tf.gather(gap, values["item"]))
        places = tf.range(6)
        right = tf.cast(tf.equal(tf.argmax(logits, -1, tf.int32), places), tf.float32)
        metrics = {"recall_at_1": tf.reduce_mean(right), "scale": tf.exp(w["log_scale"])}
        value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(places, corrected))
        return value, Outputs(metrics=metrics, states={"item_gap": gap, "item_age": age})

    weights = {"user_table": normal(23, 8, scale=0.3), "item_table": normal(17, 10, scale=0.3)}
    weights |= dense_layer(12, 18, "user1") | dense_layer(18, 9, "user2") | dense_layer(10, 9, "item1")
    weights["log_scale"] = np.float32(1.5)
    often = {"item_gap": np.full(17, 3.0, np.float32), "item_age": np.ones(17, np.float32)}
    batch = {"user": labels(23, 6), "item": labels(17, 6), "context": normal(6, 4)}

    def run(values: Arrays, rule: str) -> Outputs:
        value, more, grads = derive(loss, weights, values)
        states, shown = {}, {}
        for name, grad in grads.items():
            if rule == "adagrad":
                total = values[f"{name}_accumulator"] + tf.square(grad)
                states |= {name: values[name] - 0.05 * grad / tf.sqrt(total + 1e-7), f"{name}_accumulator": total}
            else:
                m = values[f"{name}_m"]
                move = values["rate"] * (tf.sign(m * 0.9 + grad * 0.1) + 0.01 * values[name])
                states |= {name: values[name] - move, f"{name}_m": m * 0.99 + grad * 0.01}
        if rule == "lion":
            shown = {"weight_norm": tf.linalg.global_norm([states[name] for name in weights])}
        return Outputs({"loss": value}, more.metrics | shown, states=states | more.states)

    sums = {f"{name}_accumulator": np.full_like(weight, 0.1) for name, weight in weights.items()}
    yield Step("adagrad", Inputs(batch, weights | sums | often), lambda values: run(values, "adagrad"), EXPORTER)
    inputs = Inputs(batch, weights | zeros(weights, "m") | often, {"rate": np.float32(1e-3)})
    yield Step("lion", inputs, lambda values: run(values, "lion"), STYLES["bare"])


@kind("tf-stateful-text", "tensorflow")
def stateful_text() -> Iterator[Step]:
    """Yield an LSTM of characters whose hidden state and cell go on to the next segment; AMSGrad, or clipped SGD."""
    width = 14

    def loss(w: Arrays, values: Arrays) -> tuple[Tensor, Outputs]:
        x, h, c, outputs = tf.gather(w["characters"], values["text"]), values["h"], values["c"], []
        for time in range(5):
            gates = tf.matmul(x[:, time], w["kernel"]) + tf.matmul(h, w["recurrent"]) + w["bias"]
            i, f, g, o = tf.split(gates, 4, 1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
            h = tf.sigmoid(o) * tf.tanh(c)
            outputs.append(h)
        logits = apply_dense(w, "out", tf.reshape(tf.stack(outputs, 1), [-1, width]))
        target = tf.reshape(values["following"], [-1])
        value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits))
        metrics = {"perplexity": tf.exp(value), "bits": value / math.log(2)}
        return value, Outputs(metrics=metrics, states={"h": h, "c": c})

    weights = {"characters": normal(19, 8, scale=0.4), "kernel": normal(8, 4 * width, scale=0.3)}
    weights |= {"recurrent": normal(width, 4 * width, scale=0.25), "bias": np.zeros(4 * width, np.float32)}
    weights |= dense_layer(width, 19, "out")
    hidden = {"h": np.zeros((3, width), np.float32), "c": np.zeros((3, width), np.float32)}
    batch = {"text": labels(19, 3, 5), "following": labels(19, 3, 5)}

    def amsgrad(values: Arrays) -> Outputs:
        value, more, grads = derive(loss, weights, values)
        count = values["iteration"] + 1
        time, states = tf.cast(count, tf.float32), {"iteration": count}
        for name, grad in grads.items():
            _, m, v = adam(values[name], grad, values[f"{name}_m"], values[f"{name}_v"], time, 0.01)
            most = tf.maximum(values[f"{name}_vhat"], v)
            alpha = 0.005 * tf.sqrt(1 - tf.pow(0.99, time)) / (1 - tf.pow(0.9, time))
            states |= {name: values[name] - m * alpha / (tf.sqrt(most) + 1e-6)}
            states |= {f"{name}_m": m, f"{name}_v": v, f"{name}_vhat": most}
        return Outputs({"loss": value}, more.metrics, states=states | more.states)

    def clipped(values: Arrays) -> Outputs:
        value, more, grads = derive(loss, weights, values)
        limited = {name: tf.clip_by_norm(grad, 0.25) for name, grad in grads.items()}
        states = {name: values[name] - values["lr"] * grad for name, grad in limited.items()}
        return Outputs({"loss": value}, more.metrics, states=states | more.states)

    states = weights | zeros(weights, "m", "v", "vhat") | hidden | {"iteration": np.int64(0)}
    yield Step("amsgrad", Inputs(batch, states), amsgrad)
    yield Step("clipped", Inputs(batch, weights | hidden, {"lr": np.float32(0.5)}), clipped, EXPORTER)
