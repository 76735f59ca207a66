"""`mpiexec -n N graphscale train`: whether this process is one of several, and how they begin and end together."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphscale.errors import GraphscaleError, ReplicaError, one_line

if TYPE_CHECKING:
    from graphscale.replicas.collectives import Replicas
    from graphscale.replicas.replicated_session import ReplicatedSession
    from graphscale.training.checkpoints import Checkpoints
    from graphscale.training.data import Batches, Data

__all__ = ["HEARD", "SIZE_VARIABLES", "World", "launched_size"]

# What launchers tell the processes that they start: those of MPICH and Intel MPI, Open MPI, and MVAPICH. Of others
# `--replicas` says that there are several.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# Seconds for the launcher to pass on what was said: it throws that away when it ends the processes.
HEARD = 0.3
_FIRST_SPEAKS = 1.0  # seconds for which the others let rank 0 tell an error that all of them have


def launched_size() -> int:
    """How many processes a launcher of MPI has started with this one; 1 where none has."""
    sizes = [os.environ[name] for name in SIZE_VARIABLES if name in os.environ]
    return max((int(size) for size in sizes if size.isdecimal()), default=1)


def _start_mpi(timeout: float) -> Any:
    """Import MPI, which waits in C for all processes that were started: also for one that has ended before it came.

    Python's own watchdog ends this process then, with the line that it waits in.
    """
    from graphscale.replicas.collectives import import_mpi

    if launched_size() == 1 or not timeout > 0:
        return import_mpi()
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        return import_mpi()
    finally:
        faulthandler.cancel_dump_traceback_later()


class World:
    """The replicas of a run from the command line.

    Args:
        replicas: how many there are to be; None for as many as were started.
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
                "graphscale train ... (pip install 'graphscale[mpi]' brings mpiexec)"
            )
        self._replicas: Replicas

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which draws and writes for all."""
        return bool(self._comm.Get_rank() == 0)

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Check that all replicas have the same settings.

        Raises:
            ReplicaError: with the first that differs.
        """
        from graphscale.replicas.agreement import agree

        agree(self._replicas, settings)

    def load(self, path: Path) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays of a file of data, of which each replica reads its share."""
        from graphscale.replicas.batches import map_npz

        return map_npz(path)

    def batches(self, data: Data, size: int | None, seed: int, shuffle: bool) -> Batches:
        """This replica's share of all batches."""
        from graphscale.replicas.batches import Share

        return Share(data, size, seed, shuffle, self._replicas.rank, self._replicas.size)

    def checkpoints(self, folder: Path, keep: int) -> Checkpoints:
        """Checkpoints that rank 0 reads and writes."""
        from graphscale.replicas.replica_checkpoints import ReplicaCheckpoints

        return ReplicaCheckpoints(self._replicas, folder, keep)

    def session(self, step: Path, *, providers: list[str] | None, state: Mapping[str, Any]) -> ReplicatedSession:
        """The session of this replica."""
        from graphscale.replicas.replicated_session import ReplicatedSession

        return ReplicatedSession(
            step, self._comm, providers=providers, state=state or None, replicas=self._wanted, **self._settings
        )

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Begin, and let an error on one replica end all of them: with one line, exit code 2 where it is bad input."""
        from graphscale.replicas.collectives import Replicas

        try:
            self._replicas = Replicas(self._comm, self._settings["timeout"])
            yield
        except GraphscaleError as error:
            self._end(one_line(error), 2)
        except Exception:
            self._end(traceback.format_exc(), 1)

    def _end(self, text: str, code: int) -> None:
        if self._comm.Get_size() == 1:
            print(f"graphscale: {text}", file=sys.stderr, flush=True)
            sys.exit(code)
        if not self.is_first:
            time.sleep(_FIRST_SPEAKS)
        who = "" if self.is_first else f"rank {self._comm.Get_rank()}: "
        print(f"graphscale: {who}{text}", file=sys.stderr, flush=True)
        time.sleep(HEARD)
        self._comm.Abort(code)
