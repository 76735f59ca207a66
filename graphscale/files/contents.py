"""The contents of files and streams: their kind by suffix, and JSON."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

from graphscale.files.descriptors import is_stream
from graphscale.files.reading import check_readable
from graphscale.files.stream_files import read_stream

__all__ = ["open_file", "parse_json", "suffix_of"]


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
