"""The rounding of a framework's own step: numbers that differ by it, and the errors that it excuses."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphscale.files.tensor_files import Arrays

__all__ = ["CONDITION", "DRAWS", "disturb"]

# A number that rounding of its operands moves this far cannot be met any closer than some multiples of that.
CONDITION = 10
# Draws of the rounding, as far as they are needed: in some alone, a number near zero has the other sign.
DRAWS = 12


def disturb(arrays: Arrays, rng: np.random.Generator | None, least: float) -> Arrays:
    """Change floating-point numbers by their rounding, or by more; by nothing without a generator.

    Whole numbers stay: labels, indices and masks carry no rounding.

    Args:
        arrays: numbers of a step, by name.
        rng: the generator of the changes.
        least: the least bound of a relative change; the unit of the rounding of an array is another.
    """

    def change(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if rng is None or value.dtype.kind != "f":
            return value
        unit = max(float(np.finfo(value.dtype).eps), least)
        with np.errstate(invalid="ignore"):
            moved = value * (1 + unit * rng.uniform(-1, 1, value.shape))
            return np.where(value == np.rint(value), value, moved).astype(value.dtype)

    return {name: change(value) for name, value in arrays.items()}
