"""Streams: the whole content of an open descriptor, and a file sent to one."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from graphscale.files.descriptors import descriptor_of, memory_size

__all__ = ["read_stream", "send"]

_PIECE = 2**20  # bytes

# The content of each stream that was read, since a stream gives it once: by descriptor, device and inode.
_kept: dict[tuple[int, int, int], bytes] = {}


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
