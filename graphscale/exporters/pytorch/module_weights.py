"""Loading trained weights and buffers from a step or a state into a module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphscale.errors import ExportError
from graphscale.exporters.pytorch.module_tensors import buffers_of, parameters_of
from graphscale.exporters.pytorch.onnx_step import EXPORT_KEY
from graphscale.exporters.trained_state import read_trained
from graphscale.files.tensor_files import Arrays

__all__ = ["load"]


def load(source: Any, module: Any) -> tuple[str, ...]:
    """Do the work of `graphscale.exporters.pytorch.load_weights`."""
    if not isinstance(module, torch.nn.Module):
        raise ExportError(f"the module is of type {type(module).__name__}; pass a torch.nn.Module")
    where, arrays, metadata = read_trained(source)
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
