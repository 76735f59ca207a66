"""The original of a rewritten model, packed in the model's metadata."""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections.abc import Iterator, MutableSequence

import onnx
import onnx_ir as ir

from graphscale.files.model_files import replaced_tensors
from graphscale.files.training_info import to_proto

__all__ = [
    "ORIGINAL_KEY",
    "outline",
    "record_original",
]

# The metadata property of a rewritten model that holds its original.
ORIGINAL_KEY = "graphscale.original"

_LEVEL = 1  # of zlib: the default level saves a fifth of the size, and takes six times as long


@contextlib.contextmanager
def record_original(model: ir.Model, proto: onnx.ModelProto | None = None) -> Iterator[None]:
    """Record a model in its own metadata, before the block rewrites it in place.

    The record refers to unchanged initializers by their names. If the block raises, nothing is recorded.

    Args:
        model: the model to be rewritten.
        proto: the ModelProto of the model, which saves its serialization.
    """
    initializers = {name: value.const_value for name, value in model.graph.initializers.items()}
    compressor = zlib.compressobj(_LEVEL)
    packed = compressor.compress(_copy_without_initializers(proto or _serialize(model)).SerializeToString())
    yield
    held = model.graph.initializers
    names = {id(value.const_value): name for name, value in held.items()}
    content = onnx.ModelProto()
    for name, tensor in initializers.items():
        if tensor is not None:
            kept = name if name in held and held[name].const_value is tensor else names.get(id(tensor))
            content.graph.initializer.append(_describe(name, tensor, kept))
    # Protobuf merges messages in sequence.
    packed += compressor.compress(content.SerializeToString()) + compressor.flush()
    model.metadata_props[ORIGINAL_KEY] = base64.b64encode(packed).decode()


def _serialize(model: ir.Model) -> onnx.ModelProto:
    """Turn a model into a ModelProto, without the content of its initializers."""
    empty = ir.TensorProtoTensor(onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[0]))
    with replaced_tensors(dict.fromkeys(model.graph.initializers.values(), empty)):
        return to_proto(model)


def outline(model: ir.Model, proto: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """Return a model as a small ModelProto: complete, but for the content of initializers.

    Args:
        model: the model.
        proto: the ModelProto of the model, if any, with or without the initializers; it is not changed.
    """
    if proto is None:
        return _serialize(model)
    bare = onnx.ModelProto()
    bare.MergeFrom(_copy_without_initializers(proto))
    for name in model.graph.initializers:
        bare.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=[0])
    return bare


def _copy_without_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    if not proto.graph.initializer:
        return proto
    bare = onnx.ModelProto()
    for source, copy in ((proto, bare), (proto.graph, bare.graph)):
        for field, content in source.ListFields():
            if field.name in ("graph", "initializer"):
                continue
            if isinstance(content, MutableSequence):
                getattr(copy, field.name).extend(content)
            elif field.message_type is not None:
                getattr(copy, field.name).CopyFrom(content)
            else:
                setattr(copy, field.name, content)
    return bare


def _describe(name: str, tensor: ir.TensorProtocol, kept: str | None) -> onnx.TensorProto:
    """Describe an initializer by the name of one with its content in the rewritten model, else in full."""
    if kept is None:
        loaded = ir.tensor(tensor.numpy(), name=name) if isinstance(tensor, ir.ExternalTensor) else tensor
        return ir.to_proto(loaded)
    reference = onnx.TensorProto(name=name, data_type=tensor.dtype.value, data_location=onnx.TensorProto.EXTERNAL)
    reference.dims.extend(tensor.shape.numpy())
    reference.external_data.add(key="location", value=kept)
    return reference
