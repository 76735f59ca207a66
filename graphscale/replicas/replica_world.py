"""`mpiexec -n N graphscale train`: several processes that begin a run and end it together."""

from __future__ import annotations

import faulthandler
import json
import os
import struct
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.errors import GraphscaleError, ReplicaError, TrainingError, one_line
from graphscale.files.tensor_files import read_npz
from graphscale.process.extras import install_command
from graphscale.process.streams import tell
from graphscale.replicas.agreement import agree
from graphscale.replicas.collectives import HEARD, Replicas, import_mpi, launched_size
from graphscale.replicas.replicated_session import ReplicatedSession
from graphscale.replicas.witness import dismiss_all
from graphscale.training.checkpoints import Checkpoints
from graphscale.training.data import Arrays, Batches, Data
from graphscale.training.run import World

__all__ = ["ReplicaWorld", "Share", "map_npz"]

_FIRST_SPEAKS = 1.0  # seconds for rank 0 to print a common error first
_LOCAL_HEADER = struct.Struct("<26xHH")  # before a member of a zip file; the lengths of its name and extra field


def _start_mpi(timeout: float) -> Any:
    """Import MPI, which waits in C for all started processes, even for one that has already ended.

    Then Python's own watchdog ends this process, and prints the waiting line.
    """
    if launched_size() == 1 or not timeout > 0:
        return import_mpi()
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        return import_mpi()
    finally:
        faulthandler.cancel_dump_traceback_later()


class ReplicaCheckpoints(Checkpoints):
    """The checkpoints of a run with several replicas: rank 0 reads and writes the files, and all take part."""

    def __init__(self, replicas: Replicas, folder: str | os.PathLike[str], keep: int = 3) -> None:
        super().__init__(folder, keep)
        self._replicas = replicas

    def all(self) -> list[Path]:
        """Return the checkpoints of rank 0, the oldest first, on all replicas."""
        found = super().all() if self._replicas.is_first else []
        texts = self._replicas.exchange(json.dumps([str(path) for path in found]), "the list of checkpoints")
        return [Path(text) for text in json.loads(texts[0])]

    def newest_state(self) -> Arrays:
        """Return the arrays of the newest checkpoint on rank 0; none elsewhere, since rank 0 sends them to all."""
        if self._replicas.is_first:
            return super().newest_state()
        self.all()  # as rank 0 does
        return {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder, and lock it against other runs, on rank 0."""
        with super().opened() if self._replicas.is_first else nullcontext():
            yield

    def _remove(self, path: Path) -> None:
        if self._replicas.is_first:
            super()._remove(path)


class Share(Batches):
    """This replica's part of the batches of a run, which equals the run of a single process.

    Together, the parts of all replicas are the batch of a single process. The rest of an epoch is a smaller batch,
    without samples that cannot be divided.

    Args:
        data, seed, shuffle: as for `Batches`.
        size: the batch size of all replicas together; None for the step's fixed size for each, or 32.
        rank: the number of this replica, from 0.
        replicas: number of replicas.

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
    """Map the arrays of an .npz file by `numpy.savez` into memory: only used parts are read.

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
        return read_npz(path, TrainingError)  # which names the fault


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


class ReplicaWorld(World):
    """The replicas of a run from the command line.

    Args:
        replicas: number of replicas; None for the number of started processes.
        bucket_bytes, stages, timeout, sharded: as for `ReplicatedSession`.

    Raises:
        ReplicaError: mpi4py is missing, or another number of processes was started.
    """

    def __init__(self, replicas: int | None, **settings: Any) -> None:
        self._comm = _start_mpi(settings["timeout"]).COMM_WORLD
        self._settings = settings
        self._wanted = replicas
        size = self._comm.Get_size()
        if replicas is not None and replicas < 1:
            raise ReplicaError(f"--replicas {replicas}: expected 1 or more")
        if replicas is not None and launched_size() == 1 and replicas != size:
            raise ReplicaError(
                f"--replicas {replicas}: this process is alone; start {replicas} of them: mpiexec -n {replicas} "
                f"graphscale train ... ({install_command('mpi')} brings mpiexec)"
            )
        self.is_first = self._comm.Get_rank() == 0
        self._replicas: Replicas
        self._session: ReplicatedSession

    def agree(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        """Check that all replicas have the same settings."""
        agree(self._replicas, settings())

    def load(self, path: Path) -> dict[str, np.ndarray[Any, Any]]:
        """Map the arrays of a data file; each replica reads its share."""
        return map_npz(path)

    def batches(self, data: Data, size: int | None, seed: int, shuffle: bool) -> Share:
        """Cut this replica's share out of all batches."""
        return Share(data, size, seed, shuffle, self._replicas.rank, self._replicas.size)

    def checkpoints(self, folder: Path, keep: int) -> ReplicaCheckpoints:
        """Open the folder of the run's checkpoints, which rank 0 reads and writes."""
        return ReplicaCheckpoints(self._replicas, folder, keep)

    def session(self, step: Path, *, providers: list[str] | None, state: Mapping[str, Any]) -> ReplicatedSession:
        """Open the session of this replica."""
        self._session = ReplicatedSession(
            step, self._comm, providers=providers, state=state or None, replicas=self._wanted, **self._settings
        )
        return self._session

    def stops(self, signalled: bool) -> bool:
        """Return whether the run ends with the last step on all replicas, after a signal to one."""
        if signalled:
            self._session.ask_to_stop()
        return self._session.stopping

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """End all replicas, in a `with` block, after an error on one: with one line, and exit code 2 for bad input."""
        try:
            self._replicas = Replicas(self._comm, self._settings["timeout"])
            yield
        except GraphscaleError as error:
            self._end(one_line(error), 2)
        except Exception:
            self._end(traceback.format_exc(), 1)

    def _end(self, text: str, code: int) -> None:
        if self._comm.Get_size() == 1:
            tell(text)
            sys.exit(code)
        if not self.is_first:
            time.sleep(_FIRST_SPEAKS)
        who = "" if self.is_first else f"rank {self._comm.Get_rank()}: "
        tell(f"{who}{text}")
        dismiss_all()
        time.sleep(HEARD)
        self._comm.Abort(code)
