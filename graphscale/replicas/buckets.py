"""Buckets: few contiguous arrays of bounded size, filled with gradients, so that each takes one message."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from graphscale.errors import SplitError

__all__ = [
    "BUCKET_BYTES",
    "LEAST_BYTES",
    "Arena",
    "Bucket",
    "Gradient",
    "Segment",
    "bucket_size",
    "fill_messages",
    "in_stages",
    "lay_out",
    "lay_out_shares",
]

T = TypeVar("T")

# The bucket size of PyTorch's DistributedDataParallel: large enough for the bandwidth, small enough to overlap.
BUCKET_BYTES = 25 * 2**20
LEAST_BYTES = 64
_UNITS = {"": 1, "k": 10**3, "ki": 2**10, "m": 10**6, "mi": 2**20, "g": 10**9, "gi": 2**30}


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient to be reduced.

    Attributes:
        name: its name in the graph.
        dtype: FLOAT or DOUBLE; also smaller types if a fixed loss scale divides in them.
        shape: its shape.
    """

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.elements * int(self.dtype.itemsize)

    def place(self, memory: np.ndarray[Any, Any]) -> Any:
        """Return a value of ONNX Runtime for the gradient, at the beginning of some memory."""
        import onnxruntime as ort

        return ort.OrtValue.ortvalue_from_numpy(memory[: self.elements].reshape(self.shape))


@dataclasses.dataclass(frozen=True)
class Segment:
    """The elements `begin` to `end` of a flattened gradient."""

    gradient: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Segments of gradients of one dtype, in sequence.

    Attributes:
        name: the name of its output in one half, and of its input in the other.
        dtype: the dtype of its elements.
        stage: the part of the first half that computes it, from 0.
        segments: its parts, in order.
    """

    name: str
    dtype: ir.DataType
    stage: int
    segments: tuple[Segment, ...]

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return sum(segment.end - segment.begin for segment in self.segments)


def bucket_size(size: object) -> int:
    """Return the bytes of a bucket.

    Args:
        size: a number of bytes, or a text like "4 MiB", "500kB" or "65536".

    Raises:
        SplitError: the value is no size, or smaller than 64 bytes.
    """
    wanted = (
        f"the bucket size {size!r} is no size: give bytes, {LEAST_BYTES} or more, as a whole number or like '25MiB'"
    )
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", size, re.IGNORECASE)
        number = float(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0.0
        size = int(number) if number.is_integer() else None
    if isinstance(size, bool) or not isinstance(size, int) or size < LEAST_BYTES:
        raise SplitError(wanted)
    return size


def in_stages(gradients: Sequence[Gradient], stages: object) -> list[list[Gradient]]:
    """Divide gradients, in their order, among stages of about equally many bytes.

    Raises:
        SplitError: the number of stages is invalid, or larger than the number of gradients.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise SplitError(f"{stages!r} is no number of stages: give a whole number, 1 or more")
    if stages > len(gradients):
        raise SplitError(
            f"{stages} stages do not fit: the step has {len(gradients)} gradients, and each stage needs one"
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
    """Arrange the gradients of each stage in buckets of limited size, in their order.

    A tensor larger than the rest of a bucket continues in the next.
    """
    buckets: list[Bucket] = []
    for stage, dtype, gradients in _by_dtype(stages):
        room = max(1, nbytes // int(dtype.itemsize))
        begin = 0  # position in the sequence of all gradients, which is cut at multiples of `room`
        held: dict[int, list[Segment]] = {}
        for gradient in gradients:
            end = begin + gradient.elements
            for cut in range(begin // room * room, end, room):
                segment = Segment(gradient.name, max(cut - begin, 0), min(cut + room, end) - begin)
                held.setdefault(cut, []).append(segment)
            begin = end
        for segments in held.values():
            buckets.append(Bucket(f"gradients.{len(buckets)}", dtype, stage, tuple(segments)))
    return buckets


def lay_out_shares(
    stages: Iterable[Sequence[Gradient]], owners: Mapping[str, int], size: int, nbytes: int
) -> list[Bucket]:
    """Arrange gradients in buckets, grouped by owner.

    Each gradient is completely in one bucket: a gradient larger than its owner's part of a bucket enlarges the bucket.

    Args:
        stages: the gradients of each stage.
        owners: the owner of each gradient, from 0 to `size` - 1.
        size: the number of owners.
        nbytes: the largest size of a bucket, if the gradients allow it.
    """
    buckets: list[Bucket] = []
    for stage, dtype, gradients in _by_dtype(stages):
        waiting = [[g for g in gradients if owners[g.name] == rank] for rank in range(size)]
        for message in fill_messages(waiting, lambda gradient: gradient.nbytes, nbytes):
            segments = tuple(Segment(g.name, 0, g.elements) for g in itertools.chain(*message))
            buckets.append(Bucket(f"gradients.{len(buckets)}", dtype, stage, segments))
    return buckets


def fill_messages(waiting: Iterable[Iterable[T]], size: Callable[[T], int], nbytes: int) -> Iterator[list[list[T]]]:
    """Yield messages with waiting things of all owners, owner by owner: at least one of each owner that has any.

    Args:
        waiting: the things of each owner.
        size: returns the bytes of a thing.
        nbytes: the largest size of a message, in equal parts, if the segments allow it.
    """
    queues = [deque(things) for things in waiting]
    part = nbytes // len(queues)
    while any(queues):
        message: list[list[T]] = [[] for _ in queues]
        for queue, taken in zip(queues, message, strict=True):
            room = part
            while queue and (room == part or size(queue[0]) <= room):
                room -= size(queue[0])
                taken.append(queue.popleft())
        yield message


def _by_dtype(stages: Iterable[Sequence[Gradient]]) -> Iterator[tuple[int, ir.DataType, list[Gradient]]]:
    """Yield the gradients with elements of each stage, grouped by dtype."""
    for stage, gradients in enumerate(stages):
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            yield stage, dtype, [g for g in gradients if g.dtype is dtype and g.elements]


class Arena:
    """The memory of all gradients, in the order of the buckets.

    Attributes:
        buckets: the memory of each bucket.
        gradients: for each gradient, a value of ONNX Runtime in that memory.

    Raises:
        SplitError: MPI does not add up the dtype of a gradient.
    """

    def __init__(self, gradients: Sequence[Gradient], buckets: Iterable[Bucket]) -> None:
        for gradient in gradients:
            if gradient.dtype.name not in ("FLOAT", "DOUBLE"):
                raise SplitError(
                    f"the gradient {gradient.name!r} is of {gradient.dtype.name}, which MPI does not add up; let the "
                    "step unscale in float32"
                )
        self.buckets: list[np.ndarray[Any, Any]] = []
        begins: dict[str, np.ndarray[Any, Any]] = {}
        for (_, dtype), group in itertools.groupby(buckets, lambda bucket: (bucket.stage, bucket.dtype)):
            own = list(group)
            rest = np.zeros(sum(bucket.elements for bucket in own), dtype.numpy())
            for bucket in own:
                self.buckets.append(rest[: bucket.elements])
                for segment in bucket.segments:
                    begins.setdefault(segment.gradient, rest)
                    rest = rest[segment.end - segment.begin :]
        self.gradients: dict[str, Any] = {
            gradient.name: gradient.place(begins.get(gradient.name, np.zeros(0, gradient.dtype.numpy())))
            for gradient in gradients
        }
