"""Kinds from laboratories by JAX: cautious values, two views, pumps with actor and critic, harvests."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.problems import matmul
from models.zoo.jax.training import named_leaves
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind


def stack(*sizes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return layers as pairs of a matrix and a vector."""
    pairs = itertools.pairwise(sizes)
    return [(normal(rows, columns, scale=(1.5 / rows) ** 0.5), normal(columns, scale=0.02)) for rows, columns in pairs]


def run_stack(layers: Any, x: jax.Array) -> jax.Array:
    for matrix, vector in layers[:-1]:
        x = jax.nn.relu(matmul(x, matrix) + vector)
    matrix, vector = layers[-1]
    return matmul(x, matrix) + vector


class Carried:
    """A tree that goes into the graph and out of it as named leaves."""

    def __init__(self, name: str, tree: Any) -> None:
        self.tree = jax.tree.map(jnp.array, tree)
        self.structure = jax.tree.structure(self.tree)
        self.leaves = {f"{name}/{key}": value for key, value in named_leaves(self.tree).items()}

    def read(self, values: Arrays) -> Any:
        return jax.tree.unflatten(self.structure, [values[name] for name in self.leaves])

    def write(self, tree: Any) -> Arrays:
        return dict(zip(self.leaves, jax.tree.leaves(tree), strict=True))


def choose(count: int, index: jax.Array) -> jax.Array:
    return (index[..., None] == jnp.arange(count, dtype=index.dtype)).astype(jnp.float32)


@kind("lab-jax-cautious-values", "jax")
def cautious_values() -> Iterator[Step]:
    """Values of actions from a log of others, pushed down at other actions; a target that follows."""
    batch = {"observations": normal(8, 9), "actions": np.random.randint(0, 4, 8).astype(np.int32)}
    batch |= {"rewards": normal(8), "next_observations": normal(8, 9)}
    batch["discounts"] = np.where(np.random.rand(8) > 0.2, 0.97, 0.0).astype(np.float32)

    def step(variant: str, style: Style, tx: optax.GradientTransformation, period: int) -> Step:
        layers = stack(9, 16, 12, 4)
        online, target = Carried("online", layers), Carried("target", layers)
        state = Carried("opt", tx.init(online.tree))
        counter = {"learner_steps": np.int32(0)} if period else {}

        def objective(q: Any, aim: Any, values: Arrays) -> tuple[jax.Array, Arrays]:
            scores = run_stack(q, values["observations"])
            taken = jnp.sum(scores * choose(4, values["actions"]), 1)
            after = jnp.max(run_stack(aim, values["next_observations"]), 1)
            goal = jax.lax.stop_gradient(values["rewards"] + values["discounts"] * after)
            td = jnp.mean(jnp.square(taken - goal))
            peak = jax.lax.stop_gradient(jnp.max(scores, 1, keepdims=True))
            everywhere = peak[:, 0] + jnp.log(jnp.sum(jnp.exp(scores - peak), 1))
            caution = jnp.mean(everywhere - taken)
            parts = {"td_loss": td, "conservative_loss": caution, "mean_value": jnp.mean(taken)}
            return 0.5 * td + values["alpha"] * caution, parts

        def run(values: Arrays) -> Outputs:
            q, aim = online.read(values), target.read(values)
            (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(q, aim, values)
            updates, moved = tx.update(grads, state.read(values), q)
            q = optax.apply_updates(q, updates)
            following = {}
            if period:
                count = following["learner_steps"] = values["learner_steps"] + 1
                due = (count % period) == 0
                aim = jax.tree.map(lambda new, old: jnp.where(due, new, old), q, aim)
            else:
                aim = jax.tree.map(lambda new, old: 0.01 * new + 0.99 * old, q, aim)
            following |= online.write(q) | target.write(aim) | state.write(moved)
            return Outputs({"loss": loss}, metrics, states=following)

        states = online.leaves | target.leaves | state.leaves | counter
        return Step(variant, Inputs(batch, states, {"alpha": np.float32(0.5)}), run, style, warm=5)

    yield step("soft", PLAIN, optax.adam(3e-4), 0)
    clipped = optax.chain(optax.clip_by_global_norm(10.0), optax.rmsprop(5e-4, centered=True))
    yield step("periodic", Style(names="scrambled", order="shuffled"), clipped, 3)


@kind("lab-jax-view-predictor", "jax")
def view_predictor() -> Iterator[Step]:
    """One view of a sensor predicts the other: nothing flows back through the wanted one, or an average makes it."""
    batch = {"view1": normal(9, 17), "view2": normal(9, 17)}

    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.sum(jnp.square(x), 1, keepdims=True) + 1e-6)

    def step(variant: str, style: Style, tx: optax.GradientTransformation, averaged: bool) -> Step:
        nets = {"encoder": stack(17, 20, 11), "predictor": stack(11, 8, 11)}
        params = Carried("params", nets)
        state = Carried("opt", tx.init(params.tree))
        teacher = Carried("teacher", nets["encoder"])
        number = {"step": np.float32(0)} if averaged else {}

        def objective(p: Any, wanted: Any, values: Arrays) -> tuple[jax.Array, Arrays]:
            z = [run_stack(p["encoder"], values[view]) for view in ("view1", "view2")]
            aims = [run_stack(wanted or p["encoder"], values[view]) for view in ("view1", "view2")]
            guesses = [run_stack(p["predictor"], x) for x in z]
            cosine = [
                jnp.mean(jnp.sum(unit(guess) * unit(jax.lax.stop_gradient(aim)), 1))
                for guess, aim in zip(guesses, aims[::-1], strict=True)
            ]
            spread = jnp.mean(jnp.std(jax.lax.stop_gradient(unit(z[0])), 0))
            return 2 - (cosine[0] + cosine[1]), {"representation_std": spread}

        def run(values: Arrays) -> Outputs:
            p = params.read(values)
            wanted = teacher.read(values) if averaged else None
            (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(p, wanted, values)
            updates, moved = tx.update(grads, state.read(values), p)
            p = optax.apply_updates(p, updates)
            following = params.write(p) | state.write(moved)
            if averaged:
                step = following["step"] = values["step"] + 1
                tau = 1 - 0.01 * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(step / 200.0, 1.0)))
                mixed = jax.tree.map(lambda old, new: tau * old + (1 - tau) * new, wanted, p["encoder"])
                following |= teacher.write(mixed)
                metrics["tau"] = tau
            return Outputs({"loss": loss}, metrics, states=following)

        states = params.leaves | state.leaves | (teacher.leaves | number if averaged else {})
        return Step(variant, Inputs(batch, states), run, style, warm=3)

    momentum = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9))
    yield step("stopped", Style(names="exporter"), momentum, False)
    yield step("averaged", PLAIN, optax.lars(0.1, weight_decay=1e-4), True)


