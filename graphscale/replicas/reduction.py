"""The mean of gradients over replicas, in their own memory, and its finite check."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from graphscale.errors import ReplicaError
from graphscale.replicas.buckets import Bucket
from graphscale.replicas.collectives import Replicas, Wait

__all__ = ["Reduction", "mean_and_check"]

Array = np.ndarray[Any, Any]

_CHUNK = 2**16  # number of elements that remain in the cache between two passes


class Reduction:
    """The reduction of a step's buckets, those of a stage while the next one runs.

    With more than one stage, the operations run in their own thread, in parallel to ONNX Runtime; no other thread may
    call MPI until `finish` has returned.

    Args:
        replicas, buckets: all of them.
        begin: begins the reduction of a bucket, by its number.
        results: for each bucket, the memory of this replica's result.

    Raises:
        ReplicaError: there are several stages, and the MPI library was not started for threads.
    """

    def __init__(
        self, replicas: Replicas, buckets: list[Bucket], begin: Callable[[int], Wait], results: list[Array]
    ) -> None:
        self._replicas, self._buckets, self._begin, self._parts = replicas, buckets, begin, results
        self._thread: ThreadPoolExecutor | None = None
        self._results: list[Callable[[], bool]] = []
        if replicas.size > 1 and any(bucket.stage for bucket in buckets):
            if not replicas.takes_threads:
                raise ReplicaError(
                    "stages overlap with the reduction in a thread, and MPI was started without support for threads; "
                    "let mpi4py initialize it (mpi4py.rc.threads is True by default), or take one stage"
                )
            self._thread = ThreadPoolExecutor(1, "graphscale-reduction")

    def start(self, stage: int) -> None:
        """Begin to reduce the buckets of a stage."""
        if self._replicas.size == 1:
            return
        own = [i for i, bucket in enumerate(self._buckets) if bucket.stage == stage]
        if self._thread is None:
            finite = self._reduce(own)
            self._results.append(lambda: finite)
        else:
            self._results.append(self._thread.submit(self._reduce, own).result)

    def finish(self) -> bool:
        """Wait for all buckets; return whether all are finite. A single replica leaves the check to its step."""
        results, self._results = self._results, []
        finite = [result() for result in results]  # wait for all: until then, only the thread may call MPI
        return all(finite)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _reduce(self, own: list[int]) -> bool:
        """Reduce some buckets, each while the one before is averaged and checked."""
        waits = [self._begin(i) for i in own[:1]]
        finite = True
        for at, i in enumerate(own):
            waits[at]()
            if at + 1 < len(own):
                waits.append(self._begin(own[at + 1]))
            finite &= mean_and_check(self._parts[i], self._replicas.size)
        return finite


def mean_and_check(array: Array, count: int) -> bool:
    """Divide a sum by a number of replicas, in place; return whether all elements are finite.

    A finite sum of all elements proves them finite; a non-finite one may be an overflow, so that each element is
    checked.
    """
    finite = True
    with np.errstate(all="ignore"):
        for begin in range(0, array.size, _CHUNK):
            part = array[begin : begin + _CHUNK]
            np.divide(part, part.dtype.type(count), out=part)
            finite = finite and (bool(np.isfinite(part.sum())) or bool(np.isfinite(part).all()))
    return finite
