"""Kinds that are the optimizers of Keras 3 on JAX, through its stateless interface, and some of its layers."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np

from models.zoo.arrays import normal
from models.zoo.jax.kinds_optax import form_of
from models.zoo.jax.problems import matmul
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind

optimizers = keras.optimizers
schedules = optimizers.schedules


class Dense(keras.layers.Dense):
    """Keras's own dense layer, with a product whose gradients jax2onnx exports."""

    def call(self, inputs: jax.Array, training: bool | None = None) -> jax.Array:
        product = matmul(inputs, jnp.asarray(self.kernel.value))
        if self.bias is not None:
            product = product + jnp.asarray(self.bias.value)
        return self.activation(product)


# Each optimizer with its settings.
OPTIMIZERS: dict[str, tuple[Callable[..., keras.Optimizer], list[dict]]] = {
    "sgd": (optimizers.SGD, [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01}]),
    "adam": (optimizers.Adam, [{}, {"amsgrad": True}]),
    "adamw": (optimizers.AdamW, [{}]),
    "adamax": (optimizers.Adamax, [{}]),
    "adadelta": (optimizers.Adadelta, [{}]),
    "adafactor": (optimizers.Adafactor, [{}]),
    "adagrad": (optimizers.Adagrad, [{}]),
    "ftrl": (optimizers.Ftrl, [{}, {"l2_regularization_strength": 0.01}]),
    "lamb": (optimizers.Lamb, [{}]),
    "lion": (optimizers.Lion, [{}]),
    "muon": (optimizers.Muon, [{}]),
    "nadam": (optimizers.Nadam, [{}]),
    "rmsprop": (optimizers.RMSprop, [{}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}]),
    "schedule-free-adamw": (optimizers.ScheduleFreeAdamW, [{}]),
}
OPTIONS: dict[str, dict] = {
    "clip-norm": {"clipnorm": 0.5},
    "clip-global-norm": {"global_clipnorm": 0.5},
    "clip-value": {"clipvalue": 0.1},
    "weight-average": {"use_ema": True, "ema_momentum": 0.9},
    "weight-average-overwriting": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4},
    "accumulated": {"gradient_accumulation_steps": 2},
    "decayed": {"weight_decay": 0.01},
}
SCHEDULES: dict[str, Callable[[], schedules.LearningRateSchedule]] = {
    "exponential": lambda: schedules.ExponentialDecay(0.01, 20, 0.9),
    "staircase": lambda: schedules.ExponentialDecay(0.01, 20, 0.9, staircase=True),
    "cosine": lambda: schedules.CosineDecay(0.0, 40, warmup_target=0.01, warmup_steps=4),
    "restarts": lambda: schedules.CosineDecayRestarts(0.01, 20),
    "piecewise": lambda: schedules.PiecewiseConstantDecay([5, 9], [0.01, 0.005, 0.001]),
    "polynomial": lambda: schedules.PolynomialDecay(0.01, 50),
    "inverse-time": lambda: schedules.InverseTimeDecay(0.01, 10, 0.5),
}


def named(variables: list) -> dict[str, keras.Variable]:
    """Return variables by their paths, as names of a graph; equal ones are numbered."""
    result: dict[str, keras.Variable] = {}
    for variable in variables:
        name = variable.path.replace("/", "_")
        result[f"{name}_{len(result)}" if name in result else name] = variable
    return result


def network(*widths: int, activation: str = "tanh", bias: bool = True, more: tuple = ()) -> keras.Model:
    """Return dense layers, the first width that of the input; `more` are layers before the last."""
    layers = [Dense(width, activation=activation, use_bias=bias) for width in widths[1:-1]]
    return keras.Sequential([keras.Input((widths[0],)), *layers, *more, Dense(widths[-1], use_bias=bias)])


