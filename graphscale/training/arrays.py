"""Reading arrays from files: .npz and .safetensors."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.errors import TrainingError
from graphscale.files.tensor_files import read_safetensors

__all__ = ["Arrays", "load_arrays", "load_npz"]

Arrays = Mapping[str, np.ndarray[Any, Any]]


def load_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read every array of an .npz file into memory, once, in the byte order of this machine.

    Raises:
        TrainingError: the file is missing, damaged, of another kind, or holds Python objects.
    """
    found: dict[str, np.ndarray[Any, Any]] = {}
    name = ""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise TrainingError(f"{path} holds one array without a name; write numpy.savez(FILE, NAME=array, ...)")
        with archive:
            for name in archive.files:
                found[name] = archive[name]
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error) and name:
            raise TrainingError(f"{path}: {name!r} holds Python objects, not numbers") from error
        what = f"{path}: {name!r}" if name else f"{path}"
        raise TrainingError(f"{what} is damaged, or not written by numpy.savez: {error}") from error
    strange = [name for name, value in found.items() if not isinstance(value, np.ndarray)]
    if strange:
        raise TrainingError(f"{path}: {strange[0]!r} is not an array; write the file with numpy.savez")
    return {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in found.items()}


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
