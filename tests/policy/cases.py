"""Random arguments of each project's loss scaler, with the equal preset, and random sequences of steps.

Periods and scales are small, so that sequences of a few steps meet growths, floors, limits and hysteresis. Scales come
near float32's limits where the project defines what happens there; those of the others stay away from infinity.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import graphscale as gs
from graphscale.policy import presets
from tests.policy import peers

# One step from float32's limit, and a few.
NEAR_LIMIT = (float(peers.FLOAT32_MAX) / 1.05, float(peers.FLOAT32_MAX) / 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A project's loss scaler, and a preset with options.

    Attributes:
        scaler: makes the project's loss scaler of the values of `options`.
        preset: the name of the preset; None for `DynamicLossScale` itself.
        options: options of the preset, in the order of the project's arguments.
        more: options of the preset that are no arguments of the project.
    """

    scaler: Callable[..., peers.Peer]
    preset: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def peer(self) -> peers.Peer:
        return self.scaler(*self.options.values())

    def policy(self) -> gs.DynamicLossScale:
        make = gs.DynamicLossScale if self.preset is None else getattr(presets, self.preset)
        return make(**self.options, **self.more)


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
    # The other code paths of the projects, by the presets' documentation.
    "deepspeed without ZeRO": Case(peers.DeepSpeedFused, "deepspeed", more={"hysteresis": 1, "on_stuck": "hold"}),
    "deepspeed 0.16": Case(peers.OldDeepSpeed, "deepspeed", more={"growth_delay": "none"}),
    "deepspeed 0.16, no keys set": Case(
        functools.partial(peers.OldDeepSpeed, delayed_shift=1),
        "deepspeed",
        {"initial_loss_scale": 2**32},
        {"hysteresis": 1, "growth_delay": "none"},
    ),
    "paddle.amp.GradScaler": Case(peers.PaddleGradScaler, "paddle", more={"min_loss_scale": 0}),
    "paddle decorate, older form": Case(
        functools.partial(peers.Paddle, decr_ratio=0.8),
        "paddle",
        {"initial_loss_scale": 2**15, "increment_period": 1000, "hysteresis": 2},
        {"backoff_factor": 0.8},
    ),
}


PERIODS, COUNTS = [1, 2, 3], [1, 2, 3, 4]
_MINDSPORE = {"multiplier": [2, 3, 7], "increment_period": PERIODS}
_FACTORS = {"growth_factor": [2.0, 1.3], "backoff_factor": [0.5, 0.7]}
_Variants = list[tuple[Callable[..., peers.Peer], dict[str, Any]]]
# By preset, and the name of a class after a dot: the project's loss scaler with options of the preset that are none of
# its arguments, in one or more variants, the initial scales, which are taken in turn, and the values of other options.
DRAWS: dict[str, tuple[_Variants, tuple[float, ...], dict[str, list[Any]]]] = {
    "tensorflow": (
        [(peers.TensorFlow, {})],
        (1.0, 4.0, 30.1, *NEAR_LIMIT),
        {"increment_period": PERIODS, "multiplier": [2.0, 3.0, 1.1]},
    ),
    "torch": (
        [(peers.Torch, {})],
        (1.0, 65536.0, 3.7, 3e-44, 1e-38, *NEAR_LIMIT),
        {"growth_factor": [2.0, 1.1, 1.7], "backoff_factor": [0.5, 0.7, 0.3], "increment_period": PERIODS},
    ),
    "apex": (
        [(peers.Apex, {})],
        (0.25, 1.0, 1.5, 6.0, 8.0, float(np.float32(1.1)), 0.75),
        {"increment_period": PERIODS, "min_loss_scale": [0.0, 0.25], "max_loss_scale": [8.0, 24.0, 8192.0]},
    ),
    "deepspeed": (
        [
            (functools.partial(peers.DeepSpeed, consecutive_hysteresis=True), {"hysteresis_refill": "good"}),
            (peers.DeepSpeed, {"hysteresis_refill": "growth"}),
        ],
        (4.0, 16.0, 8.0),
        {"increment_period": PERIODS, "min_loss_scale": [1, 2, 3], "hysteresis": COUNTS},
    ),
    "megatron": (
        [(peers.Megatron, {})],
        (1.7, 8.3, 4.0, 2.9),
        {"min_loss_scale": [1.0, 0.3], **_FACTORS, "increment_period": PERIODS, "hysteresis": COUNTS},
    ),
    "paddle": (
        [(peers.Paddle, {})],
        (1.0, 8.0, 30.1, *NEAR_LIMIT),
        {"increment_period": PERIODS, "hysteresis": COUNTS, "growth_factor": [2.0, 1.1], "backoff_factor": [0.5, 0.8]},
    ),
    "mindspore": ([(peers.MindSpore, {})], (1.3, 9.9, 77.7, 41.0), _MINDSPORE),
    "mindspore.amp.DynamicLossScaler": (
        [(peers.MindSporeScaler, {"backoff_factor": None})],
        (1.0, 77.7, *NEAR_LIMIT),
        _MINDSPORE,
    ),
    "flax": (
        [
            (peers.Flax, {}),
            (functools.partial(peers.Flax, minimum_scale=None), {"min_loss_scale": 0}),
            (peers.Flax, {}),
        ],
        (1.0, 3.7, 2e-38, *NEAR_LIMIT),
        {**_FACTORS, "increment_period": PERIODS},
    ),
    "keras": ([(peers.Keras, {})], (1.0, 2.0**15, 3.7), {"increment_period": PERIODS}),
}


def draw_case(name: str, random: np.random.Generator, index: int) -> Case:
    variants, initial, values = DRAWS[name]
    preset = None if name == "tensorflow" else name.partition(".")[0]
    scaler, more = variants[index % len(variants)]
    drawn = {option: random.choice(known).item() for option, known in values.items()}
    return Case(scaler, preset, {"initial_loss_scale": initial[index % len(initial)], **drawn}, more)


def random_steps(random: np.random.Generator, count: int, shortest: int = 3, longest: int = 12) -> Iterator[list[bool]]:
    """Sequences of steps, True for a finite one, from hardly any overflow to hardly anything else."""
    for share in random.choice([0.05, 0.2, 0.4, 0.6, 0.9], size=count):
        steps: list[bool] = (random.random(int(random.integers(shortest, longest + 1))) >= share).tolist()
        yield steps
