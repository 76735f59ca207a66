"""Reading models: clear errors, and external data confined to its folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir

from graphscale.errors import ModelFileError, one_line
from graphscale.files.ambiguous import refuse_ambiguous
from graphscale.files.descriptors import is_stream
from graphscale.files.model_size import parse_model, refuse_large
from graphscale.files.reading import read_file
from graphscale.files.training_info import keep_training_info
from graphscale.process.stages import report_stage

__all__ = ["from_proto", "load", "load_with_proto", "replaced_tensors"]

_LOCATION = b"location"  # a key of each external tensor
_ORT_FORMAT = b"ORTM"  # at byte 4: ONNX Runtime then reads the file as one of its own format


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX model; weights in external files stay on disk. Raises what `load_with_proto` raises."""
    return load_with_proto(path)[0]


def load_with_proto(path: str | os.PathLike[str]) -> tuple[ir.Model, onnx.ModelProto]:
    """Read an ONNX model; return it with its ModelProto, without the initializers.

    Raises:
        ModelFileError: the file, or one with its weights, is missing, truncated, or of another format.
        UnsupportedModelError: the model carries `training_info` that is more than bindings of its graph.
    """
    if not isinstance(path, str | os.PathLike):
        raise ModelFileError(f"a model is a path, an onnx_ir.Model or an onnx.ModelProto; got {_describe(path)}")
    report_stage(f"reading {path}")
    try:
        # External data is refused through links, and located relative to the model: load by the resolved path.
        resolved = Path(path) if is_stream(path) else Path(path).resolve()
        content = read_file(resolved)
        if content[4:8] == _ORT_FORMAT:
            raise ModelFileError(f"{path} is in the format of ONNX Runtime itself (.ort); pass the ONNX file")
        proto = parse_model(content, str(path))
    except (OSError, google.protobuf.message.DecodeError) as error:
        raise ModelFileError(_explain(path, error)) from error
    except (ValueError, RuntimeError) as error:  # a NUL byte, a circle of links
        raise ModelFileError(f"cannot read {path}: {error}") from error
    if not content:
        raise ModelFileError(f"{path} is not an ONNX model: it is empty; write it again")
    model = _from_proto(proto, str(path))
    if _LOCATION in content:
        from graphscale.files.external_data import confine_external_data, external_tensors, refuse_other_data

        if is_stream(path) and external_tensors(model):
            raise ModelFileError(
                f"{path} has weights in files beside it, which a stream does not have; pass the model's file"
            )
        confine_external_data(model, resolved.parent, str(path))
        refuse_other_data(model, Path(path).parent, str(path))
    del proto.graph.initializer[:]  # The model holds them.
    return model, proto


def _explain(path: str | os.PathLike[str], error: Exception) -> str:
    """Explain why a file is no readable model."""
    from graphscale.files.kinds import describe_file, describe_folder, explain_unreadable

    if isinstance(error, IsADirectoryError):
        return f"{path} is {describe_folder(path)}"
    if isinstance(error, OSError):
        return f"cannot read {path}: {explain_unreadable(path, error)}"
    kind = describe_file(path, "onnx")
    return f"{path} is not an ONNX model{f': {kind}' if kind else ', or it is truncated; write or copy it again'}"


def _describe(value: object) -> str:
    """Describe a value that is no model, and name the right argument."""
    kind = type(value).__name__
    hints = {
        "bytes": "read it with onnx.load_model_from_string",
        "GraphProto": "make a model of it with onnx.helper.make_model",
    }
    hint = "pass its attribute model" if hasattr(value, "model") else hints.get(kind)
    return f"a {kind}{f'; {hint}' if hint else ''}"


def from_proto(proto: onnx.ModelProto, name: str = "the model", held: Collection[str] = ()) -> ir.Model:
    """Turn a ModelProto into an onnx_ir model, with its external tensors confined to the current folder.

    Args:
        proto: the model.
        name: its name for messages.
        held: names of initializers to pass over.

    Raises:
        ModelFileError: the model has no graph, a damaged or too large one, or an external tensor outside the folder.
        UnsupportedModelError: the model carries `training_info` that is more than bindings of its graph.
    """
    from graphscale.files.external_data import confine_external_data  # most models come from one file

    model = _from_proto(proto, name)
    confine_external_data(model, Path.cwd(), name, held)
    return model


def _from_proto(proto: onnx.ModelProto, name: str) -> ir.Model:
    if not proto.HasField("graph") or not proto.opset_import or not proto.ir_version:
        raise ModelFileError(f"{name} is not an ONNX model: it has no graph, opset or IR version")
    refuse_large(proto, name)
    refuse_ambiguous(proto, name)
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises many kinds for damaged graphs
        cause: BaseException = error
        while (below := cause.__cause__ or cause.__context__) is not None:
            cause = below
        raise ModelFileError(f"{name} is damaged: {one_line(cause)}") from error
    keep_training_info(proto, model, name)
    return model


@contextlib.contextmanager
def replaced_tensors(tensors: Mapping[ir.Value, ir.TensorProtocol]) -> Iterator[None]:
    """Give initializers other tensors in a `with` block."""
    before = [value.const_value for value in tensors]
    try:
        for value, tensor in tensors.items():
            value.const_value = tensor
        yield
    finally:
        for value, tensor_before in zip(tensors, before, strict=True):
            value.const_value = tensor_before
