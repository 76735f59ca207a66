"""Kinds by JAX as people export them, of supervised models: images, tokens, series, pairs, citations."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.problems import matmul
from models.zoo.jax.training import named_leaves
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, kind

EXPORTER = STYLES["exporter-names"]
Parts = tuple[Arrays, Arrays]
"""Metrics, and the next values of what is carried."""
Loss = Callable[[Arrays, Arrays], tuple[jax.Array, Parts]]


def derive(loss: Loss, weights: Arrays, values: Arrays) -> tuple[jax.Array, Parts, Arrays]:
    """Return the loss, its parts, and the gradient of each weight."""
    own = {name: values[name] for name in weights}
    (value, parts), grads = jax.value_and_grad(loss, has_aux=True)(own, values)
    return value, parts, grads


def begin(optimizer: optax.GradientTransformation, weights: Arrays, prefix: str = "") -> tuple[Arrays, Callable]:
    """Return the optimizer's state by name, and its update: (grads, inputs) -> (updates, next state by name)."""
    initial = optimizer.init(jax.tree.map(jnp.asarray, weights))
    leaves = {f"{prefix}{name}": leaf for name, leaf in named_leaves(initial).items()}
    shape = jax.tree.structure(initial)

    def update(grads: Arrays, values: Arrays) -> tuple[Arrays, Arrays]:
        state = jax.tree.unflatten(shape, [values[name] for name in leaves])
        updates, state = optimizer.update(grads, state, {name: values[name] for name in grads})
        return updates, dict(zip(leaves, jax.tree.leaves(state), strict=True))

    return leaves, update


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    """Return the arrays with a prefix before their names."""
    return {f"{prefix}{name}": value for name, value in arrays.items()}


def integers(count: int, *shape: int) -> np.ndarray:
    """Return random numbers below the count."""
    return np.random.randint(0, count, shape).astype(np.int32)


def chosen(scores: jax.Array, axis: int = -1) -> jax.Array:
    """Return the places of the largest scores, outside of the derivative, which jax2onnx has none for."""
    return jnp.argmax(jax.lax.stop_gradient(scores), axis)


def glorot(rows: int, columns: int) -> np.ndarray:
    """Return a matrix by Glorot's rule."""
    return normal(rows, columns, scale=(2 / (rows + columns)) ** 0.5)


