"""The demo's sequences: a transformer block that learns to reverse them, with a loss whose gradients underflow.

The step's loss is the mean over a batch of 2**24 tokens, as in training the largest models; one run of the step
computes 2**9 of them. In float32 this changes no result, since Adam divides the factor out again. In float16 the
gradients of the logits are below 2**-24, the smallest number, and nearly all gradients behind them are zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graphscale.files.tensor_files import Arrays

__all__ = ["BATCH", "FEEDS", "VOCABULARY", "initial_state", "sequences"]

VOCABULARY, LENGTH = 16, 16
EMBEDDINGS = ("tokens.weight", "positions")
BATCH = 32  # fixed in the exported graph
# Adam's epsilon must be small beside gradients of 1e-7 and less.
FEEDS = {"epsilon": np.asarray(1e-12, np.float32)}


def sequences(rng: np.random.Generator, count: int) -> Arrays:
    """Random sequences, int64 [count, 16], as `tokens`, and their reversals as `target`."""
    tokens = rng.integers(VOCABULARY, size=(count, LENGTH))
    return {"tokens": tokens, "target": np.ascontiguousarray(tokens[:, ::-1])}


def initial_state(rng: np.random.Generator, inputs: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Draw initial values: embeddings normal, other matrices uniform, up to `1 / sqrt(columns)`; normalizations one.

    Biases, moments and the step counter are zero.

    Args:
        rng: source of the weights.
        inputs: `{name: shape}` of the weights, moments and the step counter, all float32.
    """
    state: Arrays = {}
    for name, shape in inputs.items():
        value = np.zeros(shape)
        if name in EMBEDDINGS:
            value = rng.standard_normal(shape) / np.sqrt(shape[1])
        elif len(shape) == 2 and "exp_avg" not in name:
            value = rng.uniform(-1, 1, shape) / np.sqrt(shape[1])
        elif name.startswith("norm") and name.endswith(".weight"):
            value = np.ones(shape)
        state[name] = value.astype(np.float32)
    return state
