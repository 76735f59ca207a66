"""Parts of a model that onnx_ir cannot hold: `training_info`, kept in `model.meta`, and nameless results."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from graphscale.errors import UnsupportedModelError

__all__ = [
    "ROLES_KEY",
    "copy_training_info",
    "drop_training_info",
    "keep_training_info",
    "read_bindings",
    "to_proto",
    "training_info_of",
]

# The metadata property of a training graph that states roles, as a roles file does: exporters write it.
ROLES_KEY = "graphscale.roles"
_KEY = "graphscale.training_info"  # in `model.meta`


def keep_training_info(proto: onnx.ModelProto, model: ir.Model, name: str) -> None:
    """Keep the `training_info` of a ModelProto with its onnx_ir model.

    Raises:
        UnsupportedModelError: it has an algorithm graph, several steps, or a binding of a missing value.
    """
    infos = tuple(proto.training_info)
    for info in infos:
        algorithm = info.algorithm
        if algorithm.node or algorithm.initializer or algorithm.sparse_initializer or algorithm.output:
            raise UnsupportedModelError(
                f"{name} carries training_info whose algorithm is a graph of its own; move its inputs, initializers, "
                "nodes and outputs into the main graph, which they share their names with, and keep its update_binding"
            )
        for entry in info.initialization_binding:
            if entry.key not in model.graph.initializers:
                raise UnsupportedModelError(
                    f"{name} carries training_info whose initialization_binding names {entry.key!r}, which is no "
                    "initializer of the graph; correct it, or delete it"
                )
    if sum(bool(info.update_binding) for info in infos) > 1:
        raise UnsupportedModelError(
            f"{name} carries training_info of several steps that follow each other; write one model per step"
        )
    if infos:
        model.meta[_KEY] = infos


def training_info_of(model: ir.Model) -> Sequence[onnx.TrainingInfoProto]:
    """Return the `training_info` that is kept with a model."""
    return model.meta.get(_KEY, ())  # type: ignore[no-any-return]


def copy_training_info(source: ir.Model, copy: ir.Model) -> None:
    """Keep the `training_info` of a model with its clone."""
    if _KEY in source.meta:
        copy.meta[_KEY] = source.meta[_KEY]


def drop_training_info(model: ir.Model) -> None:
    """Forget the `training_info` of a model."""
    model.meta.pop(_KEY, None)


def read_bindings(model: ir.Model) -> list[tuple[str, str]]:
    """Return the pairs `(output name, input name)` of the model's update bindings."""
    return [(entry.value, entry.key) for info in training_info_of(model) for entry in info.update_binding]


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Turn a model into a ModelProto, with its `training_info` and its nameless results."""
    proto = ir.to_proto(model)
    proto.training_info.extend(training_info_of(model))
    for metadata in (tensor.metadata_props for tensor in proto.graph.initializer):  # onnx_ir writes it twice
        if metadata[: len(metadata) // 2] == metadata[len(metadata) // 2 :]:
            del metadata[len(metadata) // 2 :]
    for i, outputs in enumerate([node.outputs for node in model.graph]):
        if outputs and not outputs[-1].name:
            written = proto.graph.node[i].output
            written.extend([""] * (len(outputs) - len(written)))
    return proto
