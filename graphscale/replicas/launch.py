"""The facts that a launcher of MPI tells a process that it starts, and the time that it takes to end one."""

from __future__ import annotations

import os

__all__ = ["HEARD", "SIZE_VARIABLES", "launched_size"]

# What launchers tell the processes that they start: those of MPICH and Intel MPI, Open MPI, and MVAPICH. Of others
# `--replicas` says that there are several.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# Seconds for the launcher to pass on what was said: it throws that away when it ends the processes.
HEARD = 0.3


def launched_size() -> int:
    """Return how many processes a launcher of MPI has started with this one; 1 where none has."""
    sizes = [os.environ[name] for name in SIZE_VARIABLES if name in os.environ]
    return max((int(size) for size in sizes if size.isdecimal()), default=1)
