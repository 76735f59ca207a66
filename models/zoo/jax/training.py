"""From a problem to a step by JAX: gradients only, or an optimizer of optax inside."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import optax

from models.zoo.jax.problems import Problem
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style


def differentiate(problem: Problem, values: Arrays) -> tuple[jax.Array, Arrays]:
    """Return the loss and the gradient of each weight."""
    return jax.value_and_grad(problem.loss)({name: values[name] for name in problem.weights}, values)


def gradients_only(problem: Problem, variant: str = "plain", style: Style = PLAIN) -> Step:
    """Return the step that gives the loss and the gradients; the weights are constants of the graph."""

    def run(values: Arrays) -> Outputs:
        loss, grads = differentiate(problem, values)
        return Outputs(losses={"loss": loss}, gradients={f"grad_{name}": grad for name, grad in grads.items()})

    return Step(variant, Inputs(problem.batch, constants=problem.constants | problem.weights), run, style)


def named_leaves(tree: Any) -> Arrays:
    """Return the leaves of a state by name: the keys of their paths, with the positions where names would be equal."""
    paths = [[key(entry) for entry in path] for path, _ in jax.tree.flatten_with_path(tree)[0]]
    short = ["_".join(str(part) for part in path if not isinstance(part, int)) or "state" for path in paths]
    counts = Counter(short)
    names = [name if counts[name] == 1 else "_".join(map(str, path)) for name, path in zip(short, paths, strict=True)]
    return dict(zip(names, map(jnp.asarray, jax.tree.leaves(tree)), strict=True))


def key(entry: Any) -> str | int:
    """Return a step of a path: an attribute, a key, or a position."""
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    raise TypeError(entry)


def train(
    problem: Problem,
    optimizer: optax.GradientTransformation,
    variant: str = "plain",
    style: Style = PLAIN,
    *,
    observe: Callable[[Arrays, Any], Outputs] = lambda *_: Outputs(),
    hyperparameters: Mapping[str, Any] = MappingProxyType({}),
    given: tuple[str, ...] = (),
    warm: int = 3,
) -> Step:
    """Return a step with the optimizer inside; the leaves of its state are inputs and outputs.

    `observe(gradients, next state)` returns further outputs. An optimizer that takes more gets the loss as `value`, the
    gradients as `grad`, the loss of other weights as `value_fn`, and the inputs of `hyperparameters` and `given`.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    initial = optimizer.init(jax.tree.map(jnp.asarray, problem.weights))
    leaves, structure = named_leaves(initial), jax.tree.structure(initial)

    def run(values: Arrays) -> Outputs:
        loss, grads = differentiate(problem, values)
        weights = {name: values[name] for name in problem.weights}
        state = jax.tree.unflatten(structure, [values[name] for name in leaves])
        fed = {name: values[name] for name in (*hyperparameters, *given)}
        fed |= {"value": loss, "grad": grads, "value_fn": lambda weights: problem.loss(weights, values)}
        updates, state = optimizer.update(grads, state, weights, **fed)
        following = dict(zip(leaves, jax.tree.leaves(state), strict=True))
        outputs = Outputs(losses={"loss": loss}, states=optax.apply_updates(weights, updates) | following)
        more = observe(grads, state)
        return replace(outputs, metrics=more.metrics, gradients=more.gradients)

    inputs = Inputs(problem.batch, problem.weights | leaves, dict(hyperparameters), problem.constants)
    return Step(variant, inputs, run, style, warm=warm)


def unrolled(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer without loops of a fixed number, which jax2onnx does not export backwards, or not at all."""

    def repeat(lower: int, upper: int, body: Callable, value: Any, **_: Any) -> Any:
        for index in range(lower, upper):
            value = body(index, value)
        return value

    def scan(body: Callable, carry: Any, rows: Any, reverse: bool = False) -> tuple[Any, Any]:
        count = len(jax.tree.leaves(rows)[0])
        results = [None] * count
        for index in range(count)[:: -1 if reverse else 1]:
            carry, results[index] = body(carry, jax.tree.map(lambda row, at=index: row[at], rows))
        return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *results)

    optimizer = optax.with_extra_args_support(optimizer)

    def update(grads: Arrays, state: Any, weights: Arrays, **fed: Any) -> tuple[Arrays, Any]:
        with patch.object(jax.lax, "fori_loop", repeat), patch.object(jax.lax, "scan", scan):
            return optimizer.update(grads, state, weights, **fed)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
