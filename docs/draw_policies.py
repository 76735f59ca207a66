"""Draw docs/policies.png: the policies on one and the same sequence of steps, as their own code runs them.

python docs/draw_policies.py    (with what `pip install -e '.[demo]'` brings)
"""

# ruff: noqa: D103

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from sketch import FAINT, INK, NEW, WARM, save

import graphscale as gs
from graphscale.policy import presets

# Steps whose gradients are not finite: one alone, two in a row, a long series; then the scale grows again.
BAD = frozenset({14, 26, 27, *range(40, 52)})
STEPS = 90
START = {"initial_loss_scale": 64.0, "increment_period": 8}
SHOWN = (
    ("TensorFlow: DynamicLossScale()", gs.DynamicLossScale(**START), "halves at once, never below 1"),
    ("presets.torch()", presets.torch(**START), "no floor: falls below 1"),
    ("presets.apex(max_loss_scale=64)", presets.apex(**START, max_loss_scale=64.0), "no floor, and a ceiling"),
    ("presets.deepspeed()", presets.deepspeed(**START), "hysteresis 2; a later first growth"),
    ("presets.flax()", presets.flax(**START), "each growth takes one good step more"),
    ("presets.paddle(hysteresis=2)", presets.paddle(**START, hysteresis=2), "falls at every second bad step in a row"),
)


def trajectory(policy: gs.DynamicLossScale) -> list[float]:
    """Return the scale of each step."""
    scales = []
    for step in range(STEPS):
        scales.append(float(policy()))
        policy.update(np.float32([np.inf if step in BAD else 1.0]))
    return scales


def draw() -> Figure:
    figure = Figure(figsize=(11.6, 5.6), facecolor="white")
    grid = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, (name, policy, what) in zip(grid.flat, SHOWN, strict=True):
        for step in BAD:
            axes.axvspan(step - 0.5, step + 0.5, color=WARM, alpha=0.25, lw=0)
        axes.axhline(1, color=FAINT, lw=0.8, ls=(0, (3, 3)))
        axes.step(range(STEPS), trajectory(policy), where="mid", color=NEW, lw=1.8)
        axes.set_title(f"{name}\n", loc="left", fontsize=10, color=INK, weight="bold")
        axes.text(0, 1.03, what, transform=axes.transAxes, fontsize=9, color=INK)
        axes.set_yscale("log", base=2)
        axes.tick_params(colors=INK, labelsize=8.5, length=3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
    for axes in grid[1]:
        axes.set_xlabel("step", fontsize=9, color=INK)
    for axes in grid[:, 0]:
        axes.set_ylabel("loss scale", fontsize=9, color=INK)
    figure.tight_layout(w_pad=2, h_pad=1.5)
    return figure


def main() -> None:
    save(draw(), "policies.png")


if __name__ == "__main__":
    main()
