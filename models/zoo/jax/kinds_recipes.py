"""Kinds by JAX that are ordinary supervised recipes: nested weights, a chain of optax, and metrics of the step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.kinds_wrappers import scheduled
from models.zoo.jax.problems import matmul
from models.zoo.jax.training import named_leaves
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind

EXPORTER = STYLES["exporter-names"]
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Carried:
    """A tree whose leaves are inputs and outputs of the graph: their first values by name, and the tree's structure."""

    values: Arrays
    structure: Any

    def read(self, values: Arrays) -> Any:
        """Return the tree of the present values."""
        return jax.tree.unflatten(self.structure, [values[name] for name in self.values])

    def write(self, tree: Any) -> Arrays:
        """Return the leaves of a tree by name."""
        return dict(zip(self.values, jax.tree.leaves(tree), strict=True))


def carried(tree: Any, prefix: str = "") -> Carried:
    """Return a tree as named values, with a prefix before their names."""
    tree = jax.tree.map(jnp.asarray, tree)
    return Carried({prefix + name: value for name, value in named_leaves(tree).items()}, jax.tree.structure(tree))


def advance(optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Return the next weights and the next state of the optimizer."""
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def fit(
    variant: str,
    params: Any,
    optimizer: optax.GradientTransformation,
    batch: Arrays,
    objective: Callable[[Any, Arrays], tuple[jax.Array, Metrics]],
    style: Style = PLAIN,
    *,
    observe: Callable[[Arrays, Any, Any], Metrics] = lambda values, grads, params: {},
    constants: Mapping[str, Any] = MappingProxyType({}),
    sharpness: float = 0.0,
) -> Step:
    """Return a step with a train state: weights, the optimizer's state, and the number of the step.

    With a `sharpness`, the gradients are those of weights that far up the hill, and the loss is that of the weights.
    """
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))

    def run(values: Arrays) -> Outputs:
        present = weights.read(values)
        (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(present, values)
        if sharpness:
            length = sharpness / (optax.global_norm(grads) + 1e-12)
            up = jax.tree.map(lambda weight, grad: weight + length * grad, present, grads)
            grads, _ = jax.grad(objective, has_aux=True)(up, values)
        following, state = advance(optimizer, grads, slots.read(values), present)
        metrics = metrics | observe(values, grads, following)
        states = weights.write(following) | slots.write(state) | {"step": values["step"] + 1}
        return Outputs({"loss": loss}, metrics, states=states)

    states = weights.values | slots.values | {"step": np.int32(0)}
    return Step(variant, Inputs(batch, states, constants=dict(constants)), run, style, warm=3)


def layer(rows: int, columns: int, *, bias: bool = True) -> Arrays:
    """Return the weights of a dense layer."""
    weights = {"kernel": normal(rows, columns, scale=rows**-0.5)}
    return weights | {"bias": normal(columns, scale=0.1)} if bias else weights


def linear(weights: Arrays, x: jax.Array) -> jax.Array:
    """Apply a dense layer to the last dimension."""
    y = matmul(x, weights["kernel"]) if x.ndim == 2 else jnp.tensordot(x, weights["kernel"], 1)
    return y + weights["bias"] if "bias" in weights else y


def stack(*sizes: int) -> dict[str, Arrays]:
    """Return dense layers by name."""
    return {f"dense_{index}": layer(rows, columns) for index, (rows, columns) in enumerate(pairwise(sizes))}


def mlp(weights: dict[str, Arrays], x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Apply dense layers with an activation between them."""
    for index in range(len(weights)):
        x = linear(weights[f"dense_{index}"], x if index == 0 else activation(x))
    return x


def layer_norm(weights: Arrays, x: jax.Array) -> jax.Array:
    """Normalize the last dimension, then scale and shift."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * weights["scale"] + weights["bias"]


def normalisation(size: int) -> Arrays:
    """Return the weights of a normalization."""
    return {"scale": 1 + normal(size, scale=0.1), "bias": normal(size, scale=0.1)}


def cross_entropy(logits: jax.Array, label: jax.Array, smoothing: float = 0.0) -> jax.Array:
    """Return the cross-entropy of each row, with smoothed labels."""
    wanted = optax.smooth_labels(jax.nn.one_hot(label, logits.shape[-1]), smoothing)
    return optax.softmax_cross_entropy(logits, wanted)


def accuracy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Return the share of rows whose largest logit is that of the label."""
    best = jnp.argmax(jax.lax.stop_gradient(logits), -1)
    return jnp.mean((best == label).astype(jnp.float32))


def labels(classes: int, *shape: int) -> np.ndarray:
    """Return random integer labels."""
    return np.random.randint(0, classes, shape).astype(np.int32)


def matrices(params: Any) -> Any:
    """Return for each weight whether it is a matrix: biases and scales are not decayed."""
    return jax.tree.map(lambda weight: jnp.ndim(weight) > 1, params)


@kind("jax-warmup-classifier", "jax")
def warmup_classifier() -> Iterator[Step]:
    """Yield smoothed classification with clipping, warm-up, cosine decay, masked weight decay; the rate is shown."""
    schedule = scheduled(optax.warmup_cosine_decay_schedule, 1e-4, 1e-2, 5, 80, 1e-4)

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, Metrics]:
        logits = mlp(params, values["features"], jax.nn.gelu)
        loss = jnp.mean(cross_entropy(logits, values["label"], 0.1))
        return loss, {"accuracy": accuracy(logits, values["label"])}

    def observe(values: Arrays, grads: Any, params: Any) -> Metrics:
        return {"grad_norm": optax.global_norm(grads), "learning_rate": schedule(values["step"])}

    adamw = optax.adamw(schedule, weight_decay=0.05, mask=matrices)
    batch = {"features": normal(8, 12), "label": labels(6, 8)}
    chained = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    yield fit("adamw", stack(12, 20, 16, 6), chained, batch, objective, observe=observe)
    lamb = optax.chain(optax.clip(0.5), optax.lamb(schedule, mask=matrices))
    yield fit("lamb", stack(12, 18, 10, 9, 6), lamb, batch, objective, EXPORTER, observe=observe)


