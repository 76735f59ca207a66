"""Each replica's share of the data: its part of every batch, whose samples it alone reads."""

from __future__ import annotations

import os
import struct
import zipfile
from typing import Any

import numpy as np

from graphscale.errors import TrainingError
from graphscale.files.tensor_files import read_npz
from graphscale.training.data import Batches, Data

__all__ = ["Share", "map_npz"]

_LOCAL_HEADER = struct.Struct("<26xHH")  # before a member of a zip file; the lengths of its name and extra field


class Share(Batches):
    """This replica's part of the batches of a run: the run is that of one process, with any number of them.

    Sample for sample, the parts of all replicas are the batch that one process would have. What is left at the end of
    an epoch is a smaller batch; samples of it that cannot be divided are left out.

    Args:
        data, seed, shuffle: as for `Batches`.
        size: the batch size, of all replicas together; None for the one that the step fixes for each, or 32.
        rank: the number of this replica, from 0.
        replicas: how many there are.

    Raises:
        TrainingError: the size cannot be divided among the replicas, or there are too few samples.
    """

    def __init__(self, data: Data, size: int | None, seed: int, shuffle: bool, rank: int, replicas: int) -> None:
        fixed = data.batch_size
        if fixed is not None and size not in (None, fixed * replicas):
            raise TrainingError(
                f"--batch-size {size}: the inputs of the step have a fixed batch of {fixed}, and {replicas} replicas "
                f"take {fixed * replicas} samples together"
            )
        super().__init__(data, fixed if fixed is not None else size, seed, shuffle)
        self._rank, self._replicas = rank, replicas
        self.size = self.size if fixed is None else fixed * replicas
        if self.size % replicas:
            below = self.size - self.size % replicas
            fitting = f"{below} or {below + replicas}" if below else str(replicas)
            raise TrainingError(f"--batch-size {self.size} cannot be divided among {replicas} replicas; take {fitting}")
        rest = data.samples % self.size
        self.per_epoch = data.samples // self.size + (fixed is None and rest >= replicas)
        if self.per_epoch == 0:
            raise TrainingError(f"the data has {data.samples} samples, too few for a batch of {replicas} replicas")

    def _samples(self, number: int) -> np.ndarray[Any, Any]:
        """Return this replica's part of the samples of a batch."""
        chosen = super()._samples(number)
        share = len(chosen) // self._replicas
        return chosen[self._rank * share : (self._rank + 1) * share]


def map_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Map the arrays of an .npz file into memory where `numpy.savez` wrote them: only used parts are read.

    Compressed arrays are read whole.

    Raises:
        TrainingError: the file is missing, damaged, of another kind, or holds Python objects.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            members = archive.infolist()
            if archive.testzip() is not None or any(m.compress_type != zipfile.ZIP_STORED for m in members):
                return read_npz(path, TrainingError)
            return {m.filename.removesuffix(".npy"): _mapped(path, file, m) for m in members}
    except (OSError, ValueError, KeyError, struct.error, NotImplementedError, zipfile.BadZipFile):
        return read_npz(path, TrainingError)  # which says what is wrong


def _mapped(path: str | os.PathLike[str], file: Any, member: zipfile.ZipInfo) -> np.ndarray[Any, Any]:
    file.seek(member.header_offset)
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    file.seek(name + extra, os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError("an .npy format that is not read here")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject or not dtype.isnative or 0 in shape or shape == ():
        raise ValueError("an array that is better read whole")
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