@kind("lab-jax-pump-control", "jax")
def pump_control() -> Iterator[Step]:
    """Pumps by an actor and a critic, each with a loss, an optimizer and a target; observations are normalized."""
    batch = {"obs": normal(7, 6) + 1, "act": np.tanh(normal(7, 2)), "rew": normal(7), "next_obs": normal(7, 6) + 1}
    batch["not_done"] = (np.random.rand(7) > 0.1).astype(np.float32)

    def step(variant: str, style: Style, of_actor: Any, of_critic: Any, smoothed: bool) -> Step:
        actor_layers, critic_layers = stack(6, 14, 2), stack(8, 15, 10, 1)
        actor, critic = Carried("actor", actor_layers), Carried("critic", critic_layers)
        actor_target, critic_target = Carried("actor_target", actor_layers), Carried("critic_target", critic_layers)
        actor_state = Carried("actor_opt", of_actor.init(actor.tree))
        critic_state = Carried("critic_opt", of_critic.init(critic.tree))
        running = {"obs_mean": np.zeros(6, np.float32), "obs_var": np.ones(6, np.float32), "obs_count": np.float32(1)}

        def act(p: Any, obs: jax.Array) -> jax.Array:
            return jnp.tanh(run_stack(p, obs))

        def value(p: Any, obs: jax.Array, action: jax.Array) -> jax.Array:
            return run_stack(p, jnp.concatenate([obs, action], 1))[:, 0]

        def run(values: Arrays) -> Outputs:
            mean, var = jnp.mean(values["obs"], 0), jnp.var(values["obs"], 0)
            count = values["obs_count"] + 7
            delta = mean - values["obs_mean"]
            following = {"obs_mean": values["obs_mean"] + delta * 7 / count, "obs_count": count}
            total = values["obs_var"] * values["obs_count"] + var * 7
            total = total + jnp.square(delta) * values["obs_count"] * 7 / count
            following["obs_var"] = total / count

            def normalise(obs: jax.Array) -> jax.Array:
                return jnp.clip((obs - following["obs_mean"]) / jnp.sqrt(following["obs_var"] + 1e-4), -5, 5)

            obs, after = normalise(values["obs"]), normalise(values["next_obs"])
            pi, q = actor.read(values), critic.read(values)
            pi_aim, q_aim = actor_target.read(values), critic_target.read(values)
            action = act(pi_aim, after)
            if smoothed:
                action = jnp.clip(action + jnp.clip(values["action_noise"], -0.5, 0.5), -1, 1)
            goal = values["rew"] + 0.98 * values["not_done"] * value(q_aim, after, action)

            def of_q(p: Any) -> tuple[jax.Array, jax.Array]:
                guess = value(p, obs, values["act"])
                return jnp.mean(jnp.square(guess - goal)), jnp.mean(guess)

            (critic_loss, guess), grads = jax.value_and_grad(of_q, has_aux=True)(q)
            updates, moved = of_critic.update(grads, critic_state.read(values), q)
            q = optax.apply_updates(q, updates)
            following |= critic.write(q) | critic_state.write(moved)
            actor_loss, grads = jax.value_and_grad(lambda p: -jnp.mean(value(q, obs, act(p, obs))))(pi)
            updates, moved = of_actor.update(grads, actor_state.read(values), pi)
            pi = optax.apply_updates(pi, updates)
            following |= actor.write(pi) | actor_state.write(moved)
            following |= actor_target.write(optax.incremental_update(pi, pi_aim, 0.005))
            following |= critic_target.write(optax.incremental_update(q, q_aim, 0.005))
            losses = {"critic_loss": critic_loss, "actor_loss": actor_loss}
            return Outputs(losses, {"q_mean": guess, "target_mean": jnp.mean(goal)}, states=following)

        nets = actor.leaves | critic.leaves | actor_target.leaves | critic_target.leaves
        states = nets | actor_state.leaves | critic_state.leaves | running
        given = batch | ({"action_noise": normal(7, 2, scale=0.2)} if smoothed else {})
        return Step(variant, Inputs(given, states), run, style, warm=3)

    yield step("deterministic", Style(names="exporter"), optax.adam(1e-4), optax.adam(1e-3), False)
    decayed = optax.adamw(1e-3, weight_decay=1e-2)
    yield step("smoothed", Style(states="initializers", order="shuffled"), optax.sgd(1e-3, 0.9), decayed, True)


