"""The carried state of a session, in buffers on its device.

State with an output in the graph is bound to inputs and outputs: one buffer where the next value can be written over
the present one, else two that take turns. State that the graph writes in place is an initializer of the session of ONNX
Runtime, which uses the buffer here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphscale.errors import SessionError, one_line, reporting, suggest
from graphscale.files.tensor_files import Arrays, to_native
from graphscale.graph.stamp import Stamp
from graphscale.graph.stamp_reading import find_wrong_number
from graphscale.session.interface import InputSpec

__all__ = ["CarriedState", "Device", "check_state", "first_values", "read_values"]


@dataclasses.dataclass(frozen=True)
class Device:
    """The device of the state: "cpu", or "cuda" with the index of the GPU."""

    name: str = "cpu"
    index: int = 0

    def __str__(self) -> str:
        """Return the name, of a GPU with its index."""
        return self.name if self.name == "cpu" else f"{self.name}:{self.index}"

    def buffer(self, name: str, array: np.ndarray[Any, Any]) -> Any:
        """Allocate a buffer of ONNX Runtime on this device that holds a copy of an array."""
        import onnxruntime as ort

        if array.dtype == ml_dtypes.bfloat16:
            raise SessionError(f"the state {name!r} is of bfloat16, which the Python API of ONNX Runtime cannot hold")
        with reporting(SessionError, f"no memory for the state {name!r} on {self.name} {self.index}", Exception):
            return ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C"), self.name, self.index)


class CarriedState:
    """All carried state, by the name of the input or initializer that holds it.

    Args:
        device: its device.
        first: its first values.
        outputs: the outputs with next values, `{input name: output name}`; all other state is written in place.
        shared: inputs whose next value can be written over the present one.
        fed: inputs without an initializer that are written in place: their buffers are bound.

    Attributes:
        specs: the dtype and shape of each state.
        buffers: the present buffers, the next ones, and their number of two, 0 or 1; always 0 where no state has two.
            Each turn sets another tuple: all change in one instant, even if a step is interrupted.
    """

    def __init__(
        self, device: Device, first: Arrays, outputs: Mapping[str, str], shared: Collection[str], fed: Collection[str]
    ) -> None:
        self.device, self.outputs, self._fed = device, dict(outputs), tuple(fed)
        self.specs = {name: InputSpec(array.dtype, array.shape) for name, array in first.items()}
        now = {name: device.buffer(name, array) for name, array in first.items()}
        second = [name for name in self.outputs if name not in shared]
        then = now | {name: device.buffer(name, first[name]) for name in second}
        self._alternates = bool(second)
        self.buffers = (now, then, 0)

    def buffer(self, name: str) -> Any:
        """Return the buffer of ONNX Runtime that holds the present value."""
        return self.buffers[0][name]

    def bind(self, binding: Any) -> None:
        """Bind the present buffers to the inputs and the next ones to the outputs of a run, outputs first in order."""
        now, then, _ = self.buffers
        for name, output in self.outputs.items():
            binding.bind_ortvalue_input(name, now[name])
            binding.bind_ortvalue_output(output, then[name])
        for name in self._fed:
            binding.bind_ortvalue_input(name, now[name])

    def turn(self) -> None:
        """Swap the present buffers and the next ones, after a run."""
        now, then, which = self.buffers
        self.buffers = (then, now, 1 - which if self._alternates else 0)

    def close(self) -> None:
        """Free all buffers."""
        self.buffers = ({}, {}, 0)

    def read(self) -> Arrays:
        """Return copies of all present values."""
        return {name: np.array(buffer.numpy()) for name, buffer in self.buffers[0].items()}

    def write(self, arrays: Arrays) -> None:
        """Replace all present values by the result of `check_state`."""
        for name, array in arrays.items():
            self.buffer(name).update_inplace(np.asarray(array, order="C"))


def first_values(
    specs: Mapping[str, InputSpec], initializers: Mapping[str, ir.Value], given: Mapping[str, Any], stamp: Stamp
) -> Arrays:
    """Return the first values of all state: given ones, else the initializers.

    Args:
        specs: all state by name.
        initializers: the initializers of the graph.
        given: first values by name.
        stamp: the stamp of the graph.

    Raises:
        SessionError: a state has no value, is not carried, or does not fit; the loss scale or a count is out of range.
    """
    for name in given if isinstance(given, Mapping) else ():
        role = stamp.role_of(name) if name not in specs else None
        if role is not None:
            raise SessionError(
                f"the state given: {name!r} is not carried by this graph, its role is {role}; feed it with each step, "
                f"or scale the step again and name its next value: --update OUT={name} (graphscale train: leave it out "
                "with --ignore-extra)"
            )
    arrays = check_state(specs, given, "the state given", stamp, complete=False)
    if missing := [name for name in specs if name not in arrays and name not in initializers]:
        raise SessionError(
            f"the carried inputs {', '.join(missing)} have no initializer; pass their first values as state "
            "(graphscale train: --state FILE.npz)"
        )
    first = {name: arrays[name] if name in arrays else read_values(initializers[name]) for name in specs}
    if (fault := find_wrong_number(stamp, first)) is not None:
        raise SessionError(f"the values in the model: {fault}")
    return first


def check_state(
    specs: Mapping[str, InputSpec], values: Mapping[str, Any], source: str, stamp: Stamp, *, complete: bool = True
) -> Arrays:
    """Return the values of state as arrays, all of them if `complete`; messages name their source.

    Raises:
        SessionError: a state is missing, is not carried, or does not fit; the loss scale or a count is out of range.
    """
    if not isinstance(values, Mapping):
        raise SessionError(f"{source} must map names to arrays; got a {type(values).__name__}")
    arrays = {}
    for name, value in values.items():
        if name not in specs:
            hint = suggest(name, specs, "carried are")
            raise SessionError(
                f"{source}: {name!r} is not carried by this graph{hint}; leave it out "
                "(graphscale train: --ignore-extra)"
            )
        with reporting(SessionError, f"{source}: the state {name!r} is no array", Exception):
            array = to_native(np.asarray(value))
        if (problem := specs[name].find_misfit(array.dtype, array.shape)) is not None:
            raise SessionError(f"{source}: the state {name!r} {problem}")
        arrays[name] = array
    missing = [name for name in specs if name not in arrays]
    if missing and complete:
        raise SessionError(f"{source} lacks the state {missing[0]!r}; it is of another graph")
    if (fault := find_wrong_number(stamp, arrays)) is not None:
        raise SessionError(f"{source}: {fault}")
    return arrays


def read_values(value: ir.Value) -> np.ndarray[Any, Any]:
    """Return a copy of an initializer's values.

    Raises:
        SessionError: the values are in a file that cannot be read.
    """
    tensor = value.const_value
    assert tensor is not None
    try:
        return np.array(tensor.numpy())
    except (OSError, ValueError) as error:
        raise SessionError(f"the values of {value.name!r} cannot be read: {one_line(error)}") from error
