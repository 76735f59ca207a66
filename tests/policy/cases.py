"""Random arguments of each project's loss scaler, with the preset that does the same, and random sequences of steps.

Periods and scales are small, so that sequences of a few steps meet growths, floors, limits and hysteresis. Scales come
near float32's limits where the project defines what happens there; those of the others stay away from infinity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import graphscale as gs
from graphscale.policy import presets
from tests.policy import peers

Draw = Callable[[np.random.Generator, int], "Case"]
# One step from float32's limit, and a few.
NEAR_LIMIT = (float(peers.FLOAT32_MAX) / 1.05, float(peers.FLOAT32_MAX) / 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A project's loss scaler, and a preset with options.

    Attributes:
        peer: makes the project's loss scaler.
        preset: the name of the preset; None for `DynamicLossScale` itself.
        options: what the preset is given.
    """

    peer: Callable[[], peers.Peer]
    preset: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def policy(self) -> gs.DynamicLossScale:
        make: Callable[..., gs.DynamicLossScale] = (
            gs.DynamicLossScale if self.preset is None else getattr(presets, self.preset)
        )
        return make(**self.options)


DEFAULTS = {
    "tensorflow": Case(peers.TensorFlow),
    "torch": Case(peers.Torch, "torch"),
    "apex": Case(peers.Apex, "apex"),
    "deepspeed": Case(peers.DeepSpeed, "deepspeed"),
    "megatron": Case(peers.Megatron, "megatron"),
    "paddle": Case(peers.Paddle, "paddle"),
    "mindspore": Case(peers.MindSpore, "mindspore"),
    "flax": Case(peers.Flax, "flax"),
    "keras": Case(peers.Keras, "keras"),
    # What the presets' documentation says of the projects' other code paths.
    "deepspeed without ZeRO": Case(peers.DeepSpeedFused, "deepspeed", {"hysteresis": 1, "on_stuck": "hold"}),
    "deepspeed 0.16": Case(peers.OldDeepSpeed, "deepspeed", {"growth_delay": "none"}),
    "deepspeed 0.16, no keys set": Case(
        lambda: peers.OldDeepSpeed(init_scale=2**32, delayed_shift=1),
        "deepspeed",
        {"initial_loss_scale": 2**32, "hysteresis": 1, "growth_delay": "none"},
    ),
    "paddle.amp.GradScaler": Case(peers.PaddleGradScaler, "paddle", {"min_loss_scale": 0}),
    "paddle decorate, older form": Case(
        lambda: peers.Paddle(2**15, 1000, 2, 2.0, 0.8),
        "paddle",
        {"initial_loss_scale": 2**15, "increment_period": 1000, "hysteresis": 2, "backoff_factor": 0.8},
    ),
}


def _period(random: np.random.Generator) -> int:
    return int(random.integers(1, 4))


def _cycle(values: tuple[float, ...], index: int) -> float:
    return values[index % len(values)]


def _power(random: np.random.Generator, low: int, high: int) -> float:
    return 2.0 ** int(random.integers(low, high))


def _tensorflow(random: np.random.Generator, index: int) -> Case:
    initial = _cycle((1.0, 4.0, 30.1, *NEAR_LIMIT), index)
    arguments = (initial, _period(random), float(random.choice([2.0, 3.0, 1.1])))
    options = dict(zip(("initial_loss_scale", "increment_period", "multiplier"), arguments, strict=True))
    return Case(lambda: peers.TensorFlow(*arguments), None, options)


def _torch(random: np.random.Generator, index: int) -> Case:
    initial = _cycle((1.0, 65536.0, 3.7, 3e-44, 1e-38, *NEAR_LIMIT), index)
    growth, backoff = float(random.choice([2.0, 1.1, 1.7])), float(random.choice([0.5, 0.7, 0.3]))
    period = _period(random)
    options = {"growth_factor": growth, "backoff_factor": backoff}
    return Case(
        lambda: peers.Torch(initial, growth, backoff, period),
        "torch",
        {"initial_loss_scale": initial, "increment_period": period, **options},
    )


def _apex(random: np.random.Generator, index: int) -> Case:
    del index
    initial = _power(random, -3, 4) * float(random.choice([1.0, 1.5, 1.1]))
    initial = float(np.float32(initial))
    highest = initial * float(random.choice([1.0, 3.0, 1024.0]))
    lowest = None if random.random() < 0.5 else initial / 4
    period = _period(random)
    options = {"initial_loss_scale": initial, "increment_period": period, "max_loss_scale": highest}
    options["min_loss_scale"] = lowest or 0
    return Case(lambda: peers.Apex(initial, period, lowest, highest), "apex", options)


