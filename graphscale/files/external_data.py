"""External data of tensors, confined to the model's folder and the user's root.

An untrusted model may name any file of the machine, and graphscale copies external data into its output.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

import onnx_ir as ir

from graphscale.errors import ModelFileError, UnsupportedModelError
from graphscale.files.limits import current_limits

__all__ = ["confine_external_data", "external_tensors", "leaves_folder", "refuse_other_data", "relocate"]

# The beginning of locations by which ONNX Runtime names its own memory.
_MEMORY = "*/_ORT_"
_TENSORS = (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS)


def external_tensors(model: ir.Model) -> dict[ir.Value, ir.ExternalTensor]:
    """Return the initializers of a model whose content is in other files, with their tensors."""
    values = model.graph.initializers.values()
    return {value: tensor for value in values if isinstance(tensor := value.const_value, ir.ExternalTensor)}


def confine_external_data(model: ir.Model, folder: Path, name: str, held: Collection[str] = ()) -> None:
    """Confine the external tensors of a new model to its folder and the root.

    Args:
        model: the model.
        folder: its folder.
        name: its name for messages.
        held: names of initializers to pass over.

    Raises:
        ModelFileError: the content of a tensor would lie elsewhere, or is missing, truncated, or no numbers.
        UnsupportedModelError: a tensor that is no initializer of the main graph has its content in another file.
    """
    for inner in _inner_tensors(model):
        if isinstance(inner, ir.ExternalTensor):
            raise UnsupportedModelError(
                f"{name} keeps the tensor {inner.name!r} in another file, and it is no initializer of the main graph; "
                "write the model as one file: onnx.save(onnx.load(MODEL), FILE)"
            )
    for value, tensor in external_tensors(model).items():
        if value.name not in held:
            value.const_value = _confine(tensor, folder, name)


def refuse_other_data(model: ir.Model, folder: Path, name: str) -> None:
    """Refuse a model behind a link with other weights beside the link: ONNX Runtime reads these.

    Args:
        model: the model, with its external tensors confined.
        folder: the folder of the link.
        name: its name for messages.

    Raises:
        ModelFileError: a file beside the link has the name of other weights.
    """
    for tensor in external_tensors(model).values():
        beside = folder / tensor.location
        if beside.exists() and not beside.samefile(tensor.path):
            raise ModelFileError(
                f"{name} is a link, and {os.fspath(tensor.location)!r} beside it is another file than beside the "
                "model; pass the model by its own path"
            )


def leaves_folder(path: Path, folder: Path) -> bool:
    """Return whether a path, with its links resolved, is outside a folder and the root."""
    roots = (folder, current_limits().external_data_root)
    return not any(path.resolve().is_relative_to(root.resolve()) for root in roots if root is not None)


def _inner_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yield all tensors but the initializers of the main graph."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for body in graph.subgraphs():
            yield from (value.const_value for value in body.initializers.values() if value.const_value is not None)
        for node in graph.all_nodes():
            for attribute in node.attributes.values():
                if attribute.type in _TENSORS and attribute.value is not None:
                    yield from [attribute.value] if attribute.type is ir.AttributeType.TENSOR else attribute.value


def _confine(tensor: ir.ExternalTensor, folder: Path, name: str) -> ir.ExternalTensor:
    """Check an external tensor against its file; return it with its base folder."""
    location, root = os.fspath(tensor.location), current_limits().external_data_root
    what = f"{name} keeps the tensor {tensor.name!r} in {location!r}"
    if location.startswith(_MEMORY):
        raise ModelFileError(f"{what}: for ONNX Runtime an address in its memory, no file")
    if tensor.dtype is ir.DataType.STRING:
        raise ModelFileError(f"{what}: strings cannot be in another file")
    path = Path(folder, location)
    try:
        strays = root is None and (os.path.isabs(location) or ".." in Path(location).parts)
        if strays or leaves_folder(path, folder):
            raise ModelFileError(
                f"{what}, outside of the model's folder; if you trust it: --external-data-root "
                f"{shlex.quote(os.fspath(path.resolve().parent))}"
            )
        found = path.stat()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a circle of links
        raise ModelFileError(f"{what}, which cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ModelFileError(f"{what}, which is no regular file")
    if path.name != os.path.basename(location):
        raise ModelFileError(f"{what}, which is no name of a file")
    if found.st_nlink > 1:
        raise ModelFileError(f"{what}, which has a second name elsewhere (a hard link); copy the file")
    offset = tensor.offset or 0
    length = tensor.nbytes if tensor.length is None else tensor.length
    is_whole = min(offset, length, *tensor.shape.numpy()) >= 0 and length >= tensor.nbytes
    if is_whole and found.st_size < offset + length:
        raise ModelFileError(f"{what}, which is truncated: {found.st_size} of {offset + length} bytes")
    if not is_whole or length > tensor.nbytes:
        raise ModelFileError(f"{what}, and {length} bytes from {offset} on are not its shape {tensor.shape}")
    base, inner = folder, location
    if not path.resolve().is_relative_to(folder.resolve()) and root is not None:
        base, inner = root.resolve(), os.path.relpath(path.resolve(), root.resolve())
    return relocate(tensor, base, inner)


def relocate(tensor: ir.ExternalTensor, folder: Path, location: str) -> ir.ExternalTensor:
    """Return an external tensor with the same offset in another file."""
    return ir.ExternalTensor(
        location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
        base_dir=folder,
    )
