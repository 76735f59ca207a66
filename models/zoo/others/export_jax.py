"""Export JAX training steps to ONNX, each without a loss scale and with the one of another project.

    pip install "jax==0.10.2" "flax==0.12.8" "jmp==0.0.4" "keras==3.15.1" "jax2onnx==0.17.1" "onnx" onnxruntime
    python -m models.zoo.others.export_jax        # CPython 3.11

NAME.onnx is the scaled step, and ORIGINAL.onnx the step that it was made from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import jmp
import keras
import numpy as np
import onnx
from flax.training.dynamic_scale import DynamicScale

from graphscale.exporters.jax import export_step

HERE = Path(__file__).resolve().parent
RATE, MOMENTUM = 0.1, 0.9
State = dict[str, Any]
Batch = dict[str, jax.Array]


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w`, whose gradients are written with explicit transposes, which jax2onnx translates."""
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def loss_of(params: State, batch: Batch) -> jax.Array:
    """The loss of a network with one hidden layer."""
    hidden = jnp.tanh(matmul(batch["x"], params["w1"]) + params["b1"])
    return jnp.square(matmul(hidden, params["w2"]) - batch["y"]).mean()


def apply(state: State, grads: State) -> State:
    """A step of gradient descent with momentum."""
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state["momentum"], grads)
    return {"momentum": momentum, "params": jax.tree.map(lambda p, m: p - RATE * m, state["params"], momentum)}


def plain(state: State, batch: Batch) -> tuple[State, jax.Array]:
    """The step without a loss scale."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    return apply(state, grads), loss


def flax_dynamic_scale(state: State, batch: Batch) -> tuple[State, jax.Array]:
    """The step with flax's DynamicScale, as its documentation shows it."""
    scale, finite, loss, grads = state["dynamic_scale"].value_and_grad(loss_of)(state["params"], batch)
    new = apply(state, grads)
    old = {key: state[key] for key in new}
    new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return {**new, "dynamic_scale": scale}, loss


def jmp_dynamic_loss_scale(state: State, batch: Batch) -> tuple[State, jax.Array]:
    """The step with jmp's DynamicLossScale, as its documentation shows it."""
    scale = jmp.DynamicLossScale(state["loss_scale"], state["counter"])

    def scaled(params: State) -> tuple[jax.Array, jax.Array]:
        loss = loss_of(params, batch)
        return scale.scale(loss), loss

    grads, loss = jax.grad(scaled, has_aux=True)(state["params"])
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    scale = scale.adjust(finite)
    new = apply(state, grads)
    new = jmp.select_tree(finite, new, {key: state[key] for key in new})
    return {**new, "loss_scale": scale.loss_scale, "counter": scale.counter}, loss


def keras_step(optimizer: keras.Optimizer) -> tuple[Callable[..., Any], State]:
    """The step with an optimizer of Keras, which may have a loss scale, and its state at the beginning."""
    first = dict(sorted(state_of()["params"].items()))  # in the order of JAX's trees
    variables = [keras.Variable(value, name=key) for key, value in first.items()]
    optimizer.build(variables)
    # The same variables have other paths inside of a LossScaleOptimizer.
    inner = {id(variable) for variable in getattr(optimizer, "inner_optimizer", optimizer).variables}
    kinds = ("sgd" if id(variable) in inner else "loss_scale" for variable in optimizer.variables)
    names = [f"{kind}.{v.path.split('/')[-1]}" for kind, v in zip(kinds, optimizer.variables, strict=True)]

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        own = [state[name] for name in names]

        def scaled(params: State) -> tuple[jax.Array, jax.Array]:
            loss = loss_of(params, batch)
            with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, own, strict=True))):
                return optimizer.scale_loss(loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(state["params"])
        params, own = optimizer.stateless_apply(own, list(grads.values()), list(state["params"].values()))
        return {"params": dict(zip(grads, params, strict=True)), **dict(zip(names, own, strict=True))}, loss

    return step, {"params": first, **dict(zip(names, (v.value for v in optimizer.variables), strict=True))}


def state_of() -> State:
    """The state at the beginning."""
    random = np.random.default_rng(0)
    shapes = {"w1": (3, 5), "b1": (5,), "w2": (5, 1)}
    params = {key: jnp.asarray(random.normal(size=shape), jnp.float32) for key, shape in shapes.items()}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def export(step: Callable[..., Any], state: State, name: str) -> None:
    """Write a step as NAME.onnx, without the roles that graphscale's exporter adds."""
    random = np.random.default_rng(1)
    batch = {key: np.asarray(random.normal(size=(4, n)), np.float32) for key, n in (("x", 3), ("y", 1))}
    path = HERE / f"{name}.onnx"
    export_step(step, state, batch, path, dynamic_batch=False)
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    print(f"{name}: {len(model.graph.node)} nodes, {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    export(plain, state_of(), "jax_step")
    scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536))
    export(flax_dynamic_scale, {**state_of(), "dynamic_scale": scale}, "flax_dynamic_scale")
    own = {"loss_scale": jnp.float32(2**15), "counter": jnp.int32(0)}
    export(jmp_dynamic_loss_scale, {**state_of(), **own}, "jmp_dynamic_loss_scale")
    for name, wrap in (("keras_step", lambda inner: inner), ("keras_loss_scale", keras.optimizers.LossScaleOptimizer)):
        step, state = keras_step(wrap(keras.optimizers.SGD(RATE, momentum=MOMENTUM)))
        export(step, state, name)
