"""Widths of the rows in which a GPU tests gradients: one width for as many gradients as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["row_widths"]

# By the kernels of a GPU: a narrow result occupies few of its cores, and a wide one is memory to write and read again.
_WIDTHS = np.arange(2**14, 2**9 - 1, -1)  # the widest first
_FEWEST_ROWS = 8  # so that at most an eighth of a gradient is written
_MOST_ROWS = 2**16  # zeros in the file, 256 kB
_SHORT = 2**12  # elements: one block of threads reads them all


def row_widths(sizes: Iterable[int]) -> dict[int, int]:
    """Return `{size: width}` for numbers of elements; a vector of zeros times `[size / width, width]` is a `[width]`.

    The first width is the one that divides the most sizes, the wider of two; then so for those that remain. Width 1, a
    dot product, is for sizes that are small, or that the first width does not divide. A large size without a divisor in
    range has no width.

    Args:
        sizes: at least 1 each, one for each gradient.
    """
    counts = Counter(sizes)
    found = {size: 1 for size in counts if size <= _MOST_ROWS}
    left = [size for size in counts if size > _SHORT]
    while left:
        votes = sum(counts[size] * _fits(size) for size in left)
        best = int(_WIDTHS[np.argmax(votes)])
        members = [size for size in left if _fits(size)[best == _WIDTHS]]
        if not members:
            break
        found |= dict.fromkeys(members, best)
        left = [size for size in left if size > _MOST_ROWS and size not in members]
    return found


def _fits(size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each width whether it divides a number of elements into rows."""
    rows, remainders = np.divmod(size, _WIDTHS)
    fits: np.ndarray[Any, np.dtype[np.bool_]] = (remainders == 0) & (rows >= _FEWEST_ROWS) & (rows <= _MOST_ROWS)
    return fits
