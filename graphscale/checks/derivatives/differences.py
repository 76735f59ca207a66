"""Central differences of a loss along directions, compared with the product of a gradient and the direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["AGREES", "DISAGREES", "UNSURE", "Direction", "Precision", "Slopes", "compare", "slopes"]

AGREES, DISAGREES, UNSURE = "agrees", "disagrees", "unsure"

_Array = np.ndarray[Any, Any]
# A weight of zeros gets the steps of a weight with elements of this size.
_SMALL = 1e-2
# A slope contradicts a gradient only if its rounding error is at most this part of the difference.
_CLEAR = 0.25


class Precision(NamedTuple):
    """The limits of a floating-point type.

    Attributes:
        tolerance: the relative error up to which a difference agrees with a gradient. Errors by constants that
            exporters round to float32, in one of the two passes only, are well below it.
        steps: the steps to try, relative to the size of the weight: the first is best for a smooth loss, later ones are
            for near kinks, and for losses by rounding.
        rounding: the relative error of a computed loss.
    """

    tolerance: float
    steps: tuple[float, ...]
    rounding: float

    @classmethod
    def of(cls, dtype: np.dtype[Any]) -> Precision:
        """Return the limits of float64 or float32."""
        if dtype == np.float64:
            return cls(1e-4, (1e-4, 1e-6, 1e-2), 1e-15)
        return cls(1e-2, (1e-2, 3e-3, 1e-3, 3e-2), 2e-7)


@dataclasses.dataclass(frozen=True)
class Direction:
    """The comparison along one direction.

    Attributes:
        kind: "random" or "gradient".
        verdict: "agrees", "disagrees", or "unsure" where differences cannot decide.
        expected: the product of the gradient with the direction.
        measured: the central difference of the loss along the direction; None where rounding hides it.
        error: the distance of the two, relative to the larger one, or to a usual value for a random direction.
        reason: the reason for "unsure".
    """

    kind: str
    verdict: str
    expected: float
    measured: float | None
    error: float | None
    reason: str = ""


class Slopes(NamedTuple):
    """The slopes of a loss at a weight for one step.

    Attributes:
        step: the distance, in units of the direction.
        central: the slope from one side to the other.
        right: the slope to the side of the direction.
        left: the slope to the other side.
        noise: the error of the slopes by rounding.
    """

    step: float
    central: float
    right: float
    left: float
    noise: float


def slopes(
    loss_at: Callable[[_Array], float], here: float, weight: _Array, direction: _Array, limits: Precision
) -> Iterator[Slopes]:
    """Yield the slopes of a loss along a direction, step by step.

    Args:
        loss_at: the loss as a function of the weight.
        here: the loss at the weight.
        weight: the weight, of the type to compute in.
        direction: an array of its shape; there is no slope for zeros, or if either is not finite.
        limits: the limits of the type.
    """
    if not (direction.any() and np.isfinite(direction).all() and np.isfinite(weight).all()):
        return
    size, length = _root_mean_square(weight), _root_mean_square(direction)
    for step in limits.steps:
        move = np.asarray(direction * (step * (size or _SMALL) / length)).astype(weight.dtype)
        distance = step * (size or _SMALL) / length
        up, down = loss_at(weight + move), loss_at(weight - move)
        if np.isfinite([up, down]).all():
            noise = limits.rounding * max(abs(up), abs(down)) / distance
            right, left = (up - here) / distance, (here - down) / distance
            yield Slopes(distance, (up - down) / (2 * distance), right, left, noise)


def _root_mean_square(array: _Array) -> float:
    """Return the root mean square of an array, without the underflow of small numbers' squares."""
    largest = float(np.abs(array).max())
    return largest * float(np.sqrt(np.mean(np.square(array / (largest or 1.0)))))


def compare(found: Iterable[Slopes], gradient: _Array, direction: _Array, limits: Precision, kind: str) -> Direction:
    """Compare a gradient with the slopes of the loss along a direction, up to the first agreement."""
    expected = float(np.vdot(gradient, direction))
    usual = float(np.linalg.norm(gradient) * np.linalg.norm(direction)) / np.sqrt(max(1, direction.size))
    tried: list[tuple[float, Slopes]] = []
    for slope in found:
        largest = max(abs(expected), abs(slope.central), usual)
        error = float(abs(slope.central - expected) / largest) if largest else 0.0
        if error <= limits.tolerance:
            return Direction(kind, AGREES, expected, slope.central, error)
        if slope.noise <= _CLEAR * abs(slope.central - expected):
            tried.append((error, slope))
    if len(tried) < 2:
        return Direction(kind, UNSURE, expected, None, None, "the loss changes by less than rounding")
    tried.sort(key=lambda each: each[1].step)
    error, slope = tried[0]
    reason = _doubt(expected, [each for _, each in tried])
    return Direction(kind, UNSURE if reason else DISAGREES, expected, slope.central, error, reason)


def _doubt(expected: float, tried: list[Slopes]) -> str:
    """Return the reason why slopes do not contradict a gradient, despite a difference; empty without one."""
    slope = tried[0]
    distance = abs(slope.central - expected)
    low, high = sorted((slope.left, slope.right))
    # A sum of many kinks may have any of their sides in its gradient, beyond the range of the slopes.
    if high - low > distance / 2:
        return f"a kink: the slope is {low:.4g} on one side and {high:.4g} on the other"
    if abs(tried[1].central - slope.central) > distance / 2:
        return "the slope depends on the step: there are kinks or jumps nearby"
    return ""
