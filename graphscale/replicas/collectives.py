"""Collective operations with a time limit: no replica waits for ever for one that has died or hangs."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from graphscale.errors import GraphscaleError, ReplicaError, one_line
from graphscale.replicas.launch import HEARD, launched_size

__all__ = ["Replicas", "Request", "Traffic", "available_cores", "import_mpi", "told"]

T = TypeVar("T")
Array = np.ndarray[Any, Any]

_EAGER = 0.02  # seconds of asking without letting others have the core, where there are enough cores
_SPIN = 1.0  # seconds of asking without a pause: MPI moves data only while it is asked
_PAUSE = 0.0002  # seconds
_LOOK = 1.0  # seconds between looks whether the others are alive


def import_mpi() -> Any:
    """mpi4py's MPI module.

    Raises:
        ReplicaError: it is missing, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ReplicaError(
            f"replicas need mpi4py and an MPI library, which cannot be imported here ({one_line(error)}); install "
            "them: pip install 'graphscale[mpi]'"
        ) from error
    return MPI


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Traffic:
    """What one replica has given to collective operations.

    Attributes:
        messages: how many operations on gradients and weights there were.
        bytes: the bytes of their buffers.
        control: how many operations there were besides: flags, metrics, state.
        control_bytes: the bytes of their buffers.
    """

    def __init__(self) -> None:
        self.messages = self.bytes = self.control = self.control_bytes = 0

    def count(self, nbytes: int, payload: bool) -> None:
        """Count an operation on a buffer of so many bytes."""
        if payload:
            self.messages, self.bytes = self.messages + 1, self.bytes + nbytes
        else:
            self.control, self.control_bytes = self.control + 1, self.control_bytes + nbytes


class Request:
    """A collective operation under way, and what it is for."""

    def __init__(self, replicas: Replicas, request: Any, what: str) -> None:
        self._replicas, self._request, self._what = replicas, request, what

    def wait(self) -> None:
        """Wait until it is done."""
        self._replicas.wait(self._request.Test, self._what)


