"""Fresh kinds by JAX of models: generative, structured, probabilistic, physical; curvature, queues, filters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from models.zoo.arrays import layers, normal
from models.zoo.jax.fresh_parts import Advanced, carried, data, fit, linear, mix, shrink, squares
from models.zoo.jax.problems import dense, matmul
from models.zoo.steps import Arrays

EDGES = {"i": np.int32([0, 2, 5, 2]), "j": np.int32([3, 1, 1, 4])}
ONE = np.float32(1)
SEEN = np.eye(4, dtype=np.float32)[[3, 1, 1, 0]]


@fit("fresh-preferences", lambda: (layers(6, 5, 1), {"won": normal(4, 6), "lost": normal(4, 6), "base": normal(4)}))
def preferences(w: Arrays, v: Arrays) -> jax.Array:
    """Direct preferences: the margin over that of a reference, which is fed, goes through a sigmoid."""
    margin = dense(w, v["won"])[:, 0] - dense(w, v["lost"])[:, 0] - v["base"]
    return jnp.mean(jax.nn.softplus(-0.5 * margin))


@fit("fresh-latent-codes", lambda: (layers(5, 6, 4) | {"back": normal(2, 5)}, {"x": normal(4, 5), "eps": normal(4, 2)}))
def latent_codes(w: Arrays, v: Arrays) -> jax.Array:
    """A variational autoencoder whose noise is fed: squared errors plus half the divergence."""
    mean, spread = jnp.split(dense(w, v["x"]), 2, axis=1)
    guess = matmul(mean + jnp.exp(0.5 * spread) * v["eps"], w["back"])
    divergence = 0.5 * jnp.sum(mean**2 + jnp.exp(spread) - 1 - spread, 1)
    return jnp.mean(jnp.sum((guess - v["x"]) ** 2, 1) + 0.5 * divergence)


@fit("fresh-affine-coupling", lambda: (layers(2, 6, 4), {"x": normal(5, 4)}), "scrambled", tx=optax.adamax(1e-2))
def affine_coupling(w: Arrays, v: Arrays) -> jax.Array:
    """A normalizing flow of one coupling: the negative log likelihood, which may be below zero."""
    scale, shift = jnp.split(dense(w, v["x"][:, :2]), 2, axis=1)
    z = v["x"][:, 2:] * jnp.exp(scale) + shift
    return jnp.mean(0.5 * jnp.sum(z**2, 1) - jnp.sum(scale, 1))


@fit("fresh-unrolled-dynamics", lambda: (layers(3, 6, 3), {"x": normal(4, 3), "y": normal(4, 3)}), tx=optax.sgd(0.1))
def unrolled_dynamics(w: Arrays, v: Arrays) -> jax.Array:
    """A neural differential equation by three steps of the midpoint rule."""
    z = v["x"]
    for _ in range(3):
        z = z + 0.2 * dense(w, z + 0.1 * dense(w, z))
    return jnp.mean((z - v["y"]) ** 2)


@fit("fresh-row-factors", lambda: ({"rows": normal(6, 3), "columns": normal(5, 3)}, EDGES | {"r": normal(4)}))
def row_factors(w: Arrays, v: Arrays) -> jax.Array:
    """Matrix factorisation: rows by gather, gradients by scatter."""
    guess = jnp.sum(w["rows"][v["i"]] * w["columns"][v["j"]], 1)
    return jnp.mean((guess - v["r"]) ** 2) + 1e-3 * jnp.sum(w["rows"] ** 2)


@fit("fresh-graph-messages", lambda: (layers(3, 4, 2), EDGES | {"nodes": normal(6, 3), "y": normal(2)}))
def graph_messages(w: Arrays, v: Arrays) -> jax.Array:
    """Messages along edges are summed at their receivers; a mean over nodes is the graph's answer."""
    sent = matmul(v["nodes"], w["w1"])[v["i"]]
    state = jnp.tanh(jax.ops.segment_sum(sent, v["j"], num_segments=6) + w["b1"])
    return jnp.sum((jnp.mean(matmul(state, w["w2"]), 0) + w["b2"] - v["y"]) ** 2)


@fit("fresh-hidden-chain", lambda: ({"move": normal(3, 3), "emit": normal(3, 4)}, {"seen": SEEN}))
def hidden_chain(w: Arrays, v: Arrays) -> jax.Array:
    """A hidden Markov model: the forward algorithm over four observations, unrolled."""
    move, emit = jax.nn.log_softmax(w["move"]), jax.nn.log_softmax(w["emit"])
    state = jnp.zeros(3)
    for seen in v["seen"]:
        state = jax.nn.logsumexp(state[:, None] + move, 0) + jnp.sum(emit * seen, 1)
    return -jax.nn.logsumexp(state)


