"""The loss-scale rules of other projects, each with its own names and variables, as references for the presets.

Written from the projects' behaviour, independently of `graphscale.policy.dynamic_rule`. The scale is held as the
project holds it: a float32 number on the device, or a Python number. The fields of each class begin with the arguments
of the project, in its order, with its defaults and, but for the scale and the period, with its names; counts follow.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

F32 = np.float32
FLOAT32_MAX = np.finfo(np.float32).max
FLOAT32_TINY = np.finfo(np.float32).tiny


class GivesUpError(Exception):
    """The project stops the training here."""


@dataclasses.dataclass
class Peer:
    """A project's loss scaler; `held` are the numbers that it holds in float32."""

    scale: Any = 2.0**16
    held: ClassVar[tuple[str, ...]] = ("scale",)

    def __post_init__(self) -> None:
        for name in self.held:
            setattr(self, name, F32(getattr(self, name)))

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step, or raise GivesUpError where the project raises an exception."""
        raise NotImplementedError

    def grow_if_finite(self, product: np.float32) -> None:
        if np.isfinite(product):
            self.scale = product


class Counting(Peer):
    """A scaler whose scale grows when finite steps in a row are as many as its `period`, and the count begins anew."""

    period: int
    good_steps = 0

    def update(self, overflow: bool) -> None:
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.lower()
        elif self.good_steps == self.period:
            self.good_steps = 0
            self.grow()

    def lower(self) -> None:
        raise NotImplementedError

    def grow(self) -> None:
        raise NotImplementedError


@dataclasses.dataclass
class TensorFlow(Counting):
    """tf.compat.v1.mixed_precision.DynamicLossScale."""

    scale: Any = 2**15
    period: int = 2000
    multiplier: Any = 2.0
    held = ("scale", "multiplier")

    def lower(self) -> None:
        self.scale = np.maximum(self.scale / self.multiplier, F32(1))

    def grow(self) -> None:
        self.grow_if_finite(self.scale * self.multiplier)


@dataclasses.dataclass
class Torch(Counting):
    """torch.amp.GradScaler: its kernel multiplies a float by a double, and stores a float."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    period: int = 2000

    def lower(self) -> None:
        self.scale = F32(float(self.scale) * self.backoff_factor)

    def grow(self) -> None:
        self.grow_if_finite(F32(float(self.scale) * self.growth_factor))


@dataclasses.dataclass
class Apex(Counting):
    """apex.amp.scaler.LossScaler."""

    period: int = 2000
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24
    held = ()

    def lower(self) -> None:
        self.scale = max(self.scale / 2, self.min_loss_scale or 0)

    def grow(self) -> None:
        self.scale = min(self.scale * 2, self.max_loss_scale)


@dataclasses.dataclass
class DeepSpeed(Peer):
    """DynamicLossScaler of DeepSpeed 0.19, which ZeRO uses; `delayed_shift` is the config's hysteresis."""

    scale_window: int = 1000
    min_scale: float = 1
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    cur_iter: int = 0
    last_overflow_iter: int = -1
    held = ()

    def __post_init__(self) -> None:
        self.cur_hysteresis = self.delayed_shift

    def update(self, overflow: bool) -> None:
        if overflow:
            self.on_overflow()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if self.grows(self.cur_iter - self.last_overflow_iter):
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.scale *= 2
        self.cur_iter += 1

    def on_overflow(self) -> None:
        if self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
        elif self.scale == self.min_scale:
            raise GivesUpError
        else:
            self.scale = max(self.scale / 2, self.min_scale)

    def grows(self, since_overflow: int) -> bool:
        stable_interval = since_overflow - 1
        return stable_interval > 0 and stable_interval % self.scale_window == 0


class OldDeepSpeed(DeepSpeed):
    """DynamicLossScaler of DeepSpeed 0.16 and before."""

    def grows(self, since_overflow: int) -> bool:
        return since_overflow % self.scale_window == 0


class DeepSpeedFused(DeepSpeed):
    """FP16_Optimizer and FP16_UnfusedOptimizer of DeepSpeed, which train without ZeRO."""

    def on_overflow(self) -> None:
        self.scale = max(self.scale / 2, self.min_scale)


