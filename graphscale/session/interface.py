"""The interface of a step: its names, dtypes and shapes, their fingerprint, and the conversion of feeds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphscale.errors import SessionError, one_line, reporting, suggest
from graphscale.files.tensor_files import ARRAY_DTYPES, to_native

__all__ = ["InputSpec", "bindable", "check_names", "convert_feed", "fingerprint", "read_specs", "to_ort_value"]

_DTYPES = {f"tensor({dtype.name.lower()})": dtype.numpy() for dtype in ARRAY_DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_CPU = 1  # among the devices of DLPack: kDLCPU


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """The dtype and shape of an input's arrays.

    Attributes:
        dtype: the dtype of the array.
        shape: each axis a size, or a name or None where any size will do.
        optional: True for an input with an initializer, its value where it is not fed.
    """

    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...]
    optional: bool = False

    @classmethod
    def of(cls, value: ir.Value) -> InputSpec:
        """Return the spec of an input of a graph, which is not optional."""
        assert value.dtype is not None
        axes = () if value.shape is None else value.shape
        return cls(value.dtype.numpy(), tuple(axis if isinstance(axis, int) else axis.value for axis in axes))

    def find_misfit(self, dtype: Any, shape: tuple[int, ...]) -> str | None:
        """Return the reason why an array of this dtype and shape does not fit, or None."""
        if dtype != self.dtype:
            return f"is of dtype {np.dtype(dtype).name}, and the step takes {self.dtype.name}"
        if len(shape) != len(self.shape):
            return f"has {len(shape)} axes, and the step takes {len(self.shape)}: {self._text()}"
        for given, wanted in zip(shape, self.shape, strict=True) if shape != self.shape else ():
            if isinstance(wanted, int) and given != wanted:
                return f"has shape {list(shape)}, and the step takes {self._text()}"
        return None

    def __str__(self) -> str:
        """Return the dtype and the axes, such as `float32[8, any]`."""
        return f"{self.dtype}{self._text()}"

    def _text(self) -> str:
        return "[" + ", ".join("any" if axis is None else str(axis) for axis in self.shape) + "]"


def read_specs(values: Iterable[Any], optional: Iterable[Any]) -> dict[str, InputSpec]:
    """Return the specs of the inputs and the overridable initializers of a session of ONNX Runtime, by name.

    Raises:
        SessionError: an input is no tensor of numbers.
    """
    specs = {}
    for value, has_initializer in (*((v, False) for v in values), *((v, True) for v in optional)):
        if value.type not in _DTYPES:
            raise SessionError(f"the input {value.name!r} is of type {value.type}, which a session cannot feed")
        specs[value.name] = InputSpec(_DTYPES[value.type], tuple(value.shape), has_initializer)
    return specs


def check_names(
    inputs: Mapping[str, InputSpec], feeds: Collection[str], outputs: Collection[str], fetch: Iterable[str]
) -> None:
    """Check the names of feeds and of outputs to fetch.

    Raises:
        SessionError: a name is unknown, or a feed is missing.
    """
    for name in feeds:
        if not isinstance(name, str):
            raise SessionError(f"feeds are named by the step's inputs; got {name!r}")
        if name not in inputs:
            raise SessionError(f"the step has no input {name!r}{suggest(name, inputs, 'its inputs are')}")
    if missing := [name for name, spec in inputs.items() if name not in feeds and not spec.optional]:
        raise SessionError(f"the step needs a feed for {', '.join(map(repr, missing))}")
    for name in fetch:
        if name not in outputs:
            hint = suggest(name, outputs, "its outputs are")
            raise SessionError(f"the step has no output {name!r} to fetch{hint}; carried state is in state_dict()")


def convert_feed(name: str, value: Any, spec: InputSpec) -> Any:
    """Convert a feed into a numpy array or a value of ONNX Runtime that fits, without a copy where possible.

    A feed is an array of numpy, an OrtValue, an object with DLPack's protocol, or a Python number, which gets the dtype
    of the input.

    Raises:
        SessionError: the feed does not fit, or is of another kind.
    """
    if type(value) is not np.ndarray:
        value = _converted(name, value, spec)
    if isinstance(value, np.ndarray):
        value = value if value.dtype.isnative else to_native(value)
        problem = spec.find_misfit(value.dtype, value.shape)
    else:
        dtype = _DTYPES.get(value.data_type())
        problem = f"is a {value.data_type()}" if dtype is None else spec.find_misfit(dtype, tuple(value.shape()))
    if problem is not None:
        raise SessionError(f"the feed {name!r} {problem}")
    return value


def bindable(name: str, value: Any, spec: InputSpec) -> Any:
    """Convert a feed for a binding, which accepts arrays of numpy's own dtypes, for inputs without an initializer."""
    value = convert_feed(name, value, spec)
    is_plain = not isinstance(value, np.ndarray) or not (spec.optional or spec.dtype == _BFLOAT16)
    return value if is_plain else to_ort_value(name, value)


def _converted(name: str, value: Any, spec: InputSpec) -> Any:
    """Convert a feed that is no plain array, without moving tensors of other libraries."""
    import onnxruntime as ort

    if isinstance(value, bool | int | float | list | tuple):
        problem = f"the feed {name!r} cannot become an array of {spec.dtype.name}"
        with reporting(SessionError, problem, ArithmeticError, TypeError, ValueError), np.errstate(over="raise"):
            array = np.asarray(value)
            if not np.can_cast(array.dtype, spec.dtype, "same_kind"):
                raise TypeError(f"{array.dtype.name} would lose what {spec.dtype.name} cannot hold")
            return np.asarray(value, dtype=spec.dtype)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, ort.OrtValue):
        return value
    if not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        raise SessionError(
            f"the feed {name!r} is a {type(value).__name__}; pass a numpy array, an OrtValue, or a tensor that has "
            "DLPack"
        )
    try:
        if value.__dlpack_device__()[0] == _CPU and spec.dtype != _BFLOAT16:
            return np.from_dlpack(value)
        capsule = value.__dlpack__()
        return ort.OrtValue(ort.capi._pybind_state.OrtValue.from_dlpack(capsule, spec.dtype == np.bool_))
    except Exception as error:  # any error of the other library
        raise SessionError(
            f"the feed {name!r} cannot be taken over by DLPack: {one_line(error)}; pass a numpy array or an OrtValue"
        ) from error


def to_ort_value(name: str, array: np.ndarray[Any, Any]) -> Any:
    """Wrap an array in a value of ONNX Runtime, without a copy.

    Raises:
        SessionError: the array is of bfloat16, which this release cannot take from numpy.
    """
    import onnxruntime as ort

    if array.dtype != _BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy(array)
    if not hasattr(ort.OrtValue, "ortvalue_from_numpy_with_onnx_type"):
        raise SessionError(
            f"the feed {name!r}: onnxruntime {ort.__version__} takes no bfloat16 arrays from numpy; pass a tensor that "
            "has DLPack"
        )
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ir.DataType.BFLOAT16)


def fingerprint(inputs: Mapping[str, InputSpec], outputs: Iterable[str], carried: Mapping[str, InputSpec]) -> str:
    """Compute a SHA-256 of the interface of a step: the names, dtypes and shapes of inputs, the names of outputs."""

    def rows(specs: Mapping[str, InputSpec]) -> list[Any]:
        return sorted([name, _NAMES[spec.dtype], [str(axis) for axis in spec.shape]] for name, spec in specs.items())

    text = json.dumps({"inputs": rows(inputs), "outputs": sorted(outputs), "carried": rows(carried)})
    return hashlib.sha256(text.encode()).hexdigest()
