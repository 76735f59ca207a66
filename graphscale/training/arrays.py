"""Reading arrays from files: .npz and .safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.errors import TrainingError
from graphscale.files.tensor_files import read_npz, read_safetensors

__all__ = ["Arrays", "load_arrays", "load_npz"]

Arrays = Mapping[str, np.ndarray[Any, Any]]


def load_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read every array of an .npz file into memory, once, in the byte order of this machine.

    Raises:
        TrainingError: the file is missing, damaged, of another kind, or holds Python objects.
    """
    return read_npz(path, TrainingError)


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read every array of an .npz or a .safetensors file, by its suffix.

    Raises:
        TrainingError, ModelFileError: the file is missing, damaged, or of another kind.
    """
    suffix = Path(path).suffix
    if suffix == ".npz":
        return load_npz(path)
    if suffix != ".safetensors":
        raise TrainingError(f"{path}: expected an .npz or a .safetensors file")
    return read_safetensors(path)[0]
