"""Kinds by JAX that are methods around an optimizer: ensembles, outer steps, critics, curvature, noise, averages."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import layers, normal
from models.zoo.jax.problems import Problem, dense, matmul, regression
from models.zoo.jax.training import differentiate, named_leaves, train
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind

EXPORTER = STYLES["exporter-names"]
OPTIMIZERS = {"sgd": optax.sgd(0.05), "momentum": optax.sgd(0.05, momentum=0.9), "adam": optax.adam(0.01)}


def prefixed(prefix: str, values: Arrays) -> Arrays:
    """Return the values with a prefix before their names."""
    return {f"{prefix}_{name}": value for name, value in values.items()}


def own(prefix: str, names: Arrays, values: Arrays) -> Arrays:
    """Return the values whose names have the prefix, without it."""
    return {name: values[f"{prefix}_{name}"] for name in names}


@kind("jax-ensemble", "jax")
def ensemble() -> Iterator[Step]:
    """Yield members of an ensemble that are stacked along their first dimension, and learn side by side."""

    def loss(weights: Arrays, values: Arrays) -> jax.Array:
        hidden = jnp.tanh(jnp.sum(values["x"][None, :, :, None] * weights["w1"][:, None], 2) + weights["b1"][:, None])
        guess = jnp.sum(hidden[..., None] * weights["w2"][:, None], 2) + weights["b2"][:, None]
        return jnp.mean(jnp.square(guess - values["y"]))

    weights = {"w1": normal(3, 5, 7, scale=0.4), "b1": normal(3, 7, scale=0.1)}
    weights |= {"w2": normal(3, 7, 2, scale=0.4), "b2": normal(3, 2, scale=0.1)}
    problem = Problem(weights, {"x": normal(4, 5), "y": normal(4, 2)}, loss)
    yield train(problem, OPTIMIZERS["momentum"], "momentum")
    yield train(problem, OPTIMIZERS["adam"], "adam", EXPORTER)
    yield train(problem, OPTIMIZERS["sgd"], "initializers", STYLES["initializers"])


def outer_step(inner: optax.GradientTransformation, variant: str, style: Style = PLAIN) -> Step:
    """Return DiLoCo: every third step the outer weights take the way of the inner ones, by Nesterov's momentum."""
    step = train(regression(), inner, variant, style)
    names = regression().weights

    def run(values: Arrays) -> Outputs:
        outputs = step.run(values)
        following, due = outputs.states, values["age"] % 3 == 2
        states = dict(following)
        for name in names:
            outer, momentum = values[f"outer_{name}"], values[f"momentum_{name}"]
            way = outer - following[name]
            faster = 0.9 * momentum + way
            moved = outer - 0.7 * (way + 0.9 * faster)
            states[name] = jnp.where(due, moved, following[name])
            states[f"outer_{name}"] = jnp.where(due, moved, outer)
            states[f"momentum_{name}"] = jnp.where(due, faster, momentum)
        return replace(outputs, states=states | {"age": values["age"] + 1})

    weights = {name: step.inputs.states[name] for name in names}
    zeros = {name: np.zeros_like(weight) for name, weight in weights.items()}
    states = step.inputs.states | prefixed("outer", weights) | prefixed("momentum", zeros) | {"age": np.int32(0)}
    return replace(step, inputs=replace(step.inputs, states=states), run=run)


@kind("jax-outer-momentum", "jax")
def outer_momentum() -> Iterator[Step]:
    """Yield local steps with an outer optimizer that is due now and then."""
    yield outer_step(OPTIMIZERS["sgd"], "sgd")
    yield outer_step(OPTIMIZERS["adam"], "adam", EXPORTER)


def sparse_autoencoder(optimizer: optax.GradientTransformation, variant: str, style: Style = PLAIN) -> Step:
    """Return a sparse autoencoder: unit rows of the decoder, and counts of the steps since each code was used."""

    def parts(weights: Arrays, values: Arrays) -> tuple[jax.Array, ...]:
        codes = jax.nn.relu(matmul(values["x"] - weights["shift"], weights["encoder"]) + weights["bias"])
        rebuilt = matmul(codes, weights["decoder"]) + weights["shift"]
        alive = jnp.where(values["silent"] > 5, 0.0, 1.0)
        return jnp.mean(jnp.square(rebuilt - values["x"])), jnp.mean(jnp.sum(codes * alive, 1)), codes

    def loss(weights: Arrays, values: Arrays) -> jax.Array:
        fit, sparsity, _ = parts(weights, values)
        return fit + 0.02 * sparsity

    weights = {"encoder": normal(5, 9, scale=0.4), "bias": normal(9, scale=0.1), "shift": np.zeros(5, np.float32)}
    problem = Problem(weights | {"decoder": normal(9, 5, scale=0.4)}, {"x": normal(6, 5)}, loss)
    step = train(problem, optimizer, variant, style)

    def run(values: Arrays) -> Outputs:
        outputs = step.run(values)
        fit, sparsity, codes = parts({name: values[name] for name in problem.weights}, values)
        decoder = outputs.states["decoder"]
        states = {"decoder": decoder / jnp.sqrt(jnp.sum(jnp.square(decoder), 1, keepdims=True) + 1e-6)}
        states["silent"] = jnp.where(jnp.max(codes, 0) > 0, 0, values["silent"] + 1)
        return replace(outputs, metrics={"fit": fit, "sparsity": sparsity}, states=outputs.states | states)

    states = step.inputs.states | {"silent": np.zeros(9, np.int32)}
    return replace(step, inputs=replace(step.inputs, states=states), run=run)


