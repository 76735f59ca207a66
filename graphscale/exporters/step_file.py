"""The file of an exported step: first values of the state, roles, documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common

from graphscale.errors import ExportError
from graphscale.files.tensor_files import Arrays
from graphscale.files.training_info import ROLES_KEY
from graphscale.files.writing import MARK_KEY

__all__ = ["REFUSED_INDEX", "complete_step", "gradient_name", "next_name", "remove_outputs", "unique_names"]

# Too far from the end of any axis: a runtime refuses it.
REFUSED_INDEX = np.iinfo(np.int32).min


def next_name(name: str) -> str:
    """Return the name of the output with the next value of an input."""
    return f"{name}.next"


def gradient_name(name: str) -> str:
    """Return the name of the output with the gradient of a weight, in a step before its comparison."""
    return f"{name}.gradient"


def remove_outputs(model: ir.Model, names: Iterable[str]) -> None:
    """Remove outputs that only the comparison reads."""
    removed = set(names)
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name not in removed]
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)


def unique_names(names: Sequence[str]) -> None:
    """Check that no two inputs or outputs of a step share a name.

    Raises:
        ExportError: two do.
    """
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ExportError(f"two inputs or outputs of the step are named {doubles[0]!r}; rename one of them")


def complete_step(
    model: ir.Model,
    first: Arrays,
    pairs: Mapping[str, str],
    *,
    losses: Sequence[str],
    metrics: Sequence[str] = (),
    documentation: str,
) -> None:
    """Give the carried inputs of a step their first values, and write its roles into the metadata.

    A carried input becomes an input with an initializer: it needs no feed, and no runtime folds it.

    Args:
        model: the step, changed in place.
        first: first values of the carried inputs, arrays of the types and shapes of the inputs.
        pairs: the output with the next value of each carried input, `{output: input}`.
        losses: names of the losses.
        metrics: names of the outputs that no later step reads.
        documentation: the doc_string of the model.

    Raises:
        ExportError: a first value does not fit its input.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    for output, name in pairs.items():
        value, tensor = inputs[name], ir.tensor(np.ascontiguousarray(first[name]).reshape(first[name].shape), name=name)
        if value.dtype != tensor.dtype or value.shape is None or tuple(value.shape) != tuple(tensor.shape):
            raise ExportError(
                f"the exporter made {name} {value.dtype}{value.shape}, its first value is {tensor.dtype}{tensor.shape}"
            )
        value.const_value = tensor
        graph.register_initializer(value)
        outputs[output].type, outputs[output].shape = value.type, ir.Shape(value.shape)
        value.doc_string = f"carried state: feed {output} back here"
        outputs[output].doc_string = f"the next value of {name}"
    roles: dict[str, object] = {"losses": list(losses), "states": dict(pairs)}
    if metrics:
        roles["metrics"] = list(metrics)
    model.metadata_props[ROLES_KEY] = json.dumps(roles)
    model.metadata_props[MARK_KEY] = version("graphscale")
    model.doc_string = documentation
    model.producer_name, model.producer_version = "graphscale", version("graphscale")
