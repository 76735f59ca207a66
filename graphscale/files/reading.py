"""Whole-file reads, of regular files, and of descriptors that are open already."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from graphscale.files.descriptors import is_stream, memory_size, read_stream

__all__ = ["check_readable", "open_file", "parse_json", "read_file", "suffix_of"]


def open_file(path: str | os.PathLike[str]) -> tuple[Path | io.BytesIO, int]:
    """Return a file for a library that takes paths and files, and its size in bytes.

    Raises:
        OSError: as `read_file`.
    """
    if is_stream(path):
        content = read_stream(path)
        return io.BytesIO(content), len(content)
    return Path(path), check_readable(path)


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a file's name, or of a stream the one that files of its content have.

    Raises:
        OSError: as `read_stream`.
    """
    if not is_stream(path):
        return Path(path).suffix
    content = read_stream(path)
    begins = {b"PK": ".npz", b"{": ".jsonl", b"step,": ".csv"}
    if content[8:9] == b"{" and int.from_bytes(content[:8], "little") < len(content):
        return ".safetensors"
    return next((suffix for mark, suffix in begins.items() if content.startswith(mark)), ".onnx")


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file, or of a stream such as standard input.

    Raises:
        OSError: as `check_readable`, or as `read_stream`.
    """
    if is_stream(path):
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


def parse_json(text: str | bytes) -> Any:
    """Parse JSON without repeated keys: readers differ in the value that they choose.

    Raises:
        ValueError: the text is no JSON, or an object has a key twice.
        RecursionError: the text is nested too deeply.
    """

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict[str, Any]()
        for key, value in pairs:
            if key in found:
                raise ValueError(f"it has {key!r} twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=refuse_duplicates)
