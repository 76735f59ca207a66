"""Kinds by JAX beyond optimizers: scalar weights, several losses, running losses, per-example gradients, teachers."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.problems import Problem, dense, regression, square
from models.zoo.jax.training import train
from models.zoo.steps import STYLES, Arrays, Inputs, Outputs, Step, kind


def scalars() -> Problem:
    """Return a line through points: two weights without dimensions."""

    def loss(weights: Arrays, values: Arrays) -> jax.Array:
        return jnp.mean(jnp.square(weights["slope"] * values["x"] + weights["offset"] - values["y"]))

    weights = {"slope": np.float32(0.5), "offset": np.float32(0.1)}
    return Problem(weights, {"x": normal(8), "y": normal(8)}, loss)


@kind("jax-scalar-weights", "jax")
def scalar_weights() -> Iterator[Step]:
    """Yield steps all of whose states have one element."""
    yield train(scalars(), optax.sgd(0.1), "sgd")
    yield train(scalars(), optax.sgd(0.1, momentum=0.9), "momentum", STYLES["scrambled"])
    yield train(scalars(), optax.adam(0.01), "adam")
    yield train(scalars(), optax.adam(0.01), "initializers", STYLES["initializers"])


@kind("jax-loss-parts", "jax")
def loss_parts() -> Iterator[Step]:
    """Yield steps that return the two parts of their loss beside it."""
    yield with_parts(regression(), "regression")
    yield with_parts(square(), "square")


def with_parts(problem: Problem, variant: str) -> Step:
    """Return a step whose loss is that of the problem and the weights' squares."""

    def objective(weights: Arrays, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        fit = problem.loss(weights, values)
        decay = 0.01 * sum(jnp.sum(jnp.square(weight)) for weight in weights.values())
        return fit + decay, (fit, decay)

    def run(values: Arrays) -> Outputs:
        weights = {name: values[name] for name in problem.weights}
        (loss, (fit, decay)), grads = jax.value_and_grad(objective, has_aux=True)(weights, values)
        states = {name: weights[name] - 0.1 * grads[name] for name in weights}
        return Outputs({"loss": loss}, {"fit": fit, "decay": decay}, states=states)

    return Step(variant, Inputs(problem.batch, problem.weights), run)


@kind("jax-running-loss", "jax")
def running_loss() -> Iterator[Step]:
    """Yield a carried average of the loss, beside SGD and Adam."""
    for variant, optimizer in {"sgd": optax.sgd(0.05), "adam": optax.adam(0.01)}.items():
        step = train(regression(), optimizer, variant)

        def run(values: Arrays, step: Step = step) -> Outputs:
            outputs = step.run(values)
            average = 0.9 * values["average"] + 0.1 * outputs.losses["loss"]
            return replace(outputs, states=outputs.states | {"average": average})

        states = step.inputs.states | {"average": np.float32(1.0)}
        yield replace(step, inputs=replace(step.inputs, states=states), run=run)


@kind("jax-per-example", "jax")
def per_example() -> Iterator[Step]:
    """Yield gradients of each example, clipped by their norms before they are added."""
    problem = regression()

    def loss(weights: Arrays, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jnp.tanh(jnp.sum(x[:, None] * weights["w1"], 0) + weights["b1"])
        return jnp.mean(jnp.square(jnp.sum(hidden[:, None] * weights["w2"], 0) + weights["b2"] - y))

    def run(values: Arrays) -> Outputs:
        weights = {name: values[name] for name in problem.weights}
        losses, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(weights, values["x"], values["y"])
        squares = sum(jnp.sum(jnp.square(grad).reshape(len(grad), -1), 1) for grad in grads.values())
        factor = jnp.minimum(1.0, 0.5 / jnp.sqrt(squares))
        mean = {name: jnp.mean(grad * factor.reshape(-1, *[1] * (grad.ndim - 1)), 0) for name, grad in grads.items()}
        return Outputs({"loss": jnp.mean(losses)}, states={name: weights[name] - 0.1 * mean[name] for name in weights})

    yield Step("clipped", Inputs(problem.batch, problem.weights), run)


@kind("jax-teacher", "jax")
def teacher() -> Iterator[Step]:
    """Yield a student that follows a moving average of itself, which is carried and read by the loss."""
    for variant, problem in {"regression": regression(), "square": square()}.items():
        names = list(problem.weights)

        def loss(weights: Arrays, values: Arrays, names: list[str] = names, problem: Problem = problem) -> jax.Array:
            held = {name: values[f"teacher_{name}"] for name in names}
            distance = dense(weights, values["x"]) - jax.lax.stop_gradient(dense(held, values["x"]))
            return problem.loss(weights, values) + jnp.mean(jnp.square(distance))

        step = train(replace(problem, loss=loss), optax.sgd(0.05, momentum=0.9), variant)

        def run(values: Arrays, step: Step = step, names: list[str] = names) -> Outputs:
            outputs = step.run(values)
            moved = {n: 0.99 * values[f"teacher_{n}"] + 0.01 * outputs.states[n] for n in names}
            following = {f"teacher_{name}": value for name, value in moved.items()}
            return replace(outputs, states=outputs.states | following)

        states = step.inputs.states | {f"teacher_{name}": 0.9 * problem.weights[name] for name in names}
        yield replace(step, inputs=replace(step.inputs, states=states), run=run)


@kind("jax-micro-batches", "jax")
def micro_batches() -> Iterator[Step]:
    """Yield gradients of two halves of the batch, added before one update."""
    for variant, optimizer in {"momentum": optax.sgd(0.05, momentum=0.9), "adam": optax.adam(0.01)}.items():
        problem = regression()

        def loss(weights: Arrays, values: Arrays, problem: Problem = problem) -> jax.Array:
            halves = ({name: values[name][part] for name in "xy"} for part in (slice(0, 2), slice(2, 4)))
            return sum(problem.loss(weights, half) for half in halves) / 2

        yield train(replace(problem, loss=loss), optimizer, variant)
