"""Kinds by JAX that learn sequences: a language model, a tagger, a forecaster, and a stream with a carried memory."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.kinds_recipes import (
    EXPORTER,
    Metrics,
    advance,
    carried,
    cross_entropy,
    fit,
    labels,
    layer,
    linear,
    matrices,
    mlp,
    normalisation,
    stack,
)
from models.zoo.jax.kinds_wrappers import scheduled
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Divide by the root of the mean square."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def attend(weights: dict[str, Arrays], x: jax.Array, heads: int) -> jax.Array:
    """Return causal attention, with rows that are queries, keys and values side by side."""
    rows, length, width = x.shape
    parts = linear(weights["qkv"], x).reshape(rows, length, 3, heads, width // heads)
    query, key, value = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
    score = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5
    causal = np.tril(np.ones((length, length), bool))
    weight = jax.nn.softmax(jnp.where(causal, score, -1e9), -1)
    return linear(weights["out"], jnp.einsum("bhqk,bkhd->bqhd", weight, value).reshape(rows, length, width))


@kind("jax-causal-language-block", "jax")
def language_block() -> Iterator[Step]:
    """Yield a small causal language model, tied or not: masked tokens, a penalty of the normalizer, perplexity."""
    words, width, length = 13, 12, 6

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, Metrics]:
        tokens, mask = values["tokens"], values["loss_mask"]
        x = params["embedding"][tokens[:, :-1]] + params["position"]
        for name in sorted(name for name in params if name.startswith("block")):
            held = params[name]
            x = x + attend(held["attention"], rms_norm(held["norm_0"], x), 3)
            gate = jax.nn.silu(linear(held["gate"], rms_norm(held["norm_1"], x)))
            x = x + linear(held["down"], gate * linear(held["up"], rms_norm(held["norm_1"], x)))
        x = rms_norm(params["norm"], x)
        logits = jnp.tensordot(x, params["head"] if "head" in params else params["embedding"].T, 1)
        share = mask / jnp.sum(mask)
        nll = jnp.sum(share * cross_entropy(logits, tokens[:, 1:]))
        penalty = 1e-4 * jnp.sum(share * jnp.square(jax.nn.logsumexp(logits, -1)))
        best = jnp.argmax(jax.lax.stop_gradient(logits), -1)
        right = jnp.sum(share * (best == tokens[:, 1:]).astype(jnp.float32))
        return nll + penalty, {"perplexity": jnp.exp(nll), "token_accuracy": right, "token_count": jnp.sum(mask)}

    def block() -> dict[str, Any]:
        made = {"attention": {"qkv": layer(width, 3 * width, bias=False), "out": layer(width, width, bias=False)}}
        made |= {"norm_0": 1 + normal(width, scale=0.1), "norm_1": 1 + normal(width, scale=0.1)}
        return made | {name: layer(width, 20, bias=False) for name in ("gate", "up")} | {"down": layer(20, width)}

    def observe(values: Arrays, grads: Any, params: Any) -> Metrics:
        return {"grad_norm": optax.global_norm(grads)}

    mask = np.ones((3, length), np.float32)
    mask[0, 4:] = mask[2, 5:] = 0
    batch = {"tokens": labels(words, 3, length + 1), "loss_mask": mask}
    params = {"embedding": normal(words, width, scale=0.3), "position": normal(length, width, scale=0.1)}
    params |= {"norm": 1 + normal(width, scale=0.1), "block_0": block()}
    rate = scheduled(optax.warmup_cosine_decay_schedule, 0.0, 3e-3, 4, 50)
    adamw = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(0.1, mask=matrices),
        optax.scale_by_learning_rate(rate),
    )
    yield fit("tied", params, adamw, batch, objective, EXPORTER, observe=observe)
    params |= {"head": normal(width, words, scale=0.3), "block_1": block()}
    factored = optax.adafactor(3e-3, min_dim_size_to_factor=12)
    yield fit("two-blocks", params, factored, batch, objective, STYLES["scrambled-bare"])


def gated(weights: dict[str, Arrays], x: jax.Array, h: jax.Array) -> jax.Array:
    """Return the next hidden state of a gated recurrent unit."""
    size = h.shape[-1]
    ours, theirs = linear(weights["input"], x), linear(weights["hidden"], h)
    gates = jax.nn.sigmoid(ours[:, : 2 * size] + theirs[:, : 2 * size])
    reset, update = gates[:, :size], gates[:, size:]
    return (1 - update) * jnp.tanh(ours[:, 2 * size :] + reset * theirs[:, 2 * size :]) + update * h


@kind("jax-gru-tagger", "jax")
def tagger() -> Iterator[Step]:
    """Yield an unrolled gated recurrent tagger with padding, in one or two directions, and accumulated steps."""
    length, size, tags = 5, 9, 4

    def sweep(weights: dict[str, Arrays], values: Arrays, order: range) -> list[jax.Array]:
        h, seen = jnp.tile(weights["start"], (values["words"].shape[0], 1)), {}
        for at in order:
            valid = values["valid"][:, at, None]
            h = valid * gated(weights, values["words"][:, at], h) + (1 - valid) * h
            seen[at] = h
        return [seen[at] for at in range(length)]

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, Metrics]:
        hidden = jnp.stack(sweep(params["forward"], values, range(length)), 1)
        if "backward" in params:
            back = jnp.stack(sweep(params["backward"], values, range(length)[::-1]), 1)
            hidden = jnp.concatenate([hidden, back], -1)
        logits = linear(params["head"], hidden)
        count = jnp.sum(values["valid"])
        loss = jnp.sum(values["valid"] * cross_entropy(logits, values["tags"])) / count
        best = jnp.argmax(jax.lax.stop_gradient(logits), -1)
        wrong = jnp.sum(values["valid"] * (best != values["tags"]).astype(jnp.float32))
        return loss, {"error_rate": wrong / count, "words_seen": count}

    def unit() -> dict[str, Any]:
        weights = {"input": layer(6, 3 * size), "hidden": layer(size, 3 * size)}
        return weights | {"start": normal(1, size, scale=0.1)}

    valid = np.ones((3, length), np.float32)
    valid[1, 3:] = 0
    batch = {"words": normal(3, length, 6), "tags": labels(tags, 3, length), "valid": valid}
    params = {"forward": unit(), "head": layer(size, tags)}
    rmsprop = optax.chain(optax.clip(1.0), optax.rmsprop(2e-3, centered=True, momentum=0.9))
    yield fit("centred", params, rmsprop, batch, objective)
    both = {"forward": unit(), "backward": unit(), "head": layer(2 * size, tags)}
    gathered = optax.chain(optax.apply_every(2), optax.sgd(0.1))
    yield fit("two-directions", both, gathered, batch, objective, EXPORTER)


@kind("jax-quantile-forecaster", "jax")
def forecaster() -> Iterator[Step]:
    """Yield a dilated causal convolution of a scaled window that forecasts quantiles, with its coverage beside."""
    horizon, levels = 4, np.array([0.1, 0.5, 0.9], np.float32)

    def taps(weights: Arrays, x: jax.Array, dilation: int) -> jax.Array:
        early = jnp.pad(x, ((0, 0), (2 * dilation, 0), (0, 0)))
        parts = (early[:, at * dilation : at * dilation + x.shape[1]] for at in range(3))
        return weights["bias"] + sum(jnp.tensordot(part, weights["kernel"][at], 1) for at, part in enumerate(parts))

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, Metrics]:
        past = values["past"]
        centre, spread = jnp.mean(past[:, :, :1], 1), jnp.std(past[:, :, :1], 1) + 1e-3
        x = jnp.concatenate([(past[:, :, :1] - centre[:, None]) / spread[:, None], past[:, :, 1:]], -1)
        x = jax.nn.elu(taps(params["conv_0"], x, 1))
        x = jax.nn.elu(taps(params["conv_1"], x, 2))
        guess = mlp(params["head"], x[:, -1], jax.nn.elu).reshape(-1, horizon, 3) * spread[:, None] + centre[:, None]
        miss = values["future"][..., None] - guess
        pinball = jnp.maximum(levels * miss, (levels - 1) * miss)
        fixed = jax.lax.stop_gradient(miss)
        inside = ((fixed[..., 0] >= 0) & (fixed[..., 2] <= 0)).astype(jnp.float32)
        return jnp.mean(pinball), {"coverage": jnp.mean(inside), "median_error": jnp.mean(jnp.abs(miss[..., 1]))}

    params = {"conv_0": {"kernel": normal(3, 3, 8, scale=0.3), "bias": normal(8, scale=0.1)}}
    params |= {"conv_1": {"kernel": normal(3, 8, 6, scale=0.2), "bias": normal(6, scale=0.1)}}
    params |= {"head": stack(6, 10, 3 * horizon)}
    batch = {"past": normal(5, 9, 3), "future": normal(5, horizon)}
    decay = scheduled(optax.exponential_decay, 5e-3, 10, 0.9)
    yield fit("adafactor", params, optax.adafactor(decay, momentum=0.9), batch, objective, STYLES["shuffled"])
    finite = optax.apply_if_finite(optax.chain(optax.adaptive_grad_clip(0.1), optax.adabelief(decay)), 3)
    yield fit("finite-adabelief", params, finite, batch, objective)


def stream(optimizer: optax.GradientTransformation, variant: str, style: Style = PLAIN, *, layers: int) -> Step:
    """Return a window of a stream: memories that are cleared where an episode starts, and go on to the next window."""
    sizes = (5, 10, 7)[: layers + 1]
    params = {f"lstm_{i}": layer(sizes[i] + sizes[i + 1], 4 * sizes[i + 1]) for i in range(layers)}
    params |= {"norm": normalisation(sizes[-1]), "readout": layer(sizes[-1], 3)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))
    start = {f"layer_{i}": {part: normal(4, sizes[i + 1], scale=0.3) for part in "ch"} for i in range(layers)}
    memory = carried(start, "carry_")

    def cell(weights: Arrays, held: Arrays, x: jax.Array) -> Arrays:
        gates = linear(weights, jnp.concatenate([x, held["h"]], 1))
        i, f, g, o = jnp.split(gates, 4, -1)
        c = jax.nn.sigmoid(f + 1) * held["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return {"c": c, "h": jax.nn.sigmoid(o) * jnp.tanh(c)}

    def objective(params: Any, memory: Any, values: Arrays) -> tuple[jax.Array, tuple[Any, jax.Array]]:
        guesses = []
        for at in range(4):
            going = 1 - values["first"][:, at, None]
            x, following = values["x"][:, at], {}
            for index in range(layers):
                held = jax.tree.map(lambda state, going=going: state * going, memory[f"layer_{index}"])
                following[f"layer_{index}"] = cell(params[f"lstm_{index}"], held, x)
                x = following[f"layer_{index}"]["h"]
            memory = following
            scaled = x / (1e-3 + jnp.std(x, -1, keepdims=True)) * params["norm"]["scale"] + params["norm"]["bias"]
            guesses.append(linear(params["readout"], scaled))
        errors = jnp.square(jnp.stack(guesses, 1) - values["y"])
        return jnp.mean(errors), (memory, jnp.mean(errors[:, -1]))

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        made = jax.value_and_grad(objective, has_aux=True)(params, memory.read(values), values)
        (loss, (following, last)), grads = made
        params, state = advance(optimizer, grads, slots.read(values), params)
        metrics = {"last_error": last, "grad_norm": optax.global_norm(grads)}
        states = weights.write(params) | slots.write(state) | memory.write(following)
        return Outputs({"loss": loss}, metrics, states=states)

    first = np.zeros((4, 4), np.float32)
    first[1, 0] = first[2, 2] = 1
    batch = {"x": normal(4, 4, 5), "y": normal(4, 4, 3), "first": first}
    return Step(variant, Inputs(batch, weights.values | slots.values | memory.values), run, style)


@kind("jax-lstm-stream", "jax")
def lstm_stream() -> Iterator[Step]:
    """Yield truncated backpropagation through windows of a stream, whose cells and hidden states are carried."""
    yield stream(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3)), "adam", layers=2)
    yield stream(optax.chain(optax.clip(0.3), optax.sgd(0.05)), "sgd", EXPORTER, layers=1)
