"""State files: all carried state in one safetensors file, with the policy and the interface of its graph."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from graphscale.errors import ModelFileError, SessionError
from graphscale.files.tensor_files import read_safetensors, write_safetensors
from graphscale.graph.stamp import Stamp

__all__ = ["check_origin", "read_extra", "read_state_file", "write_state_file"]

_FORMAT, _STATE = "graphscale.format", "state/1"

Arrays = dict[str, np.ndarray[Any, Any]]


def write_state_file(
    path: str | os.PathLike[str],
    state: Mapping[str, np.ndarray[Any, Any]],
    stamp: Stamp,
    interface: str,
    extra: Mapping[str, str],
) -> None:
    """Write a state file atomically.

    Raises:
        SessionError: `extra` does not map texts to texts.
        OutputError: it cannot be written; an existing file is as it was.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(text, str) for item in extra.items() for text in item):
        raise SessionError("extra maps names to texts; turn numbers into texts first")
    metadata = {
        _FORMAT: _STATE,
        "graphscale.version": version("graphscale"),
        "graphscale.target": stamp.target,
        "graphscale.policy": json.dumps(stamp.policy, sort_keys=True),
        "graphscale.interface": interface,
        "graphscale.extra": json.dumps(dict(extra)),
    }
    write_safetensors(path, state, metadata)


def read_state_file(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, str]]:
    """Read a state file.

    Returns:
        the state, and the file's metadata.

    Raises:
        SessionError: it is missing, truncated, or no state file.
    """
    try:
        state, metadata = read_safetensors(path)
    except ModelFileError as error:
        raise SessionError(str(error)) from error
    if metadata.get(_FORMAT) != _STATE:
        raise SessionError(f"{path} is no state file of a graphscale session; write one with Session.save_state")
    return state, metadata


def read_extra(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, str]:
    """The extra texts of a state file.

    Raises:
        SessionError: they are damaged.
    """
    try:
        extra = json.loads(metadata.get("graphscale.extra", "{}"))
    except ValueError as error:
        raise SessionError(f"{path}: its extra texts are damaged: {error}") from error
    if not isinstance(extra, dict) or not all(isinstance(text, str) for text in extra.values()):
        raise SessionError(f"{path}: its extra texts are damaged")
    return extra


def check_origin(path: str | os.PathLike[str], metadata: Mapping[str, str], stamp: Stamp, interface: str) -> None:
    """Refuse a state file of another graph or policy.

    Raises:
        SessionError: with what differs.
    """
    policy = json.dumps(stamp.policy, sort_keys=True)
    if metadata.get("graphscale.target") != stamp.target:
        raise SessionError(
            f"{path} is the state of a graph for target {metadata.get('graphscale.target')!r}, and this graph is for "
            f"{stamp.target!r}"
        )
    if metadata.get("graphscale.interface") != interface:
        raise SessionError(f"{path} is the state of another graph: its inputs and outputs are not those of this one")
    if metadata.get("graphscale.policy") != policy:
        raise SessionError(
            f"{path} was saved with the loss scale {metadata.get('graphscale.policy')}, and this graph has {policy}"
        )
