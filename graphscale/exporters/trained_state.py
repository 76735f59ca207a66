"""Trained values of an exported step, from wherever they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from graphscale.errors import ExportError
from graphscale.files import model_files
from graphscale.files.tensor_files import Arrays
from graphscale.ort.fusing.trained_weights import read_weights
from graphscale.pipeline import ScaledModel
from graphscale.session import Session
from graphscale.session.carried import read_values

__all__ = ["Trained", "read_trained"]


class Trained(NamedTuple):
    """Trained values.

    Attributes:
        name: their source, in messages.
        arrays: the values of carried inputs, and other initializers of a step, by name.
        metadata: the metadata of the step; empty where the source is no step.
    """

    name: str
    arrays: Arrays
    metadata: Mapping[str, str]


def read_trained(source: Any) -> Trained:
    """Read trained values.

    Args:
        source: a gs.Session, its `state_dict()`, a file of it (.npz, .safetensors), or a step whose initializers hold
            trained values: a .onnx file or a model.

    Raises:
        ExportError: it is none of these.
        ModelFileError: the file is missing, or of another format.
    """
    if isinstance(source, Session):
        return Trained("the session", source.state_dict(), source.metadata)
    if isinstance(source, Mapping):
        return Trained("the state", {str(name): np.asarray(value) for name, value in source.items()}, {})
    if isinstance(source, ScaledModel):
        source = source.model
    if isinstance(source, onnx.ModelProto):
        source = model_files.from_proto(source)
    if isinstance(source, ir.Model):
        return _read_model("the step", source)
    if not isinstance(source, str | os.PathLike):
        raise ExportError(f"pass a session, its state, a step, or a file of one; got a {type(source).__name__}")
    name = os.fspath(source)
    if Path(name).suffix.lower() == ".onnx":
        return _read_model(name, model_files.load(name))
    return Trained(name, read_weights(name), {})


def _read_model(name: str, model: ir.Model) -> Trained:
    arrays = {key: read_values(value) for key, value in model.graph.initializers.items()}
    return Trained(name, arrays, model.metadata_props)
