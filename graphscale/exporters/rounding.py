"""The rule of all exporters: numbers of an exported step that agree, that rounding excuses, and that are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphscale.files.tensor_files import Arrays

__all__ = ["Numbers", "disturb", "largest", "tolerance_of"]

Array = np.ndarray[Any, Any]

# Errors are relative to the largest number of a tensor. Float32 sums in another order differ by 1e-6 to 1e-5.
_TOLERANCE = {"float64": 1e-7, "float32": 1e-4, "float16": 2e-2}
# A number that rounding of its operands moves this far cannot be met any closer than some multiples of that.
_CONDITION = 10
# The limit of an excused error: some tolerances if the distance that excuses it is within the tolerance, else some of
# the tensor's largest distances.
_WITHIN, _BEYOND = 3, 2
# A tensor whose largest number may be off by more than this part of it shows nothing.
_DECIDED = 0.5


class Numbers:
    """The numbers of a result in the file and in the framework, and the errors that rounding excuses.

    Each number must be within the tolerance. One that the framework's own rounding moves may be off by a multiple of
    this distance. Below the tolerance that is a few tolerances. Above it the multiple has no fixed limit: of such
    numbers, be they one or all of a tensor, the size alone is proven.

    Args:
        got: the numbers of the file.
        wanted: those of the framework, of the same type and shape.
        compared: the numbers that errors are relative to: those of the framework, or their change in the step.
        tolerance: the error of each number, relative to the largest, that needs no excuse.
        coarse: the same in the coarsest type that takes part.
        slack: an error that is none.
        least: the least number that errors are relative to.
        is_strict: never excuse more than the coarse tolerance.

    Attributes:
        error: the largest error, relative to the largest number.
        size: the count of numbers.
    """

    def __init__(
        self,
        got: Array,
        wanted: Array,
        compared: Array,
        *,
        tolerance: float,
        coarse: float,
        slack: float = 0.0,
        least: float = 0.0,
        is_strict: bool = False,
    ) -> None:
        a, b = got.astype(np.float64), wanted.astype(np.float64)
        with np.errstate(invalid="ignore"):
            errors = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        self._errors = np.nan_to_num(errors, nan=np.inf, posinf=np.inf)
        self._compared, self._scale = compared, max(largest(compared), least)
        self._coarse = coarse * self._scale
        self._base, self._noise = max(tolerance * self._scale, slack), max(self._coarse, slack)
        self._limit = self._noise if is_strict else np.inf
        self._distances = np.zeros(b.shape)
        self.size = b.size
        self.error = float(self._errors.max(initial=0.0)) / largest(b)

    def add(self, compared: Array) -> None:
        """Add the framework's numbers from operands that differ by their rounding."""
        with np.errstate(invalid="ignore"):
            distances = np.nan_to_num(np.abs(compared - self._compared), nan=0.0, posinf=0.0)
        self._distances = np.maximum(self._distances, distances)

    @property
    def _allowed(self) -> Array:
        """The error that is allowed for each number."""
        distances = self._distances
        # Where rounding moves most numbers, the tensor shows its size alone.
        is_noise = distances.size and _CONDITION * np.median(distances) > _DECIDED * self._scale
        beyond = (_CONDITION if is_noise else _BEYOND) * distances.max(initial=0.0)
        most = np.where(distances > self._coarse, beyond, _WITHIN * self._coarse)
        excused: Array = np.minimum(np.minimum(_CONDITION * distances, most), self._limit)
        return np.maximum(self._base, excused)

    @property
    def are_wrong(self) -> bool:
        """A number is off by more than is allowed."""
        return bool((self._errors > self._allowed).any())

    @property
    def excused(self) -> int:
        """The count of numbers beyond the coarse tolerance."""
        return int((self._errors > self._noise).sum())

    @property
    def are_decided(self) -> bool:
        """The largest of them is more than its rounding."""
        values = np.where(np.isfinite(self._compared), np.abs(self._compared), 0.0)
        place = np.argmax(values) if self._coarse and values.size else 0
        return bool(self._coarse and values.size and self._allowed.flat[place] <= _DECIDED * values.flat[place])

    @property
    def worst(self) -> tuple[float, float]:
        """The error of the number that is furthest off, and its allowed error, relative to the largest number."""
        place = np.argmax(self._errors - self._allowed)
        return float(self._errors.flat[place]) / self._scale, float(self._allowed.flat[place]) / self._scale


def tolerance_of(kind: str) -> float:
    """Return the error of floating-point numbers of a type that needs no excuse; zero for other types."""
    return _TOLERANCE.get(kind, 0.0)


def largest(values: Array) -> float:
    """Return the largest finite magnitude; never zero."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=1e-30))


def disturb(arrays: Arrays, rng: np.random.Generator, least: float) -> Arrays:
    """Change floating-point numbers by their rounding, or by more.

    Whole numbers stay: labels, indices and masks carry no rounding.

    Args:
        arrays: numbers of a step, by name.
        rng: the generator of the changes.
        least: the least bound of a relative change; the unit of the rounding of an array is another.
    """

    def change(value: Array) -> Array:
        if value.dtype.kind != "f":
            return value
        unit = max(float(np.finfo(value.dtype).eps), least)
        with np.errstate(invalid="ignore"):
            moved = value * (1 + unit * rng.uniform(-1, 1, value.shape))
            return np.where(value == np.rint(value), value, moved).astype(value.dtype)

    return {name: change(value) for name, value in arrays.items()}
