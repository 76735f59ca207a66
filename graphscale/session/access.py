"""Access to an object that holds sessions of ONNX Runtime: by one thread at a time, in one process, without copies."""

from __future__ import annotations

import os
import threading
from typing import NoReturn, Self

from graphscale.errors import SessionError

__all__ = ["Access", "Uncopyable"]


class Access:
    """A context that lets one thread in at a time; the others wait.

    A child that was forked from the process would train a copy of its own, without the threads of ONNX Runtime, and
    wait for ever for a lock that a thread held: it is refused.

    Args:
        waits: False to refuse a thread instead of letting it wait.

    Raises:
        SessionError: this is another process; another thread is in, and `waits` is False.
    """

    def __init__(self, waits: bool = True) -> None:
        self._lock, self._waits, self._process = threading.RLock(), waits, os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made this."""
        return os.getpid() == self._process

    def __enter__(self) -> Self:
        if not self.is_here:
            raise SessionError(
                f"the session was made in the process {self._process}, and a fork of it cannot use it; make a session "
                "here, and give it the state with state_dict and load_state_dict, or save_state and load_state"
            )
        if not self._lock.acquire(blocking=self._waits):
            raise SessionError(
                "another thread is using the session, whose calls must come in the same order on all replicas; call it "
                "from one thread"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class Uncopyable:
    """A base class of objects that can be neither copied nor pickled."""

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            f"a {type(self).__name__} cannot be copied or pickled: ONNX Runtime holds its state; make another one of "
            "the same step, and give it the state with state_dict and load_state_dict, or save_state and load_state"
        )
