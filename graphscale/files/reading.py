"""Whole-file reads, of regular files alone."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["check_readable", "parse_json", "read_file"]


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: as `check_readable`.
    """
    check_readable(path)
    return Path(path).read_bytes()


def check_readable(path: str | os.PathLike[str]) -> int:
    """Return the size of a file, in bytes, without opening it: a pipe would wait for its writer.

    Raises:
        OSError: it is missing, no regular file, or larger than the machine's memory; `strerror` says which.
    """
    try:
        found = os.stat(path)
    except ValueError as error:  # a NUL byte
        raise OSError(errno.EINVAL, f"no file has such a name: {error}") from error
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if found.st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise OSError(errno.EINVAL, f"its {found.st_size} bytes are more than the memory of this machine")
    return found.st_size


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in which no key stands twice: readers differ in which of the two they take.

    Raises:
        ValueError: it is no JSON, or a key stands twice.
        RecursionError: it is nested too deeply.
    """

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict[str, Any]()
        for key, value in pairs:
            if key in found:
                raise ValueError(f"it has {key!r} twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=refuse_duplicates)
