"""Reading and writing models: clear errors, atomic writes, external data kept where it is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir

from graphscale.errors import ModelFileError, OutputError, UnsupportedModelError

__all__ = ["check_output", "from_proto", "load", "save", "to_proto"]


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX model; weights in external files stay on disk.

    Raises:
        ModelFileError: the file is missing, truncated, or not an ONNX model.
        UnsupportedModelError: the model carries `training_info`, which would be lost.
    """
    # External data is refused through links, and located relative to the model: resolve and load by absolute path.
    resolved = Path(path).resolve()
    if resolved.is_dir():
        raise ModelFileError(f"{path} is a folder; pass an ONNX file")
    try:
        proto = onnx.ModelProto.FromString(resolved.read_bytes())
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    except google.protobuf.message.DecodeError as error:
        raise ModelFileError(f"{path} is not an ONNX model, or it is truncated: {error}") from error
    model = from_proto(proto, str(path))
    ir.external_data.set_base_dir(model.graph, resolved.parent)
    return model


def from_proto(proto: onnx.ModelProto, name: str = "the model") -> ir.Model:
    """Turn a ModelProto into an onnx_ir model.

    Raises:
        ModelFileError: it has no graph, or its graph is damaged.
        UnsupportedModelError: it carries `training_info`.
    """
    if not proto.HasField("graph") or not proto.opset_import or not proto.ir_version:
        raise ModelFileError(f"{name} is not an ONNX model: it has no graph, opset or IR version")
    if proto.training_info:
        raise UnsupportedModelError(
            f"{name} carries training_info, which would be lost; move its graphs into the main graph first"
        )
    try:
        return ir.serde.deserialize_model(proto)
    except Exception as error:  # onnx_ir raises many kinds for damaged graphs
        cause = error.__cause__ or error
        raise ModelFileError(f"{name} is damaged: {str(cause).splitlines()[0]}") from error


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Turn an onnx_ir model into a ModelProto."""
    return ir.serde.serialize_model(model)


def check_output(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of an output file.

    Raises:
        OutputError: its folder does not exist, or the path is a folder.
    """
    target = Path(path).absolute()
    if target.is_dir():
        raise OutputError(f"{path} is a folder; name the file to write")
    if not target.parent.is_dir():
        raise OutputError(f"the folder {target.parent} does not exist; create it, or write somewhere else")
    return target


def save(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model atomically: an existing file is replaced only by a complete one.

    Weights in external files stay there if the model is written into the same folder; elsewhere they are copied to
    `NAME.data` beside it.

    Raises:
        OutputError: the folder does not exist, or cannot be written.
    """
    target = check_output(path)
    external = [
        value.const_value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    moves = any(Path(tensor.base_dir).resolve() != target.parent.resolve() for tensor in external)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".onnx", dir=target.parent)
    os.close(handle)
    try:
        if moves:
            ir.save(model, temporary, format="protobuf", external_data=f"{target.name}.data")
        else:
            ir.save(model, temporary, format="protobuf")
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
