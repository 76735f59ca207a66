"""Runs the loss scales of PyTorch and TensorFlow themselves, and records the results for tests without them.

python -m tests.policy.record torch             # needs torch; writes recorded/torch.npz
python -m tests.policy.record tensorflow        # needs tensorflow; writes recorded/tensorflow.npz
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import graphscale as gs
from graphscale.policy import presets

RECORDED = Path(__file__).parent / "recorded"
FIXED = (1.0, 123.0, 2.0**15, 1.1, 3e38)
MAX = float(np.finfo(np.float32).max)

# After each step the scale, whether the step is applied, and the count of good steps.
Run = tuple[list[float], list[bool], list[int]]


def gradients(index: int, finite: bool) -> list[Any]:
    """Gradients of a step, nested as TensorFlow allows; at most one is not finite."""
    good, bad = np.ones(3, np.float32), np.asarray([0, (np.inf, np.nan, -np.inf)[index % 3]], np.float32)
    return [good, [None, good if finite else bad]]


def run_policy(policy: gs.DynamicLossScale, steps: list[bool]) -> Run:
    """Run a policy of graphscale over finite (True) and non-finite steps."""
    rows = []
    for index, finite in enumerate(steps):
        applied = policy.update(gradients(index, finite))[1]
        rows.append((float(policy()), applied, policy.num_good_steps))
    return tuple(map(list, zip(*rows, strict=True)))  # type: ignore[return-value]


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def draw_torch(random: np.random.Generator) -> tuple[Any, ...]:
    """Arguments of a GradScaler: scales from the smallest to the largest, factors that float32 cannot hold."""
    initial = float(random.choice([1.0, 2.0**16, 7.3, 3e-44, 2e-38, MAX / 1.05, MAX / 50]))
    growth, backoff = float(random.choice([2.0, 1.1, 1.7])), float(random.choice([0.5, 0.7, 0.3]))
    return initial, growth, backoff, int(random.integers(1, 5))


def torch_policy(*arguments: Any) -> gs.DynamicLossScale:
    """The preset with GradScaler's init_scale, growth_factor, backoff_factor and growth_interval."""
    words = ("initial_loss_scale", "growth_factor", "backoff_factor", "increment_period")
    return presets.torch(**dict(zip(words, arguments, strict=False)))  # type: ignore[typeddict-item]


