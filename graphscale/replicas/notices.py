"""Notices of replicas that leave the others: the reason, and the number of their operations."""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar

from graphscale.errors import one_line

__all__ = ["Notices"]

_TAG = 7
_DELIVERY = 0.3  # seconds for notices to be on their way
_REASON = 500  # characters


class Notices:
    """The notices among some processes.

    Their communicator is never freed: when all replicas end in order, the remaining notices are never received, and
    Open MPI would treat them as messages of the next communicator. All sessions of the same processes share one
    communicator.

    Args:
        mpi: mpi4py's MPI module.
        comm: a communicator for notices alone.
    """

    present: ClassVar[dict[tuple[Any, ...], Notices]] = {}

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._found: dict[str, dict[int, tuple[int, str]]] = {}

    def send(self, token: str, begun: int, reason: str) -> None:
        """Send all others a notice that this process leaves.

        Args:
            token: the token of the session.
            begun: the number of operations that this process has begun.
            reason: the text after "rank 3" in a message.
        """
        notice = json.dumps([token, begun, one_line(reason)[:_REASON]]).encode()
        here, size = self._comm.Get_rank(), self._comm.Get_size()
        try:
            requests = [self._comm.Isend(notice, rank, _TAG) for rank in range(size) if rank != here]
            end = time.monotonic() + _DELIVERY
            while requests and time.monotonic() < end:
                requests = [request for request in requests if not request.Test()]
        except self._mpi.Exception:
            pass  # they have ended, too

    def find_leaver(self, token: str, begun: int) -> str | None:
        """Return a rank that has left before a number of operations of a session, and its reason; None for none."""
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
            notice = bytearray(status.Get_count())
            self._comm.Recv(notice, status.Get_source(), _TAG)
            of, count, reason = json.loads(notice)
            self._found.setdefault(of, {})[status.Get_source()] = (count, reason)
        for rank, (count, reason) in self._found.get(token, {}).items():
            if count < begun:
                return f"rank {rank} {reason}"
        return None
