"""The preset `torch` against PyTorch's own GradScaler: recorded, and living where PyTorch is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.policy import presets
from tests.policy import record_torch
from tests.policy.cases import random_steps
from tests.policy.forms import BAD, GOOD, GraphForm, eager_trajectory

pytestmark = [pytest.mark.static, pytest.mark.pytorch]

# GradScaler's arguments, in the words of graphscale.
WORDS = {"init_scale": "initial_loss_scale", "growth_interval": "increment_period"}


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(record_torch.RECORDED) as stored:
        return dict(stored)


def preset(arguments: dict[str, Any]) -> gs.DynamicLossScale:
    return presets.torch(**{WORDS.get(name, name): value for name, value in arguments.items()})  # type: ignore[arg-type]


def named(arguments: np.ndarray) -> dict[str, Any]:
    values = [*arguments[:-1].tolist(), int(arguments[-1])]
    return dict(zip(record_torch.ARGUMENTS, values, strict=True))


def run(policy: gs.DynamicLossScale, steps: list[bool]) -> tuple[list[float], list[bool], list[int]]:
    """As `record_torch.run`."""
    scales, applied, good_steps = [], [], []
    for index, finite in enumerate(steps):
        applied.append(policy.update([GOOD if finite else BAD[index % len(BAD)]])[1])
        scales.append(float(policy()))
        good_steps.append(policy.num_good_steps)
    return scales, applied, good_steps


def test_recorded_trajectories(recorded: dict[str, np.ndarray]) -> None:
    columns = (recorded[name] for name in ("arguments", "steps", "scales", "applied", "good_steps"))
    for arguments, steps, scales, applied, good_steps in zip(*columns, strict=True):
        expected = (scales.tolist(), applied.tolist(), good_steps.tolist())
        assert run(preset(named(arguments)), steps.tolist()) == expected, (named(arguments), steps)


def test_recorded_trajectories_in_the_graph(recorded: dict[str, np.ndarray]) -> None:
    columns = (recorded[name][:60] for name in ("arguments", "steps", "scales", "applied"))
    for arguments, steps, scales, applied in zip(*columns, strict=True):
        result = GraphForm(preset(named(arguments))).trajectory(steps.tolist())
        assert (result.scales, result.applied) == (scales.tolist(), applied.tolist()), named(arguments)


def test_recorded_defaults(recorded: dict[str, np.ndarray]) -> None:
    scales, _, good_steps = run(presets.torch(), recorded["default_steps"].tolist())
    assert scales == recorded["default_scales"].tolist()
    assert good_steps == recorded["default_good_steps"].tolist()


def test_the_recording_meets_the_limits(recorded: dict[str, np.ndarray]) -> None:
    """Zero, numbers below the smallest normal one, growths left out, and products that float32 would round apart."""
    scales, limits = recorded["scales"], np.finfo(np.float32)
    assert (scales == 0).any() and ((scales > 0) & (scales < limits.tiny)).any()
    assert np.isfinite(scales).all() and (scales > limits.max / 1.1).any()
    arithmetic = {"arithmetic": "float32"}
    apart = 0
    for arguments, steps, expected in zip(recorded["arguments"], recorded["steps"], scales, strict=True):
        single = gs.DynamicLossScale.from_config({**preset(named(arguments)).get_config(), **arithmetic})
        apart += eager_trajectory(single, steps.tolist()).scales != expected.tolist()
    assert apart >= 50
    assert set(recorded["default_scales"].tolist()) == {2.0**14, 2.0**15, 2.0**16}


def test_the_living_class() -> None:
    pytest.importorskip("torch", reason="needs PyTorch; its recorded trajectories are tested without it")
    random = np.random.default_rng(17)
    for _ in range(100):
        arguments = dict(zip(record_torch.ARGUMENTS, record_torch.draw(random), strict=True))
        for steps in random_steps(random, 100):
            assert run(preset(arguments), steps) == record_torch.run(arguments, steps), (arguments, steps)
