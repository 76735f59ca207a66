"""What replicas know of the step as a whole: its interface, its state, and the file it can be written to again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import SessionError
from graphscale.graph.stamp import Stamp
from graphscale.replicas.splitting import Halves
from graphscale.session.interface import InputSpec

__all__ = ["first_state", "output_names", "sizes_of", "without_state"]

Array = np.ndarray[Any, Any]


def output_names(model: ir.Model, stamp: Stamp, carried: Mapping[str, InputSpec]) -> tuple[str, ...]:
    """Return the outputs of a step but its carried state."""
    hidden = {*stamp.state.values(), *(f"{name}.next" for name in stamp.names.values() if name in carried)}
    return tuple(value.name or "" for value in model.graph.outputs if value.name not in hidden)


def first_state(halves: Halves, given: Mapping[str, Any] | None, is_first: bool) -> Mapping[str, Any]:
    """Return a replica's first state: on rank 0 the one given; elsewhere zeros, until rank 0 has sent it."""
    if is_first or given is not None:
        return given or {}
    graph = halves.update.graph
    bare = [value for value in graph.inputs if value.name in halves.states and value.name not in graph.initializers]
    found = {}
    for value in bare:
        if value.shape is None or not value.shape.is_static() or value.dtype is None:
            raise SessionError(
                f"the shape of the state {value.name!r} is not in the step: give its first value here, too"
            )
        found[value.name or ""] = np.zeros(value.shape.numpy(), value.dtype.numpy())
    return found


def sizes_of(spec: InputSpec) -> list[int]:
    """Return the shape of a value whose shape is known."""
    return [axis for axis in spec.shape if isinstance(axis, int)]


def without_state(model: ir.Model, states: frozenset[str]) -> ir.Model:
    """Drop the first values of a step's state: the session has the present ones."""
    for value in model.graph.inputs:
        if value.name in states and value.name in model.graph.initializers:
            del model.graph.initializers[value.name]
            value.const_value = None
    return model
