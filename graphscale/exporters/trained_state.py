"""Trained values of an exported step, from wherever they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from graphscale.errors import ExportError
from graphscale.ort.fusing.trained_weights import read_weights
from graphscale.session import Session

__all__ = ["read_trained"]


def read_trained(source: Any) -> Mapping[str, Any]:
    """Return the values of carried inputs by name.

    Args:
        source: a gs.Session, its `state_dict()`, a file of it (.npz, .safetensors), or a step whose initializers hold
            trained values.

    Raises:
        ExportError: it is none of these.
        ModelFileError: the file is missing, or of another format.
    """
    if isinstance(source, Session):
        return source.state_dict()
    if isinstance(source, Mapping):
        return {name: np.asarray(value) for name, value in source.items()}
    if isinstance(source, str | os.PathLike):
        return read_weights(source)
    raise ExportError(f"pass a session, its state, or a file of either; got a {type(source).__name__}")
