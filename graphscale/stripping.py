"""strip: the graph without graphscale's loss scale or mixed precision."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from graphscale.collector import paused_collector
from graphscale.errors import ModelFileError
from graphscale.graph.damage import name_damage
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.graph.restored import restore_with_proto
from graphscale.lowering.lower_model import plain_form
from graphscale.pipeline import Model, open_copy

__all__ = ["is_rewritten", "strip", "strip_model", "strip_with_proto"]


def strip(model: Model) -> ir.Model | onnx.ModelProto:
    """Remove the loss scale, or mixed precision, from a model. The given model is not changed.

    A ModelProto that was scaled comes back byte for byte. An onnx_ir model has the nodes, their order, names, types,
    metadata, opset and IR version of the original, in the form in which onnx_ir writes them. Initializers keep their
    content: in a model that was exported from a session, the trained weights. Where a model was put into mixed
    precision first and scaled later, only the loss scale is removed; strip again for the rest.

    Args:
        model: a path, an onnx_ir model or a ModelProto, made by `scale` or `autocast`.

    Returns:
        A ModelProto if one was given, else an onnx_ir model.

    Raises:
        ModelFileError: graphscale has not rewritten the model, or a later change of the model cannot be undone.
    """
    stripped, proto = strip_with_proto(model)
    return proto if isinstance(model, onnx.ModelProto) else stripped


@name_damage
@paused_collector()
def strip_with_proto(model: Model) -> tuple[ir.Model, onnx.ModelProto]:
    """Return a model as `strip` does, in both forms."""
    return strip_model(*open_copy(model))


def is_rewritten(model: ir.Model) -> bool:
    """Return whether a model holds its original."""
    return ORIGINAL_KEY in model.metadata_props


def strip_model(model: ir.Model, name: str) -> tuple[ir.Model, onnx.ModelProto]:
    """Return the original of a rewritten model, in both forms; see `strip`.

    Args:
        model: the model.
        name: its name in messages.
    """
    if not is_rewritten(model):
        raise ModelFileError(
            f"{name} has nothing to strip: graphscale put neither a loss scale nor casts into it, or another tool "
            "dropped its metadata"
        )
    try:
        return restore_with_proto(plain_form(model, name))
    except ModelFileError as error:
        raise ModelFileError(
            f"{name} cannot be stripped: it was changed after graphscale had rewritten it ({error})"
        ) from error
