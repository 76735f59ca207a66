"""Reading named arrays from where trained weights are kept: .npz, .safetensors, or the initializers of a model."""

from __future__ import annotations

import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from graphscale import io
from graphscale.errors import ModelFileError

__all__ = ["read_weights"]

Arrays = dict[str, np.ndarray[Any, Any]]

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}


def read_weights(path: str | os.PathLike[str]) -> Arrays:
    """Read all arrays of a file by name.

    Args:
        path: a .npz or .safetensors file, as `Session.state_dict()` is saved to, or an ONNX model: its initializers.

    Raises:
        ModelFileError: the file is missing, damaged, or of another format.
    """
    suffix = Path(path).suffix
    try:
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        if suffix == ".safetensors":
            return _safetensors(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ModelFileError(f"{path} is damaged, or not what its suffix says: {error}") from error
    if suffix != ".onnx":
        raise ModelFileError(f"{path}: trained weights are read from .npz, .safetensors and .onnx files")
    initializers = io.load(path).graph.initializers
    return {name: v.const_value.numpy() for name, v in initializers.items() if v.const_value is not None}


def _safetensors(data: bytes, name: str) -> Arrays:
    """The format: the header's length in 8 bytes, a JSON header, and the arrays one after the other."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise ModelFileError(f"{name} is truncated")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ModelFileError(f"{name} has a damaged header")
    arrays: Arrays = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        try:
            dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError) as error:
            raise ModelFileError(f"{name}: the entry of {key!r} is damaged, or of an unknown dtype") from error
        raw = data[8 + length + begin : 8 + length + end]
        if len(raw) != end - begin or len(raw) != dtype.itemsize * math.prod(shape):
            raise ModelFileError(f"{name} is truncated: the array {key!r} is not complete")
        arrays[key] = np.frombuffer(raw, dtype).reshape(shape)
    return arrays
