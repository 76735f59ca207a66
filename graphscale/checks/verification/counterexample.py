"""A counterexample in a file, with its feeds and its kind, for another run."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import ml_dtypes
import numpy as np

from graphscale.checks.verification.verify_report import Case
from graphscale.errors import ModelFileError
from graphscale.files import writing
from graphscale.files.tensor_files import read_npz

__all__ = ["load_case", "save_case"]

_FEED, _CASE = "feed/", "graphscale.case"


def save_case(case: Case, path: str | os.PathLike[str]) -> None:
    """Write a case as an .npz file, atomically: `feed/NAME` for each input, and the rest as JSON.

    Raises:
        OutputError: the file cannot be written; an existing one is unchanged.
    """
    small = [name for name, array in case.feeds.items() if array.dtype == ml_dtypes.bfloat16]
    arrays: dict[str, Any] = {f"{_FEED}{n}": a.view(np.uint16) if n in small else a for n, a in case.feeds.items()}
    arrays = {name: array.astype(str) if array.dtype.kind == "O" else array for name, array in arrays.items()}
    arrays[_CASE] = np.asarray(json.dumps({**case.to_dict(), "bfloat16": small}))
    with writing.write_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def load_case(path: str | os.PathLike[str]) -> Case:
    """Read a case.

    Raises:
        ModelFileError: the file is missing, damaged, or no case.
    """
    arrays = read_npz(path)
    if _CASE not in arrays:
        raise ModelFileError(f"{path} is no counterexample of graphscale verify")
    try:
        fields = json.loads(str(arrays.pop(_CASE)))
        feeds = {name.removeprefix(_FEED): array for name, array in arrays.items() if name.startswith(_FEED)}
        feeds = {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in feeds.items()}
        for name in fields.pop("bfloat16"):
            feeds[name] = feeds[name].view(ml_dtypes.bfloat16)
        number = None if fields["number"] is None else float(fields["number"])
        numbers = {"number": number, "tolerance": float(fields["tolerance"])}
        case = Case(**{**fields, **numbers, "feeds": feeds, "others": tuple(map(str, fields.get("others", ())))})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{path} is a damaged counterexample: {error!r}") from error
    forces = isinstance(case.gradient, str) and isinstance(case.position, int) and number is not None
    is_known = case.kind in ("step", "poison", "rule") or (case.kind == "skip" and forces)
    if not is_known or math.isnan(case.tolerance):
        raise ModelFileError(f"{path} is a damaged counterexample: it says {fields!r}")
    return case
