"""Export JAX training steps to ONNX, each with one sample batch and the outputs that JAX computes.

    pip install "jax==0.10.2" "jax2onnx==0.17.1" "optax==0.2.8" "onnx==1.23.2" "onnxruntime==1.31.1" numpy
    python models/jax/export.py [NAME ...]        # no NAME: every model; CPython 3.11

NAME.onnx is what jax2onnx makes of the step, untouched. NAME.npz holds a value for every graph input under
its name, and under `expected/OUTPUT` every output as JAX computed it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime as ort
import optax
from jax import lax
from jax2onnx import to_onnx

HERE = Path(__file__).resolve().parent
# The newest opset that onnxruntime-training 1.19 loads; jax2onnx would take 23.
OPSET = 21
BATCH = 8

Arrays = dict[str, np.ndarray]
Params = Mapping[str, jax.Array]
Loss = Callable[[Params, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Step:
    """A training step: `run(*inputs.values())` returns one array per name in `outputs`."""

    run: Callable[..., tuple[jax.Array, ...]]
    inputs: Arrays
    outputs: list[str]


MODELS: dict[str, Callable[[], Step]] = {}


def model(function: Callable[[], Step]) -> Callable[[], Step]:
    """Register a model under its function's name."""
    MODELS[function.__name__] = function
    return function


