"""float16 gradients that underflow without a loss scale; `graphscale demo --precision` trains with them.

The network is the demo's transformer block, which learns to reverse sequences of 16 tokens: a training step exported
from PyTorch, Adam inside (`models/pytorch/training_graphs.py`, `reversal_step`). Its gradients are small because its
loss is the mean over a batch of 2**24 tokens, and the step computes 2**9 of them. The gradient of a logit is then
2**-24 at most, float16's smallest number; 15 of 16 are about 2**-28 in the beginning, and become zero. The gradients
of the weights have a median of 2**-26. Adam divides the factor out again, so that in float32 it changes nothing.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.demo import reversal
from graphscale.demo.precision import Task, Way, tasks, train
from graphscale.passes import Autocast
from tests.conftest import run_once

STEPS = 150


@functools.cache
def reversal_task() -> Task:
    return next(task for task in tasks(0) if task.name == "reversal")


@pytest.mark.full
def test_the_gradients_of_one_step() -> None:
    """The first moments after one step are a tenth of the gradients: of the same weights, with and without a scale."""
    first, state = reversal_task().batches[0], reversal_task().state
    feeds = {**first, **state, **reversal.FEEDS, "learning_rate": np.float32(1e-3)}

    def gradients(model: onnx.ModelProto) -> np.ndarray:
        outputs, _ = run_once(model, feeds)
        names = [name for name in outputs if name.endswith(".exp_avg.next")]
        return 10 * np.concatenate([outputs[name].ravel() for name in sorted(names)])

    def in_float16(loss_scale: float) -> np.ndarray:
        model = gs.scale(reversal_task().step, loss_scale, autocast=Autocast("float16", emulate=True)).model
        assert isinstance(model, onnx.ModelProto)
        return gradients(model)

    exact = gradients(reversal_task().step)
    assert np.median(np.abs(exact)) < 2.0**-25, "most would be zero even if nothing but they were rounded"
    assert np.abs(exact).max() < 2.0**-14, "and none is a normal number of float16"
    unscaled, scaled = in_float16(1), in_float16(2**20)
    assert np.mean(unscaled == 0) > 0.9
    errors = [np.linalg.norm(found - exact) / np.linalg.norm(exact) for found in (unscaled, scaled)]
    assert errors[0] > 0.9
    assert errors[1] < 2e-3


@pytest.mark.full
def test_bfloat16_needs_no_loss_scale() -> None:
    """It has the range of float32."""
    *_, exact = train(reversal_task(), Way("float32", False, gs.FixedLossScale(1)), STEPS)
    pass_ = Autocast("bfloat16", emulate=True)
    scaled = gs.scale(reversal_task().step, 1, telemetry=True, skip_nonfinite=True, autocast=pass_)
    with gs.Session(scaled, state=reversal_task().state) as session:
        feeds = {**reversal.FEEDS, "learning_rate": np.float32(reversal_task().learning_rate)}
        results = [session.step({**feeds, **reversal_task().batches[step]}) for step in range(STEPS)]
    assert np.mean([result["cross_entropy"] for result in results[-10:]]) == pytest.approx(
        np.mean(exact.losses[-10:]), rel=0.02
    )
    assert max(result.zero_fraction or 0 for result in results) < 1e-3