@kind("jax-sparse-autoencoder", "jax")
def sparse_autoencoders() -> Iterator[Step]:
    """Yield sparse autoencoders with a carried count for each code."""
    yield sparse_autoencoder(OPTIMIZERS["sgd"], "sgd")
    yield sparse_autoencoder(OPTIMIZERS["adam"], "adam", EXPORTER)
    yield sparse_autoencoder(OPTIMIZERS["momentum"], "scrambled", STYLES["scrambled"])


def twin_critics(optimizer: optax.GradientTransformation, variant: str, style: Style = PLAIN) -> Step:
    """Return TD3: two critics and a policy, each with a slow copy; the noise of the target's action is fed."""
    nets = {"a": layers(6, 5, 1), "b": layers(6, 5, 1), "policy": layers(4, 5, 2)}
    first = {name: prefixed(name, net) for name, net in nets.items()}
    critics, policy = first["a"] | first["b"], first["policy"]

    def net(name: str, values: Arrays, x: jax.Array, suffix: str = "") -> jax.Array:
        return dense({key: values[f"{name}_{key}{suffix}"] for key in nets[name]}, x)

    def critic_loss(weights: Arrays, values: Arrays) -> jax.Array:
        act = jnp.tanh(net("policy", values, values["after"], "_slow")) + jnp.clip(0.2 * values["noise"], -0.5, 0.5)
        ahead = jnp.concatenate([values["after"], jnp.clip(act, -1.0, 1.0)], 1)
        best = jnp.minimum(net("a", values, ahead, "_slow"), net("b", values, ahead, "_slow"))
        wanted, here = values["reward"][:, None] + 0.9 * best, jnp.concatenate([values["seen"], values["action"]], 1)
        return sum(jnp.mean(jnp.square(net(name, weights, here) - wanted)) for name in "ab")

    def policy_loss(weights: Arrays, values: Arrays) -> jax.Array:
        act = jnp.tanh(net("policy", weights, values["seen"]))
        return -jnp.mean(net("a", values, jnp.concatenate([values["seen"], act], 1)))

    parts = {"critic": (critics, critic_loss), "actor": (policy, policy_loss)}
    starts = {name: optimizer.init(jax.tree.map(jnp.asarray, weights)) for name, (weights, _) in parts.items()}
    slots = {name: prefixed(name, named_leaves(start)) for name, start in starts.items()}

    def run(values: Arrays) -> Outputs:
        losses, states = {}, {}
        for name, (weights, loss) in parts.items():
            losses[f"{name}_loss"], grads = differentiate(Problem(weights, {}, loss), values)
            present = {key: values[key] for key in weights}
            state = jax.tree.unflatten(jax.tree.structure(starts[name]), [values[key] for key in slots[name]])
            updates, state = optimizer.update(grads, state, present)
            states |= optax.apply_updates(present, updates)
            states |= dict(zip(slots[name], jax.tree.leaves(state), strict=True))
        slow = {f"{key}_slow": 0.98 * values[f"{key}_slow"] + 0.02 * states[key] for key in critics | policy}
        return Outputs(losses, states=states | slow)

    weights = critics | policy
    states = weights | slots["critic"] | slots["actor"] | {f"{key}_slow": 0.9 * value for key, value in weights.items()}
    batch = {"seen": normal(3, 4), "action": normal(3, 2, scale=0.5), "after": normal(3, 4), "reward": normal(3)}
    return Step(variant, Inputs(batch | {"noise": normal(3, 2)}, states), run, style)


@kind("jax-twin-critics", "jax")
def twins() -> Iterator[Step]:
    """Yield two losses with two optimizers and slow copies of all networks."""
    yield twin_critics(OPTIMIZERS["sgd"], "sgd")
    yield twin_critics(OPTIMIZERS["adam"], "adam", EXPORTER)


