"""Buckets: gradients one after the other in few contiguous arrays of bounded size, so that one message moves each."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from graphscale.errors import SplitError

__all__ = ["BUCKET_BYTES", "Bucket", "Gradient", "Segment", "bucket_size", "in_stages", "lay_out", "lay_out_shares"]

# What PyTorch's DistributedDataParallel takes for a bucket: large enough for the bandwidth, small enough to overlap.
BUCKET_BYTES = 25 * 2**20
_LEAST = 64
_UNITS = {"": 1, "k": 10**3, "ki": 2**10, "m": 10**6, "mi": 2**20, "g": 10**9, "gi": 2**30}


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient that is reduced.

    Attributes:
        name: its name in the graph.
        dtype: FLOAT or DOUBLE; also the smaller types where a fixed loss scale divides in them.
        shape: its shape.
    """

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.elements * int(self.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Segment:
    """The elements `begin` to `end` of a flattened gradient."""

    gradient: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Segments of gradients of one dtype, one after the other.

    Attributes:
        name: of the output that gives it and the input that takes it.
        dtype: of its elements.
        stage: the part of the first half that gives it, from 0.
        segments: what it holds, in order.
    """

    name: str
    dtype: ir.DataType
    stage: int
    segments: tuple[Segment, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return sum(segment.end - segment.begin for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.elements * int(self.dtype.itemsize)


def bucket_size(size: object) -> int:
    """Return the bytes of a bucket.

    Args:
        size: a number of bytes, or a text like "4 MiB", "500kB" or "65536".

    Raises:
        SplitError: it is no size, or smaller than 64 bytes.
    """
    wanted = f"the bucket size {size!r} is no size: give bytes, {_LEAST} or more, as a whole number or like '25MiB'"
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", size, re.IGNORECASE)
        if match is None:
            raise SplitError(wanted)
        number = float(match[1]) * _UNITS[(match[2] or "").lower()]
        if not number.is_integer():
            raise SplitError(wanted)
        size = int(number)
    if isinstance(size, bool) or not isinstance(size, int) or size < _LEAST:
        raise SplitError(wanted)
    return size


def in_stages(gradients: Sequence[Gradient], stages: object) -> list[list[Gradient]]:
    """Divide gradients, in their order, among stages, so that each gives about as many bytes.

    Raises:
        SplitError: that is no number of stages, or there are more stages than gradients.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise SplitError(f"{stages!r} is no number of stages: give a whole number, 1 or more")
    if stages > len(gradients):
        raise SplitError(
            f"{stages} stages do not fit: the step has {len(gradients)} gradients, and each stage gives one"
        )
    total, done = sum(gradient.nbytes for gradient in gradients), 0
    found: list[list[Gradient]] = [[]]
    for i, gradient in enumerate(gradients):
        left, wanted = len(gradients) - i, stages - len(found)
        full = done + gradient.nbytes / 2 > total * len(found) / stages
        if found[-1] and wanted and (full or left <= wanted):
            found.append([])
        found[-1].append(gradient)
        done += gradient.nbytes
    return found


def lay_out(stages: Iterable[Sequence[Gradient]], nbytes: int) -> list[Bucket]:
    """Put gradients into buckets, in their order; what does not fit into the rest of one goes on in the next.

    Args:
        stages: the gradients of each stage.
        nbytes: what a bucket holds at most.
    """
    buckets: list[Bucket] = []
    for stage, gradients in enumerate(stages):
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            room = max(1, nbytes // int(dtype.itemsize))
            segments: list[Segment] = []
            for gradient in (gradient for gradient in gradients if gradient.dtype is dtype):
                begin = 0
                while begin < gradient.elements:
                    free = room - sum(segment.end - segment.begin for segment in segments)
                    if free == 0:
                        buckets.append(Bucket(f"gradients.{len(buckets)}", dtype, stage, tuple(segments)))
                        segments, free = [], room
                    end = min(gradient.elements, begin + free)
                    segments.append(Segment(gradient.name, begin, end))
                    begin = end
            if segments:
                buckets.append(Bucket(f"gradients.{len(buckets)}", dtype, stage, tuple(segments)))
    return buckets


def lay_out_shares(
    stages: Iterable[Sequence[Gradient]], owners: Mapping[str, int], size: int, nbytes: int
) -> list[Bucket]:
    """Put gradients into buckets in which those of each owner stand together, owner after owner.

    A gradient is in one bucket as a whole: one that is larger than its owner's part of a bucket makes a larger bucket.

    Args:
        stages: the gradients of each stage.
        owners: the owner of each gradient, from 0.
        size: how many owners there are.
        nbytes: what a bucket holds at most, where the gradients allow it.
    """
    buckets: list[Bucket] = []
    for stage, gradients in enumerate(stages):
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            waiting = [
                [g for g in gradients if g.dtype is dtype and owners[g.name] == rank and g.elements]
                for rank in range(size)
            ]
            while any(waiting):
                segments: list[Segment] = []
                for queue in waiting:
                    room = nbytes // size
                    while queue and (room >= queue[0].nbytes or room == nbytes // size):
                        gradient = queue.pop(0)
                        room -= gradient.nbytes
                        segments.append(Segment(gradient.name, 0, gradient.elements))
                buckets.append(Bucket(f"gradients.{len(buckets)}", dtype, stage, tuple(segments)))
    return buckets