def step(
    model: keras.Model,
    optimizer: keras.Optimizer,
    variant: str,
    style: Style = PLAIN,
    *,
    rows: int = 4,
    labelled: bool = False,
) -> Step:
    """Return a step of a regression, or of a classification."""
    inputs, outputs = model.input_shape[-1], model.output_shape[-1]
    optimizer.build(model.trainable_variables)
    weights, others = named(model.trainable_variables), named(model.non_trainable_variables)
    for name, weight in weights.items():
        weight.assign(normal(*weight.shape, scale=weight.shape[0] ** -0.5 if "kernel" in name else 0.1))
    slots = named(optimizer.variables)

    def objective(values: list, fixed: list, x: jax.Array, y: jax.Array) -> tuple[jax.Array, list]:
        predicted, fixed = model.stateless_call(values, fixed, x, training=True)
        if labelled:
            picked = jax.nn.one_hot(y, outputs) * jax.nn.log_softmax(predicted)
            return -jnp.mean(jnp.sum(picked, -1)), fixed
        return jnp.mean(jnp.square(predicted - y)), fixed

    def run(values: Arrays) -> Outputs:
        held = [[values[name] for name in group] for group in (weights, others, slots)]
        (loss, fixed), grads = jax.value_and_grad(objective, has_aux=True)(held[0], held[1], values["x"], values["y"])
        moved, state = optimizer.stateless_apply(held[2], grads, held[0])
        following = dict(zip([*weights, *others, *slots], [*moved, *fixed, *state], strict=True))
        return Outputs(losses={"loss": loss}, states=following)

    target = np.random.randint(0, outputs, (rows,)).astype(np.int32) if labelled else normal(rows, outputs)
    states = {name: jnp.asarray(variable.value) for name, variable in (weights | others | slots).items()}
    return Step(variant, Inputs({"x": normal(rows, inputs), "y": target}, states), run, style, warm=3)


def on_problems(make: Callable[..., keras.Optimizer], settings: list[dict], form: str) -> Iterator[Step]:
    """Yield an optimizer with each of its settings, the first one on all problems."""
    for index, options in enumerate(settings):
        keras.utils.clear_session()
        rated = {"learning_rate": 0.01} | options
        yield step(network(5, 7, 3), make(**rated), "-".join(options).replace("_", "-") or "regression")
        if index == 0:
            same = network(6, 6, 6, bias=False)
            yield step(same, make(**rated), "square", Style(names="scrambled", order="shuffled"), rows=6)
            yield step(network(8, 9, 5, activation="relu"), make(**rated), form, STYLES[form], rows=6, labelled=True)


for name, entry in OPTIMIZERS.items():
    kind(f"keras-{name}", "jax")(partial(on_problems, *entry, form_of(name)))
for name, options in OPTIONS.items():
    kind(f"keras-option-{name}", "jax")(partial(on_problems, optimizers.Adam, [options], form_of(name)))


@kind("keras-schedules", "jax")
def scheduled() -> Iterator[Step]:
    """Yield rates that are computed from the number of the iteration."""
    for name, make in SCHEDULES.items():
        yield step(network(5, 7, 3), optimizers.SGD(make(), momentum=0.9), name)


@kind("keras-loss-scale", "jax")
def loss_scale() -> Iterator[Step]:
    """Yield Keras's own LossScaleOptimizer around others; the loss is scaled by its scale, which it carries."""
    for variant, inner in {"momentum": optimizers.SGD(0.01, momentum=0.9), "adam": optimizers.Adam(0.01)}.items():
        yield step(network(5, 7, 3), optimizers.LossScaleOptimizer(inner, initial_scale=16.0), variant)


@kind("keras-layers", "jax")
def layers() -> Iterator[Step]:
    """Yield layers with variables that are not trained, and normalizations."""
    make = {
        "batch-norm": lambda: (keras.layers.BatchNormalization(),),
        "layer-norm": lambda: (keras.layers.LayerNormalization(),),
        "unit-norm": lambda: (keras.layers.UnitNormalization(),),
        "dropout": lambda: (keras.layers.Dropout(0.5, seed=1),),
        "noise": lambda: (keras.layers.GaussianNoise(0.1, seed=1),),
    }
    for name, more in make.items():
        keras.utils.clear_session()
        made = step(network(5, 7, 3, more=more()), optimizers.Adam(0.01), name)
        yield replace(made, deterministic=name not in ("dropout", "noise"))
    keras.utils.clear_session()
    both = (keras.layers.BatchNormalization(), keras.layers.BatchNormalization())
    yield step(network(6, 6, 6, more=both), optimizers.SGD(0.01, momentum=0.9), "batch-norms", STYLES["scrambled"])


@kind("keras-several-optimizers", "jax")
def several() -> Iterator[Step]:
    """Yield two optimizers, each for some of the variables."""
    group = optimizers.OptimizerMap(optimizers.SGD(0.01, momentum=0.9), {".*kernel": optimizers.Adam(0.01)})
    yield step(network(5, 7, 3), optimizers.MultiOptimizer(group), "kernels")
