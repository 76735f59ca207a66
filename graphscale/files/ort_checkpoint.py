"""Reading and writing the checkpoints of ONNX Runtime training sessions.

A checkpoint is a flatbuffer. The classes that read and write it are in every onnxruntime wheel, stock builds included;
the training build's own functions would drop the optimizer's state on the way.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from graphscale.errors import ModelFileError, UnsupportedModelError
from graphscale.files.descriptors import is_stream
from graphscale.files.kinds import ORT_CHECKPOINT
from graphscale.files.reading import check_readable, read_file
from graphscale.files.stream_files import read_stream
from graphscale.files.tensor_files import ARRAY_DTYPES
from graphscale.files.writing import write_file

__all__ = ["Checkpoint", "OptimizerGroup", "is_checkpoint", "read_checkpoint", "write_checkpoint"]

Array = np.ndarray[Any, Any]
T = TypeVar("T")

_NUMBERS = {dtype.numpy(): int(dtype) for dtype in ARRAY_DTYPES if dtype is not ir.DataType.BFLOAT16}
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}
# The properties of each kind: their field of the property bag, their class, and their Python type.
_PROPERTIES = (("Ints", "IntProperty", int), ("Floats", "FloatProperty", float), ("Strings", "StringProperty", str))


@dataclasses.dataclass
class OptimizerGroup:
    """The optimizer's state for one group of parameters: the steps applied, and `{parameter: {moment: array}}`."""

    step: int
    initial_learning_rate: float
    moments: dict[str, dict[str, Array]]


@dataclasses.dataclass
class Checkpoint:
    """The content of a checkpoint file.

    Attributes:
        trainable: the parameters that require gradients, by name.
        frozen: the other parameters.
        properties: values that the user stored: whole numbers, floating-point numbers and strings.
        groups: the optimizer's state, if it was saved.
        version: the version of the format.
        nominal: True if the parameters have no values yet; they are read as empty arrays.
    """

    trainable: dict[str, Array]
    frozen: dict[str, Array]
    properties: dict[str, int | float | str] = dataclasses.field(default_factory=dict)
    groups: dict[str, OptimizerGroup] = dataclasses.field(default_factory=dict)
    version: int = 2
    nominal: bool = False

    @property
    def parameters(self) -> dict[str, Array]:
        """All parameters."""
        return {**self.trainable, **self.frozen}


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has the mark of a checkpoint. Raises an OSError for an unreadable file."""
    if is_stream(path):
        return read_stream(path)[4:8] == ORT_CHECKPOINT
    check_readable(path)
    with open(path, "rb") as file:
        return file.read(8)[4:] == ORT_CHECKPOINT


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        ModelFileError: the file is missing, truncated, or no checkpoint.
        UnsupportedModelError: its parameters are in an external file, or onnxruntime is not installed.
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    if data[4:8] != ORT_CHECKPOINT:
        raise ModelFileError(f"{path} is not a checkpoint of an ONNX Runtime training session")
    if len(data) % 4:
        raise ModelFileError(f"{path} is a damaged checkpoint; it may be truncated ({len(data)} bytes)")
    root = _import("Checkpoint").Checkpoint
    try:
        return _Reader(path, 2 * len(data)).checkpoint(root.GetRootAs(_Buffer(data), 0))
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise ModelFileError(f"{path} is a damaged checkpoint; it may be truncated ({error})") from error


def write_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: an existing file is replaced only by a complete one.

    Raises:
        OutputError: the file cannot be written.
        UnsupportedModelError: onnxruntime is not installed.
    """
    data = _Writer().checkpoint(checkpoint)
    with write_file(path) as temporary:
        temporary.write_bytes(data)


def _import(table: str) -> Any:
    """Import the flatbuffers module of a table from the installed onnxruntime."""
    try:
        importlib.import_module("onnxruntime.tools.ort_format_model")  # puts ort_flatbuffers_py on the path
        return importlib.import_module(f"ort_flatbuffers_py.fbs.{table}")
    except ImportError as error:
        raise UnsupportedModelError(
            f"reading and writing checkpoints needs onnxruntime ({error}): pip install onnxruntime"
        ) from error


