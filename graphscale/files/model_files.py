"""Reading and writing models: clear errors, atomic writes, external data kept where it is."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir

from graphscale.collector import paused_collector
from graphscale.errors import ModelFileError, OutputError, UnsupportedModelError, one_line

__all__ = ["check_output", "from_proto", "load", "load_with_proto", "replaced_tensors", "replacing", "save"]

# A protocol buffer holds less than 2 GiB; larger weights go to a file of their own.
_LARGEST = 2**31 - 2**27
_PIECE = 2**30  # bytes


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX model; weights in external files stay on disk. Raises what `load_with_proto` raises."""
    return load_with_proto(path)[0]


def load_with_proto(path: str | os.PathLike[str]) -> tuple[ir.Model, onnx.ModelProto]:
    """Read an ONNX model, and return the ModelProto that it was made from as well.

    Raises:
        ModelFileError: the file, or one with its weights, is missing, truncated, or of another format.
        UnsupportedModelError: the model carries `training_info`, which would be lost.
    """
    try:
        # External data is refused through links, and located relative to the model: load by the resolved path.
        resolved = Path(path).resolve()
        if resolved.is_dir():
            raise ModelFileError(f"{path} is a folder; pass an ONNX file")
        proto = onnx.ModelProto.FromString(resolved.read_bytes())
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    except google.protobuf.message.DecodeError as error:
        raise ModelFileError(f"{path} is not an ONNX model, or it is truncated: {error}") from error
    model = from_proto(proto, str(path))
    ir.external_data.set_base_dir(model.graph, resolved.parent)
    _check_external_files(model, path)
    return model, proto


def _external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    values = model.graph.initializers.values()
    return [v.const_value for v in values if isinstance(v.const_value, ir.ExternalTensor)]


def _bytes_in_memory(model: ir.Model) -> int:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(t.nbytes for t in tensors if t is not None and not isinstance(t, ir.ExternalTensor))


def _check_external_files(model: ir.Model, path: str | os.PathLike[str]) -> None:
    needed: dict[str, int] = {}
    for tensor in _external_tensors(model):
        file = os.path.join(tensor.base_dir, tensor.location)
        needed[file] = max(needed.get(file, 0), (tensor.offset or 0) + (tensor.length or tensor.nbytes))
    for file, length in needed.items():
        try:
            size = os.stat(file).st_size
        except OSError as error:
            raise ModelFileError(f"{path} keeps weights in {file}, which cannot be read: {error.strerror}") from error
        if size < length:
            raise ModelFileError(f"{path} keeps weights in {file}, which is truncated: {size} of {length} bytes")


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
        return ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises many kinds for damaged graphs
        cause = error.__cause__ or error
        raise ModelFileError(f"{name} is damaged: {str(cause).splitlines()[0]}") from error


def check_output(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of an output file.

    Raises:
        OutputError: its folder does not exist, or the path is a folder, or the file system refuses the name.
    """
    target = Path(path).absolute()
    try:
        if target.is_dir():
            raise OutputError(f"{path} is a folder; name the file to write")
        if not target.parent.is_dir():
            raise OutputError(f"the folder {target.parent} does not exist; create it, or write somewhere else")
        if target.exists() and not target.is_file():
            raise OutputError(f"{path} is no regular file, and would be replaced by one; name a file to write")
    except (OSError, ValueError) as error:  # a name with a NUL byte is a ValueError
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return target


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the path of a temporary file beside `path`, which becomes `path` when the block ends without an error.

    Its content is on the disk before it takes the name: after a power cut there is the old file or the new one.

    Raises:
        OutputError: the folder does not exist or cannot be written, or there was an OSError in the block; an existing
            file is as it was.
    """
    target = check_output(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".graphscale-", suffix=".tmp", dir=target.parent) as folder:
            temporary = Path(folder, target.name)
            yield temporary
            os.chmod(temporary, _mode_for(target))
            _sync(temporary)
            os.replace(temporary, target)
            _sync(target.parent)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _mode_for(target: Path) -> int:
    """The mode of the file that is replaced, else that of any new file."""
    if target.exists():
        return target.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@paused_collector(builds=False)
def save(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model atomically: an existing file is replaced only by a complete one.

    Weights in external files stay there if the model is written into the same folder; elsewhere they are copied to
    `NAME.data` beside it, and so are weights in memory that are too large for one file.

    Raises:
        OutputError: the folder does not exist, or cannot be written.
    """
    target = check_output(path)
    folder = target.parent.resolve()
    data = f"{target.name}.data"
    moves = any(Path(tensor.base_dir).resolve() != folder for tensor in _external_tensors(model))
    moves = moves or _bytes_in_memory(model) > _LARGEST
    try:
        with tempfile.TemporaryDirectory(prefix=".graphscale-", dir=folder) as temporary:
            written = Path(temporary, "model.onnx")
            source = _one_file_of_weights(model) if moves else None
            if source is not None:
                # As a whole: faster than tensor by tensor.
                _copy(source, Path(temporary, data))
                with replaced_tensors(_located_in(model, folder, data)):
                    written.write_bytes(ir.to_proto(model).SerializeToString())
            elif moves:
                ir.save(model, written, format="protobuf", external_data=data)
            else:
                written.write_bytes(ir.to_proto(model).SerializeToString())
            weights = Path(temporary, data)
            if weights.exists() and weights.stat().st_size > 0:
                os.replace(weights, folder / data)
            os.replace(written, target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    except ir.serde.SerdeError as error:
        cause = one_line(error.__cause__ or "a part of it has the wrong type")[:200]
        raise ModelFileError(f"cannot write {path}: the model cannot be serialized: {cause}") from error


def _one_file_of_weights(model: ir.Model) -> Path | None:
    """The file that holds all external weights of a model, if it is one and holds little else."""
    tensors = _external_tensors(model)
    files = {Path(tensor.base_dir, tensor.location) for tensor in tensors}
    if len(files) != 1 or _bytes_in_memory(model) > _LARGEST:
        return None
    (file,) = files
    used = sum(tensor.length or tensor.nbytes for tensor in tensors)
    return file if 2 * used > file.stat().st_size else None


def _copy(source: Path, target: Path) -> None:
    """Let the system copy a file: where the file system can, both then share their blocks."""
    with (
        contextlib.suppress(AttributeError, OSError),  # not on every system, nor between all file systems
        source.open("rb") as content,
        target.open("wb") as file,
    ):
        while os.copy_file_range(content.fileno(), file.fileno(), _PIECE):
            pass
        if os.fstat(file.fileno()).st_size == os.fstat(content.fileno()).st_size:
            return
    shutil.copyfile(source, target)


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


def _located_in(model: ir.Model, folder: Path, name: str) -> dict[ir.Value, ir.TensorProtocol]:
    """Return the external weights of a model as they are in another file, at the same offsets."""
    return {
        value: ir.ExternalTensor(
            name,
            old.offset,
            old.length,
            old.dtype,
            shape=old.shape,
            name=value.name or "",
            doc_string=old.doc_string,
            base_dir=folder,
        )
        for value in model.graph.initializers.values()
        if isinstance(old := value.const_value, ir.ExternalTensor)
    }
