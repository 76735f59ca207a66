"""Writing models: atomically, with external data kept where it is."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir

from graphscale.collector import paused_collector
from graphscale.errors import ModelFileError, OutputError, one_line
from graphscale.files.descriptors import descriptor_of
from graphscale.files.external_data import external_tensors, relocate
from graphscale.files.model_files import from_proto, load, replaced_tensors
from graphscale.files.model_size import parse_model
from graphscale.files.training_info import to_proto, training_info_of
from graphscale.files.writing import check_output, write_file, write_files
from graphscale.process.stages import report_stage

__all__ = ["save", "save_all"]

# A protocol buffer holds less than 2 GiB, and many readers of files less; larger weights go to a file of their own.
_LARGEST = 10**9
_PIECE = 2**30  # bytes


@paused_collector(builds=False)
def save(model: ir.Model | onnx.ModelProto, path: str | os.PathLike[str], proto: onnx.ModelProto | None = None) -> None:
    """Write a model atomically: an existing file, and its weights, are replaced only by complete ones.

    Weights in external files stay there if the model is written into the same folder; elsewhere they are copied to
    `NAME.data` beside it. Weights in memory that are too large for one file are written there, too. Where `NAME.data`
    holds weights of the replaced file, the new weights are written to `NAME.data.new` and then copied over `NAME.data`;
    if the disk refuses the copy, `NAME.data.new` remains.

    Args:
        model: the model.
        path: the file.
        proto: the model as it is written where its weights stay; by default as onnx_ir writes it.

    Raises:
        OutputError: the folder does not exist, or cannot be written.
    """
    save_all([model], [path], [proto])


@paused_collector(builds=False)
def save_all(
    models: Sequence[ir.Model | onnx.ModelProto],
    paths: Sequence[str | os.PathLike[str]],
    protos: Sequence[onnx.ModelProto | None] = (),
) -> None:
    """Write models as `save` does: all or none of them, except where weights move to files beside them.

    Raises:
        OutputError: as `save`.
    """
    held = [from_proto(model) if isinstance(model, onnx.ModelProto) else model for model in models]
    targets = [check_output(path) for path in paths]
    report_stage(f"writing {', '.join(map(str, paths))}")
    for model, target in zip(held, targets, strict=True):
        _refuse_weights(model, target)
        if descriptor_of(target) is not None and (external_tensors(model) or _bytes_in_memory(model) > _LARGEST):
            raise OutputError(f"{target} takes one file, and the weights need another one; name a file to write")
    moving = [_weights_move(model, target.parent.resolve()) for model, target in zip(held, targets, strict=True)]
    try:
        if any(moving):
            for model, target, moves in zip(held, targets, moving, strict=True):
                _save_pair(model, target) if moves else _write_models([model], [target])
        else:
            _write_models(held, targets, protos)
    except OSError as error:
        raise OutputError(f"cannot write {', '.join(map(str, paths))}: {error.strerror or error}") from error
    except ir.serde.SerdeError as error:
        cause = one_line(error.__cause__ or "a part of it has the wrong type")[:200]
        names = ", ".join(map(str, paths))
        raise ModelFileError(f"cannot write {names}: the model cannot be serialized: {cause}") from error


def _bytes_in_memory(model: ir.Model) -> int:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(t.nbytes for t in tensors if t is not None and not isinstance(t, ir.ExternalTensor))


def _save_pair(model: ir.Model, target: Path) -> None:
    weights = target.with_name(f"{target.name}.data")
    spare = weights.with_name(f"{weights.name}.new")
    # Until the second model is complete, the first one needs its own weights.
    before = _find_locations(target)
    file = spare if weights.name in before else weights
    is_new = not file.exists()
    try:
        _write_pair(model, target, file)
    except BaseException:
        if is_new and file.name not in _find_locations(target):
            file.unlink(missing_ok=True)
        raise
    if file is spare:
        try:
            _write_pair(load(target), target, weights, replaces=True)
        except OutputError:  # the model is saved, but its weights keep their second name
            return
    if file is spare or spare.name in before:
        spare.unlink(missing_ok=True)


def _refuse_weights(model: ir.Model, target: Path) -> None:
    """Refuse to write a model over its own weights."""
    for file in {Path(tensor.base_dir, tensor.location) for tensor in external_tensors(model).values()}:
        if target.exists() and file.exists() and target.samefile(file):
            raise OutputError(f"{target} holds weights of the model that is written; name another file")


def _weights_move(model: ir.Model, folder: Path) -> bool:
    """Return whether weights of a model are written to a file beside it."""
    elsewhere = any(Path(tensor.base_dir).resolve() != folder for tensor in external_tensors(model).values())
    return elsewhere or _bytes_in_memory(model) > _LARGEST


def _find_locations(path: Path) -> set[str]:
    """Find the names of the files that hold the weights of a model file; none if there is no such file."""
    try:
        proto = parse_model(path.read_bytes(), str(path))
    except (FileNotFoundError, ModelFileError, google.protobuf.message.DecodeError):
        return set()
    entries = (entry for tensor in proto.graph.initializer for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def _write_models(
    models: Sequence[ir.Model], targets: Sequence[Path], protos: Sequence[onnx.ModelProto | None] = ()
) -> None:
    with write_files(*targets) as files:
        for model, file, proto in itertools.zip_longest(models, files, protos):
            file.write_bytes((proto or to_proto(model)).SerializeToString())


def _write_pair(model: ir.Model, target: Path, weights: Path, replaces: bool = False) -> None:
    """Write the weights of a model, then the model that refers to them."""
    source = _find_only_source(model)
    if source is not None:
        # One copy of the file is faster than one per tensor.
        with write_file(weights, replaces) as written:
            _copy(source, written)
        located = {v: relocate(tensor, target.parent, weights.name) for v, tensor in external_tensors(model).items()}
        with replaced_tensors(located):
            _write_models([model], [target])
        return
    with write_file(target) as written:
        ir.save(model, written, format="protobuf", external_data=weights.name)
        with written.open("ab") as end:  # protobuf merges messages in sequence
            end.write(onnx.ModelProto(training_info=training_info_of(model)).SerializeToString())
        content = written.with_name(weights.name)
        if content.exists() and content.stat().st_size > 0:
            with write_file(weights, replaces) as moved:
                os.replace(content, moved)


def _find_only_source(model: ir.Model) -> Path | None:
    """Find the file of a model's external weights, if there is only one, with little other content."""
    tensors = external_tensors(model).values()
    files = {Path(tensor.base_dir, tensor.location) for tensor in tensors}
    if len(files) != 1 or _bytes_in_memory(model) > _LARGEST:
        return None
    (file,) = files
    used = sum(tensor.length or tensor.nbytes for tensor in tensors)
    return file if 2 * used > file.stat().st_size else None


def _copy(source: Path, target: Path) -> None:
    """Let the system copy a file: on some file systems both copies then share their blocks."""
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
