"""Training data: arrays from files, checked against the inputs of the same names, and cut into batches."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphscale.errors import TrainingError, reporting
from graphscale.files.contents import suffix_of
from graphscale.files.kinds import describe_file
from graphscale.files.tensor_files import read_npz, read_safetensors
from graphscale.process.stages import report_stage

if TYPE_CHECKING:
    from graphscale.session import InputSpec

__all__ = ["Arrays", "Batches", "Data", "load_arrays"]

Arrays = Mapping[str, np.ndarray[Any, Any]]

DEFAULT_BATCH_SIZE = 32


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read every array of an .npz or a .safetensors file, by its suffix.

    Raises:
        TrainingError, ModelFileError: the file is missing, damaged, or of another kind.
    """
    report_stage(f"reading {path}")
    with reporting(TrainingError, f"cannot read {path}"):
        suffix = suffix_of(path)
    if suffix == ".npz":
        return read_npz(path, TrainingError)
    if suffix != ".safetensors":
        other = describe_file(path, "npz")
        raise TrainingError(f"{path}: expected an .npz or a .safetensors file{other and f'; {other}'}")
    return read_safetensors(path)[0]


@dataclasses.dataclass(frozen=True)
class Data:
    """Training data that fits a step.

    Attributes:
        arrays: `{input name: array}`, the first axis of each the samples.
        samples: the number of samples.
        batch_size: the batch size fixed by the step's inputs; None for a free one.
    """

    arrays: Arrays
    samples: int
    batch_size: int | None

    @classmethod
    def check(cls, arrays: Arrays, inputs: Mapping[str, InputSpec], source: str) -> Data:
        """Check arrays, from the file `source`, against the inputs of a step.

        Raises:
            TrainingError: an array fits no input, or has another dtype, shape or number of samples.
        """
        if not arrays:
            raise TrainingError(f"{source} holds no array; the step is fed {_listed(inputs)}")
        for name, array in arrays.items():
            if name not in inputs:
                raise TrainingError(
                    f"{source} has an array {name!r}, but the step is fed {_listed(inputs)}; rename it, or ignore "
                    "such arrays with --ignore-extra"
                )
            _check_array(f"{source}: {name!r}", array, inputs[name])
        first, samples = next((name, len(array)) for name, array in arrays.items())
        for name, array in arrays.items():
            if len(array) != samples:
                raise TrainingError(f"{source}: {first!r} has {samples} samples, but {name!r} has {len(array)}")
        if samples == 0:
            raise TrainingError(f"{source} has no samples: the first axis of {first!r} is 0")
        _check_named_axes(arrays, inputs, source)
        return cls(arrays, samples, _fixed_batch(arrays, inputs, samples, source))

    def describe(self) -> str:
        """Return names, dtypes and shapes in one line."""
        return ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in sorted(self.arrays.items()))

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of the content: names, dtypes, shapes and elements."""
        digest = hashlib.sha256(self.describe().encode())
        for _, array in sorted(self.arrays.items()):
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


class Batches:
    """The batches of a run, each a pure function of the seed and its number, for a resume without further state.

    Epoch e (from 0) goes through the samples in the order `numpy.random.default_rng([seed, e]).permutation(samples)`.
    If the step allows it, the remaining samples are a smaller last batch; else they are left out.

    Args:
        data: the samples.
        size: the batch size; None for the step's fixed size, or 32.
        seed: the seed of the order, 0 or more.
        shuffle: True to shuffle the samples; else every epoch has the order of the file.

    Attributes:
        size: the batch size.
        per_epoch: batches in an epoch.

    Raises:
        TrainingError: the size differs from the step's fixed size, or is not positive.
    """

    def __init__(self, data: Data, size: int | None = None, seed: int = 0, shuffle: bool = True) -> None:
        fixed = data.batch_size
        if fixed is not None and size not in (None, fixed):
            raise TrainingError(f"--batch-size {size}: the inputs of the step have a fixed batch of {fixed}")
        self.size = fixed or (DEFAULT_BATCH_SIZE if size is None else size)
        if self.size < 1:
            raise TrainingError(f"--batch-size {size}: expected 1 or more")
        if seed < 0:
            raise TrainingError(f"--seed {seed}: expected 0 or more")
        self.data, self.seed, self.shuffle = data, seed, shuffle
        self.per_epoch = data.samples // self.size if fixed else -(-data.samples // self.size)
        self._order: tuple[int, np.ndarray[Any, Any]] = (-1, np.empty(0, np.int64))

    def __getitem__(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        """Return a batch by its number, from 0 through all epochs: `{input name: array}`, new copies."""
        chosen = self._samples(number)
        return {name: np.asarray(array[chosen]) for name, array in self.data.arrays.items()}

    def _samples(self, number: int) -> np.ndarray[Any, Any]:
        epoch, position = divmod(number, self.per_epoch)
        if self._order[0] != epoch:
            samples = self.data.samples
            rng = np.random.default_rng([self.seed, epoch])
            self._order = (epoch, rng.permutation(samples) if self.shuffle else np.arange(samples))
        return self._order[1][position * self.size : (position + 1) * self.size]


def _listed(inputs: Mapping[str, InputSpec]) -> str:
    return ", ".join(inputs) or "nothing"


def _check_array(what: str, array: np.ndarray[Any, Any], spec: InputSpec) -> None:
    if not spec.shape:
        raise TrainingError(f"{what} is an array, but the input is a scalar; give it with --feed NAME=VALUE")
    problem = dataclasses.replace(spec, shape=("samples", *spec.shape[1:])).find_misfit(array.dtype, array.shape)
    if problem is not None:
        hint = f"; convert it with .astype({spec.dtype.name!r})" if array.dtype != spec.dtype else ""
        raise TrainingError(f"{what} {problem}{hint}")


def _check_named_axes(arrays: Arrays, inputs: Mapping[str, InputSpec], source: str) -> None:
    """Check that axes with the same name, after the first, have the same size."""
    sizes: dict[str, tuple[str, int]] = {}
    for name, array in arrays.items():
        for axis, size in zip(inputs[name].shape[1:], array.shape[1:], strict=True):
            if isinstance(axis, str) and axis:
                other, expected = sizes.setdefault(axis, (name, size))
                if size != expected:
                    raise TrainingError(
                        f"{source}: the axis {axis!r} has the size {expected} in {other!r}, but {size} in {name!r}"
                    )


def _fixed_batch(arrays: Arrays, inputs: Mapping[str, InputSpec], samples: int, source: str) -> int | None:
    fixed = {name: size for name in arrays if isinstance(size := inputs[name].shape[0], int)}
    if not fixed:
        return None
    first, batch = next(iter(fixed.items()))
    for name, size in fixed.items():
        if size != batch:
            raise TrainingError(
                f"the inputs of the step have different first axes: {first!r} has {batch}, {name!r} {size}; the first "
                "axis of each array in the data must be the samples"
            )
    if samples < batch:
        raise TrainingError(f"{source} has {samples} samples, fewer than the {batch} of the step's fixed batch")
    return batch
