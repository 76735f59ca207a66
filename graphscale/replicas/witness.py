"""A witness of the replicas on one machine: a small process that reports the first replica to end, and its end.

A launcher that notices the end of one process kills the others at once, without time for a message. MPICH reports
nothing about a process that leaves by `os._exit`. The witness is no process of the launcher.

This file is also the program of the witness, which imports only Python's own modules.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

__all__ = ["Witness", "dismiss_all"]

_DONE = "done"
_KILLED = "SIGKILL"
_MOMENT = 0.1  # seconds


class Witness:
    """The witness of some processes of this machine, on Linux; other systems have only the launcher's messages.

    Args:
        peers: `{rank: process}` of all replicas on this machine.
        rank: the rank of this process; the lowest one starts the witness.
        token: a text of these processes alone.
    """

    present: ClassVar[dict[tuple[tuple[int, int], ...], Witness]] = {}

    def __init__(self, peers: Mapping[int, int], rank: int, token: str) -> None:
        self._rank, self._address, self._users = rank, f"\0graphscale-{token}", 0
        self._process: subprocess.Popen[bytes] | None = None
        if rank != min(peers) or not hasattr(os, "pidfd_open") or not sys.executable:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as box:
            box.bind(self._address)
            pairs = [f"{number}:{process}" for number, process in peers.items()]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(box.fileno()), *pairs],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=[box.fileno()],
                start_new_session=True,
            )
            assert self._process.stdout is not None
            with self._process.stdout as ready:
                ready.read(1)  # empty if the witness could not start

    @classmethod
    def of(cls, peers: Mapping[int, int], rank: int, token: str) -> Witness:
        """Return the common witness of these processes."""
        key = tuple(sorted(peers.items()))
        found = cls.present.get(key)
        if found is None:
            found = cls.present[key] = cls(peers, rank, token)
        found._users += 1
        return found

    def leave(self) -> None:
        """Stop reports on the end of this process, once for each call of `of`."""
        self._users -= 1
        if self._users == 0:
            type(self).present = {key: value for key, value in self.present.items() if value is not self}
            self.tell(str(self._rank))

    def tell(self, text: str) -> None:
        """Send the witness a text, if it runs."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as box:
            box.sendto(text.encode(), self._address)


def dismiss_all() -> None:
    """Stop reports on all processes, after a message of this one on the reason of their end."""
    for witness in Witness.present.values():
        witness.tell(_DONE)


def _watch(box: socket.socket, peers: dict[int, int], moment: float = _MOMENT) -> None:
    """Wait until all have left, or one has ended without leaving, and print a line."""
    poll = select.epoll()
    poll.register(box, select.EPOLLIN)
    descriptors = {}
    for rank, process in peers.items():
        try:
            descriptors[os.pidfd_open(process)] = rank
        except ProcessLookupError:
            _report(rank, process)
            return
    for descriptor in descriptors:
        poll.register(descriptor, select.EPOLLIN)
    watched = set(peers)
    os.write(sys.stdout.fileno(), b"!")  # the witness is ready
    while watched:
        events = poll.poll()  # in the order of their arrival
        with contextlib.suppress(BlockingIOError):
            while (text := box.recv(64, socket.MSG_DONTWAIT).decode()) != _DONE:
                watched.discard(int(text))
            return
        if ended := _ranks(events, descriptors, watched):
            if all(_KILLED in _describe_end(peers[rank]) for rank in ended):
                # The launcher may have killed them, after an end that is reported late.
                time.sleep(moment)
                ended += _ranks(poll.poll(0), descriptors, watched)
            rank = next((rank for rank in ended if _KILLED not in _describe_end(peers[rank])), ended[0])
            _report(rank, peers[rank])
            return
        for descriptor, _ in events:
            if descriptor in descriptors:
                poll.unregister(descriptor)


def _ranks(events: list[tuple[int, int]], descriptors: dict[int, int], watched: set[int]) -> list[int]:
    """Return the ranks that have ended without leaving, in the order of their events."""
    ranks = (descriptors[descriptor] for descriptor, _ in events if descriptor in descriptors)
    return [rank for rank in ranks if rank in watched]


def _report(rank: int, process: int) -> None:
    print(
        f"graphscale: rank {rank} (process {process} on {socket.gethostname()}) has ended{_describe_end(process)}, "
        "without a word to the other replicas, which end with it",
        file=sys.stderr,
        flush=True,
    )


def _describe_end(process: int) -> str:
    """Return the end of a process in words; empty if the launcher has collected it first."""
    try:
        status = int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[-1])
    except (OSError, IndexError, ValueError):
        return ""
    if not os.WIFSIGNALED(status):
        return f" with exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else "a real-time signal"
    hint = ", which the system sends when memory runs out" if name == _KILLED else ""
    return f" by signal {number} ({name}{hint})"


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        _watch(inherited, {int(rank): int(process) for rank, process in (pair.split(":") for pair in sys.argv[2:])})
