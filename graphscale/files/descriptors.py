"""Paths of open descriptors: standard input and output, and those that a shell puts in place of a process."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path

__all__ = ["STDIN", "STDOUT", "descriptor_of", "is_stream", "memory_size", "read_stream", "send"]

STDIN, STDOUT = "/dev/stdin", "/dev/stdout"
_NUMBERED = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")
_PIECE = 2**20  # bytes

# The content of each stream that was read, since a stream gives it once: by descriptor, device and inode.
_kept: dict[tuple[int, int, int], bytes] = {}


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


def read_stream(path: str | os.PathLike[str]) -> bytes:
    """Read a stream to its end, or return its content again.

    Raises:
        OSError: it cannot be read, is a terminal, or has more bytes than the machine's memory.
    """
    number = descriptor_of(path)
    if number is None:
        raise OSError(errno.EINVAL, "it is no open descriptor")
    status = os.fstat(number)
    source = number, status.st_dev, status.st_ino
    if source in _kept:
        return _kept[source]
    if os.isatty(number):
        raise OSError(errno.EINVAL, "it is a terminal; pipe a file into it")
    content, most = bytearray(), memory_size()
    while piece := os.read(number, _PIECE):
        content += piece
        if len(content) > most:
            raise OSError(errno.EINVAL, "its bytes are more than the memory of this machine")
    _kept[source] = bytes(content)
    return _kept[source]


def send(file: Path, path: str | os.PathLike[str]) -> None:
    """Write the content of a file to the descriptor that a path names.

    Raises:
        OSError: it cannot be written to, or is a terminal.
    """
    number = descriptor_of(path)
    if number is None or os.isatty(number):
        raise OSError(errno.EINVAL, "it is a terminal; redirect it, or name a file to write")
    with file.open("rb") as source, os.fdopen(os.dup(number), "wb") as target:
        shutil.copyfileobj(source, target, _PIECE)


def memory_size() -> int:
    """Return the size of the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