@jax.custom_vjp
def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    """Convolve with the same size; its gradients are convolutions whose dimensions are in ONNX's order."""
    around = [(size // 2, size // 2) for size in w.shape[2:]]
    return jax.lax.conv_general_dilated(x, w, (1, 1), around)


def convolve_back(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the image and of the kernel."""
    (x, w), swap = saved, (1, 0, 2, 3)
    around = [(size // 2, size // 2) for size in w.shape[2:]]
    of_w = jax.lax.conv_general_dilated(x.transpose(swap), g.transpose(swap), (1, 1), around)
    return convolve(g, jnp.flip(w, (2, 3)).transpose(swap)), of_w.transpose(swap)


convolve.defvjp(lambda x, w: (convolve(x, w), (x, w)), convolve_back)


def convnet(optimizer: optax.GradientTransformation, variant: str, style: Style) -> Step:
    """Return two convolutions with a batch normalization, whose statistics are carried beside the weights."""
    params = {"conv_0": {"kernel": normal(6, 2, 3, 3, scale=0.3)}, "bn": normalisation(6), "head": layer(10, 5)}
    params |= {"conv_1": {"kernel": normal(10, 6, 3, 3, scale=0.2), "bias": normal(10, scale=0.1)}}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))
    stats = carried({"mean": normal(6, scale=0.1), "var": 1 + 0.1 * np.abs(normal(6))}, "batch_stats_")

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, dict]]:
        x = convolve(values["image"], params["conv_0"]["kernel"])
        mean, var = jnp.mean(x, (0, 2, 3)), jnp.var(x, (0, 2, 3))
        x = (x - mean[:, None, None]) * jax.lax.rsqrt(var + 1e-5)[:, None, None]
        x = jax.nn.relu(x * params["bn"]["scale"][:, None, None] + params["bn"]["bias"][:, None, None])
        x = jnp.max(x.reshape(*x.shape[:2], 4, 2, 4, 2), (3, 5))
        x = jax.nn.relu(convolve(x, params["conv_1"]["kernel"]) + params["conv_1"]["bias"][:, None, None])
        logits = linear(params["head"], jnp.mean(x, (2, 3)))
        return jnp.mean(cross_entropy(logits, values["label"])), (logits, {"mean": mean, "var": var})

    def run(values: Arrays) -> Outputs:
        params, old = weights.read(values), stats.read(values)
        (loss, (logits, seen)), grads = jax.value_and_grad(objective, has_aux=True)(params, values)
        params, state = advance(optimizer, grads, slots.read(values), params)
        following = jax.tree.map(lambda before, now: 0.9 * before + 0.1 * now, old, seen)
        metrics = {"accuracy": accuracy(logits, values["label"]), "param_norm": optax.global_norm(params)}
        states = weights.write(params) | slots.write(state) | stats.write(following)
        return Outputs({"loss": loss}, metrics, states=states)

    batch = {"image": normal(4, 2, 8, 8), "label": labels(5, 4)}
    return Step(variant, Inputs(batch, weights.values | slots.values | stats.values), run, style)


@kind("jax-convnet-recipe", "jax")
def convnet_recipe() -> Iterator[Step]:
    """Yield a convnet with batch normalization by Nesterov's momentum with stepped rates, and by AdamW."""
    stepped = scheduled(optax.piecewise_constant_schedule, 0.05, {10: 0.1, 20: 0.1})
    decayed = optax.add_decayed_weights(5e-4, mask=matrices)
    yield convnet(optax.chain(decayed, optax.sgd(stepped, momentum=0.9, nesterov=True)), "nesterov", EXPORTER)
    yield convnet(optax.adamw(3e-3, mask=matrices), "adamw", STYLES["scrambled"])


@kind("jax-mixer", "jax")
def mixer() -> Iterator[Step]:
    """Yield a mixer of tokens and channels by Lion and AdamW, whose settings are injected and so carried."""
    tokens, channels = 6, 10
    block = lambda: {  # noqa: E731
        "token_norm": normalisation(channels),
        "token_mix": {"dense_0": layer(tokens, 8), "dense_1": layer(8, tokens, bias=False)},
        "channel_norm": normalisation(channels),
        "channel_mix": stack(channels, 14, channels),
    }

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, Metrics]:
        x = linear(params["stem"], values["patches"])
        for name in ("block_0", "block_1"):
            held = params[name]
            mixed = mlp(held["token_mix"], layer_norm(held["token_norm"], x).transpose(0, 2, 1), jax.nn.gelu)
            x = x + mixed.transpose(0, 2, 1)
            x = x + mlp(held["channel_mix"], layer_norm(held["channel_norm"], x), jax.nn.gelu)
        logits = linear(params["head"], jnp.mean(layer_norm(params["norm"], x), 1))
        return jnp.mean(cross_entropy(logits, values["label"])), {"accuracy": accuracy(logits, values["label"])}

    def observe(values: Arrays, grads: Any, params: Any) -> Metrics:
        return {"grad_norm": optax.global_norm(grads), "param_norm": optax.global_norm(params)}

    params = {"stem": layer(7, channels), "block_0": block(), "block_1": block()}
    params |= {"norm": normalisation(channels), "head": layer(channels, 4)}
    batch = {"patches": normal(5, tokens, 7), "label": labels(4, 5)}
    rate = scheduled(optax.linear_schedule, 3e-3, 1e-4, 60)
    lion = optax.inject_hyperparams(optax.lion)(learning_rate=rate, weight_decay=0.1)
    yield fit("lion", params, lion, batch, objective, observe=observe)
    adamw = optax.inject_hyperparams(optax.adamw)(learning_rate=2e-3, weight_decay=0.01)
    finite = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), adamw), 4)
    yield fit("finite-adamw", params, finite, batch, objective, STYLES["initializers"])
