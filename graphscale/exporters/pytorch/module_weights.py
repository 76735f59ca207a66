"""Loading trained weights and buffers from a step or a state into a module."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from graphscale.errors import ExportError, ModelFileError
from graphscale.exporters.pytorch.module_tensors import buffers_of, parameters_of
from graphscale.exporters.pytorch.onnx_step import EXPORT_KEY
from graphscale.files import model_files
from graphscale.files.tensor_files import Arrays, read_npz, read_safetensors
from graphscale.pipeline import ScaledModel
from graphscale.session import Session
from graphscale.session.carried import read_values

__all__ = ["load"]


def load(source: Any, module: Any) -> tuple[str, ...]:
    """Do the work of `graphscale.exporters.pytorch.load_weights`."""
    if not isinstance(module, torch.nn.Module):
        raise ExportError(f"the module is of type {type(module).__name__}; pass a torch.nn.Module")
    where, arrays, metadata = _read(source)
    unchanged = _unchanged(metadata)
    parameters = parameters_of(module)
    saved = set(module.state_dict())
    wanted = parameters | {name: b for name, b in buffers_of(module).items() if name in saved or name in arrays}
    loaded: list[tuple[Any, Any]] = []
    names: list[str] = []
    for name, tensor in wanted.items():
        key = _key(name, tensor, arrays)
        if key is None:
            if name in unchanged or (name in parameters and not tensor.requires_grad):
                continue
            raise ExportError(
                f"{where} has no value for {name!r}; pass the session, or the trained step, of this module"
            )
        loaded.append((tensor, _fitting(where, name, arrays[key], tensor)))
        names.append(name)
    if not loaded:
        raise ExportError(f"{where} has no weight of this module")
    with torch.no_grad():
        for tensor, value in loaded:
            tensor.copy_(value)
    return tuple(names)


def _read(source: Any) -> tuple[str, Arrays, Mapping[str, str]]:
    """Return a name of the source, its arrays, and the metadata of the model, if it is one."""
    if isinstance(source, Session):
        return "the session", source.state_dict(), source.metadata
    if isinstance(source, ScaledModel):
        source = source.model
    if isinstance(source, onnx.ModelProto):
        source = model_files.from_proto(source)
    if isinstance(source, ir.Model):
        return "the step", _initializers(source), source.metadata_props
    if isinstance(source, Mapping):
        return "the state", {str(k): np.asarray(v) for k, v in source.items()}, {}
    if not isinstance(source, str | os.PathLike):
        raise ExportError(f"weights come from a session, a step, a state or a file; got {type(source).__name__}")
    suffix = Path(source).suffix.lower()
    if suffix == ".npz":
        return os.fspath(source), read_npz(source, ModelFileError), {}
    if suffix == ".safetensors":
        return os.fspath(source), read_safetensors(source)[0], {}
    model = model_files.load(source)
    return os.fspath(source), _initializers(model), model.metadata_props


def _initializers(model: ir.Model) -> Arrays:
    return {name: read_values(value) for name, value in model.graph.initializers.items()}


def _unchanged(metadata: Mapping[str, str]) -> frozenset[str]:
    """Return the tensors that the step does not change, by its metadata."""
    try:
        names = json.loads(metadata.get(EXPORT_KEY, "{}")).get("unchanged", [])
    except (ValueError, AttributeError):
        return frozenset()
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _key(name: str, tensor: Any, arrays: Arrays) -> str | None:
    """Return the array to take: the master of a weight where the module holds more digits than float16."""
    master = f"{name}.master"
    if master in arrays and tensor.dtype != torch.float16:
        return master
    return name if name in arrays else None


def _fitting(where: str, name: str, array: Any, tensor: Any) -> Any:
    """Return an array as a tensor, if it fits without loss."""
    if tuple(array.shape) != tuple(tensor.shape):
        raise ExportError(f"{where}: {name!r} has shape {list(array.shape)}, the module's {list(tensor.shape)}")
    value = torch.from_numpy(np.array(array))
    if torch.promote_types(value.dtype, tensor.dtype) != tensor.dtype:
        raise ExportError(f"{where}: {name!r} is of {value.dtype}, which the module's {tensor.dtype} cannot hold")
    return value