def small_images() -> tuple[Arrays, Arrays, Arrays, Loss]:
    """Return weights, statistics, a batch and the loss of two convolutions with batch normalization."""

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        wide, size = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), x.shape[1]
        rows = [wide[:, i : i + size, j : j + size] for i in range(3) for j in range(3)]
        return matmul(jnp.concatenate(rows, -1).reshape(-1, kernel.shape[0]), kernel)

    def loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        x, stats = values["image"], {}
        for name in ("conv0", "conv1"):
            size = x.shape[1]
            y = convolve(x, w[f"{name}_kernel"])
            mean, variance = jnp.mean(y, 0), jnp.var(y, 0)
            stats[f"{name}_mean"] = 0.9 * values[f"{name}_mean"] + 0.1 * mean
            stats[f"{name}_var"] = 0.9 * values[f"{name}_var"] + 0.1 * variance
            y = (y - mean) * jax.lax.rsqrt(variance + 1e-5) * w[f"{name}_scale"] + w[f"{name}_bias"]
            pooled = jax.nn.relu(y).reshape(-1, size // 2, 2, size // 2, 2, y.shape[-1])
            x = jnp.mean(pooled, (2, 4))
        logits = matmul(x.reshape(x.shape[0], -1), w["head_kernel"]) + w["head_bias"]
        target = optax.smooth_labels(jax.nn.one_hot(values["label"], 6), 0.1)
        accuracy = jnp.mean((chosen(logits, -1) == values["label"]).astype(jnp.float32))
        return jnp.mean(-jnp.sum(target * jax.nn.log_softmax(logits), -1)), ({"accuracy": accuracy}, stats)

    weights, stats = {}, {}
    for name, inputs, outputs in (("conv0", 3, 10), ("conv1", 10, 14)):
        weights |= {f"{name}_kernel": normal(9 * inputs, outputs, scale=(9 * inputs) ** -0.5)}
        weights |= {f"{name}_scale": np.ones(outputs, np.float32), f"{name}_bias": np.zeros(outputs, np.float32)}
        stats |= {f"{name}_mean": np.zeros(outputs, np.float32), f"{name}_var": np.ones(outputs, np.float32)}
    weights |= {"head_kernel": glorot(56, 6), "head_bias": np.zeros(6, np.float32)}
    return weights, stats, {"image": normal(5, 8, 8, 3), "label": integers(6, 5)}, loss


@kind("jax-small-image-trainer", "jax")
def small_image_trainer() -> Iterator[Step]:
    """Yield a convnet with batch statistics: accumulated Nesterov with a fed rate, or a cosine and averaged weights."""
    weights, stats, batch, loss = small_images()
    slots, update = begin(optax.trace(0.9, nesterov=True), weights)

    def accumulated(values: Arrays) -> Outputs:
        value, (metrics, following), grads = derive(loss, weights, values)
        due = values["mini_step"] == 3
        totals = {name: values[f"acc_{name}"] + grad / 4 for name, grad in grads.items()}
        moves, moved = update(totals, values)
        states = {n: jnp.where(due, values[n] - values["lr"] * moves[n], values[n]) for n in weights}
        states |= {name: jnp.where(due, new, values[name]) for name, new in moved.items()}
        states |= {f"acc_{n}": jnp.where(due, jnp.zeros_like(total), total) for n, total in totals.items()}
        states["mini_step"] = jnp.where(due, 0, values["mini_step"] + 1)
        return Outputs({"loss": value}, metrics, states=states | following)

    def cosine(values: Arrays) -> Outputs:
        value, (metrics, following), grads = derive(loss, weights, values)
        norm, step = optax.global_norm(grads), values["step"] + 1
        rate = 0.05 * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(step / 500, 1.0)))
        moves, moved = update({n: g * jnp.minimum(1.0, 2.0 / (norm + 1e-6)) for n, g in grads.items()}, values)
        states = {n: values[n] - rate * (moves[n] + 1e-4 * values[n]) for n in weights}
        averages = {f"ema_{n}": 0.99 * values[f"ema_{n}"] + 0.01 * states[n] for n in weights}
        metrics |= {"grad_norm": norm, "lr": rate}
        return Outputs({"loss": value}, metrics, states=states | moved | averages | following | {"step": step})

    totals = {f"acc_{name}": np.zeros_like(weight) for name, weight in weights.items()}
    states = weights | slots | totals | stats | {"mini_step": np.int32(0)}
    yield Step("accumulated", Inputs(batch, states, {"lr": np.float32(0.05)}), accumulated, warm=3)
    states = weights | slots | prefixed("ema_", weights) | stats | {"step": np.float32(0)}
    yield Step("cosine", Inputs(batch, states), cosine, EXPORTER)


def masked_tokens() -> tuple[Arrays, Arrays, Loss]:
    """Return weights, a batch and the loss of an encoder that restores masked tokens."""
    width, vocabulary, length = 20, 26, 7

    def loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        x = jax.nn.one_hot(values["tokens"], vocabulary) @ w["embedding"] + w["position"]
        for n in ("layer0", "layer1"):
            y = jax.nn.standardize(x) * w[f"{n}_ln1"]
            q, k, v = ((y @ w[f"{n}_{p}"]).reshape(-1, length, 2, 10).transpose(0, 2, 1, 3) for p in "qkv")
            scores = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / 10**0.5)
            x = x + (scores @ v).transpose(0, 2, 1, 3).reshape(-1, length, width) @ w[f"{n}_o"]
            y = jax.nn.standardize(x) * w[f"{n}_ln2"]
            x = x + jax.nn.gelu(y @ w[f"{n}_up"] + w[f"{n}_up_bias"]) @ w[f"{n}_down"]
        logp = jax.nn.log_softmax(jax.nn.standardize(x) @ w["head"] + w["head_bias"])
        each = -jnp.sum(jax.nn.one_hot(values["original"], vocabulary) * logp, -1)
        total = jnp.sum(values["masked"])
        value = jnp.sum(each * values["masked"]) / total
        right = (chosen(logp, -1) == values["original"]).astype(jnp.float32)
        metrics = {"perplexity": jnp.exp(value), "masked_accuracy": jnp.sum(right * values["masked"]) / total}
        return value, (metrics, {})

    weights = {"embedding": normal(vocabulary, width, scale=0.3), "position": normal(length, width, scale=0.1)}
    for n in ("layer0", "layer1"):
        weights |= {f"{n}_{part}": glorot(width, width) for part in "qkvo"}
        weights |= {f"{n}_{part}": np.ones(width, np.float32) for part in ("ln1", "ln2")}
        weights |= {f"{n}_up": glorot(width, 36), f"{n}_up_bias": np.zeros(36, np.float32)}
        weights |= {f"{n}_down": glorot(36, width)}
    weights |= {"head": glorot(width, vocabulary), "head_bias": np.zeros(vocabulary, np.float32)}
    batch = {"tokens": integers(vocabulary, 3, length), "original": integers(vocabulary, 3, length)}
    return weights, batch | {"masked": (np.arange(21).reshape(3, 7) % 3 == 0).astype(np.float32)}, loss


