"""Reading named arrays from where trained weights are kept: .npz, .safetensors, or the initializers of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.errors import ModelFileError
from graphscale.files import model_files
from graphscale.files.tensor_files import read_npz, read_safetensors

__all__ = ["read_weights"]

Arrays = dict[str, np.ndarray[Any, Any]]


def read_weights(path: str | os.PathLike[str]) -> Arrays:
    """Read all arrays of a file by name.

    Args:
        path: a .npz or .safetensors file, as `Session.state_dict()` is saved to, or an ONNX model: its initializers.

    Raises:
        ModelFileError: the file is missing, damaged, or of another format.
    """
    suffix = Path(path).suffix
    if suffix == ".npz":
        return read_npz(path)
    if suffix == ".safetensors":
        return read_safetensors(path)[0]
    if suffix != ".onnx":
        raise ModelFileError(f"{path}: trained weights are read from .npz, .safetensors and .onnx files")
    initializers = model_files.load(path).graph.initializers
    return {name: v.const_value.numpy() for name, v in initializers.items() if v.const_value is not None}
