"""What replicas know of the step as a whole: its interface, its state, and the file it can be written to again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import SessionError
from graphscale.files import model_files
from graphscale.graph.stamp import Stamp
from graphscale.replicas.splitting import Halves
from graphscale.session.interface import InputSpec

__all__ = ["check_names", "export_step", "first_state", "output_names", "sizes_of", "without_state"]

Array = np.ndarray[Any, Any]


def output_names(model: ir.Model, stamp: Stamp, carried: Mapping[str, InputSpec]) -> tuple[str, ...]:
    """The outputs of a step but its carried state."""
    hidden = {*stamp.state.values(), *(f"{name}.next" for name in stamp.names.values() if name in carried)}
    return tuple(value.name or "" for value in model.graph.outputs if value.name not in hidden)


def check_names(inputs: Mapping[str, InputSpec], feeds: Any, outputs: Sequence[str], fetch: Sequence[str]) -> None:
    """Check that what is fed and fetched exists, and that nothing is missing.

    Raises:
        SessionError: with what is wrong.
    """
    if not isinstance(feeds, Mapping):
        raise SessionError(f"feeds are a mapping of input names to values; got a {type(feeds).__name__}")
    unknown = [name for name in feeds if name not in inputs]
    if unknown:
        raise SessionError(f"the step has no input {unknown[0]!r} to feed; its inputs are {', '.join(inputs)}")
    missing = [name for name, spec in inputs.items() if name not in feeds and not spec.optional]
    if missing:
        raise SessionError(f"the step needs a feed for {', '.join(map(repr, missing))}")
    wrong = [name for name in fetch if name not in outputs]
    if wrong:
        raise SessionError(f"the step has no output {wrong[0]!r} to fetch; its outputs are {', '.join(outputs)}")


def first_state(halves: Halves, given: Mapping[str, Any] | None, is_first: bool) -> Mapping[str, Any]:
    """The first state of a replica: what is given to rank 0; elsewhere zeros stand for it until rank 0 has sent it."""
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
    """The shape of something whose shape is known."""
    return [axis for axis in spec.shape if isinstance(axis, int)]


def without_state(model: ir.Model, states: frozenset[str]) -> ir.Model:
    """A step that has no memory for the first values of its state: the session has the present ones."""
    for value in model.graph.inputs:
        if value.name in states and value.name in model.graph.initializers:
            del model.graph.initializers[value.name]
            value.const_value = None
    return model


def export_step(model: ir.Model, state: Mapping[str, Array], path: str | os.PathLike[str]) -> None:
    """Write a step with state in it.

    Raises:
        OutputError: the file cannot be written.
    """
    work = model.clone()
    for value in (*work.graph.inputs, *work.graph.initializers.values()):
        array = state.get(value.name or "")
        if array is not None:
            value.const_value = ir.tensor(array, name=value.name)
            work.graph.initializers[value.name or ""] = value
    model_files.save(work, path)
