"""Kinds by JAX that learn a distribution: a flow, denoising in a scan, a codebook that revives codes, an adversary."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.kinds_recipes import EXPORTER, advance, carried, layer, linear, mlp, stack
from models.zoo.jax.problems import matmul
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind


def flow(optimizer: optax.GradientTransformation, variant: str, style: Style = PLAIN, *, context: int = 0) -> Step:
    """Return affine couplings of alternating halves, with an average of the weights whose decay warms up."""
    size, half = 6, 3
    params = {f"coupling_{i}": stack(half + context, 11, 7, 2 * half) for i in range(3)}
    for index in range(3):
        params[f"actnorm_{index}"] = {"log_scale": normal(size, scale=0.1), "shift": normal(size, scale=0.1)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))
    average = carried(jax.tree.map(lambda weight: 0.9 * weight, params), "ema_")

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, jax.Array]:
        z, log_det = values["x"], jnp.zeros(values["x"].shape[0])
        for index in range(3):
            held = params[f"actnorm_{index}"]
            z = (z + held["shift"]) * jnp.exp(held["log_scale"])
            left, right = z[:, :half], z[:, half:]
            seen = jnp.concatenate([left, values["context"]], 1) if context else left
            made = mlp(params[f"coupling_{index}"], seen, jax.nn.relu)
            scale = jnp.tanh(made[:, :half])
            z = jnp.concatenate([right * jnp.exp(scale) + made[:, half:], left], 1)
            log_det = log_det + jnp.sum(scale, 1) + jnp.sum(held["log_scale"])
        nll = 0.5 * jnp.sum(jnp.square(z), 1) + 0.5 * size * np.log(2 * np.pi) - log_det
        return jnp.mean(nll), jnp.mean(log_det)

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        (loss, log_det), grads = jax.value_and_grad(objective, has_aux=True)(params, values)
        params, state = advance(optimizer, grads, slots.read(values), params)
        seen = values["ema_count"].astype(jnp.float32)
        decay = jnp.minimum(0.99, (1 + seen) / (10 + seen))
        slow = optax.incremental_update(params, average.read(values), 1 - decay)
        metrics = {"bits_per_dimension": loss / (size * np.log(2.0)), "mean_log_det": log_det, "ema_decay": decay}
        states = weights.write(params) | slots.write(state) | average.write(slow)
        return Outputs({"nll": loss}, metrics, states=states | {"ema_count": values["ema_count"] + 1})

    batch = {"x": normal(5, size)} | ({"context": normal(5, context)} if context else {})
    states = weights.values | slots.values | average.values | {"ema_count": np.int32(2)}
    return Step(variant, Inputs(batch, states), run, style)


@kind("jax-coupling-flow", "jax")
def coupling_flow() -> Iterator[Step]:
    """Yield normalizing flows of couplings and scales, free and on a context, with a warming average of the weights."""
    yield flow(optax.chain(optax.clip_by_global_norm(5.0), optax.adam(3e-3)), "adam")
    rmsprop = optax.chain(optax.clip_by_global_norm(5.0), optax.rmsprop(1e-3, momentum=0.9))
    yield flow(rmsprop, "conditional", STYLES["scrambled-initializers"], context=4)


def scanned(optimizer: optax.GradientTransformation, variant: str, style: Style, *sizes: int, count: int) -> Step:
    """Return several steps of a denoising autoencoder in one graph, by a scan over minibatches."""
    params = {"encoder": stack(*sizes), "decoder": stack(*sizes[::-1])}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))

    def objective(params: Any, clean: jax.Array, noise: jax.Array) -> jax.Array:
        code = mlp(params["encoder"], clean + 0.3 * noise, jnp.tanh)
        return jnp.mean(jnp.square(mlp(params["decoder"], jnp.tanh(code), jnp.tanh) - clean))

    def run(values: Arrays) -> Outputs:
        def body(held: tuple[Any, Any], rows: tuple[jax.Array, jax.Array]) -> tuple[tuple[Any, Any], Any]:
            loss, grads = jax.value_and_grad(objective)(held[0], *rows)
            return advance(optimizer, grads, held[1], held[0]), (loss, optax.global_norm(grads))

        start = weights.read(values), slots.read(values)
        (params, state), (losses, norms) = jax.lax.scan(body, start, (values["clean"], values["noise"]))
        metrics = {"losses": losses, "largest_grad_norm": jnp.max(norms)}
        return Outputs({"loss": jnp.mean(losses)}, metrics, states=weights.write(params) | slots.write(state))

    batch = {"clean": normal(count, 5, sizes[0]), "noise": normal(count, 5, sizes[0])}
    return Step(variant, Inputs(batch, weights.values | slots.values), run, style)


@kind("jax-scanned-epoch", "jax")
def scanned_epoch() -> Iterator[Step]:
    """Yield an epoch as a scan over minibatches, which carries weights and moments; the loss is the mean."""
    yield scanned(optax.lamb(0.01), "lamb", PLAIN, 9, 7, 3, count=3)
    yield scanned(optax.sgd(0.05, momentum=0.9), "momentum", EXPORTER, 8, 10, 4, count=4)


def quantised(optimizer: optax.GradientTransformation, variant: str, style: Style, *, codes: int, width: int) -> Step:
    """Return an autoencoder with a codebook of averages, in which codes that were idle are put on rows of the batch."""
    params = {"encoder": stack(8, 11, width), "decoder": stack(width, 10, 8)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))
    book = normal(codes, width)

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        z = mlp(params["encoder"], values["x"], jax.nn.gelu)
        fixed = jax.lax.stop_gradient(z)
        distance = jnp.sum(jnp.square(fixed[:, None] - values["codebook"]), -1)
        picked = jax.nn.one_hot(jnp.argmin(distance, -1), codes)
        quantised = matmul(picked, values["codebook"])
        rebuilt = mlp(params["decoder"], z + jax.lax.stop_gradient(quantised - z), jax.nn.gelu)
        fit, commitment = jnp.mean(jnp.square(rebuilt - values["x"])), jnp.mean(jnp.square(z - quantised))
        return fit + 0.25 * commitment, (fit, commitment, fixed, picked)

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        made = jax.value_and_grad(objective, has_aux=True)(params, values)
        (loss, (fit, commitment, z, picked)), grads = made
        params, state = advance(optimizer, grads, slots.read(values), params)
        used = jnp.sum(picked, 0)
        size = 0.9 * values["cluster_size"] + 0.1 * used
        total = 0.9 * values["embedding_sum"] + 0.1 * matmul(picked.T, z)
        idle = jnp.where(used > 0, 0, values["idle_steps"] + 1)
        dead = idle > 3
        row = z[jnp.arange(codes) % z.shape[0]]
        size = jnp.where(dead, 1.0, size)
        total = jnp.where(dead[:, None], row, total)
        following = {"cluster_size": size, "embedding_sum": total, "idle_steps": jnp.where(dead, 0, idle)}
        following["codebook"] = total / (size[:, None] + 1e-5)
        share = used / jnp.sum(used)
        metrics = {"reconstruction": fit, "commitment": commitment}
        metrics |= {"code_perplexity": jnp.exp(-jnp.sum(share * jnp.log(share + 1e-10)))}
        metrics |= {"revived": jnp.sum(dead.astype(jnp.float32))}
        return Outputs({"loss": loss}, metrics, states=weights.write(params) | slots.write(state) | following)

    states = weights.values | slots.values | {"codebook": book, "cluster_size": np.ones(codes, np.float32)}
    states |= {"embedding_sum": book.copy(), "idle_steps": np.full(codes, 1, np.int32)}
    return Step(variant, Inputs({"x": normal(6, 8)}, states), run, style)


@kind("jax-codebook-revival", "jax")
def codebook_revival() -> Iterator[Step]:
    """Yield a quantised autoencoder: codes by averages of sums and sizes, and counters that revive unused codes."""
    yield quantised(optax.adam(2e-3), "adam", EXPORTER, codes=7, width=4)
    yield quantised(optax.adamw(2e-3, weight_decay=1e-3), "adamw", STYLES["shuffled"], codes=5, width=6)


def adversaries(rule: optax.GradientTransformation, variant: str, style: Style = PLAIN, *, penalty: bool) -> Step:
    """Return a generator with an average and its critic; the share of augmented rows follows the critic's certainty."""
    nets = {"generator": stack(4, 9, 6), "critic": {"hidden": stack(6, 10, 8), "score": layer(8, 1)}}
    held = {name: carried(net, f"{name}_") for name, net in nets.items()}
    slots = {name: carried(rule.init(jax.tree.map(jnp.asarray, net)), f"{name}_opt_") for name, net in nets.items()}
    average = carried(nets["generator"], "generator_ema_")

    def score(net: Any, x: jax.Array, values: Arrays) -> jax.Array:
        chosen = values["uniform"][:, None] < values["augment_probability"]
        x = jnp.where(chosen, jnp.flip(x, 1) + 0.1 * values["jitter"], x)
        return linear(net["score"], jax.nn.leaky_relu(mlp(net["hidden"], x, jax.nn.leaky_relu), 0.2))[:, 0]

    def critic_loss(net: Any, other: Any, values: Arrays) -> tuple[jax.Array, jax.Array]:
        real = score(net, values["real"], values)
        fake = score(net, mlp(other, values["latent"], jax.nn.relu), values)
        loss = jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))
        return loss + (0.01 * jnp.mean(jnp.square(real)) if penalty else 0.0), real

    def generator_loss(net: Any, other: Any, values: Arrays) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-score(other, mlp(net, values["latent"], jax.nn.relu), values)))

    def run(values: Arrays) -> Outputs:
        maker, critic = held["generator"].read(values), held["critic"].read(values)
        (of_critic, real), grads = jax.value_and_grad(critic_loss, has_aux=True)(critic, maker, values)
        critic, critic_state = advance(rule, grads, slots["critic"].read(values), critic)
        of_maker, grads = jax.value_and_grad(generator_loss)(maker, critic, values)
        maker, state = advance(rule, grads, slots["generator"].read(values), maker)
        sure = 0.8 * values["certainty"] + 0.2 * jnp.mean(jnp.sign(real))
        share = jnp.clip(values["augment_probability"] + 0.05 * jnp.sign(sure - 0.6), 0.0, 0.8)
        states = held["generator"].write(maker) | slots["generator"].write(state)
        states |= held["critic"].write(critic) | slots["critic"].write(critic_state)
        states |= average.write(optax.incremental_update(maker, average.read(values), 0.02))
        states |= {"certainty": sure, "augment_probability": share}
        losses = {"critic_loss": of_critic, "generator_loss": of_maker}
        return Outputs(losses, {"real_score": jnp.mean(real)}, states=states)

    batch = {"real": normal(5, 6), "latent": normal(5, 4), "jitter": normal(5, 6)}
    batch |= {"uniform": np.random.rand(5).astype(np.float32)}
    states = held["generator"].values | held["critic"].values | slots["generator"].values | slots["critic"].values
    states |= average.values | {"certainty": np.float32(0.3), "augment_probability": np.float32(0.4)}
    return Step(variant, Inputs(batch, states), run, style)


@kind("jax-augmented-adversaries", "jax")
def augmented_adversaries() -> Iterator[Step]:
    """Yield a generator, its average and a critic, with a carried share of augmentations that a controller moves."""
    yield adversaries(optax.adam(2e-3, b1=0.0, b2=0.99), "adam", STYLES["scrambled"], penalty=False)
    yield adversaries(optax.optimistic_adam_v2(1e-3, b1=0.5), "optimistic", penalty=True)