@kind("lab-jax-harvests", "jax")
def harvests() -> Iterator[Step]:
    """Harvests of fields from weeks of weather, with an uncertainty: plain descent, or gradients alone."""
    names = ("week", "field", "mean", "log_scale")
    nets = dict(zip(names, (stack(8, 11, 9), stack(5, 9), stack(9, 1), stack(9, 1)), strict=True))
    params = Carried("params", nets)
    batch = {"weather": normal(6, 4, 8), "soil": normal(6, 5), "harvest": normal(6)}

    def objective(p: Any, values: Arrays) -> tuple[jax.Array, Arrays]:
        weeks = run_stack(p["week"], values["weather"].reshape(24, 8)).reshape(6, 4, 9)
        field = run_stack(p["field"], values["soil"])
        share = jax.nn.softmax(jnp.sum(weeks * field[:, None], 2) / 3.0)
        x = jnp.tanh(field + jnp.sum(weeks * share[..., None], 1))
        mean = run_stack(p["mean"], x)[:, 0]
        log_scale = jnp.clip(run_stack(p["log_scale"], x)[:, 0], -3.0, 3.0)
        error = values["harvest"] - mean
        nll = jnp.mean(0.5 * jnp.square(error) * jnp.exp(-2 * log_scale) + log_scale)
        inside = jnp.mean((jnp.abs(error) < jnp.exp(log_scale)).astype(jnp.float32))
        return nll, {"rmse": jnp.sqrt(jnp.mean(jnp.square(error))), "coverage": inside}

    def descent(values: Arrays) -> Outputs:
        p = params.read(values)
        (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(p, values)
        p = jax.tree.map(lambda weight, grad: weight - values["step_size"] * grad, p, grads)
        return Outputs({"nll": loss}, metrics, states=params.write(p))

    fed = {"step_size": np.float32(0.02)}
    yield Step("descent", Inputs(batch, params.leaves, fed), descent, Style(states="initializers", shapes="interface"))

    def gradients(values: Arrays) -> Outputs:
        (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params.read(values), values)
        shown = {f"d_{name}": grad for name, grad in params.write(grads).items()}
        return Outputs({"nll": loss}, metrics, shown)

    yield Step("gradients", Inputs(batch, constants=params.leaves), gradients, Style(order="shuffled"))