@carried("fresh-curvature-products", lambda: ({"w": normal(5, 3)}, data()))
def curvature_products(v: Arrays, tree: Any) -> Advanced:
    """Newton by conjugate gradients: two products with the Hessian, gradients of a gradient's product with a vector."""
    loss, grad = jax.value_and_grad(linear)(tree["w"], v)
    step, rest, way = jnp.zeros_like(grad), grad, grad
    for _ in range(2):
        bent = jax.grad(lambda w, way=way: jnp.sum(jax.grad(linear)(w, v) * way))(tree["w"]) + way
        size = jnp.sum(rest**2)
        rate = size / jnp.sum(way * bent)
        step, rest = step + rate * way, rest - rate * bent
        way = rest + jnp.sum(rest**2) / size * way
    return loss, {"rest": jnp.sqrt(jnp.sum(rest**2))}, {"w": tree["w"] - step}


@carried("fresh-inner-steps", lambda: ({"w": normal(5, 3)}, data() | {"x2": normal(4, 5), "y2": normal(4, 3)}))
def inner_steps(v: Arrays, tree: Any) -> Advanced:
    """Meta-learning: two inner steps on support rows, the loss of query rows is differentiated through them."""

    def outer(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(2):
            w = w - 0.1 * jax.grad(linear)(w, v)
        return linear(w, {"x": v["x2"], "y": v["y2"]}), linear(w, v)

    (loss, support), grad = jax.value_and_grad(outer, has_aux=True)(tree["w"])
    return loss, {"support_loss": support}, {"w": tree["w"] - 0.1 * grad}


def make_queue() -> tuple[Any, Arrays]:
    return {"net": (p := layers(5, 6, 3)), "slow": p, "queue": normal(8, 3), "at": np.int32(0)}, data(wide=5, out=5)


@carried("fresh-key-queue", make_queue)
def key_queue(v: Arrays, tree: Any) -> Advanced:
    """Momentum contrast: keys of a slow encoder enter a queue at a pointer; the loss compares with the old queue."""
    keys = dense(tree["slow"], v["y"])

    def contrast(net: Any) -> jax.Array:
        query = dense(net, v["x"])
        logits = jnp.concatenate([jnp.sum(query * keys, 1, keepdims=True), matmul(query, tree["queue"].T)], 1)
        return jnp.mean(jax.nn.logsumexp(logits, 1) - logits[:, 0])

    loss, grads = jax.value_and_grad(contrast)(tree["net"])
    net = shrink(tree["net"], grads)
    queue = lax.dynamic_update_slice(tree["queue"], keys, (tree["at"], jnp.int32(0)))
    return loss, {}, {"net": net, "slow": mix(tree["slow"], net, 0.01), "queue": queue, "at": (tree["at"] + 4) % 8}


@carried("fresh-kalman-noise", lambda: ({"noise": normal(2), "mean": normal(), "spread": ONE}, {"seen": normal(5)}))
def kalman_noise(v: Arrays, tree: Any) -> Advanced:
    """Noise levels of a Kalman filter by the likelihood of innovations; its mean and spread are carried, too."""

    def filtered(noise: jax.Array) -> tuple[jax.Array, Any]:
        (drift, blur), mean, spread, total = jnp.exp(noise), tree["mean"], tree["spread"], 0.0
        for step in range(5):
            spread = spread + drift
            gap, width = v["seen"][step] - mean, spread + blur
            total += 0.5 * (gap**2 / width + jnp.log(width))
            mean, spread = mean + spread / width * gap, spread * blur / width
        return total, (mean, spread)

    (loss, (mean, spread)), grad = jax.value_and_grad(filtered, has_aux=True)(tree["noise"])
    return loss, {}, {"noise": tree["noise"] - 0.05 * grad, "mean": mean, "spread": spread}


@carried("fresh-dual-ascent", lambda: ({"w": normal(5, 3), "price": np.float32(0.1)}, data()), "initializers")
def dual_ascent(v: Arrays, tree: Any) -> Advanced:
    """A bound on the weights' size by a multiplier: weights descend, the price ascends, on one Lagrangian."""

    def lagrangian(w: jax.Array, price: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (loss := squares({"w1": w}, v)) + price * (jnp.sum(w**2) - 1.0), loss

    (loss, plain), (down, up) = jax.value_and_grad(lagrangian, (0, 1), has_aux=True)(tree["w"], tree["price"])
    price = jnp.maximum(tree["price"] + 0.01 * up, 0.0)
    return loss, {"data_loss": plain}, {"w": tree["w"] - 0.05 * down, "price": price}
