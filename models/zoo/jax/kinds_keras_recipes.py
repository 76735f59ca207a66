"""Kinds by Keras 3 on JAX as loops by hand are written: several inputs and losses, and metrics that are carried."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import keras
import numpy as np

from models.zoo.arrays import normal
from models.zoo.jax.kinds_keras import Dense, named, network
from models.zoo.jax.kinds_recipes import EXPORTER, labels
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind

optimizers = keras.optimizers


def initialise(model: keras.Model) -> None:
    """Give a model reproducible weights."""
    for name, weight in named(model.trainable_variables).items():
        scale = weight.shape[0] ** -0.5 if "kernel" in name else 0.1
        weight.assign(normal(*weight.shape, scale=scale) + (1 if "gamma" in name else 0))


def wide_and_deep(optimizer: keras.Optimizer, variant: str, style: Style, *hidden: int) -> Step:
    """Return a functional model with two inputs and two outputs, a click and a price, each with a loss of Keras."""
    wide, deep = keras.Input((9,), name="wide"), keras.Input((6,), name="deep")
    x = deep
    for width in hidden:
        x = Dense(width, activation="relu")(x)
    joined = keras.layers.Concatenate()([keras.layers.LayerNormalization()(x), wide])
    model = keras.Model([wide, deep], [Dense(1, name="click")(joined), Dense(1, name="price")(x)])
    initialise(model)
    optimizer.build(model.trainable_variables)
    weights, slots = named(model.trainable_variables), named(optimizer.variables)
    losses = keras.losses  # the functions: the mean of a Loss divides by where(), which jax2onnx does not differentiate

    def objective(held: list, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (click, price), _ = model.stateless_call(held, [], [values["wide"], values["deep"]], training=True)
        clicked = losses.binary_crossentropy(values["clicked"], click, from_logits=True)
        parts = jnp.mean(clicked), jnp.mean(losses.huber(values["price"], price))
        return parts[0] + 0.3 * parts[1], (*parts, jax.lax.stop_gradient(click))

    def run(values: Arrays) -> Outputs:
        held = [values[name] for name in weights]
        (loss, (click, price, logit)), grads = jax.value_and_grad(objective, has_aux=True)(held, values)
        moved, state = optimizer.stateless_apply([values[name] for name in slots], grads, held)
        right = jnp.mean(((logit > 0).astype(jnp.float32) == values["clicked"]).astype(jnp.float32))
        metrics = {"click_loss": click, "price_loss": price, "click_accuracy": right}
        return Outputs({"loss": loss}, metrics, states=dict(zip([*weights, *slots], [*moved, *state], strict=True)))

    batch = {"wide": labels(2, 6, 9).astype(np.float32), "deep": normal(6, 6)}
    batch |= {"clicked": labels(2, 6, 1).astype(np.float32), "price": normal(6, 1)}
    states = {name: jnp.asarray(variable.value) for name, variable in (weights | slots).items()}
    return Step(variant, Inputs(batch, states), run, style, warm=3)


@kind("keras-wide-and-deep", "jax")
def wide_and_deeps() -> Iterator[Step]:
    """Yield a wide and deep model of Keras with two weighted losses, by decayed Adam and by averaged RMSprop."""
    keras.utils.clear_session()
    decay = optimizers.schedules.ExponentialDecay(5e-3, 20, 0.9)
    yield wide_and_deep(optimizers.Adam(decay, global_clipnorm=1.0), "adam", PLAIN, 14, 8)
    keras.utils.clear_session()
    averaged = optimizers.RMSprop(2e-3, momentum=0.9, use_ema=True, ema_momentum=0.95)
    yield wide_and_deep(averaged, "averaged", EXPORTER, 12, 10, 7)


def with_metrics(
    model: keras.Model, optimizer: keras.Optimizer, meters: list[keras.Metric], variant: str, style: Style
) -> Step:
    """Return a step as a loop by hand has it: weights, the optimizer's and the metrics' variables go in and out."""
    initialise(model)
    optimizer.build(model.trainable_variables)
    mean = keras.metrics.Mean(name="mean_loss")
    weights, others, slots = map(named, (model.trainable_variables, model.non_trainable_variables, optimizer.variables))
    totals = named([variable for meter in [mean, *meters] for variable in meter.variables])

    def objective(held: list, fixed: list, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, list]]:
        guess, fixed = model.stateless_call(held, fixed, values["x"], training=True)
        return jnp.mean(keras.losses.log_cosh(values["y"], guess)), (guess, fixed)

    def run(values: Arrays) -> Outputs:
        held, fixed, state, counts = ([values[name] for name in group] for group in (weights, others, slots, totals))
        (loss, (guess, fixed)), grads = jax.value_and_grad(objective, has_aux=True)(held, fixed, values)
        held, state = optimizer.stateless_apply(state, grads, held)
        metrics, following = {}, []
        for meter in [mean, *meters]:
            own, counts = counts[: len(meter.variables)], counts[len(meter.variables) :]
            own = meter.stateless_update_state(own, *([loss] if meter is mean else [values["y"], guess]))
            metrics[meter.name] = meter.stateless_result(own)
            following += own
        names = [*weights, *others, *slots, *totals]
        states = dict(zip(names, [*held, *fixed, *state, *following], strict=True))
        return Outputs({"loss": loss}, metrics, states=states)

    batch = {"x": normal(6, model.input_shape[-1]), "y": normal(6, model.output_shape[-1])}
    variables = weights | others | slots | totals
    states = {name: jnp.asarray(variable.value) for name, variable in variables.items()}
    return Step(variant, Inputs(batch, states), run, style, warm=3)


@kind("keras-carried-metrics", "jax")
def carried_metrics() -> Iterator[Step]:
    """Yield loops with the totals and counts of Keras's metrics, beside the loss of the batch."""
    keras.utils.clear_session()
    errors = [keras.metrics.MeanAbsoluteError(), keras.metrics.RootMeanSquaredError()]
    rule = optimizers.AdamW(optimizers.schedules.CosineDecay(5e-3, 60), weight_decay=0.01, clipnorm=1.0)
    yield with_metrics(network(7, 13, 9, 3), rule, errors, "adamw", EXPORTER)
    keras.utils.clear_session()
    errors = [keras.metrics.MeanSquaredError(name="mse")]
    normalised = network(6, 11, 8, 2, more=(keras.layers.BatchNormalization(),))
    yield with_metrics(normalised, optimizers.Lion(1e-3), errors, "batch-norm", STYLES["initializers"])
