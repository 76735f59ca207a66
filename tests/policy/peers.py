"""The loss-scale rules of other projects, each in its own words and variables: what the presets are tested against.

Written from what the projects do, without a look at `graphscale.policy.dynamic_rule`. The scale is held as the project
holds it: a float32 number on the device, or a Python number. Constructor arguments have the names and defaults of the
projects.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

F32 = np.float32
FLOAT32_MAX = np.finfo(np.float32).max
FLOAT32_TINY = np.finfo(np.float32).tiny


class GivesUpError(Exception):
    """The project stops the training here."""


class Peer(Protocol):
    """A project's loss scaler."""

    @property
    def scale(self) -> float | np.float32:
        """The scale of the next step."""

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step.

        Raises:
            GivesUpError: the project raises an exception here.
        """


class TensorFlow:
    """tf.compat.v1.mixed_precision.DynamicLossScale."""

    def __init__(self, initial_loss_scale: float = 2**15, increment_period: int = 2000, multiplier: float = 2.0):
        self.scale = F32(initial_loss_scale)
        self.num_good_steps = 0
        self.increment_period = increment_period
        self.multiplier = F32(multiplier)

    def update(self, overflow: bool) -> None:
        if overflow:
            self.num_good_steps = 0
            self.scale = np.maximum(self.scale / self.multiplier, F32(1))
            return
        if self.num_good_steps + 1 < self.increment_period:
            self.num_good_steps += 1
            return
        self.num_good_steps = 0
        new_scale = self.scale * self.multiplier
        if np.isfinite(new_scale):
            self.scale = new_scale


class Torch:
    """torch.amp.GradScaler: its kernel multiplies a float by a double, and stores a float."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ):
        self.scale = F32(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.growth_tracker = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = F32(float(self.scale) * self.backoff_factor)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            product = F32(float(self.scale) * self.growth_factor)
            self.scale = product if np.isfinite(product) else self.scale


class Apex:
    """apex.amp.scaler.LossScaler."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ):
        self.scale = init_scale
        self.scale_window = scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.unskipped = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.unskipped = 0
            self.scale /= 2
            if self.min_loss_scale:
                self.scale = max(self.scale, self.min_loss_scale)
        else:
            self.unskipped += 1
        if self.unskipped == self.scale_window:
            self.unskipped = 0
            self.scale = min(self.scale * 2, self.max_loss_scale)


class DeepSpeed:
    """DynamicLossScaler of DeepSpeed 0.19, which ZeRO uses; `delayed_shift` is the config's hysteresis."""

    def __init__(
        self,
        init_scale: float = 2**16,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 2,
        consecutive_hysteresis: bool = False,
    ):
        self.scale = float(init_scale)
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.cur_hysteresis = delayed_shift
        self.cur_iter = 0
        self.last_overflow_iter = -1

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


class DeepSpeedFused:
    """FP16_Optimizer and FP16_UnfusedOptimizer of DeepSpeed, which train without ZeRO."""

    def __init__(self, init_scale: float = 2**16, scale_window: int = 1000, min_scale: float = 1):
        self.scale = float(init_scale)
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / 2, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        else:
            stable_interval = self.cur_iter - self.last_overflow_iter - 1
            if stable_interval > 0 and stable_interval % self.scale_window == 0:
                self.scale *= 2
        self.cur_iter += 1


class Megatron:
    """DynamicGradScaler of Megatron-LM; its factors are float32 tensors."""

    def __init__(
        self,
        initial_scale: float = 2**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ):
        self.scale = F32(initial_scale)
        self.min_scale = F32(min_scale)
        self.growth_factor = F32(growth_factor)
        self.backoff_factor = F32(backoff_factor)
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.growth_tracker = 0
        self.hysteresis_tracker = hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = np.maximum(self.scale * self.backoff_factor, self.min_scale)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale = self.scale * self.growth_factor


class Paddle:
    """The operator update_loss_scaling of PaddlePaddle."""

    def __init__(
        self,
        init_loss_scaling: float = 2**16,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
    ):
        self.scale = F32(init_loss_scaling)
        self.incr_every_n_steps = incr_every_n_steps
        self.decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
        self.incr_ratio = F32(incr_ratio)
        self.decr_ratio = F32(decr_ratio)
        self.good = 0
        self.bad = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good, self.bad = 0, self.bad + 1
            if self.bad == self.decr_every_n_nan_or_inf:
                self.bad = 0
                self.scale = self.decreased()
        else:
            self.good, self.bad = self.good + 1, 0
            if self.good == self.incr_every_n_steps:
                self.good = 0
                product = self.scale * self.incr_ratio
                self.scale = product if np.isfinite(product) else self.scale

    def decreased(self) -> np.float32:
        product = self.scale * self.decr_ratio
        return F32(1) if product < 1 else product


class PaddleGradScaler(Paddle):
    """paddle.amp.GradScaler, of dynamic graphs: without a floor."""

    def decreased(self) -> np.float32:
        return self.scale * self.decr_ratio


class MindSpore:
    """DynamicLossScaleUpdateCell, with the defaults of DynamicLossScaleManager."""

    def __init__(self, init_loss_scale: float = 2**24, scale_factor: float = 2, scale_window: int = 2000):
        self.scale = F32(init_loss_scale)
        self.scale_factor = F32(scale_factor)
        self.scale_window = scale_window
        self.cur_iter = 1
        self.last_overflow_iter = 0

    def update(self, overflow: bool) -> None:
        should_increase = self.scale_window <= self.cur_iter - self.last_overflow_iter
        if overflow:
            self.scale = np.maximum(self.scale * np.reciprocal(self.scale_factor), F32(1))
        elif should_increase:
            self.scale = self.scale * self.scale_factor
        if overflow or should_increase:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1


class MindSporeScaler:
    """mindspore.amp.DynamicLossScaler, which has no defaults."""

    def __init__(self, scale_value: float, scale_factor: int, scale_window: int):
        self.scale = F32(scale_value)
        self.scale_factor = F32(scale_factor)
        self.scale_window = scale_window
        self.counter = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = np.maximum(F32(1), self.scale / self.scale_factor)
        elif self.counter == self.scale_window - 1:
            product = self.scale * self.scale_factor
            self.scale = product if np.isfinite(product) else self.scale
        self.counter = 0 if overflow else (self.counter + 1) % self.scale_window


class Flax:
    """flax.training.dynamic_scale.DynamicScale, in a jitted step."""

    def __init__(
        self,
        scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        minimum_scale: float | None = float(FLOAT32_TINY),
    ):
        self.scale = F32(scale)
        self.growth_factor = F32(growth_factor)
        self.backoff_factor = F32(backoff_factor)
        self.growth_interval = growth_interval
        self.minimum_scale = minimum_scale
        self.fin_steps = 0

    def update(self, overflow: bool) -> None:
        grow = self.fin_steps == self.growth_interval
        if overflow:
            self.scale = self.scale * self.backoff_factor
            if self.minimum_scale is not None:
                self.scale = np.maximum(self.scale, F32(self.minimum_scale))
        elif grow:
            self.scale = np.minimum(self.scale * self.growth_factor, FLOAT32_MAX)
        self.fin_steps = 0 if grow or overflow else self.fin_steps + 1


class Keras:
    """LossScaleOptimizer of Keras 3."""

    def __init__(self, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000):
        self.dynamic_scale = F32(initial_scale)
        self.dynamic_growth_steps = dynamic_growth_steps
        self.step_counter = 0

    @property
    def scale(self) -> np.float32:
        return self.dynamic_scale

    def update(self, overflow: bool) -> None:
        if overflow:
            self.step_counter = 0
            self.dynamic_scale = self.dynamic_scale * F32(0.5)
        elif self.step_counter == self.dynamic_growth_steps - 1:
            self.step_counter = 0
            self.dynamic_scale = self.dynamic_scale * F32(2)
        else:
            self.step_counter += 1
