"""Runs PyTorch's own GradScaler, and records what it does for the tests that have no PyTorch.

python -m tests.policy.record_torch        # needs torch; writes recorded/torch.npz
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded" / "torch.npz"
ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
SEQUENCES, STEPS = 240, 30
MAX = float(np.finfo(np.float32).max)


def draw(random: np.random.Generator) -> tuple[float, float, float, int]:
    """Arguments of a GradScaler: scales from the smallest to the largest, factors that float32 cannot hold."""
    initial = float(random.choice([1.0, 2.0**16, 7.3, 3e-44, 2e-38, MAX / 1.05, MAX / 50]))
    growth, backoff = float(random.choice([2.0, 1.1, 1.7])), float(random.choice([0.5, 0.7, 0.3]))
    return initial, growth, backoff, int(random.integers(1, 5))


def run(arguments: dict[str, Any], steps: list[bool]) -> tuple[list[float], list[bool], list[int]]:
    """Run a new GradScaler over finite (True) and non-finite steps.

    Returns:
        after each step its scale, whether it let the optimizer step, and its count of good steps.
    """
    import torch

    class Optimizer(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            del closure
            self.steps += 1

    weight = torch.zeros(1, requires_grad=True)
    optimizer = Optimizer([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", **arguments)
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


def main() -> None:
    import torch

    random = np.random.default_rng(5)
    drawn = [draw(random) for _ in range(SEQUENCES)]
    steps = random.random((SEQUENCES, STEPS)) < random.choice([0.3, 0.6, 0.8, 0.95], (SEQUENCES, 1))
    results = [
        run(dict(zip(ARGUMENTS, arguments, strict=True)), sequence.tolist())
        for arguments, sequence in zip(drawn, steps, strict=True)
    ]
    scales, applied, good_steps = zip(*results, strict=True)
    # Its defaults: two growths, with an overflow before each.
    default_steps = np.repeat([True, False, True, False, True], [5, 1, 2001, 2, 2000])
    default_scales, _, default_good_steps = run({}, default_steps.tolist())
    np.savez_compressed(
        RECORDED,
        version=torch.__version__,
        arguments=np.asarray(drawn, dtype=np.float64),
        steps=steps,
        scales=np.asarray(scales, dtype=np.float32),
        applied=np.asarray(applied),
        good_steps=np.asarray(good_steps, dtype=np.int8),
        default_steps=default_steps,
        default_scales=np.asarray(default_scales, dtype=np.float32),
        default_good_steps=np.asarray(default_good_steps, dtype=np.int16),
    )


if __name__ == "__main__":
    main()
