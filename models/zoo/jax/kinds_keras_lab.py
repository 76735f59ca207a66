"""Kinds from laboratories by Keras 3 on JAX: customers who leave, loads of a grid, defects of wafers."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import keras
import numpy as np

from models.zoo.arrays import normal
from models.zoo.jax.kinds_keras import Dense, named
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

layers, optimizers = keras.layers, keras.optimizers
# (predictions, all inputs) -> loss, metrics
Score = Callable[[list, Arrays], tuple[jax.Array, Arrays]]


def begin() -> None:
    keras.utils.clear_session()


def custom_loop(
    variant: str,
    model: keras.Model,
    optimizer: keras.Optimizer,
    batch: Arrays,
    score: Score,
    style: Style = PLAIN,
    *,
    meters: tuple[tuple[keras.Metric, Callable], ...] = (),
    fed: Arrays | None = None,
) -> Step:
    """Return the step of a loop by hand; `meters` are carried, each with what it sees of loss, outputs and inputs."""
    for variable in model.trainable_variables:
        if "kernel" in variable.path:
            variable.assign(normal(*variable.shape, scale=variable.shape[0] ** -0.5))
        elif "embeddings" in variable.path:
            variable.assign(normal(*variable.shape, scale=0.3))
    optimizer.build(model.trainable_variables)
    weights, fixed = named(model.trainable_variables), named(model.non_trainable_variables)
    slots = named(optimizer.variables)
    counts = named([variable for meter, _ in meters for variable in meter.variables])
    inputs = [tensor.name for tensor in model.inputs]

    def objective(trained: list, others: list, values: Arrays) -> tuple[jax.Array, tuple]:
        given = [values[name] for name in inputs]
        outputs, others = model.stateless_call(trained, others, given if len(given) > 1 else given[0], training=True)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        loss, metrics = score(outputs, values)
        return loss, (metrics, outputs, others)

    def run(values: Arrays) -> Outputs:
        trained, others, state, totals = ([values[n] for n in group] for group in (weights, fixed, slots, counts))
        found = jax.value_and_grad(objective, has_aux=True)(trained, others, values)
        (loss, (metrics, outputs, others)), grads = found
        trained, state = optimizer.stateless_apply(state, grads, trained)
        following, metrics = [*trained, *others, *state], dict(metrics)
        for meter, sees in meters:
            own, totals = totals[: len(meter.variables)], totals[len(meter.variables) :]
            own = meter.stateless_update_state(own, *sees(loss, outputs, values))
            metrics[meter.name] = meter.stateless_result(own)
            following += own
        names = [*weights, *fixed, *slots, *counts]
        return Outputs({"loss": loss}, metrics, states=dict(zip(names, following, strict=True)))

    states = {name: jnp.asarray(v.value) for name, v in (weights | fixed | slots | counts).items()}
    return Step(variant, Inputs(batch, states, fed or {}), run, style, warm=3)


@kind("lab-keras-customer-churn", "jax")
def customer_churn() -> Iterator[Step]:
    """Customers who leave, with rare ones weighted: batch normalization, AdamW with a cosine; a fed weight, Adamax."""

    def build(*widths: int, normalised: bool) -> keras.Model:
        begin()
        x = usage = keras.Input((13,), name="usage")
        for width in widths:
            x = Dense(width, use_bias=not normalised)(x)
            x = layers.BatchNormalization(momentum=0.9)(x) if normalised else x
            x = layers.Activation("swish")(x)
        return keras.Model(usage, Dense(1, name="churn")(x))

    batch = {"usage": normal(12, 13), "left": (np.random.rand(12, 1) > 0.7).astype(np.float32)}

    def weighted(outputs: list, values: Arrays) -> tuple[jax.Array, Arrays]:
        logit, left = outputs[0], values["left"]
        weight = 1 + left * (values["positive_weight"] - 1 if "positive_weight" in values else 3.0)
        each = jax.nn.softplus(logit) - left * logit
        right = ((logit > 0) == (left > 0.5)).astype(jnp.float32)
        return jnp.sum(each * weight) / jnp.sum(weight), {"accuracy": jnp.mean(right)}

    rate = optimizers.schedules.CosineDecay(0.0, 100, warmup_target=3e-3, warmup_steps=5)
    model = build(18, 10, normalised=True)
    yield custom_loop(
        "cosine", model, optimizers.AdamW(rate, weight_decay=0.01), batch, weighted, Style(names="exporter")
    )
    model = build(16, 12, normalised=False)
    fed = {"positive_weight": np.float32(4.0)}
    rule = optimizers.Adamax(2e-3, global_clipnorm=1.0)
    mean = (keras.metrics.Mean(name="running_loss"), lambda loss, outputs, values: (loss,))
    yield custom_loop("fed-weight", model, rule, batch, weighted, meters=(mean,), fed=fed)


@kind("lab-keras-grid-load", "jax")
def grid_load() -> Iterator[Step]:
    """The load of a grid by hours ahead: two inputs, quantiles, layer norms; Nadam, and momentum with averages."""

    def build(width: int) -> keras.Model:
        begin()
        past, calendar = keras.Input((24,), name="past_load"), keras.Input((9,), name="calendar")
        x = layers.Concatenate()([Dense(width, activation="elu")(past), Dense(7, activation="tanh")(calendar)])
        x = layers.LayerNormalization(epsilon=1e-4)(x)
        x = layers.Add()([x, Dense(width + 7, activation="elu")(x)])
        return keras.Model([past, calendar], [Dense(6, name="median")(x), Dense(6, name="upper")(x)])

    def pinball(outputs: list, values: Arrays) -> tuple[jax.Array, Arrays]:
        parts = []
        for level, guess in zip((0.5, 0.9), outputs, strict=True):
            error = values["load"] - guess
            parts.append(jnp.mean(jnp.maximum(level * error, (level - 1) * error)))
        above = jnp.mean((values["load"] > outputs[1]).astype(jnp.float32))
        return parts[0] + parts[1], {"median_loss": parts[0], "upper_loss": parts[1], "exceedance": above}

    batch = {"past_load": normal(5, 24), "calendar": normal(5, 9), "load": normal(5, 6)}
    error = (keras.metrics.MeanAbsoluteError(), lambda loss, outputs, values: (values["load"], outputs[0]))
    yield custom_loop("nadam", build(14), optimizers.Nadam(2e-3, clipnorm=0.5), batch, pinball, meters=(error,))
    rule = optimizers.SGD(
        optimizers.schedules.PiecewiseConstantDecay([50, 90], [0.02, 0.01, 0.001]),
        momentum=0.9,
        use_ema=True,
        ema_momentum=0.97,
    )
    style = Style(names="scrambled", order="shuffled", shapes="interface")
    yield custom_loop("averaged", build(11), rule, batch, pinball, style)


@kind("lab-keras-wafer-defects", "jax")
def wafer_defects() -> Iterator[Step]:
    """Defects of wafers from patches of maps, rare ones by focal loss: Lion; AMSGrad over accumulated gradients."""

    def build(width: int) -> keras.Model:
        begin()
        wafer = keras.Input((36,), name="wafer_map")
        x = Dense(width, activation="relu", kernel_regularizer=None)(wafer)
        x = layers.BatchNormalization()(x)
        gate = Dense(width, activation="sigmoid", name="gate")(x)
        x = layers.Multiply()([x, gate])
        return keras.Model(wafer, Dense(8, name="defect")(Dense(13, activation="relu")(x)))

    def focal(outputs: list, values: Arrays) -> tuple[jax.Array, Arrays]:
        log_p = jax.nn.log_softmax(outputs[0])
        target = (values["defect_class"][:, None] == jnp.arange(8, dtype=jnp.int32)).astype(jnp.float32)
        target = target * 0.95 + 0.05 / 8
        each = -jnp.sum(target * jnp.square(1 - jnp.exp(log_p)) * log_p, 1)
        best = jnp.argmax(jax.lax.stop_gradient(outputs[0]), 1)
        right = jnp.mean((best == values["defect_class"]).astype(jnp.float32))
        return jnp.mean(each), {"accuracy": right}

    batch = {"wafer_map": (np.random.rand(7, 36) > 0.8).astype(np.float32)}
    batch["defect_class"] = np.random.randint(0, 8, 7).astype(np.int32)
    yield custom_loop(
        "lion", build(19), optimizers.Lion(5e-4, weight_decay=0.01), batch, focal, Style(names="exporter")
    )
    style = Style(states="initializers")
    rule = optimizers.Adam(2e-3, amsgrad=True, gradient_accumulation_steps=3)
    yield custom_loop("accumulated", build(15), rule, batch, focal, style)


@kind("lab-keras-soil-moisture", "jax")
def soil_moisture() -> Iterator[Step]:
    """The moisture of soil from satellites, errors weighted by quality: Adam by inverse time; FTRL."""

    def build(*widths: int) -> keras.Model:
        begin()
        x = signal = keras.Input((10,), name="signal")
        for width in widths:
            x = Dense(width, activation="softplus")(x)
        return keras.Model(signal, Dense(2, name="moisture")(x))

    def score(outputs: list, values: Arrays) -> tuple[jax.Array, Arrays]:
        error = outputs[0] - values["moisture"]
        loss = jnp.mean(jnp.square(error) * values["quality"][:, None])
        return loss, {"mae": jnp.mean(jnp.abs(error)), "bias": jnp.mean(error, 0)}

    batch = {"signal": normal(8, 10), "moisture": normal(8, 2), "quality": np.random.rand(8).astype(np.float32)}
    model = build(15, 9)
    rate = optimizers.schedules.InverseTimeDecay(5e-3, 30, 0.5)
    yield custom_loop("inverse-time", model, optimizers.Adam(rate), batch, score)
    model = build(12)
    rule = optimizers.Ftrl(0.05, l2_regularization_strength=0.001)
    yield custom_loop("ftrl", model, rule, batch, score, Style(names="exporter"))
