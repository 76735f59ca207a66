"""A counterexample in a file: what is fed, and what was done, so that it can be run again."""

from __future__ import annotations

import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from graphscale.checks.verification.verify_report import Case
from graphscale.errors import ModelFileError
from graphscale.files import model_files

__all__ = ["load_arrays", "load_case", "save_case"]

_FEED, _CASE = "feed/", "graphscale.case"


def save_case(case: Case, path: str | os.PathLike[str]) -> None:
    """Write a case as an .npz file, atomically: `feed/NAME` for each input, and the rest as JSON.

    Raises:
        OutputError: the file cannot be written; an existing one is as it was.
    """
    bfloat16 = [name for name, array in case.feeds.items() if array.dtype == ml_dtypes.bfloat16]
    told = {
        "kind": case.kind,
        "gradient": case.gradient,
        "number": None if case.number is None else str(case.number),
        "position": case.position,
        "finite": case.finite,
        "tolerance": case.tolerance,
        "bfloat16": bfloat16,
    }
    arrays: dict[str, Any] = {f"{_FEED}{name}": _plain(array) for name, array in case.feeds.items()}
    arrays[_CASE] = np.asarray(json.dumps(told))
    with model_files.replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def load_case(path: str | os.PathLike[str]) -> Case:
    """Read a case.

    Raises:
        ModelFileError: the file is missing, damaged, or no case.
    """
    arrays = load_arrays(path)
    if _CASE not in arrays:
        raise ModelFileError(f"{path} is no counterexample of graphscale verify")
    try:
        told = json.loads(str(arrays.pop(_CASE)))
        feeds = {name.removeprefix(_FEED): array for name, array in arrays.items() if name.startswith(_FEED)}
        for name in told["bfloat16"]:
            feeds[name] = feeds[name].view(ml_dtypes.bfloat16)
        number = None if told["number"] is None else float(told["number"])
        case = Case(
            str(told["kind"]),
            feeds,
            gradient=told["gradient"],
            number=number,
            position=told["position"],
            finite=bool(told["finite"]),
            tolerance=float(told["tolerance"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{path} is a damaged counterexample: {error!r}") from error
    whole = case.kind != "skip" or (
        isinstance(case.gradient, str) and isinstance(case.position, int) and number is not None
    )
    if case.kind not in ("step", "skip", "rule") or not whole or math.isnan(case.tolerance):
        raise ModelFileError(f"{path} is a damaged counterexample: it says {told!r}")
    return case


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of an .npz file.

    Raises:
        ModelFileError: the file is missing, damaged, or of another format.
    """
    try:
        stored = np.load(Path(path), allow_pickle=False)
        if isinstance(stored, np.ndarray):
            raise ModelFileError(f"{path} holds one array; save arrays by name: numpy.savez(FILE, name=array)")
        with stored:
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError, TypeError) as error:
        raise ModelFileError(f"{path} is no .npz file of arrays, or it is damaged: {error}") from error


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else np.asarray(array)
