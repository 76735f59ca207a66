"""Collective operations with a time limit: no replica waits forever for a dead or hanging one."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from graphscale.errors import GraphscaleError, ReplicaError, one_line
from graphscale.process.extras import install_command
from graphscale.process.streams import tell
from graphscale.replicas.notices import Notices
from graphscale.replicas.witness import Witness, dismiss_all

__all__ = [
    "HEARD",
    "Replicas",
    "Traffic",
    "Wait",
    "available_cores",
    "describe_error",
    "has_launcher",
    "import_mpi",
    "launched_size",
]

T = TypeVar("T")
Array = np.ndarray[Any, Any]
# Waits for the end of a collective operation.
Wait = Callable[[], None]

# Environment variables that launchers set for their processes: those of MPICH and Intel MPI, Open MPI, and MVAPICH.
# With other launchers, `--replicas` announces several processes.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# Seconds for the launcher to pass messages on: it drops them when it ends the processes.
HEARD = 0.3
_EAGER = 0.02  # seconds of polling without yielding the core, if there are enough cores
_SPIN = 1.0  # seconds of polling without a pause: MPI moves data only while it is polled
_PAUSE = 0.0002  # seconds
_LOOK = 1.0  # seconds between checks that the others are alive


def launched_size() -> int:
    """Return the number of processes that a launcher of MPI has started with this one; 1 without a launcher."""
    sizes = [os.environ[name] for name in SIZE_VARIABLES if name in os.environ]
    return max((int(size) for size in sizes if size.isdecimal()), default=1)


def has_launcher() -> bool:
    """Return whether a launcher of MPI has started this process."""
    return any(name in os.environ for name in SIZE_VARIABLES)


def import_mpi() -> Any:
    """Return mpi4py's MPI module.

    Raises:
        ReplicaError: mpi4py is missing, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ReplicaError(
            f"replicas need mpi4py and an MPI library, which cannot be imported here ({one_line(error)}); install "
            f"them: {install_command('mpi')}"
        ) from error
    return MPI