@dataclasses.dataclass
class Megatron(Counting):
    """DynamicGradScaler of Megatron-LM; its factors are float32 tensors."""

    scale: Any = 2**32
    min_scale: Any = 1.0
    growth_factor: Any = 2.0
    backoff_factor: Any = 0.5
    period: int = 1000
    hysteresis: int = 2
    held = ("scale", "min_scale", "growth_factor", "backoff_factor")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hysteresis_tracker = self.hysteresis

    def lower(self) -> None:
        self.hysteresis_tracker -= 1
        if self.hysteresis_tracker <= 0:
            self.scale = np.maximum(self.scale * self.backoff_factor, self.min_scale)

    def grow(self) -> None:
        self.hysteresis_tracker = self.hysteresis
        self.scale = self.scale * self.growth_factor


@dataclasses.dataclass
class Paddle(Counting):
    """The operator update_loss_scaling of PaddlePaddle."""

    period: int = 2000
    decr_every_n_nan_or_inf: int = 1
    incr_ratio: Any = 2.0
    decr_ratio: Any = 0.5
    bad: int = 0
    held = ("scale", "incr_ratio", "decr_ratio")

    def update(self, overflow: bool) -> None:
        self.bad = self.bad + 1 if overflow else 0
        super().update(overflow)

    def lower(self) -> None:
        if self.bad == self.decr_every_n_nan_or_inf:
            self.bad = 0
            self.scale = self.decreased()

    def grow(self) -> None:
        self.grow_if_finite(self.scale * self.incr_ratio)

    def decreased(self) -> np.float32:
        product = self.scale * self.decr_ratio
        return F32(1) if product < 1 else product


class PaddleGradScaler(Paddle):
    """paddle.amp.GradScaler, of dynamic graphs: without a floor."""

    def decreased(self) -> np.float32:
        return self.scale * self.decr_ratio


@dataclasses.dataclass
class MindSpore(Peer):
    """DynamicLossScaleUpdateCell, with the defaults of DynamicLossScaleManager."""

    scale: Any = 2**24
    scale_factor: Any = 2
    scale_window: int = 2000
    cur_iter: int = 1
    last_overflow_iter: int = 0
    held = ("scale", "scale_factor")

    def update(self, overflow: bool) -> None:
        should_increase = self.scale_window <= self.cur_iter - self.last_overflow_iter
        if overflow:
            self.scale = np.maximum(self.scale * np.reciprocal(self.scale_factor), F32(1))
        elif should_increase:
            self.scale = self.scale * self.scale_factor
        if overflow or should_increase:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1


@dataclasses.dataclass
class MindSporeScaler(Counting):
    """mindspore.amp.DynamicLossScaler, which has no defaults."""

    scale_factor: Any = 2
    period: int = 1
    held = ("scale", "scale_factor")

    def lower(self) -> None:
        self.scale = np.maximum(F32(1), self.scale / self.scale_factor)

    def grow(self) -> None:
        self.grow_if_finite(self.scale * self.scale_factor)


@dataclasses.dataclass
class Flax(Peer):
    """flax.training.dynamic_scale.DynamicScale, in a jitted step."""

    growth_factor: Any = 2.0
    backoff_factor: Any = 0.5
    growth_interval: int = 2000
    minimum_scale: float | None = float(FLOAT32_TINY)
    fin_steps: int = 0
    held = ("scale", "growth_factor", "backoff_factor")

    def update(self, overflow: bool) -> None:
        grow = self.fin_steps == self.growth_interval
        if overflow:
            self.scale = self.scale * self.backoff_factor
            if self.minimum_scale is not None:
                self.scale = np.maximum(self.scale, F32(self.minimum_scale))
        elif grow:
            self.scale = np.minimum(self.scale * self.growth_factor, FLOAT32_MAX)
        self.fin_steps = 0 if grow or overflow else self.fin_steps + 1


@dataclasses.dataclass
class Keras(Counting):
    """LossScaleOptimizer of Keras 3."""

    scale: Any = 2.0**15
    period: int = 2000

    def lower(self) -> None:
        self.scale = self.scale * F32(0.5)

    def grow(self) -> None:
        self.scale = self.scale * F32(2)