@kind("jax-masked-token-trainer", "jax")
def masked_token_trainer() -> Iterator[Step]:
    """Yield an encoder of masked tokens: LAMB with warm-up, or AdamW with clipping, a fed rate and norms."""
    weights, batch, loss = masked_tokens()
    lamb = optax.chain(optax.scale_by_adam(eps=1e-6), optax.add_decayed_weights(0.01), optax.scale_by_trust_ratio())
    slots, update = begin(lamb, weights, "lamb_")

    def warming(values: Arrays) -> Outputs:
        value, (metrics, _), grads = derive(loss, weights, values)
        rate = 0.02 * jnp.minimum(1.0, (values["step"] + 1) / 30)
        moves, moved = update(grads, values)
        states = {name: values[name] - rate * moves[name] for name in weights}
        return Outputs({"loss": value}, metrics, states=states | moved | {"step": values["step"] + 1})

    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.98, 1e-6))
    more, improve = begin(adamw, weights)

    def clipped(values: Arrays) -> Outputs:
        value, (metrics, _), grads = derive(loss, weights, values)
        moves, moved = improve(grads, values)
        states = {n: values[n] - values["learning_rate"] * (moves[n] + 0.01 * values[n]) for n in weights}
        metrics |= {"grad_norm": optax.global_norm(grads), "param_norm": optax.global_norm(states)}
        return Outputs({"loss": value}, metrics, states=states | moved)

    yield Step("lamb", Inputs(batch, weights | slots | {"step": np.float32(0)}), warming)
    fed = {"learning_rate": np.float32(1e-3)}
    yield Step("adamw", Inputs(batch, weights | more, fed), clipped, STYLES["scrambled-bare"])


@kind("jax-sigmoid-pairs", "jax")
def sigmoid_pairs() -> Iterator[Step]:
    """Yield SigLIP: two towers, a learnt temperature and a learnt bias; by Adafactor, or by Lion with a limit."""

    def tower(w: Arrays, name: str, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(matmul(x, w[f"{name}_in"]) + w[f"{name}_in_bias"])
        x = matmul(x, w[f"{name}_out"])
        return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)

    def loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        cosine = matmul(tower(w, "image", values["image"]), tower(w, "text", values["text"]).T)
        logits = jnp.exp(w["log_temperature"]) * cosine + w["bias"]
        signs = 2 * jnp.eye(6) - 1
        hits = (chosen(cosine, 1) == jnp.arange(6)).astype(jnp.float32)
        metrics = {"temperature": jnp.exp(w["log_temperature"]), "retrieval": jnp.mean(hits)}
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits), -1)), (metrics, {})

    weights = {"image_in": glorot(20, 28), "image_in_bias": np.zeros(28, np.float32), "image_out": glorot(28, 16)}
    weights |= {"text_in": glorot(12, 24), "text_in_bias": np.zeros(24, np.float32), "text_out": glorot(24, 16)}
    weights |= {"log_temperature": np.float32(2.3), "bias": np.float32(-3.0)}
    batch = {"image": normal(6, 20), "text": normal(6, 12)}
    factored = optax.adafactor(0.01, min_dim_size_to_factor=8, multiply_by_parameter_scale=False)
    for variant, optimizer in {"adafactor": factored, "lion": optax.lion(1e-3, weight_decay=0.01)}.items():
        slots, update = begin(optimizer, weights)

        def run(values: Arrays, variant: str = variant, update: Callable = update) -> Outputs:
            value, (metrics, _), grads = derive(loss, weights, values)
            moves, moved = update(grads, values)
            states = {name: values[name] + moves[name] for name in weights}
            if variant == "lion":
                states["log_temperature"] = jnp.clip(states["log_temperature"], 0.0, 4.6052)
                metrics |= {"grad_norm": optax.global_norm(grads)}
            return Outputs({"loss": value}, metrics, states=states | moved)

        yield Step(variant, Inputs(batch, weights | slots), run, EXPORTER if variant == "adafactor" else STYLES["bare"])