# --- layers and losses ----------------------------------------------------------------------------


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` of matrices, whose gradients are written with explicit transposes.

    JAX's own rule contracts over dimension 0, which jax2onnx lowers to a Gemm of the wrong shape. Products of
    arrays with three dimensions become MatMul and Einsum, and need no such help.
    """
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv3x3(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    """3 x 3 convolution (NCHW, OIHW, padding 1) whose gradients are convolutions in the same layout.

    JAX's own rule permutes the layouts instead of the arrays (batch as features), which jax2onnx refuses.
    """
    return convolve(x, w, ((1, 1), (1, 1)), window_strides=(stride, stride))


def convolve(x: jax.Array, w: jax.Array, padding: tuple, window_strides=(1, 1), **dilation: tuple) -> jax.Array:
    layout = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(x, w, window_strides, padding, dimension_numbers=layout, **dilation)


def conv3x3_backward(stride: int, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    # Rows and columns at the far edge that the stride never reached.
    unread = [size - 1 - stride * (out - 1) for size, out in zip(x.shape[2:], g.shape[2:], strict=True)]
    flipped = jnp.flip(w, (2, 3)).swapaxes(0, 1)
    dx = convolve(g, flipped, tuple((1, 1 + n) for n in unread), lhs_dilation=(stride, stride))
    dw_padding = tuple((1, 1 - n) for n in unread)
    dw = convolve(x.swapaxes(0, 1), g.swapaxes(0, 1), dw_padding, rhs_dilation=(stride, stride))
    return dx, dw.swapaxes(0, 1)


conv3x3.defvjp(lambda x, w, stride: (conv3x3(x, w, stride), (x, w)), conv3x3_backward)


def max_pool(x: jax.Array) -> jax.Array:
    """Largest of each 2 x 2 window, by reshape: jax2onnx cannot export the gradient of reduce_window."""
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 2, 2, w // 2, 2).max((3, 5))


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return matmul(x, params[f"{name}.weight"]) + params[f"{name}.bias"]


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    unit = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return unit * params[f"{name}.weight"] + params[f"{name}.bias"]


def self_attention(params: Params, x: jax.Array, *, causal: bool) -> jax.Array:
    """Pre-norm single-head self-attention with a residual connection."""
    normed = layer_norm(params, "norm", x)
    query, key, value = (normed @ params[f"{name}.weight"] for name in ("query", "key", "value"))
    scores = query @ key.swapaxes(1, 2) / x.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -1e9)
    return x + jax.nn.softmax(scores) @ value @ params["out.weight"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy of integer labels, by one-hot: a gather's gradient does not export."""
    onehot = jax.nn.one_hot(labels, logits.shape[-1])
    return -jnp.mean(jnp.sum(onehot * jax.nn.log_softmax(logits), axis=-1))


# --- initial values -------------------------------------------------------------------------------


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def integers(rng: np.random.Generator, end: int, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, end, shape, dtype=np.int32)


def dense_params(rng: np.random.Generator, name: str, fan_in: int, fan_out: int) -> Arrays:
    return {
        f"{name}.weight": normal(rng, (fan_in, fan_out), fan_in**-0.5),
        f"{name}.bias": normal(rng, (fan_out,), 0.02),
    }


def attention_params(rng: np.random.Generator, width: int) -> Arrays:
    params = {"norm.weight": 1 + normal(rng, (width,), 0.02), "norm.bias": normal(rng, (width,), 0.02)}
    for name in ("query", "key", "value", "out"):
        params[f"{name}.weight"] = normal(rng, (width, width), width**-0.5)
    return params


# --- steps ----------------------------------------------------------------------------------------


def gradient_step(loss: Loss, params: Arrays, batch: Arrays) -> Step:
    """Loss and gradients; the inputs are the batch and the parameters."""

    def run(x: jax.Array, labels: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
        value, grads = jax.value_and_grad(loss)(dict(zip(params, values, strict=True)), x, labels)
        return value, *(grads[name] for name in params)

    return Step(run, batch | params, ["loss", *(f"{name}.grad" for name in params)])


def mlp_training_step(optimizer: optax.GradientTransformation) -> Step:
    """Loss and next state of the MLP; the inputs are the batch and the state, as it is after a few steps."""
    rng = np.random.default_rng(0)
    params = mlp_params(rng)
    state = (params, optimizer.init(params))

    def advance(state: tuple, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, tuple]:
        params, memory = state
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, labels)
        updates, memory = optimizer.update(grads, memory, params)
        return loss, (optax.apply_updates(params, updates), memory)

    # From zero moments, Adam's first update is the gradient's sign: no value to compare runtimes by.
    for _ in range(3):
        _, state = jax.jit(advance)(state, **mlp_batch(rng))
    leaves, treedef = jax.tree.flatten_with_path(state)
    values = {path_name(path): np.asarray(value) for path, value in leaves}

    def run(x: jax.Array, labels: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
        loss, state = advance(jax.tree.unflatten(treedef, values), x, labels)
        return loss, *jax.tree.leaves(state)

    return Step(run, mlp_batch(rng) | values, ["loss", *(f"{name}.next" for name in values)])


def path_name(path: tuple) -> str:
    """Join a path without its tuple positions: `fc1.weight`, its moment `mu.fc1.weight`, `count`."""
    keys = (getattr(entry, "key", getattr(entry, "name", None)) for entry in path)
    return ".".join(key for key in keys if key is not None)


# --- models ---------------------------------------------------------------------------------------


def mlp_loss(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
    x = jax.nn.gelu(dense(params, "fc1", x), approximate=False)
    x = jnp.tanh(dense(params, "fc2", x))
    return cross_entropy(dense(params, "fc3", x), labels)


def mlp_params(rng: np.random.Generator) -> Arrays:
    return dense_params(rng, "fc1", 16, 32) | dense_params(rng, "fc2", 32, 32) | dense_params(rng, "fc3", 32, 10)


def mlp_batch(rng: np.random.Generator) -> Arrays:
    return {"x": normal(rng, (BATCH, 16)), "labels": integers(rng, 10, (BATCH,))}


@model
def mlp() -> Step:
    """MLP (exact GELU, tanh), softmax cross-entropy of integer labels; loss and gradients."""
    rng = np.random.default_rng(0)
    return gradient_step(mlp_loss, mlp_params(rng), mlp_batch(rng))


@model
def mlp_sgd() -> Step:
    """The MLP with optax SGD and weight decay inside; loss and next weights."""
    return mlp_training_step(optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1)))


@model
def mlp_adam() -> Step:
    """The MLP with optax Adam inside; loss and next weights, int32 step count, moments."""
    return mlp_training_step(optax.adam(1e-2))


@model
def mlp_adamw_clip() -> Step:
    """The MLP with global-norm clipping and optax AdamW inside; loss and next weights, count, moments."""
    # The gradients' norm is 1.6 here: the clipping is active.
    return mlp_training_step(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=1e-2)))


@model
def conv() -> Step:
    """Conv net: two 3 x 3 convolutions (the second with stride 2), ReLU, max pooling; loss and gradients."""
    rng = np.random.default_rng(0)
    params = {
        "conv1.weight": normal(rng, (8, 3, 3, 3), (2 / 27) ** 0.5),
        "conv1.bias": normal(rng, (8,), 0.02),
        "conv2.weight": normal(rng, (12, 8, 3, 3), (2 / 72) ** 0.5),
        "conv2.bias": normal(rng, (12,), 0.02),
        **dense_params(rng, "fc", 48, 10),
    }

    def loss(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        x = conv3x3(x, params["conv1.weight"], 1) + params["conv1.bias"][:, None, None]
        x = max_pool(jax.nn.relu(x))
        x = conv3x3(x, params["conv2.weight"], 2) + params["conv2.bias"][:, None, None]
        return cross_entropy(dense(params, "fc", jax.nn.relu(x).reshape(len(x), -1)), labels)

    return gradient_step(loss, params, {"x": normal(rng, (BATCH, 3, 8, 8)), "labels": integers(rng, 10, (BATCH,))})


@model
def attention() -> Step:
    """Layer norm, single-head self-attention, mean over the sequence, dense layer; loss and gradients."""
    rng = np.random.default_rng(0)
    params = attention_params(rng, 16) | dense_params(rng, "fc", 16, 10)

    def loss(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(dense(params, "fc", self_attention(params, x, causal=False).mean(1)), labels)

    return gradient_step(loss, params, {"x": normal(rng, (BATCH, 6, 16)), "labels": integers(rng, 10, (BATCH,))})


@model
def language_model() -> Step:
    """Causal self-attention between tied embeddings, next-token cross-entropy; loss and gradients."""
    rng = np.random.default_rng(0)
    params = {"embedding.weight": normal(rng, (12, 16), 0.25)} | attention_params(rng, 16)

    def loss(params: Params, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        embedding = params["embedding.weight"]
        return cross_entropy(self_attention(params, embedding[tokens], causal=True) @ embedding.T, labels)

    text = integers(rng, 12, (BATCH, 7))
    return gradient_step(loss, params, {"tokens": text[:, :-1], "labels": text[:, 1:]})


# --- export ---------------------------------------------------------------------------------------


def subnormals(arrays: Arrays) -> Iterator[str]:
    """Names of the arrays that hold a subnormal float: runtimes may flush those to zero."""
    for name, array in arrays.items():
        if array.dtype == np.float32 and np.any((array != 0) & (np.abs(array) < np.finfo(np.float32).tiny)):
            yield name


def export(name: str, folder: Path = HERE) -> str:
    """Write NAME.onnx and NAME.npz if onnxruntime computes what JAX computes; return one line of summary."""
    step = MODELS[name]()
    specs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in step.inputs.values()]
    proto = to_onnx(
        step.run,
        specs,
        model_name=name,
        opset=OPSET,
        input_names=list(step.inputs),
        output_names=step.outputs,
    )
    values = jax.jit(step.run)(*step.inputs.values())
    expected = {out: np.asarray(value) for out, value in zip(step.outputs, values, strict=True)}
    if bad := [*subnormals(step.inputs), *subnormals(expected)]:
        raise ValueError(f"{name}: subnormal values in {bad}")

    content = proto.SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    for out, actual in zip(step.outputs, session.run(step.outputs, step.inputs), strict=True):
        np.testing.assert_allclose(actual, expected[out], rtol=1e-5, atol=1e-6, err_msg=f"{name}: {out}")

    (folder / f"{name}.onnx").write_bytes(content)
    np.savez(folder / f"{name}.npz", **step.inputs, **{f"expected/{out}": v for out, v in expected.items()})
    return f"{name}: {len(proto.graph.node)} nodes, {len(content) / 1000:.0f} kB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Export JAX training steps to ONNX.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(MODELS)}; default: all")
    names = parser.parse_args().names
    if unknown := set(names) - set(MODELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    # jax2onnx leaves values without a type and unused initializers, and each brings a warning.
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    ort.set_default_logger_severity(3)
    for name in names or MODELS:
        print(export(name), flush=True)


if __name__ == "__main__":
    main()
