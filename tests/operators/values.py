"""Operands and results: arrays, sequences of arrays, and their comparison under scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from graphscale.flow.degree import ZERO, Degree

# An array, a sequence of arrays, or None for an empty optional.
Data = Any


def is_float_data(value: Data) -> bool:
    """Return whether a value is an array of floating-point numbers of any size, or a sequence of such arrays."""
    if isinstance(value, list):
        return bool(value) and all(map(is_float_data, value))
    return isinstance(value, np.ndarray) and _float_info(value.dtype) is not None


def _float_info(dtype: np.dtype[Any]) -> Any:
    try:
        return ml_dtypes.finfo(dtype)
    except ValueError:
        return None


def is_narrow(value: Data, size: int = 2) -> bool:
    """Return whether a value has floating-point numbers of at most so many bytes."""
    if isinstance(value, list):
        return any(is_narrow(item, size) for item in value)
    return is_float_data(value) and value.dtype.itemsize <= size


def copy_data(value: Data) -> Data:
    """Return a copy that shares no memory."""
    if isinstance(value, list):
        return [copy_data(item) for item in value]
    return np.array(value) if isinstance(value, np.ndarray | np.generic) else value


def tame_data(value: Data, factor: float) -> Data:
    """Replace numbers of one byte that a factor would take out of their range."""
    if not is_narrow(value, 1):
        return value
    info = _float_info(value.dtype)
    wide = np.abs(value.astype(np.float64))
    keep = (wide <= float(info.max) / factor) & ((wide >= float(info.tiny) * factor) | (wide == 0))
    return np.where(keep, value.astype(np.float64), float(info.tiny) * factor).astype(value.dtype)


def scale_data(value: Data, factor: float) -> Data:
    """Multiply a value by a power of two, or by zero; None if its type has no such number."""
    if isinstance(value, list):
        scaled = [scale_data(item, factor) for item in value]
        return None if any(item is None for item in scaled) else scaled
    with np.errstate(all="ignore"):
        if factor == 0:
            result = np.zeros_like(value)
            return None if result.astype(np.float64).any() else result
        wide = value.astype(np.float64)
        result = (wide * factor).astype(value.dtype)
        return result if np.array_equal(np.isfinite(result.astype(np.float64)), np.isfinite(wide)) else None


def find_difference(before: Data, after: Data, degree: Degree, factor: float, tolerance: float) -> str:
    """Describe how a result differs from `before * factor ** degree`, or return an empty text.

    Zeros, infinities and NaN have every degree.
    """
    if isinstance(before, list):
        if len(before) != len(after):
            return f"{len(after)} members in place of {len(before)}"
        parts = (find_difference(one, two, degree, factor, tolerance) for one, two in zip(before, after, strict=True))
        return next(filter(None, parts), "")
    if before is None or after is None:
        return "" if before is after else "one of two results is empty"
    if before.shape != after.shape:
        return f"shape {list(after.shape)} in place of {list(before.shape)}"
    if not is_float_data(before):
        return _find_integer_difference(before, after, degree)
    with np.errstate(all="ignore"):
        first, got = before.astype(np.float64), after.astype(np.float64)
        if degree is ZERO:
            want, same = np.zeros_like(first), (got == 0) | ~np.isfinite(got)
        else:
            want = first * factor**degree
            same = (got == want) | (np.isnan(got) & np.isnan(want))
            same |= _out_of_range(before.dtype, first, got, want, factor)
            if tolerance:
                same |= np.isclose(got, want, rtol=max(tolerance, float(_float_info(before.dtype).eps)), atol=0)
    if same.all():
        return ""
    at = int(np.argmin(same.ravel()))
    return f"{got.ravel()[at]:.6g} in place of {want.ravel()[at]:.6g} ({int((~same).sum())} of {same.size})"


def _out_of_range(
    dtype: np.dtype[Any], before: np.ndarray, got: np.ndarray, want: np.ndarray, factor: float
) -> np.ndarray:
    """Mark the elements that a type cannot show: too large, or so small that they are rounded."""
    info = _float_info(dtype)
    largest, least = float(info.max), 4 * float(info.tiny) * max(factor, 1 / factor)
    result = np.isfinite(before) & (np.abs(want) >= largest)
    result |= (np.abs(want) < least) & (np.abs(got) < least)
    if dtype.itemsize == 1:  # out of range is NaN, infinity or the largest number
        result |= ~(np.abs(before) < largest) | ~(np.abs(got) < largest) | (np.abs(before) < least)
    return result


def _find_integer_difference(before: np.ndarray, after: np.ndarray, degree: Degree) -> str:
    if degree not in (0, ZERO):
        return f"{before.dtype} has no degree"
    return "" if np.array_equal(before, after) else f"{after.ravel()[:4]} in place of {before.ravel()[:4]}"


def all_close(outputs: Sequence[Data], expected: Sequence[Data]) -> bool:
    """Return whether results are about those that a case comes with."""
    for actual, wanted in zip(outputs, expected, strict=True):
        if isinstance(wanted, np.ndarray) and is_float_data(wanted):
            one, two = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
            if one.shape != two.shape or not np.allclose(one, two, rtol=1e-2, atol=1e-4, equal_nan=True):
                return False
    return True