@kind("jax-citation-graph", "jax")
def citation_graph() -> Iterator[Step]:
    """Yield a graph convolution of all nodes, with the best accuracy of held-out ones carried; by Adam, or Rprop."""

    def loss(w: Arrays, values: Arrays) -> tuple[jax.Array, Parts]:
        links = values["adjacency"]
        x = jax.nn.relu(matmul(links, matmul(values["features"], w["gcn0"])) + w["gcn0_bias"])
        x = jax.nn.elu(matmul(links, matmul(x, w["gcn1"])) + matmul(x, w["skip"]))
        logp = jax.nn.log_softmax(matmul(x, w["out"]) + w["out_bias"])
        each = -jnp.sum(jax.nn.one_hot(values["labels"], 5) * logp, -1)
        right = (chosen(logp, -1) == values["labels"]).astype(jnp.float32)
        penalty = 5e-3 * jnp.sum(jnp.square(w["gcn0"]))
        train, held = values["train_mask"], values["val_mask"]
        metrics = {"l2_penalty": penalty, "train_accuracy": jnp.sum(right * train) / jnp.sum(train)}
        metrics |= {"val_loss": jnp.sum(each * held) / jnp.sum(held)}
        metrics |= {"val_accuracy": jnp.sum(right * held) / jnp.sum(held)}
        return jnp.sum(each * train) / jnp.sum(train) + penalty, (metrics, {})

    weights = {"gcn0": glorot(9, 18), "gcn0_bias": np.zeros(18, np.float32), "gcn1": glorot(18, 14)}
    weights |= {"skip": glorot(18, 14), "out": glorot(14, 5), "out_bias": np.zeros(5, np.float32)}
    links = (np.random.rand(16, 16) < 0.2).astype(np.float32)
    links = np.minimum(links + links.T + np.eye(16, dtype=np.float32), 1)
    degree = links.sum(1) ** -0.5
    batch = {"features": normal(16, 9), "adjacency": (degree[:, None] * links * degree).astype(np.float32)}
    batch |= {"labels": integers(5, 16), "train_mask": (np.arange(16) < 9).astype(np.float32)}
    batch |= {"val_mask": (np.arange(16) >= 9).astype(np.float32)}
    styles = {"adam": PLAIN, "rprop": EXPORTER}
    for variant, optimizer in {"adam": optax.adam(0.01), "rprop": optax.rprop(1e-3)}.items():
        slots, update = begin(optimizer, weights)

        def run(values: Arrays, update: Callable = update) -> Outputs:
            value, (metrics, _), grads = derive(loss, weights, values)
            moves, moved = update(grads, values)
            better = metrics["val_accuracy"] > values["best_accuracy"]
            best = {"best_accuracy": jnp.maximum(metrics["val_accuracy"], values["best_accuracy"])}
            best |= {"epoch": values["epoch"] + 1}
            best |= {"best_epoch": jnp.where(better, values["epoch"], values["best_epoch"])}
            states = {name: values[name] + moves[name] for name in weights}
            return Outputs({"loss": value}, metrics, states=states | moved | best)

        carried = {"best_accuracy": np.float32(0), "epoch": np.int32(0), "best_epoch": np.int32(0)}
        yield Step(variant, Inputs(batch, weights | slots | carried), run, styles[variant])