def available_cores() -> int:
    """Return the available cores of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass
class Traffic:
    """The bytes and calls of one replica's collective operations.

    Attributes:
        messages: number of operations on gradients and weights.
        bytes: the bytes of their buffers.
        control: number of other operations: flags, metrics, state.
        control_bytes: the bytes of their buffers.
    """

    messages: int = 0
    bytes: int = 0
    control: int = 0
    control_bytes: int = 0


class Replicas:
    """The processes that train together, one replica each.

    Args:
        comm: an intra-communicator of mpi4py. The session duplicates it, so that other messages do not interfere.
        timeout: the longest wait for the others, in seconds.

    Attributes:
        rank: the number of this replica, from 0.
        size: number of replicas.
        traffic: the share of this replica in collective operations.

    Raises:
        ReplicaError: the communicator is invalid, mpi4py is missing, or mpiexec is of another MPI than mpi4py.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        self._mpi = _checked(comm)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ReplicaError(f"timeout={timeout!r}: expected seconds, more than 0")
        self._timeout = float(timeout)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.traffic = Traffic()
        self._peers: dict[int, tuple[str, int]] = {}
        self._comm: Any = comm
        self._eager = 0.0
        self._begun = 0  # number of operations, the same on all replicas
        self._notices: Notices | None = None
        if self.size > 1:
            self._comm, request = comm.Idup()
            self.wait(request.Test, "the start of all replicas")
            here = f"{secrets.token_hex(8)} {os.getpid()} {socket.gethostname()}"
            texts = [text.split(" ", 2) for text in self.exchange(here, "the start of all replicas")]
            self._peers = {rank: (host, int(pid)) for rank, (_, pid, host) in enumerate(texts)}
            self._token = texts[0][0]
            if self.neighbours <= available_cores():
                self._eager = _EAGER
            here_too = {rank: pid for rank, (host, pid) in self._peers.items() if host == socket.gethostname()}
            key = tuple(self._peers.items())
            if key not in Notices.present:
                notices, request = self._comm.Idup()
                self.wait(request.Test, "the start of all replicas")
                Notices.present[key] = Notices(self._mpi, notices)
            self._notices = Notices.present[key]
            self._witness = Witness.of(here_too, self.rank, self._token)
            atexit.register(self._leave_at_exit, os.getpid())

    @property
    def takes_threads(self) -> bool:
        """True if other threads than the first may call MPI."""
        return bool(self._mpi.Query_thread() >= self._mpi.THREAD_SERIALIZED)

    @property
    def neighbours(self) -> int:
        """The number of replicas on this machine, this one included."""
        return sum(host == socket.gethostname() for host, _ in self._peers.values()) or 1

    @property
    def is_first(self) -> bool:
        """True for rank 0, which reads and writes for all."""
        return self.rank == 0

    def sum_in_place(self, array: Array, what: str) -> Wait:
        """Begin to sum an array over all replicas, in its own memory."""
        return self._begin_payload(array, self._start("Iallreduce", self._mpi.IN_PLACE, array), what)

    def scatter_sums(self, array: Array, share: Array, counts: Sequence[int], what: str) -> Wait:
        """Begin to sum an array over all replicas; each gets its share of `counts[rank]` elements."""
        return self._begin_payload(array, self._start("Ireduce_scatter", array, share, counts), what)

    def gather_shares(self, array: Array, counts: Sequence[int], what: str) -> Wait:
        """Begin to send all parts of an array to all replicas; each holds its own `counts[rank]` elements in place."""
        request = self._start("Iallgatherv", self._mpi.IN_PLACE, [array, (counts, _starts(counts))])
        return self._begin_payload(array, request, what)

    def sums(self, array: Array, what: str) -> Array:
        """Sum a small array over all replicas."""
        return self._reduced(array.copy(), what, self._mpi.SUM)

    def all_true(self, flags: Array, what: str) -> Array:
        """Return for each of some flags whether it is true on all replicas (MPI.LAND)."""
        return self._reduced(np.array(flags, dtype=np.bool_), what, self._mpi.LAND)

    def broadcast(self, array: Array, what: str, root: int = 0) -> None:
        """Copy the content of one replica's array to all replicas, in place."""
        flat = array.reshape(-1).view(np.uint8)
        self._finish_control(flat, self._start("Ibcast", flat, root), what)

    def exchange(self, text: str, what: str) -> list[str]:
        """Return the texts of all replicas, by rank."""
        if self.size == 1:
            return [text]
        data = np.frombuffer(text.encode(), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self.wait(self._start("Iallgather", np.asarray([data.size], np.int64), sizes).Test, what)
        counts = sizes.tolist()
        starts = _starts(counts)
        found = np.empty(sum(counts), np.uint8)
        self._finish_control(found, self._start("Iallgatherv", data, [found, (counts, starts)]), what)
        return [bytes(found[s : s + n]).decode() for s, n in zip(starts, counts, strict=True)]

    def wait(self, done: Callable[[], Any], what: str) -> None:
        """Wait for the end of an operation; end all replicas if one has died or does not take part."""
        begin = time.monotonic()
        look = begin + _LOOK
        try:
            while not done():
                now = time.monotonic()
                if now - begin > self._eager:
                    time.sleep(0 if now - begin < _SPIN else _PAUSE)
                if now >= look:
                    look = now + _LOOK
                    self._abort_if_gone(what)
                    if now - begin > self._timeout:
                        self.abort(
                            f"waited {self._timeout:g} s for {what}: another replica hangs, is slow, or has left the "
                            "loop"
                        )
        except self._mpi.Exception as error:
            self.abort(f"{what} has failed: {one_line(error)}")

    def agreed(self, act: Callable[[], T], what: str) -> T:
        """Call a function that may fail on any replica: after a failure on one, it fails on all.

        Raises:
            ReplicaError: the function failed; the message has the rank and the text of the error.
        """
        try:
            result = act()
        except BaseException as error:
            self.raise_together(error, what)
            raise
        self.raise_together(None, what)
        return result

    def raise_together(self, error: BaseException | None, what: str) -> None:
        """Raise the error of one replica, if any, on all replicas."""
        texts = self.exchange("" if error is None else describe_error(error), what)
        failed = [(rank, text) for rank, text in enumerate(texts) if text]
        if error is not None and (self.size == 1 or not isinstance(error, Exception)):
            raise error
        if failed:
            rank, text = failed[0]
            raise ReplicaError(text if self.size == 1 else f"rank {rank}: {text}") from error

    def abort(self, text: str, code: int = 1) -> NoReturn:
        """Print a message, and end the processes of all replicas with an exit code."""
        tell(f"rank {self.rank}: {one_line(text)}")
        dismiss_all()
        time.sleep(HEARD)
        self._comm.Abort(code)
        os._exit(code)  # if Abort returns

    def close(self, reason: str = "has closed its session") -> None:
        """Leave the others, once, and free the communicator, as the others do."""
        if self.size > 1 and not self._mpi.Is_finalized():
            self._leave(reason)
            self._comm.Free()

    def _leave(self, reason: str) -> None:
        """Send the others the reason why this replica leaves."""
        atexit.unregister(self._leave_at_exit)
        if self._notices is not None:
            self._notices.send(self._token, self._begun, reason)
        self._witness.leave()

    def _leave_at_exit(self, process: int) -> None:
        """Leave the others at the interpreter's end, or end them after an uncaught exception."""
        if process != os.getpid() or self._mpi.Is_finalized():
            return
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.abort(describe_error(error))
        self._leave("has ended its program")

    def _start(self, operation: str, *arguments: Any, **options: Any) -> Any:
        self._begun += 1
        return getattr(self._comm, operation)(*arguments, **options)

    def _begin_payload(self, array: Array, request: Any, what: str) -> Wait:
        self.traffic.messages += 1
        self.traffic.bytes += array.nbytes
        return functools.partial(self.wait, request.Test, what)

    def _finish_control(self, array: Array, request: Any, what: str) -> None:
        self.traffic.control += 1
        self.traffic.control_bytes += array.nbytes
        self.wait(request.Test, what)

    def _reduced(self, array: Array, what: str, operation: Any) -> Array:
        self._finish_control(array, self._start("Iallreduce", self._mpi.IN_PLACE, array, op=operation), what)
        return array

    def _abort_if_gone(self, what: str) -> None:
        """End all replicas if one has died, or has left before an operation that this one has begun."""
        here = socket.gethostname()
        for rank, (host, pid) in self._peers.items():
            if host == here and rank != self.rank and not _lives(pid):
                self.abort(f"rank {rank} (process {pid} on {host}) has died, {what} cannot be done")
        if self._notices is not None:
            leaver = self._notices.find_leaver(self._token, self._begun)
            if leaver is not None:
                self.abort(f"{leaver}, {what} cannot be done")


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts[:-1])]


def describe_error(error: BaseException) -> str:
    """Return an error in one line, with its class unless it is graphscale's own."""
    text = one_line(error)
    return text if isinstance(error, GraphscaleError) and text else f"{type(error).__name__}: {text}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The state follows the name in parentheses; it is Z for an ended process.
        return text.rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):
        return True


def _checked(comm: Any) -> Any:
    mpi = import_mpi()
    if not isinstance(comm, mpi.Intracomm):
        raise ReplicaError(f"comm is {comm!r}, and no communicator: pass mpi4py.MPI.COMM_WORLD, or a part of it")
    if comm == mpi.COMM_NULL:
        raise ReplicaError("comm is MPI.COMM_NULL: this process is no member of the communicator")
    launched = launched_size()
    if launched > 1 and mpi.COMM_WORLD.Get_size() == 1:
        raise ReplicaError(
            f"mpiexec has started {launched} processes, but MPI sees this one alone: mpiexec is of another MPI than "
            f"the one that mpi4py uses ({mpi.Get_library_version().splitlines()[0].strip()}); use the mpiexec beside it"
        )
    return mpi
