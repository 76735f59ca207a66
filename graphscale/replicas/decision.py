"""One decision for all replicas: whether the step is applied, and whether they are still in step with each other."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from graphscale.errors import ReplicaError
from graphscale.replicas.collectives import Replicas

__all__ = ["decide", "means"]

Array = np.ndarray[Any, Any]

_FIRST_BIT, _BITS = 3, 32


def decide(
    replicas: Replicas, error: BaseException | None, finite: bool, common: Mapping[str, Any], stop: bool
) -> tuple[bool, bool]:
    """Decide whether all replicas have finite gradients, and whether one wants to stop, by one MPI_LAND of flags.

    The flags are: no error; all finite; go on; and the bits of a checksum of what must be the same on all replicas, and
    of its complement. The checksums agree if each bit is true on all replicas, or its complement is.

    Args:
        replicas: the processes.
        error: what failed on this replica.
        finite: whether the reduced gradients are finite here.
        common: what the second half reads on this replica that must be the same on all.
        stop: whether this replica wants to stop.

    Raises:
        ReplicaError: there is an error on one of them, or they are not in step; all raise it.
    """
    sums = {} if error is not None else {name: checksum(value) for name, value in common.items()}
    total = np.uint32(zlib.crc32(repr(sorted(sums.items())).encode()))
    bits = ((total >> np.arange(_BITS, dtype=np.uint32)) & np.uint32(1)).astype(np.bool_)
    flags = replicas.all_true(
        np.concatenate([[error is None, finite, not stop], bits, ~bits]), "the decision on a step"
    )
    if not flags[0]:
        replicas.raise_together(error, "the exchange of errors")
    if not (flags[_FIRST_BIT : _FIRST_BIT + _BITS] | flags[_FIRST_BIT + _BITS :]).all():
        _raise_difference(replicas, sums)
    return bool(flags[1]), not flags[2]


def means(replicas: Replicas, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the means of small arrays over all replicas, in one operation on float64."""
    if not arrays or replicas.size == 1:
        return dict(arrays)
    flat = np.concatenate([array.astype(np.float64).reshape(-1) for array in arrays.values()])
    total = replicas.sums(flat, "the reduction of metrics")
    with np.errstate(all="ignore"):
        total /= replicas.size
        found, begin = {}, 0
        for name, array in arrays.items():
            found[name] = total[begin : begin + array.size].reshape(array.shape).astype(array.dtype)
            begin += array.size
    return found


def checksum(value: Any) -> int:
    """Return a checksum of a number, an array or a value of ONNX Runtime."""
    array = np.ascontiguousarray(value.numpy() if hasattr(value, "numpy") else value)
    return zlib.crc32(array.tobytes())


def _raise_difference(replicas: Replicas, sums: Mapping[str, int]) -> None:
    texts = replicas.exchange(json.dumps(sums), "the comparison of what is common")
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        here = json.loads(text)
        differing = [name for name in [*first, *here] if first.get(name) != here.get(name)]
        if differing:
            raise ReplicaError(
                f"{differing[0]!r} differs between rank 0 and rank {rank}: the update reads it, and would give other "
                "weights on each; it must be the same on all replicas"
            )
    raise ReplicaError("the replicas are not in step with each other")