@kind("jax-noise-scale", "jax")
def noise_scale() -> Iterator[Step]:
    """Yield the gradient noise scale of two halves of the batch, from two averages that are carried."""
    for variant, style in {"sgd": PLAIN, "momentum": EXPORTER, "adam": PLAIN}.items():
        problem, optimizer = regression(batch=8), OPTIMIZERS[variant]
        start = optimizer.init(jax.tree.map(jnp.asarray, problem.weights))
        slots, shape = named_leaves(start), jax.tree.structure(start)

        def run(
            values: Arrays,
            problem: Problem = problem,
            optimizer: optax.GradientTransformation = optimizer,
            slots: Arrays = slots,
            shape: object = shape,
        ) -> Outputs:
            weights = {name: values[name] for name in problem.weights}
            halves = [{name: values[name][part] for name in "xy"} for part in (slice(0, 4), slice(4, 8))]
            (one, left), (two, right) = (differentiate(problem, weights | half) for half in halves)
            grads = {name: (left[name] + right[name]) / 2 for name in left}
            small = (optax.tree.norm(left, squared=True) + optax.tree.norm(right, squared=True)) / 2
            large = optax.tree.norm(grads, squared=True)
            signal = 0.9 * values["signal"] + 0.1 * (2 * large - small)
            noise = 0.9 * values["noise"] + 0.1 * 8 * (small - large)
            state = jax.tree.unflatten(shape, [values[name] for name in slots])
            updates, state = optimizer.update(grads, state, weights)
            states = optax.apply_updates(weights, updates) | dict(zip(slots, jax.tree.leaves(state), strict=True))
            metrics = {"noise_scale": noise / (jnp.abs(signal) + 1e-3)}
            return Outputs({"loss": (one + two) / 2}, metrics, states=states | {"signal": signal, "noise": noise})

        carried = {"signal": np.float32(0.5), "noise": np.float32(0.5)}
        yield Step(variant, Inputs(problem.batch, problem.weights | slots | carried), run, style)


@kind("jax-power-averages", "jax")
def power_averages() -> Iterator[Step]:
    """Yield two averages of the weights whose decays are powers of the number of the step (EDM2)."""
    for variant, style in {"sgd": PLAIN, "adam": EXPORTER, "momentum": STYLES["scrambled"]}.items():
        problem = regression()
        step = train(problem, OPTIMIZERS[variant], variant, style)

        def run(values: Arrays, step: Step = step, problem: Problem = problem) -> Outputs:
            outputs, time = step.run(values), values["time"] + 1
            states = outputs.states | {"time": time}
            for prefix, power in {"short": 17.8, "long": 7.9}.items():
                decay = jnp.exp(power * jnp.log(time / (time + 1)))
                for name in problem.weights:
                    average = values[f"{prefix}_{name}"]
                    states[f"{prefix}_{name}"] = decay * average + (1 - decay) * outputs.states[name]
            return replace(outputs, states=states)

        averages = prefixed("short", problem.weights) | prefixed("long", problem.weights)
        states = step.inputs.states | averages | {"time": np.float32(0)}
        yield replace(step, inputs=replace(step.inputs, states=states), run=run)


@kind("jax-adaptive-damping", "jax")
def adaptive_damping() -> Iterator[Step]:
    """Yield Levenberg and Marquardt's step by conjugate gradients; the damping is carried, and follows success."""

    def curve(weights: Arrays, x: jax.Array) -> jax.Array:
        bumps = jnp.exp(-jnp.square((x[:, None] - weights["centre"]) * jnp.exp(weights["log_slope"])))
        return jnp.sum(weights["height"] * bumps, 1)

    def dot(left: Arrays, right: Arrays) -> jax.Array:
        return sum(jnp.sum(left[name] * right[name]) for name in left)

    weights = {"height": normal(4), "centre": normal(4), "log_slope": normal(4, scale=0.1)}
    data = {"x": normal(9), "y": normal(9)}
    problem = Problem(weights, data, lambda w, values: jnp.mean(jnp.square(curve(w, values["x"]) - values["y"])))
    for variant, style in {"plain": PLAIN, "names": EXPORTER}.items():

        def run(values: Arrays) -> Outputs:
            weights = {name: values[name] for name in problem.weights}
            loss, grads = differentiate(problem, values)
            _, slope = jax.vjp(lambda weights: curve(weights, values["x"]), weights)

            def forward(move: Arrays) -> jax.Array:
                """Return the change of the outputs by a move of the weights: the transpose of the transpose."""
                zero = jnp.zeros_like(values["y"])
                return jax.vjp(lambda outer: slope(outer)[0], zero)[1](move)[0]

            def curved(move: Arrays) -> Arrays:
                back = slope(forward(move) * 2 / values["y"].size)[0]
                return {name: back[name] + values["damping"] * move[name] for name in move}

            move = jax.tree.map(jnp.zeros_like, grads)
            rest = way = jax.tree.map(jnp.negative, grads)
            for _ in range(3):
                bent, size = curved(way), dot(rest, rest)
                length = size / (dot(way, bent) + 1e-8)
                move = {name: move[name] + length * way[name] for name in move}
                rest = {name: rest[name] - length * bent[name] for name in rest}
                grown = dot(rest, rest) / (size + 1e-8)
                way = {name: rest[name] + grown * way[name] for name in way}
            states = {name: weights[name] + move[name] for name in weights}
            better = problem.loss(states, values) < loss
            damping = jnp.clip(values["damping"] * jnp.where(better, 0.7, 1.5), 1e-4, 10.0)
            return Outputs({"loss": loss}, states=states | {"damping": damping})

        yield Step(variant, Inputs(problem.batch, problem.weights | {"damping": np.float32(0.1)}), run, style)