def run_torch(arguments: Sequence[Any], steps: list[bool]) -> Run:
    """Run a new GradScaler."""
    import torch

    class Optimizer(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            del closure
            self.steps += 1

    weight = torch.zeros(1, requires_grad=True)
    optimizer = Optimizer([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", *arguments)
    scaler.scale(weight)
    scales, applied, good_steps = [], [], []
    for index, finite in enumerate(steps):
        # As the backward pass would leave it.
        weight.grad = torch.full((1,), 1.0 if finite else (torch.inf, torch.nan)[index % 2])
        before = optimizer.steps
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        applied.append(optimizer.steps > before)
        good_steps.append(scaler.state_dict()["_growth_tracker"])
    return scales, applied, good_steps


# --- TensorFlow -------------------------------------------------------------------------------------------------------


def draw_tensorflow(random: np.random.Generator) -> tuple[Any, ...]:
    """Arguments of a DynamicLossScale: scales up to the largest, factors that float32 cannot hold."""
    initial = float(random.choice([1.0, 4.0, 30.1, 2.0**15, MAX / 1.05, MAX / 50]))
    return initial, int(random.integers(1, 5)), float(random.choice([2.0, 3.0, 1.1, 1.7]))


def run_tensorflow(arguments: Sequence[Any], steps: list[bool]) -> Run:
    """Run a new DynamicLossScale, eagerly."""
    import tensorflow as tf

    loss_scale = tf.compat.v1.mixed_precision.DynamicLossScale(*arguments)
    scales, applied, good_steps = [], [], []
    for index, finite in enumerate(steps):
        tensors = tf.nest.map_structure(lambda a: a if a is None else tf.constant(a), gradients(index, finite))
        applied.append(bool(loss_scale.update(tensors)[1]))
        scales.append(float(loss_scale()))
        good_steps.append(int(loss_scale._num_good_steps))  # it has no public name
    return scales, applied, good_steps


def run_fixed(value: float) -> tuple[float, bool]:
    """The scale of a FixedLossScale after gradients that are NaN, and whether it has that step applied."""
    import tensorflow as tf

    loss_scale = tf.compat.v1.mixed_precision.FixedLossScale(value)
    should_apply = loss_scale.update([tf.constant([np.nan])])[1]
    return float(loss_scale()), bool(should_apply)


# --- Keras ------------------------------------------------------------------------------------------------------------


def draw_keras(random: np.random.Generator) -> tuple[Any, ...]:
    """Arguments of a LossScaleOptimizer."""
    return float(random.choice([0.01, 1.0, 3.7, 2.0**15])), int(random.integers(1, 5))


def keras_policy(initial: float, period: int) -> gs.DynamicLossScale:
    return presets.keras(initial_loss_scale=initial, increment_period=period)


def run_keras(arguments: Sequence[Any], steps: list[bool]) -> Run:
    """Run a new LossScaleOptimizer of Keras 3."""
    import keras
    import tensorflow as tf

    weight, inner = keras.Variable(tf.zeros(1)), keras.optimizers.SGD(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, *arguments)
    optimizer.build([weight])
    scales, applied, good_steps = [], [], []
    for finite in steps:
        before = int(inner.iterations)
        optimizer.apply([tf.constant([0.0 if finite else np.nan])], [weight])
        scales.append(float(optimizer.dynamic_scale))
        applied.append(int(inner.iterations) > before)
        good_steps.append(int(optimizer.step_counter))
    return scales, applied, good_steps


# --- all --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Original:
    """A dynamic loss scale: how to draw its arguments, to run it, and to make the same policy of ours.

    Attributes:
        needs: the package that has it.
        seed: for the recording, as are `sequences` and `steps`.
    """

    needs: str
    draw: Callable[[np.random.Generator], tuple[Any, ...]]
    run: Callable[[Sequence[Any], list[bool]], Run]
    policy: Callable[..., gs.DynamicLossScale]
    seed: int = 0
    sequences: int = 0
    steps: int = 0


ORIGINALS = {
    "torch": Original("torch", draw_torch, run_torch, torch_policy, 5, 240, 30),
    "tensorflow": Original("tensorflow", draw_tensorflow, run_tensorflow, gs.DynamicLossScale, 6, 160, 24),
    "keras": Original("tensorflow", draw_keras, run_keras, keras_policy),
}


def main(name: str) -> None:
    original = ORIGINALS[name]
    random = np.random.default_rng(original.seed)
    drawn = [original.draw(random) for _ in range(original.sequences)]
    likely = random.choice([0.3, 0.6, 0.8, 0.95], (original.sequences, 1))
    steps = random.random((original.sequences, original.steps)) < likely
    results = [original.run(arguments, sequence.tolist()) for arguments, sequence in zip(drawn, steps, strict=True)]
    scales, applied, good_steps = zip(*results, strict=True)
    # Its defaults: two growths, with an overflow before each.
    default_steps = np.repeat([True, False, True, False, True], [5, 1, 2001, 2, 2000])
    default_scales, _, default_good_steps = original.run((), default_steps.tolist())
    fixed = {}
    if name == "tensorflow":
        fixed_scales, fixed_applied = map(np.asarray, zip(*map(run_fixed, FIXED), strict=True))
        fixed = {"fixed": np.asarray(FIXED), "fixed_scales": fixed_scales, "fixed_applied": fixed_applied}
    np.savez_compressed(
        RECORDED / f"{name}.npz",
        version=__import__(name).__version__,
        arguments=np.asarray(drawn, dtype=np.float64),
        steps=steps,
        scales=np.asarray(scales, dtype=np.float32),
        applied=np.asarray(applied),
        good_steps=np.asarray(good_steps, dtype=np.int8),
        default_steps=default_steps,
        default_scales=np.asarray(default_scales, dtype=np.float32),
        default_good_steps=np.asarray(default_good_steps, dtype=np.int16),
        **fixed,
    )


if __name__ == "__main__":
    for word in sys.argv[1:]:
        main(word)
