"""State on disk: safetensors files with the policy and the interface of a graph, and steps with the state in them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from importlib.metadata import version

import onnx_ir as ir

from graphscale.errors import ModelFileError, SessionError, one_line, reporting
from graphscale.files import checksum, model_files, saving
from graphscale.files.external_data import external_tensors
from graphscale.files.tensor_files import Arrays, read_safetensors, write_safetensors
from graphscale.graph.stamp import Stamp

__all__ = ["copy_without_state", "drop_state", "export_step", "read_state_file", "write_state_file"]

_FORMAT, _STATE = "graphscale.format", "state/2"
_WITHOUT_CHECKSUM = "state/1"
_OF_OTHER_FILES = (".npz", ".npy", ".onnx")
_LARGE = 2**24  # bytes


def write_state_file(
    path: str | os.PathLike[str], state: Arrays, stamp: Stamp, interface: str, extra: Mapping[str, str] | None
) -> None:
    """Write a state file atomically.

    Raises:
        SessionError: `extra` does not map texts to texts; or the name is that of an array or a model.
        OutputError: the file cannot be written; an existing one is unchanged.
    """
    extra = {} if extra is None else extra
    if not isinstance(extra, Mapping) or not all(isinstance(text, str) for item in extra.items() for text in item):
        raise SessionError("extra maps names to texts; turn numbers into texts first")
    if (suffix := os.path.splitext(os.fspath(path))[1]) in _OF_OTHER_FILES:
        raise SessionError(f"{path}: a state file is a safetensors file, not {suffix}; name it state.safetensors")
    metadata = {
        _FORMAT: _STATE,
        "graphscale.version": version("graphscale"),
        "graphscale.target": stamp.target,
        "graphscale.policy": json.dumps(stamp.policy, sort_keys=True),
        "graphscale.interface": interface,
        "graphscale.extra": json.dumps(dict(extra)),
    }
    write_safetensors(path, state, metadata)


def read_state_file(path: str | os.PathLike[str], stamp: Stamp, interface: str) -> tuple[Arrays, dict[str, str]]:
    """Read a state file of a step.

    Returns:
        the state, and the extra texts.

    Raises:
        SessionError: the file is missing, damaged, no state file, or of another graph or policy.
    """
    try:
        state, metadata = read_safetensors(path)
    except ModelFileError as error:
        raise SessionError(str(error)) from error
    kind = metadata.get(_FORMAT)
    if kind not in (_STATE, _WITHOUT_CHECKSUM):
        raise SessionError(f"{path} is no state file of a graphscale session; write one with Session.save_state")
    if kind == _STATE and checksum.KEY not in metadata:
        raise SessionError(
            f"{path} has lost its checksum: it is damaged, or not the file that Session.save_state wrote"
        )
    target, policy = metadata.get("graphscale.target"), json.dumps(stamp.policy, sort_keys=True)
    if target != stamp.target:
        raise SessionError(
            f"{path} is the state of a graph for target {one_line(target)!r}, and this graph is for {stamp.target!r}"
        )
    if metadata.get("graphscale.interface") != interface:
        raise SessionError(f"{path} is the state of another graph: its inputs and outputs are not those of this one")
    if metadata.get("graphscale.policy") != policy:
        raise SessionError(
            f"{path} was saved with the loss scale {one_line(metadata.get('graphscale.policy'))}, and this graph has "
            f"{policy}"
        )
    with reporting(SessionError, f"{path}: its extra texts are damaged", RecursionError, ValueError):
        extra = json.loads(metadata.get("graphscale.extra", "{}"))
    if not isinstance(extra, dict) or not all(isinstance(text, str) for text in extra.values()):
        raise SessionError(f"{path}: its extra texts are damaged")
    return state, extra


def copy_without_state(model: ir.Model, state: Arrays) -> ir.Model:
    """Copy a step for `export_step`, without memory for the first values of its state."""
    copy = model.clone()
    drop_state(copy, state)
    if external_tensors(copy) or sum(array.nbytes for array in state.values()) < _LARGE:
        return copy
    # A single remaining constant keeps its whole protocol buffer in memory: copy the constant into a new buffer.
    return model_files.from_proto(ir.to_proto(copy))


def drop_state(model: ir.Model, state: Collection[str]) -> None:
    """Drop the first values of a step's carried inputs."""
    for value in model.graph.inputs:
        name = value.name or ""
        if name in state and name in model.graph.initializers:
            del model.graph.initializers[name]
            value.const_value = None


def export_step(model: ir.Model, state: Arrays, path: str | os.PathLike[str]) -> None:
    """Write a step with its state.

    Raises:
        OutputError: the file cannot be written.
    """
    copy = model.clone()
    inputs = {value.name: value for value in copy.graph.inputs}
    for name, array in state.items():
        value = copy.graph.initializers.get(name) or inputs[name]
        value.const_value = ir.tensor(array, name=name)
        copy.graph.initializers[name] = value
    saving.save(copy, path)
