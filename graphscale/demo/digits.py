"""The demo's digits: scikit-learn's 8 x 8 pictures, the exported training step of a perceptron, and initial weights."""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from graphscale.files.tensor_files import Arrays

__all__ = ["initial_state", "read_step", "split"]

LAYERS = {"fc1": (128, 64), "fc2": (64, 128), "fc3": (10, 64)}
HELD_OUT = 360


def read_step(name: str) -> bytes:
    """Return an exported training step of the package: `digits_step` or `reversal_step`."""
    return files("graphscale.demo").joinpath(f"{name}.onnx").read_bytes()


def split(rng: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Return the training digits and the held-out ones: `images` float32 [N, 64], 0 to 1, `labels` int64 [N]."""
    from sklearn.datasets import load_digits

    pixels, numbers = load_digits(return_X_y=True)
    images, labels = (pixels / 16).astype(np.float32), numbers.astype(np.int64)
    order = rng.permutation(len(images))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    return (
        {"images": images[train], "labels": labels[train]},
        {"images": images[held_out], "labels": labels[held_out]},
    )


def initial_state(rng: np.random.Generator) -> Arrays:
    """He's initial weights, zero biases, zero momentum: a PyTorch export has its weights as bare inputs."""
    weights: Arrays = {}
    for name, (fan_out, fan_in) in LAYERS.items():
        deviation = np.sqrt(2 / fan_in)
        weights[f"{name}.weight"] = (deviation * rng.standard_normal((fan_out, fan_in))).astype(np.float32)
        weights[f"{name}.bias"] = np.zeros(fan_out, dtype=np.float32)
    return weights | {f"{name}.momentum": np.zeros_like(weight) for name, weight in weights.items()}
