"""The comparison of values that a run gives with those that are expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from graphscale.checks.verification.verify_report import Difference

__all__ = ["compare_bits", "compare_values", "is_finite"]


def is_finite(array: np.ndarray[Any, Any]) -> bool:
    """Return whether all elements of an array of numbers are finite."""
    if array.dtype.kind in "biu":
        return True
    wide = array if array.dtype.kind == "f" else array.astype(np.float64)  # numpy has no test for bfloat16
    return bool(np.isfinite(wide).all())


def compare_bits(
    name: str, expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any] | None, source: str
) -> Iterator[Difference]:
    """Yield the difference between two arrays whose types, shapes or bits differ."""
    if got is None or _are_alike(expected, got):
        return
    yield Difference(name, np.asarray(expected), np.asarray(got), source)


def compare_values(
    name: str,
    expected: np.ndarray[Any, Any],
    got: np.ndarray[Any, Any] | None,
    source: str,
    tolerance: float = 0.0,
    lost: float = 0.0,
) -> Iterator[Difference]:
    """Yield the difference between two arrays of numbers that are not equal; NaN equals NaN, and -0.0 equals 0.0.

    Args:
        name: the name of the value.
        expected: the array that it should be.
        got: the array that it is; None where there is none.
        source: the origin of the expectation.
        tolerance: the error that is allowed, relative to the largest finite element.
        lost: the absolute error that is allowed.
    """
    if got is None or _are_alike(expected, got):
        return
    expected, got = np.asarray(expected), np.asarray(got)
    same = (expected.dtype, expected.shape) == (got.dtype, got.shape)
    if not (same and _close(expected, got, tolerance, lost)):
        yield Difference(name, expected, got, source)


def _are_alike(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> bool:
    one, other = np.asarray(expected), np.asarray(got)
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()


def _close(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any], tolerance: float, lost: float) -> bool:
    if expected.dtype.kind in "biu":
        return False
    one, other = expected.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return False
    largest = np.abs(one[finite]).max(initial=0.0)
    return bool((np.abs(one[finite] - other[finite]) <= tolerance * largest + lost).all())
