"""Widths of the rows in which a GPU tests gradients: one width for as many gradients as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["row_widths"]

# Chosen for a GPU's kernels: a narrow result uses few cores, and a wide one is more memory to write and read.
_WIDTHS = np.arange(2**14, 2**9 - 1, -1)  # the widest first
_FEWEST_ROWS = 8  # at most an eighth of a gradient is written
_MOST_ROWS = 2**16  # zeros in the file, 256 kB
_SHORT = 2**12  # elements: one block of threads reads them all


def row_widths(sizes: Iterable[int]) -> dict[int, int]:
    """Return `{size: width}` for numbers of elements; a vector of zeros times `[size / width, width]` is a `[width]`.

    The first width divides the most sizes; among equals, it is the widest. The next width is chosen in the same way for
    the remaining sizes. Width 1, a dot product, is for small sizes, and sizes that the first width does not divide. A
    large size without a divisor in range has no width.

    Args:
        sizes: the sizes of the gradients, at least 1 each.
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
