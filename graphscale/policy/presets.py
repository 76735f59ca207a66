"""The loss-scale policies of other projects, by name, for both the eager form and the graph.

    gs.presets.deepspeed()                       # the defaults of DeepSpeed
    gs.presets.torch(growth_factor=1.5)          # any option of DynamicLossScale can be overridden

Each preset gives the scale and the skipped steps of its peer, step by step. No preset reproduces the finite check of a
step: most peers test the gradients before they divide them by the scale, graphscale tests them afterwards. The results
differ where a division by a scale below 1 overflows. No preset has an infinite scale: where a peer's scale grows beyond
float32 (its training is lost then, since infinity times a backoff factor stays infinite), the growth is left out. Peers
that keep the scale as a Python number (apex, DeepSpeed) agree as long as it is a normal float32 number; powers of two
always are, from 2**-126 to 2**127.

Sources: the rules were read in the projects' source, at the versions that the functions name.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

import numpy as np

from graphscale.policy.loss_scale import DynamicLossScale

__all__ = ["NAMES", "PolicyOptions", "apex", "deepspeed", "flax", "keras", "megatron", "mindspore", "paddle", "torch"]

NAMES = tuple(name for name in __all__ if name.islower())


class PolicyOptions(TypedDict, total=False):
    """The options of a preset: the arguments of `DynamicLossScale`, which documents them."""

    initial_loss_scale: float
    increment_period: int
    multiplier: float
    growth_factor: float | None
    backoff_factor: float | None
    min_loss_scale: float
    max_loss_scale: float | None
    growth_delay: Literal["none", "always", "first"]
    hysteresis: int
    hysteresis_refill: Literal["growth", "good", "decrease"]
    max_consecutive_skips: int | None
    on_stuck: Literal["hold", "flag", "stop", "reset", "accept"]
    arithmetic: Literal["float32", "float64"]


def _preset(options: PolicyOptions, **defaults: Unpack[PolicyOptions]) -> DynamicLossScale:
    # Every peer doubles and halves by default, as DynamicLossScale does; halving is exact as a product and as a
    # division.
    arguments: PolicyOptions = {**defaults, **options}
    return DynamicLossScale(**arguments)


def torch(**options: Unpack[PolicyOptions]) -> DynamicLossScale:
    """PyTorch's `torch.amp.GradScaler`, and `torch.cuda.amp.GradScaler`.

    Starts at 2**16, doubles at the 2000th finite step in a row unless that overflows float32, halves at every
    non-finite step, without a floor: the scale can fall to zero, and stays there. The product with a factor is
    computed in float64 and rounded to float32, which shows with factors such as 1.1 and 0.7.

    GradScaler's arguments: `init_scale` is `initial_loss_scale`, `growth_interval` is `increment_period`;
    `growth_factor` and `backoff_factor` are called so here too.

    Source: PyTorch 2.13, torch/amp/grad_scaler.py and the kernels of _amp_update_scale_
    (aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp and cuda/AmpKernels.cu).

    Raises:
        ValueError: an option is out of its range.
    """
    return _preset(options, initial_loss_scale=2.0**16, min_loss_scale=0.0, arithmetic="float64")


def apex(**options: Unpack[PolicyOptions]) -> DynamicLossScale:
    """NVIDIA apex's `LossScaler`, the one of `apex.amp.initialize(loss_scale="dynamic")`.

    Starts at 2**16, doubles at the 2000th finite step in a row but not beyond 2**24, halves at every non-finite step,
    without a floor.

    apex's arguments: `init_scale`, `scale_window`, `min_loss_scale` (None: 0 here), `max_loss_scale`. It accepts a
    `scale_factor` and ignores it. A `max_loss_scale` below the initial scale, which apex's first growth falls to, is
    refused here. apex keeps the scale as a Python number.

    Source: apex (main branch), apex/amp/scaler.py.

    Raises:
        ValueError: an option is out of its range.
    """
    return _preset(options, initial_loss_scale=2.0**16, min_loss_scale=0.0, max_loss_scale=2.0**24)


def deepspeed(**options: Unpack[PolicyOptions]) -> DynamicLossScale:
    """DeepSpeed's `DynamicLossScaler`: ZeRO stages 1 to 3 with `"fp16": {"enabled": true}` and nothing else set.

    Starts at 2**16. The first growth, and the first after each non-finite step, takes 1001 finite steps in a row, the
    following ones 1000. The second non-finite step halves the scale, not below 1, and so does every further one,
    finite steps between them or not, until the scale grows: only that refills the hysteresis. Where the scale should
    fall and is 1 already, DeepSpeed raises an exception; here `stuck` is True, and the scale stays.

    The keys of DeepSpeed's config: 2**`initial_scale_power` is `initial_loss_scale`, `loss_scale_window` is
    `increment_period`; `hysteresis` and `min_loss_scale` are called so here too, and `consecutive_hysteresis: true`
    is `hysteresis_refill="good"`. Other forms in DeepSpeed:

    - Without ZeRO, `FP16_Optimizer` and `FP16_UnfusedOptimizer` ignore the hysteresis and never raise:
      `deepspeed(hysteresis=1, on_stuck="hold")`.
    - `DynamicLossScaler` grew at the 1000th finite step up to 0.16 at least: `deepspeed(growth_delay="none")`. And a
      config that set none of these keys made it start at 2**32 without hysteresis:
      `deepspeed(initial_loss_scale=2**32, hysteresis=1, growth_delay="none")`.

    DeepSpeed keeps the scale as a Python number, without an upper limit.

    Source: DeepSpeed 0.19.8 (and 0.14.4, 0.16.4), deepspeed/runtime/fp16/loss_scaler.py, fused_optimizer.py and
    unfused_optimizer.py, and deepspeed/runtime/precision_config.py.

    Raises:
        ValueError: an option is out of its range.
    """
    return _preset(
        options, initial_loss_scale=2.0**16, increment_period=1000, growth_delay="first", hysteresis=2, on_stuck="flag"
    )


def megatron(**options: Unpack[PolicyOptions]) -> DynamicLossScale:
    """Megatron-LM's `DynamicGradScaler`.

    Starts at 2**32, doubles at the 1000th finite step in a row. The second non-finite step halves the scale, not below
    1, and so does every further one until the scale grows: only that refills the hysteresis, although its
    documentation speaks of consecutive steps. Nothing happens where the scale is at its minimum.

    Megatron-LM's arguments: `--initial-loss-scale`, `--min-loss-scale`, `--hysteresis` are called so here too;
    `--loss-scale-window` is `increment_period`. Its scale can grow to infinity.

    Source: megatron-core 0.16.1, megatron/core/optimizer/grad_scaler.py, and the defaults of optimizer_config.py.

    Raises:
        ValueError: an option is out of its range.
    """
    return _preset(options, initial_loss_scale=2.0**32, increment_period=1000, hysteresis=2)


def paddle(**options: Unpack[PolicyOptions]) -> DynamicLossScale:
    """PaddlePaddle's `update_loss_scaling` operator, which `paddle.static.amp.decorate` puts into a program.

    Starts at 2**16, doubles at the 2000th finite step in a row unless that overflows float32, halves at every
    non-finite step, not below 1. With `hysteresis=n`, Paddle's `decr_every_n_nan_or_inf`, each decrease takes n
    non-finite steps in a row.

    Paddle's arguments: `init_loss_scaling` is `initial_loss_scale`, `incr_every_n_steps` is `increment_period`,
    `incr_ratio` is `growth_factor`, `decr_ratio` is `backoff_factor`. Other forms in Paddle:

    - `paddle.amp.GradScaler` (dynamic graphs) has the same defaults, no floor, and can grow to infinity:
      `paddle(min_loss_scale=0)`.
    - `decorate` called in its older form (with `use_pure_fp16`, `use_fp16_guard` or `use_bf16`):
      `paddle(initial_loss_scale=2**15, increment_period=1000, hysteresis=2, backoff_factor=0.8)`.

    Source: Paddle 2.5 and later, paddle/phi/kernels/impl/amp_kernel_impl.h, python/paddle/static/amp/decorator.py and
    python/paddle/amp/grad_scaler.py.

    Raises:
        ValueError: an option is out of its range.
    """
    return _preset(options, initial_loss_scale=2.0**16, hysteresis_refill="decrease")


def mindspore(**options: Unpack[PolicyOptions]) -> DynamicLossScale:
    """MindSpore's `DynamicLossScaleManager`, as `mindspore.Model` runs it: `DynamicLossScaleUpdateCell`.

    Starts at 2**24, doubles at the 2000th finite step in a row, halves at every non-finite step, not below 1. The
    decrease is a product with the float32 reciprocal of the factor, which shows with factors that are no powers of
    two; where `multiplier` is given and `backoff_factor` is not, it is that reciprocal here too.

    MindSpore's arguments: `init_loss_scale` is `initial_loss_scale`, `scale_factor` is `multiplier`, `scale_window` is
    `increment_period`. Other forms in MindSpore:

    - `mindspore.amp.DynamicLossScaler` divides by the factor, and leaves a growth out that overflows float32:
      `mindspore(multiplier=m, backoff_factor=None)`. It has no defaults. The cell's scale can grow to infinity.
    - Outside of data sinking the manager also keeps a count on the host, and raises an exception at the 1001st
      non-finite step in a row. `mindspore(max_consecutive_skips=1001, on_stuck="flag")` reports that as `stuck`, and
      also a decrease at scale 1.

    Source: MindSpore 2, mindspore/python/mindspore/nn/wrap/loss_scale.py, train/loss_scale_manager.py and amp.py.

    Raises:
        ValueError: an option is out of its range.
    """
    policy = _preset(options, initial_loss_scale=2.0**24)
    if "multiplier" not in options or "backoff_factor" in options:
        return policy
    # The multiplier of a policy is a number above 1: only then can it divide.
    config = policy.get_config()
    return DynamicLossScale(**config, backoff_factor=float(np.float32(1) / np.float32(policy.multiplier)))


def flax(**options: Unpack[PolicyOptions]) -> DynamicLossScale:
    """Flax's `flax.training.dynamic_scale.DynamicScale`.

    Starts at 2**16. Each growth takes 2001 finite steps in a row, one more than its `growth_interval` of 2000, and
    ends at float32's largest number instead of overflowing. Every non-finite step halves the scale, not below
    float32's smallest normal number.

    Flax's arguments: `scale` is `initial_loss_scale`, `growth_interval` is `increment_period`, `minimum_scale` is
    `min_loss_scale` (None: 0 here); `growth_factor` and `backoff_factor` are called so here too. Outside of `jax.jit`
    Flax computes the first product of a scale and a factor that are both Python numbers in float64; here, as under
    `jax.jit`, all are float32.

    Source: Flax 0.12.8, flax/training/dynamic_scale.py.

    Raises:
        ValueError: an option is out of its range.
    """
    numbers = np.finfo(np.float32)
    return _preset(
        options,
        initial_loss_scale=2.0**16,
        min_loss_scale=float(numbers.tiny),
        max_loss_scale=float(numbers.max),
        growth_delay="always",
    )


def keras(**options: Unpack[PolicyOptions]) -> DynamicLossScale:
    """Keras 3's `keras.optimizers.LossScaleOptimizer`.

    Starts at 2**15, doubles at the 2000th finite step in a row, halves at every non-finite step, without a floor.
    Unlike that of Keras 2 and of TensorFlow, which are `DynamicLossScale()` itself, its scale can fall below 1, and
    can grow to infinity. Below float32's smallest normal number it depends on the backend, since TensorFlow and JAX
    treat such numbers as zero on some devices; here they are kept.

    Keras' arguments: `initial_scale` is `initial_loss_scale`, `dynamic_growth_steps` is `increment_period`.

    Source: Keras 3.15.1, keras/src/optimizers/loss_scale_optimizer.py.

    Raises:
        ValueError: an option is out of its range.
    """
    return _preset(options, min_loss_scale=0.0)
