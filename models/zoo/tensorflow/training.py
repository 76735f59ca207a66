"""From a problem to a step by TensorFlow: gradients only, or an update rule inside."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style
from models.zoo.tensorflow.problems import Problem


@dataclass(frozen=True)
class Rule:
    """An update rule for one weight: (w, g, *slots, t if counted, rate) -> (next w, *next slots)."""

    update: Callable[..., Any]
    slots: dict[str, float] = field(default_factory=dict)
    """The slots by name, each with its first value."""
    counted: bool = False
    """The rule reads t, the number of the step from 1; the weights share one counter, an int64 as in Keras."""


def differentiate(problem: Problem, values: Arrays) -> tuple[tf.Tensor, Arrays]:
    """Return the loss and the gradient of each weight."""
    weights = {name: values[name] for name in problem.weights}
    with tf.GradientTape() as tape:
        tape.watch(list(weights.values()))
        loss = problem.loss(weights, values)
    grads = tape.gradient(loss, weights)
    return loss, {name: tf.convert_to_tensor(grad) for name, grad in grads.items()}


def gradients_only(problem: Problem, variant: str = "gradients", style: Style = PLAIN) -> Step:
    """Return the step that gives the loss and the gradients; the weights are constants of the graph."""

    def run(values: Arrays) -> Outputs:
        loss, grads = differentiate(problem, values)
        return Outputs(losses={"loss": loss}, gradients={f"grad_{name}": grad for name, grad in grads.items()})

    return Step(variant, Inputs(problem.batch, constants=problem.weights), run, style)


def train(
    problem: Problem,
    rule: Rule,
    variant: str = "plain",
    style: Style = PLAIN,
    *,
    rate: float = 0.01,
    fed: bool = False,
    transform: Callable[[Arrays], Arrays] = lambda grads: grads,
    observe: Callable[[Arrays], Outputs] = lambda grads: Outputs(),
) -> Step:
    """Return a step with the optimizer inside; `fed` makes its rate an input, `transform` changes the gradients."""
    slots = {
        f"{name}_{slot}": np.full_like(weight, first)
        for slot, first in rule.slots.items()
        for name, weight in problem.weights.items()
    }
    counter = {"iteration": np.int64(0)} if rule.counted else {}

    def run(values: Arrays) -> Outputs:
        loss, grads = differentiate(problem, values)
        extra, grads = observe(grads), transform(grads)
        count = values["iteration"] + 1 if rule.counted else None
        following: Arrays = {}
        for name in problem.weights:
            own = [values[f"{name}_{slot}"] for slot in rule.slots]
            own += [tf.cast(count, tf.float32)] if rule.counted else []
            moved = rule.update(values[name], grads[name], *own, values.get("rate", rate))
            moved = moved if isinstance(moved, tuple) else (moved,)
            following |= dict(zip([name, *(f"{name}_{slot}" for slot in rule.slots)], moved, strict=True))
        following |= {"iteration": count} if rule.counted else {}
        states = {name: following[name] for name in (*problem.weights, *slots, *counter)}
        return Outputs({"loss": loss}, extra.metrics, extra.gradients, states)

    hyperparameters = {"rate": np.float32(rate)} if fed else {}
    return Step(variant, Inputs(problem.batch, problem.weights | slots | counter, hyperparameters), run, style)
