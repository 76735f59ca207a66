"""Named arrays in safetensors files, written completely or not at all, with every dtype of ONNX."""

from __future__ import annotations

import json
import mmap
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import GraphscaleError, ModelFileError, one_line
from graphscale.files import checksum, writing
from graphscale.files.contents import open_file
from graphscale.files.kinds import describe_file, explain_unreadable
from graphscale.files.limits import current_limits
from graphscale.files.reading import read_file

__all__ = ["ARRAY_DTYPES", "NUMPY_ERRORS", "Arrays", "read_npz", "read_safetensors", "to_native", "write_safetensors"]

Arrays = dict[str, np.ndarray[Any, Any]]

# The dtypes of arrays in files and feeds; each format has its own names for them.
_NAMES = "BOOL UINT8 INT8 UINT16 INT16 UINT32 INT32 UINT64 INT64 FLOAT16 BFLOAT16 FLOAT DOUBLE"
ARRAY_DTYPES = tuple(ir.DataType[name] for name in _NAMES.split())
_DTYPES = {"BOOL" if dtype is ir.DataType.BOOL else dtype.short_name().upper(): dtype.numpy() for dtype in ARRAY_DTYPES}

# Compression shrinks arrays a few times. Beyond this ratio, a file may unpack to this part of the limit.
_RATIO, _SHARE = 64, 16

# Errors of numpy for damaged files, whose headers it parses as Python.
NUMPY_ERRORS = (
    *(ValueError, EOFError, LookupError, RuntimeError, MemoryError, SyntaxError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


def read_safetensors(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, str]]:
    """Read a safetensors file.

    Returns:
        the arrays by name, which cannot be written to, and the file's metadata.

    Raises:
        ModelFileError: the file is missing, truncated, of another format, or does not fit its checksum.
    """
    from safetensors import SafetensorError, deserialize

    try:
        data = read_file(path)
        found: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {explain_unreadable(path, error)}") from error
    except SafetensorError as error:
        if other := describe_file(path, "safetensors"):
            raise ModelFileError(f"{path} is no safetensors file: {other}") from error
        raise ModelFileError(f"{path} is damaged, truncated, or no safetensors file: {one_line(error)}") from error
    if checksum.KEY in metadata and not checksum.is_intact(data):
        raise ModelFileError(f"{path} is damaged: its content has changed since its checksum was computed")
    arrays = {}
    for name, entry in sorted(found, key=lambda each: each[0]):
        if entry["dtype"] not in _DTYPES:
            raise ModelFileError(f"{path}: the array {name!r} is of dtype {entry['dtype']}, which is not supported")
        arrays[name] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, dict(metadata)


def write_safetensors(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file with a checksum, atomically: only a complete file on the disk replaces an existing one.

    Raises:
        OutputError: the file cannot be written; an existing one is unchanged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with writing.write_file(path) as temporary:
        try:
            save_file(whole, temporary, {**metadata, checksum.KEY: checksum.BLANK})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        with temporary.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
            checksum.seal(view)


def read_npz(path: str | os.PathLike[str], kind: type[GraphscaleError] = ModelFileError) -> Arrays:
    """Read every array of an .npz file into memory, once, in the byte order of this machine.

    Raises:
        GraphscaleError: of the class `kind`: the file is missing, damaged, of another kind, or holds Python objects.
    """
    found: Arrays = {}
    name = ""
    try:
        file, size = open_file(path)
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise kind(f"{path} holds one array without a name; write numpy.savez(FILE, NAME=array): arrays by name")
        with archive:
            members = [] if archive.zip is None else archive.zip.infolist()
            unpacked, most = sum(member.file_size for member in members), current_limits().max_bytes
            limit = max(size, most // _SHARE, min(most, _RATIO * size))
            if unpacked > limit:
                hint = f"--max-bytes {_SHARE * unpacked}"
                raise kind(f"{path} unpacks to {unpacked} bytes; the limit is {limit} ({hint})")
            for name in archive.files:
                found[name] = archive[name]
    except OSError as error:
        raise kind(f"cannot read {path}: {explain_unreadable(path, error)}") from error
    except NUMPY_ERRORS as error:
        if "allow_pickle" in str(error) and name:
            raise kind(f"{path}: {name!r} holds Python objects, not numbers") from error
        if other := describe_file(path, "npz"):
            raise kind(f"{path} is no .npz file: {other}") from error
        what = f"{path}: {name!r}" if name else f"{path}"
        raise kind(f"{what} is damaged, or not written by numpy.savez: {error}") from error
    strange = [name for name, value in found.items() if not isinstance(value, np.ndarray)]
    if strange:
        other = describe_file(path, "npz") or f"{strange[0]!r} is not an array; write it with numpy.savez"
        raise kind(f"{path} is no .npz file: {other}")
    for name, array in found.items():
        # A file of a few bytes can hold 2**60 elements without bytes: a conversion would never end.
        if array.dtype.names is not None or not array.dtype.itemsize:
            raise kind(f"{path}: {name!r} holds records or elements without bytes, not numbers")
        found[name] = to_native(array)
    return found


def to_native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert an array to this machine's byte order, without a copy where possible."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)
