"""The original of a rewritten model, unpacked from the model's metadata."""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from graphscale.errors import GraphscaleError, ModelFileError, one_line
from graphscale.files.limits import current_limits
from graphscale.files.model_files import from_proto
from graphscale.files.model_size import parse_model
from graphscale.graph.original import ORIGINAL_KEY

__all__ = ["find_references", "restore_original", "restore_with_proto"]

# Graphs shrink to a fifth, and have about one field for each packed byte. A record with many more was made to fill the
# memory. The limits of bytes and nodes allow small records a part of the limits.
_LIMIT = 64  # bytes for each packed byte, beside this part of the limit of bytes
_FIELDS = 4  # fields for each packed byte, or this part of the limit of nodes


@contextlib.contextmanager
def _naming_damage() -> Iterator[None]:
    try:
        yield
    except (LookupError, ValueError, zlib.error, DecodeError, GraphscaleError) as error:
        raise ModelFileError(one_line(error)) from error


def restore_original(model: ir.Model, others: ir.Graph | None = None) -> ir.Model:
    """Unpack the original of a rewritten model, with the initializers' content from the rewritten model.

    Args:
        model: the rewritten model.
        others: the graph whose initializers replace those that another tool renamed, removed or gave another type; None
            to refuse such a model.

    Raises:
        ModelFileError: the original is missing or damaged, or the rewritten model lacks an input or an initializer of
            it.
    """
    return _restore(model, others)[0]


def restore_with_proto(model: ir.Model) -> tuple[ir.Model, onnx.ModelProto]:
    """Unpack the original as `restore_original`, and as the recorded ModelProto, in the form of its writer."""
    original, proto, tensors = _restore(model, None)
    for reference in _references(proto):
        name, tensor = reference.name, tensors[reference.name]
        reference.CopyFrom(tensor.raw if isinstance(tensor, ir.TensorProtoTensor) else ir.to_proto(tensor))
        reference.name = name
    return original, proto


@_naming_damage()
def _restore(
    model: ir.Model, others: ir.Graph | None
) -> tuple[ir.Model, onnx.ModelProto, Mapping[str, ir.TensorProtocol]]:
    """Return the original, its record, and the content of initializers that the record lacks."""
    proto = _read_record(model)
    inputs = {value.name for value in model.graph.inputs}
    for value in proto.graph.input:
        if value.name not in inputs:
            raise ValueError(f"it has no input {value.name!r}")
    tensors = {tensor.name: _find_content(model.graph, tensor, others) for tensor in _references(proto)}
    original = from_proto(proto, "the original in its metadata", held=tensors)
    for name, tensor in tensors.items():
        original.graph.initializers[name].const_value = tensor
    return original, proto, tensors


@_naming_damage()
def find_references(model: ir.Model) -> list[str]:
    """Return the names of initializers in the record of the original.

    Raises:
        ModelFileError: the record is missing or damaged.
    """
    return [tensor.external_data[0].value for tensor in _references(_read_record(model))]


def _read_record(model: ir.Model) -> onnx.ModelProto:
    packed = base64.b64decode(model.metadata_props[ORIGINAL_KEY], validate=True)
    fields = max(current_limits().max_nodes // _FIELDS, _FIELDS * len(packed))
    return parse_model(_decompress(packed), "its record", fields)


def _references(record: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    return (each for each in record.graph.initializer if each.data_location == onnx.TensorProto.EXTERNAL)


def _decompress(packed: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(packed, current_limits().max_bytes // _LIMIT + _LIMIT * len(packed))
    if not decompressor.eof:
        raise ValueError("its record is truncated, or larger than any original (--max-bytes)")
    return content


def _find_content(graph: ir.Graph, reference: onnx.TensorProto, others: ir.Graph | None) -> ir.TensorProtocol:
    """Find the tensor of a record's reference in a graph, else in another."""
    name = reference.external_data[0].value
    tensor = graph.initializers[name].const_value if name in graph.initializers else None
    is_fit = tensor is not None and (tensor.dtype, list(tensor.shape)) == (reference.data_type, list(reference.dims))
    if others is not None and not is_fit:
        return _find_content(others, reference, None)
    if tensor is None:
        raise ValueError(f"it has no initializer {name!r}")
    if not is_fit:
        raise ValueError(f"the initializer {name!r} has another type or shape")
    return tensor
