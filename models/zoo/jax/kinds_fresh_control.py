"""Fresh kinds by JAX with control flow in the step, of reinforcement learning, and with several losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from models.zoo.arrays import layers, normal
from models.zoo.jax.fresh_parts import (
    Advanced,
    carried,
    data,
    descend,
    fit,
    mix,
    product,
    shrink,
    squares,
    start,
    zeros,
)
from models.zoo.jax.problems import dense
from models.zoo.steps import Arrays

ADAM = optax.adam(1e-2)


def transition() -> Arrays:
    return {"x": normal(1, 5), "after": normal(1, 5), "reward": np.float32(1)}


@carried("fresh-scanned-micro-batches", lambda: (start(ADAM, layers(5, 6, 3)), data(3, 4)), "plain", "scrambled")
def scanned_micro_batches(v: Arrays, tree: Any) -> Advanced:
    """lax.scan over micro-batches sums losses and gradients; one update behind it."""

    def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(squares)(tree["params"], {"x": part[0], "y": part[1]})
        return jax.tree.map(jnp.add, total, (loss, grads)), loss

    zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, tree["params"]))
    (loss, grads), each = lax.scan(add, zero, (v["x"], v["y"]))
    return loss / 3, {"each": each}, descend(ADAM, jax.tree.map(lambda g: g / 3, grads), tree)


@carried("fresh-cond-skip", lambda: ({"params": layers(5, 3), "norm": np.float32(1), "spikes": np.int32(0)}, data()))
def cond_skip(v: Arrays, tree: Any) -> Advanced:
    """lax.cond skips the update where the norm is above twice its running mean; the mean and a counter move anyway."""
    loss, grads = jax.value_and_grad(squares)(tree["params"], v)
    norm = optax.global_norm(grads)
    spike = norm > 2 * tree["norm"] + 10.0
    params = lax.cond(spike, lambda p, g: jax.tree.map(lambda w: w + 0.0, p), shrink, tree["params"], grads)
    following = {"norm": mix(tree["norm"], norm, 0.1), "spikes": tree["spikes"] + spike.astype(jnp.int32)}
    return loss, {"grad_norm": norm}, {"params": params} | following


@carried("fresh-while-backtracking", lambda: ({"params": layers(5, 6, 3), "rate": np.float32(1)}, data()))
def while_backtracking(v: Arrays, tree: Any) -> Advanced:
    """lax.while_loop halves the rate until the loss falls; losses in the loop are of no gradient."""
    loss, grads = jax.value_and_grad(squares)(tree["params"], v)
    slope = sum(jnp.sum(jnp.square(grad)) for grad in grads.values())

    def trial(rate: jax.Array) -> jax.Array:
        return squares(shrink(tree["params"], grads, rate), v)

    rate = lax.while_loop(lambda r: trial(r) > loss - 0.5 * r * slope, lambda r: r * 0.5, tree["rate"] * 2)
    return loss, {"loss_after": trial(rate)}, {"params": shrink(tree["params"], grads, rate), "rate": rate}


@carried("fresh-seeded-noise", lambda: ({"w": normal(5, 3), "seed": np.array([7], np.uint32)}, data()), kept=("seed",))
def seeded_noise(v: Arrays, tree: Any) -> Advanced:
    """Langevin dynamics by a generator of the step's own, whose uint32 seed is carried."""
    seed = tree["seed"] * np.uint32(1664525) + np.uint32(1013904223)
    bits = (seed + np.arange(15, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(8)
    noise = jnp.reshape((bits.astype(jnp.float32) + 0.5) / 2.0**24 - 0.5, (5, 3))
    loss, grad = jax.value_and_grad(lambda w: squares({"w1": w}, v))(tree["w"])
    return loss, {}, {"w": tree["w"] - 0.05 * grad + 0.01 * noise, "seed": seed}


def make_rollout() -> tuple[Any, Arrays]:
    batch = {"observation": normal(6, 7), "reward": normal(6), "alive": np.float32([1, 1, 0, 1, 1, 1])}
    return layers(7, 8, 5), batch | {"bootstrap": normal(), "chosen": np.float32(np.eye(4)[[0, 3, 1, 1, 2, 0]])}


@fit("fresh-advantage-actor", make_rollout, tx=optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(7e-4)))
def advantage_actor(w: Arrays, v: Arrays) -> jax.Array:
    """Advantage actor-critic on a rollout of six: a policy, a value and an entropy part make one loss."""
    out, future, returns = dense(w, v["observation"]), v["bootstrap"], []
    for step in range(6)[::-1]:
        returns.insert(0, future := v["reward"][step] + 0.97 * v["alive"][step] * future)
    logp, advantage = jax.nn.log_softmax(out[:, :4]), jnp.stack(returns) - out[:, 4]
    policy = -jnp.mean(jnp.sum(logp * v["chosen"], 1) * lax.stop_gradient(advantage))
    return policy + 0.5 * jnp.mean(advantage**2) + 0.01 * jnp.mean(jnp.sum(logp * jnp.exp(logp), 1))


def make_replay() -> tuple[Any, Arrays]:
    batch = {"x": normal(4, 5), "after": normal(4, 5), "reward": normal(4), "weight": np.abs(normal(4))}
    batch |= {"chosen": np.eye(3, dtype=np.float32)[[0, 2, 1, 1]], "alive": np.float32([1, 0, 1, 1])}
    return start(ADAM, layers(5, 6, 3), target=layers(5, 6, 3), count=np.int32(0)), batch


@carried("fresh-cond-target-sync", make_replay, "plain", "initializers")
def cond_target_sync(v: Arrays, tree: Any) -> Advanced:
    """Q-learning with Huber errors; lax.cond copies the network to the target every third step; priorities go out."""
    aim = v["reward"] + 0.99 * v["alive"] * jnp.max(dense(tree["target"], v["after"]), 1)

    def objective(params: Any) -> tuple[jax.Array, jax.Array]:
        error = jnp.sum(dense(params, v["x"]) * v["chosen"], 1) - aim
        return jnp.mean(v["weight"] * optax.huber_loss(error)), jnp.abs(error)

    (loss, priority), grads = jax.value_and_grad(objective, has_aux=True)(tree["params"])
    tree, count = descend(ADAM, grads, tree), tree["count"] + 1
    target = lax.cond(count % 3 == 0, lambda p, t: p, lambda p, t: t, tree["params"], tree["target"])
    return loss, {"priority": priority}, tree | {"target": target, "count": count}


def make_soft() -> tuple[Any, Arrays]:
    tree = {"one": layers(7, 6, 1), "two": layers(7, 6, 1), "actor": layers(5, 6, 2), "log_alpha": np.float32(-1)}
    return tree, {"x": normal(4, 5), "action": normal(4, 2), "noise": normal(4, 2), "aim": normal(4)}


@carried("fresh-learnt-temperature", make_soft)
def learnt_temperature(v: Arrays, tree: Any) -> Advanced:
    """Soft actor-critic: twin critics with fed aims, an actor, a temperature; three losses, their updates at once."""
    alpha = jnp.exp(tree["log_alpha"])

    def scores(critics: Any, a: jax.Array) -> list[jax.Array]:
        return [dense(critic, jnp.concatenate([v["x"], a], 1))[:, 0] for critic in critics]

    def actor_loss(actor: Any) -> tuple[jax.Array, jax.Array]:
        a = jnp.tanh(dense(actor, v["x"]) + 0.3 * v["noise"])
        logp = -0.5 * jnp.sum(v["noise"] ** 2, 1) - jnp.sum(jnp.log(1.1 - a**2), 1)
        return jnp.mean(alpha * logp - jnp.minimum(*scores((tree["one"], tree["two"]), a))), logp

    def critic_loss(*critics: Any) -> jax.Array:
        return sum(jnp.mean((q - v["aim"]) ** 2) for q in scores(critics, v["action"]))

    critic, (one, two) = jax.value_and_grad(critic_loss, (0, 1))(tree["one"], tree["two"])
    (actor, logp), pull = jax.value_and_grad(actor_loss, has_aux=True)(tree["actor"])
    heat, rise = jax.value_and_grad(lambda t: -jnp.mean(t * (logp - 2.0)))(tree["log_alpha"])
    tree = shrink(tree, {"one": one, "two": two, "actor": pull, "log_alpha": rise})
    return {"critic": critic, "actor": actor, "temperature": heat}, {"entropy": -jnp.mean(logp)}, tree


@carried("fresh-eligibility", lambda: ({"params": (p := layers(5, 1)), "trace": zeros(p)}, transition()))
def eligibility(v: Arrays, tree: Any) -> Advanced:
    """Temporal differences with traces: no loss, the value is differentiated. Two-sided: none, or the value."""
    value, grads = jax.value_and_grad(lambda w: dense(w, v["x"])[0, 0])(tree["params"])
    error = v["reward"] + 0.9 * dense(tree["params"], v["after"])[0, 0] - value
    traces = jax.tree.map(lambda trace, grad: 0.8 * trace + grad, tree["trace"], grads)
    params = shrink(tree["params"], traces, -0.01 * error)
    return {"value": value}, {"error": error}, {"params": params, "trace": traces}


@carried("fresh-evolution", lambda: (layers(5, 3, bias=False), data() | {"noise": normal(3, 5, 3)}))
def evolution(v: Arrays, tree: Any) -> Advanced:
    """Evolution strategies with fed, mirrored noise: losses of a population, no backward pass. Not to be scaled."""
    pairs = [[squares({"w1": tree["w1"] + 0.1 * sign * noise}, v) for sign in (1, -1)] for noise in v["noise"]]
    slope = sum((high - low) * noise for (high, low), noise in zip(pairs, v["noise"], strict=True))
    return {}, {"mean_loss": sum(map(sum, pairs)) / 6}, {"w1": tree["w1"] - 0.05 * slope}


@carried("fresh-adversaries", lambda: ({"maker": layers(3, 6, 5), "judge": layers(5, 6, 1)}, data(wide=3, out=5)))
def adversaries(v: Arrays, tree: Any) -> Advanced:
    """A generator and a discriminator with a gradient penalty, each with its loss, updated at once."""

    def judge_loss(judge: Any) -> jax.Array:
        fake = lax.stop_gradient(dense(tree["maker"], v["x"]))
        slopes = jax.grad(lambda real: jnp.sum(product(jnp.tanh(product(real, judge["w1"])), judge["w2"])))(v["y"])
        parts = jax.nn.softplus(dense(judge, fake)) + jax.nn.softplus(-dense(judge, v["y"]))
        return jnp.mean(parts) + 0.5 * jnp.mean(jnp.sum(slopes**2, 1))

    def maker_loss(maker: Any) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-dense(tree["judge"], dense(maker, v["x"]))))

    (d, down), (g, up) = (jax.value_and_grad(f)(tree[n]) for f, n in ((judge_loss, "judge"), (maker_loss, "maker")))
    return {"judge": d, "maker": g}, {}, {"maker": shrink(tree["maker"], up), "judge": shrink(tree["judge"], down)}