class _Buffer(bytes):
    """Bytes that refuse a slice beyond their end, where flatbuffers would shorten a name silently."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.stop is not None and key.stop > len(self):
            raise IndexError("a name reaches beyond the end of the file")
        return super().__getitem__(key)


class _Reader:
    """A reader of the tables, with a limit for their bytes, since tables of a forged file may share vectors and names.

    Args:
        path: the file, for messages.
        most: the bytes that tensors, names and the items of vectors may take together.
    """

    def __init__(self, path: str | os.PathLike[str], most: int) -> None:
        self._path = path
        self._left = most

    def checkpoint(self, root: Any) -> Checkpoint:
        module = root.ModuleState()
        if module is None:
            raise ModelFileError(f"{self._path} holds no parameters")
        if module.HasExternalData():
            raise UnsupportedModelError(
                f"{self._path} keeps its parameters in another file; save it without external data"
            )
        return Checkpoint(
            trainable=_unique(map(self._tensor, self._items(module, "RequiresGradParams"))),
            frozen=_unique(map(self._tensor, self._items(module, "FrozenParams"))),
            properties=_unique(self._properties(root.PropertyBag())),
            groups=_unique(map(self._group, self._items(root, "OptimizerGroups"))),
            version=root.Version(),
            nominal=bool(module.IsNominalState()),
        )

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError("its tables share vectors or names, and hold more than twice the bytes of the file")

    def _items(self, owner: Any, field: str) -> Iterator[Any]:
        """Yield the items of a vector."""
        item, count = getattr(owner, field), getattr(owner, f"{field}Length")()
        self._spend(4 * count)
        return (item(i) for i in range(count))

    def _text(self, content: bytes) -> str:
        self._spend(len(content))
        return content.decode()

    def _tensor(self, tensor: Any) -> tuple[str, Array]:
        dtype: np.dtype[Any] = _DTYPES[tensor.DataType()]
        self._spend(8 * tensor.DimsLength() + tensor.RawDataLength())
        shape = tuple(tensor.Dims(i) for i in range(tensor.DimsLength()))
        data = tensor.RawDataAsNumpy().tobytes() if tensor.RawDataLength() else b""
        if not data and not shape:
            shape = (0,)  # in a nominal checkpoint a parameter has neither value nor shape
        return self._text(tensor.Name()), np.frombuffer(data, dtype).reshape(shape)

    def _group(self, group: Any) -> tuple[str, OptimizerGroup]:
        moments = _unique(
            (self._text(state.ParamName()), _unique(map(self._tensor, self._items(state, "Momentums"))))
            for state in self._items(group, "OptimizerStates")
        )
        step, rate = group.Step(), group.InitialLearningRate()
        if step < 0 or not math.isfinite(rate):
            raise ValueError(f"an optimizer's step {step}, its learning rate {rate}")
        return self._text(group.GroupName()), OptimizerGroup(step, rate, moments)

    def _properties(self, bag: Any) -> Iterator[tuple[str, int | float | str]]:
        for field, _, kind in _PROPERTIES if bag is not None else ():
            for item in self._items(bag, field):
                value = item.Value()
                yield self._text(item.Name()), self._text(value) if kind is str else value


def _unique(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, item in pairs:
        if name in found:
            raise ValueError(f"it holds {name!r} twice")
        found[name] = item
    return found


class _Writer:
    """A writer of the flatbuffer, inner objects first."""

    def __init__(self) -> None:
        self._builder = _import("Checkpoint").flatbuffers.Builder(1 << 16)
        self._string = self._builder.CreateString

    def checkpoint(self, checkpoint: Checkpoint) -> bytes:
        state = self._table(
            "ModuleState",
            RequiresGradParams=self._tensors(checkpoint.trainable),
            FrozenParams=self._tensors(checkpoint.frozen),
            IsNominalState=checkpoint.nominal,
        )
        fields: dict[str, Any] = {"Version": checkpoint.version, "ModuleState": state}
        if checkpoint.groups:
            fields["OptimizerGroups"] = self._vector([self._group(*item) for item in checkpoint.groups.items()])
        if checkpoint.properties:
            bags = {field: self._properties(checkpoint.properties, table, kind) for field, table, kind in _PROPERTIES}
            fields["PropertyBag"] = self._table("PropertyBag", **bags)
        self._builder.Finish(self._table("Checkpoint", **fields), file_identifier=ORT_CHECKPOINT)
        return bytes(self._builder.Output())

    def _table(self, name: str, **fields: Any) -> Any:
        module = _import(name)
        module.Start(self._builder)
        for field, value in fields.items():
            getattr(module, f"Add{field}")(self._builder, value)
        return module.End(self._builder)

    def _vector(self, offsets: Sequence[Any]) -> Any:
        self._builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return self._builder.EndVector()

    def _tensors(self, tensors: Mapping[str, Array]) -> Any:
        return self._vector([self._tensor(name, array) for name, array in tensors.items()])

    def _tensor(self, name: str, array: Array) -> Any:
        label, builder, data = self._string(name), self._builder, array.tobytes()
        # The runtime reads the values in place: align them, as its own writer does.
        builder.StartVector(1, len(data), 16)
        builder.head -= len(data)
        builder.Bytes[builder.head : builder.head + len(data)] = data
        raw = builder.EndVector()
        dims = builder.CreateNumpyVector(np.asarray(array.shape, dtype=np.int64))
        return self._table("Tensor", Name=label, Dims=dims, DataType=_NUMBERS[array.dtype], RawData=raw)

    def _group(self, name: str, group: OptimizerGroup) -> Any:
        states = [
            self._table("ParameterOptimizerState", ParamName=self._string(parameter), Momentums=self._tensors(moments))
            for parameter, moments in group.moments.items()
        ]
        return self._table(
            "OptimizerGroup",
            GroupName=self._string(name),
            Step=group.step,
            InitialLearningRate=group.initial_learning_rate,
            OptimizerStates=self._vector(states),
        )

    def _properties(self, properties: Mapping[str, int | float | str], table: str, kind: type) -> Any:
        rows = [
            self._table(table, Name=self._string(name), Value=self._string(value) if isinstance(value, str) else value)
            for name, value in properties.items()
            if type(value) is kind
        ]
        return self._vector(rows)
