"""Paths of open descriptors: standard input and output, and those that a shell puts in place of a process."""

from __future__ import annotations

import os
import re
import stat

__all__ = ["STDIN", "STDOUT", "descriptor_of", "is_stream", "memory_size"]

STDIN, STDOUT = "/dev/stdin", "/dev/stdout"
_NUMBERED = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")


def descriptor_of(path: str | os.PathLike[str]) -> int | None:
    """Return the number of the descriptor that a path names, or None for any other path."""
    text = os.fspath(path)
    numbered = _NUMBERED.fullmatch(text)
    return int(numbered[1]) if numbered else {STDIN: 0, STDOUT: 1}.get(text)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names an open descriptor of something that is no regular file, such as a pipe."""
    number = descriptor_of(path)
    if number is None:
        return False
    try:
        return not stat.S_ISREG(os.fstat(number).st_mode)
    except OSError:
        return False


def memory_size() -> int:
    """Return the size of the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