def _deepspeed(random: np.random.Generator, index: int) -> Case:
    del index
    initial, period, shift = _power(random, 2, 5), _period(random), int(random.integers(1, 5))
    lowest, consecutive = int(random.integers(1, 4)), bool(random.random() < 0.5)
    return Case(
        lambda: peers.DeepSpeed(initial, period, lowest, shift, consecutive),
        "deepspeed",
        {
            "initial_loss_scale": initial,
            "increment_period": period,
            "min_loss_scale": lowest,
            "hysteresis": shift,
            "hysteresis_refill": "good" if consecutive else "growth",
        },
    )


def _megatron(random: np.random.Generator, index: int) -> Case:
    del index
    initial, lowest = float(random.uniform(1, 9)), float(random.choice([1.0, 0.3]))
    growth, backoff = float(random.choice([2.0, 1.3])), float(random.choice([0.5, 0.7]))
    period, hysteresis = _period(random), int(random.integers(1, 5))
    return Case(
        lambda: peers.Megatron(initial, lowest, growth, backoff, period, hysteresis),
        "megatron",
        {
            "initial_loss_scale": initial,
            "increment_period": period,
            "growth_factor": growth,
            "backoff_factor": backoff,
            "min_loss_scale": lowest,
            "hysteresis": hysteresis,
        },
    )


def _paddle(random: np.random.Generator, index: int) -> Case:
    initial = _cycle((1.0, 8.0, 30.1, *NEAR_LIMIT), index)
    growth, backoff = float(random.choice([2.0, 1.1])), float(random.choice([0.5, 0.8]))
    period, every = _period(random), int(random.integers(1, 5))
    return Case(
        lambda: peers.Paddle(initial, period, every, growth, backoff),
        "paddle",
        {
            "initial_loss_scale": initial,
            "increment_period": period,
            "hysteresis": every,
            "growth_factor": growth,
            "backoff_factor": backoff,
        },
    )


def _mindspore(random: np.random.Generator, index: int) -> Case:
    del index
    initial, factor, period = float(random.uniform(1, 99)), int(random.choice([2, 3, 7])), _period(random)
    options = {"initial_loss_scale": initial, "increment_period": period, "multiplier": factor}
    return Case(lambda: peers.MindSpore(initial, factor, period), "mindspore", options)


def _mindspore_scaler(random: np.random.Generator, index: int) -> Case:
    initial = _cycle((1.0, 77.7, *NEAR_LIMIT), index)
    factor, period = int(random.choice([2, 3, 7])), _period(random)
    options = {"initial_loss_scale": initial, "increment_period": period, "multiplier": factor}
    return Case(
        lambda: peers.MindSporeScaler(initial, factor, period), "mindspore", {**options, "backoff_factor": None}
    )


def _flax(random: np.random.Generator, index: int) -> Case:
    initial = _cycle((1.0, 3.7, 2e-38, *NEAR_LIMIT), index)
    growth, backoff = float(random.choice([2.0, 1.3])), float(random.choice([0.5, 0.7]))
    period = _period(random)
    options = {"growth_factor": growth, "backoff_factor": backoff}
    lowest: dict[str, float | None] = {}
    if random.random() < 0.3:
        lowest = {"minimum_scale": None}
        options["min_loss_scale"] = 0
    return Case(
        lambda: peers.Flax(initial, growth, backoff, period, **lowest),
        "flax",
        {"initial_loss_scale": initial, "increment_period": period, **options},
    )


def _keras(random: np.random.Generator, index: int) -> Case:
    initial, period = _cycle((1.0, 2.0**15, 3.7), index), _period(random)
    return Case(
        lambda: peers.Keras(initial, period), "keras", {"initial_loss_scale": initial, "increment_period": period}
    )


DRAWS: dict[str, Draw] = {
    "tensorflow": _tensorflow,
    "torch": _torch,
    "apex": _apex,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
    "paddle": _paddle,
    "mindspore": _mindspore,
    "mindspore.amp.DynamicLossScaler": _mindspore_scaler,
    "flax": _flax,
    "keras": _keras,
}


def random_steps(random: np.random.Generator, count: int, shortest: int = 3, longest: int = 12) -> Iterator[list[bool]]:
    """Sequences of steps, True for a finite one, from hardly any overflow to hardly anything else."""
    for share in random.choice([0.05, 0.2, 0.4, 0.6, 0.9], size=count):
        steps: list[bool] = (random.random(int(random.integers(shortest, longest + 1))) >= share).tolist()
        yield steps
