"""Whole-file reads, of regular files, and of descriptors that are open already."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from graphscale.files.descriptors import is_stream, memory_size

__all__ = ["check_readable", "read_file"]


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file, or of a stream such as standard input.

    Raises:
        OSError: as `check_readable`, or as `read_stream`.
    """
    if is_stream(path):
        from graphscale.files.stream_files import read_stream

        return read_stream(path)
    check_readable(path)
    return Path(path).read_bytes()


def check_readable(path: str | os.PathLike[str]) -> int:
    """Return the size of a file, in bytes, without opening it: a pipe would wait for its writer.

    Raises:
        OSError: the file is missing, no regular file, or larger than the machine's memory; `strerror` gives the reason.
    """
    try:
        found = os.stat(path)
    except ValueError as error:  # a NUL byte
        raise OSError(errno.EINVAL, f"no file has such a name: {error}") from error
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if found.st_size > memory_size():
        raise OSError(errno.EINVAL, f"its {found.st_size} bytes are more than the memory of this machine")
    return found.st_size