class Replicas:
    """The processes that train together, one replica each.

    Args:
        comm: an intra-communicator of mpi4py. It is duplicated: messages of others do not get in the way.
        timeout: seconds after which a replica gives up waiting for the others.

    Attributes:
        rank: the number of this replica, from 0.
        size: how many there are.
        traffic: what this replica has given to collective operations.

    Raises:
        ReplicaError: that is no communicator, mpi4py is missing, or mpiexec is of another MPI than mpi4py.
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
        if self.size > 1:
            self._comm, request = comm.Idup()
            self.wait(request.Test, "the start of all replicas")
            here = f"{socket.gethostname()} {os.getpid()}"
            for rank, text in enumerate(self.exchange(here, "the start of all replicas")):
                host, pid = text.rsplit(" ", 1)
                self._peers[rank] = (host, int(pid))
            if self.neighbours <= available_cores():
                self._eager = _EAGER

    @property
    def takes_threads(self) -> bool:
        """Whether MPI may be called from another thread than the one that started it."""
        return bool(self._mpi.Query_thread() >= self._mpi.THREAD_SERIALIZED)

    @property
    def neighbours(self) -> int:
        """How many replicas run on this machine, this one included."""
        return sum(host == socket.gethostname() for host, _ in self._peers.values()) or 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reads and writes for all."""
        return self.rank == 0

    def sum_in_place(self, array: Array, what: str) -> Request:
        """Begin to add up an array over all replicas, in its own memory."""
        self.traffic.count(array.nbytes, payload=True)
        return Request(self, self._comm.Iallreduce(self._mpi.IN_PLACE, array), what)

    def scatter_sums(self, array: Array, share: Array, counts: list[int], what: str) -> Request:
        """Begin to add up an array over all replicas; each gets its share of `counts[rank]` elements."""
        self.traffic.count(array.nbytes, payload=True)
        return Request(self, self._comm.Ireduce_scatter(array, share, counts), what)

    def gather_shares(self, array: Array, counts: list[int], what: str) -> Request:
        """Begin to give each replica all parts of an array; each has its own `counts[rank]` elements in place."""
        self.traffic.count(array.nbytes, payload=True)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return Request(self, self._comm.Iallgatherv(self._mpi.IN_PLACE, [array, (counts, starts)]), what)

    def sums(self, array: Array, what: str) -> Array:
        """Add up a small array over all replicas."""
        self.traffic.count(array.nbytes, payload=False)
        found = array.copy()
        self.wait(self._comm.Iallreduce(self._mpi.IN_PLACE, found).Test, what)
        return found

    def all_true(self, flags: Array, what: str) -> Array:
        """For each of some flags, whether it is true on all replicas (MPI.LAND)."""
        self.traffic.count(flags.nbytes, payload=False)
        found = np.ascontiguousarray(flags, dtype=np.bool_)
        self.wait(self._comm.Iallreduce(self._mpi.IN_PLACE, found, op=self._mpi.LAND).Test, what)
        return found

    def broadcast(self, array: Array, what: str, root: int = 0) -> None:
        """Give every replica the content of one replica's array, in place."""
        flat = array.reshape(-1).view(np.uint8)
        self.traffic.count(flat.nbytes, payload=False)
        self.wait(self._comm.Ibcast(flat, root).Test, what)

    def exchange(self, text: str, what: str) -> list[str]:
        """Return the texts of all replicas, by rank."""
        if self.size == 1:
            return [text]
        data = np.frombuffer(text.encode(), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self.wait(self._comm.Iallgather(np.asarray([data.size], np.int64), sizes).Test, what)
        counts = sizes.tolist()
        starts = [sum(counts[:i]) for i in range(self.size)]
        found = np.empty(sum(counts), np.uint8)
        self.wait(self._comm.Iallgatherv(data, [found, (counts, starts)]).Test, what)
        self.traffic.count(found.nbytes, payload=False)
        return [bytes(found[s : s + n]).decode() for s, n in zip(starts, counts, strict=True)]

    def wait(self, done: Callable[[], Any], what: str) -> None:
        """Wait until an operation is done, and end all replicas where one of them has died or does not come."""
        begin = time.monotonic()
        look = begin + _LOOK
        try:
            while not done():
                now = time.monotonic()
                if now - begin > self._eager:
                    time.sleep(0 if now - begin < _SPIN else _PAUSE)
                if now >= look:
                    look = now + _LOOK
                    for rank, host, pid in self._dead():
                        self.abort(f"rank {rank} (process {pid} on {host}) has died, {what} cannot be done")
                    if now - begin > self._timeout:
                        self.abort(
                            f"waited {self._timeout:g} s for {what}: another replica hangs, is slow, or has left the "
                            "loop"
                        )
        except self._mpi.Exception as error:
            self.abort(f"{what} has failed: {one_line(error)}")

    def agreed(self, act: Callable[[], T], what: str) -> T:
        """Do something that may fail here or elsewhere: where it fails on one replica, it fails on all.

        Raises:
            ReplicaError: it failed, with the rank and the text of the error.
        """
        error: BaseException | None = None
        result: T | None = None
        try:
            result = act()
        except BaseException as caught:
            error = caught
        self.raise_together(error, what)
        return result  # type: ignore[return-value]

    def raise_together(self, error: BaseException | None, what: str) -> None:
        """Raise the error that one replica has on all of them; do nothing where none has one."""
        texts = self.exchange("" if error is None else told(error), what)
        failed = [(rank, text) for rank, text in enumerate(texts) if text]
        if error is not None and (self.size == 1 or not isinstance(error, Exception)):
            raise error
        if failed:
            rank, text = failed[0]
            raise ReplicaError(text if self.size == 1 else f"rank {rank}: {text}") from error

    def abort(self, text: str, code: int = 1) -> NoReturn:
        """Say what is wrong, and end the processes of all replicas with an exit code."""
        print(f"graphscale: rank {self.rank}: {one_line(text)}", file=sys.stderr, flush=True)
        time.sleep(HEARD)
        self._comm.Abort(code)
        os._exit(code)  # where Abort returns

    def close(self) -> None:
        """Free the communicator, which the other replicas do, too."""
        if self.size > 1 and not self._mpi.Is_finalized():
            self._comm.Free()

    def _dead(self) -> Iterator[tuple[int, str, int]]:
        here = socket.gethostname()
        for rank, (host, pid) in self._peers.items():
            if host == here and rank != self.rank and not _lives(pid):
                yield rank, host, pid


def told(error: BaseException) -> str:
    """Return an error in one line, with its kind where it is none of graphscale's own."""
    text = one_line(error)
    return text if isinstance(error, GraphscaleError) and text else f"{type(error).__name__}: {text}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # The state comes after the name in parentheses, Z for a process that has ended.
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
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
