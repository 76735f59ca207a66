"""The writer of formulas: nodes, and the forms that changed between the opsets 10 and 26."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import onnx_ir as ir

from graphscale.graph.inference import measured_by
from graphscale.passes.lower_training_ops.node_writer import NodeWriter

__all__ = ["Formula", "Writer"]

_Axes = Sequence[int] | ir.Value | None


class Writer(NodeWriter):
    """A writer of one node's standard form, with the same helpers for all opsets."""

    def reduce_sum(self, value: ir.Value, axes: _Axes = None, keepdims: bool = True) -> ir.Value:
        """Sum over axes; None for all, and the value itself for none."""
        return self._reduce("ReduceSum", 13, value, axes, keepdims)

    def reduce_mean(self, value: ir.Value, axes: _Axes = None, keepdims: bool = True) -> ir.Value:
        """Compute the mean over axes; None for all, and the value itself for none."""
        return self._reduce("ReduceMean", 18, value, axes, keepdims)

    def reduce_max(self, value: ir.Value, axes: _Axes = None, keepdims: bool = True) -> ir.Value:
        """Compute the maximum over axes; None for all, and the value itself for none."""
        return self._reduce("ReduceMax", 18, value, axes, keepdims)

    def squeeze(self, value: ir.Value, axes: Sequence[int] | ir.Value) -> ir.Value:
        """Remove axes of size 1."""
        return self._move("Squeeze", value, axes, self.opset < 11 and not isinstance(axes, ir.Value))

    def unsqueeze(self, value: ir.Value, axes: Sequence[int] | ir.Value) -> ir.Value:
        """Insert axes of size 1, counted in the result."""
        return self._move("Unsqueeze", value, axes, False)

    def softmax(self, value: ir.Value, axis: int = -1) -> ir.Value:
        """Compute `exp(x - max) / sum(exp(x - max))` along one axis."""
        if self._runs_along(value, axis):
            return self("Softmax", value, axis=self.axis(value, axis))
        exponential = self("Exp", self("Sub", value, self.reduce_max(value, [axis])))
        return self("Div", exponential, self.reduce_sum(exponential, [axis]))

    def log_softmax(self, value: ir.Value, axis: int = -1) -> ir.Value:
        """Compute `x - max - log(sum(exp(x - max)))` along one axis."""
        if self._runs_along(value, axis):
            return self("LogSoftmax", value, axis=self.axis(value, axis))
        moved = self("Sub", value, self.reduce_max(value, [axis]))
        return self("Sub", moved, self("Log", self.reduce_sum(self("Exp", moved), [axis])))

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """Cast a value; return a value that has this dtype."""
        return value if value.dtype is to else self("Cast", value, to=to)

    def shape(self, value: ir.Value) -> tuple[int | None, ...] | None:
        """Return the sizes of a value's axes, None for unknown ones; None if their number is unknown."""
        if value.shape is None:
            return None
        return tuple(dim if isinstance(dim, int) else None for dim in value.shape)

    def rank(self, value: ir.Value) -> int:
        """Return the number of a value's axes.

        Raises:
            UnsupportedModelError: the number is unknown.
        """
        if value.shape is None:
            raise self.refusal(f"the rank of {value.name!r} is not known; run shape inference on the model")
        return len(value.shape)

    def shape_of(self, value: ir.Value) -> ir.Value:
        """Return the shape of a value as a value, a constant if known."""
        sizes = self.shape(value)
        is_known = sizes is not None and None not in sizes
        return self.constant(np.asarray(sizes, dtype=np.int64)) if is_known else self("Shape", value)

    def expand(self, value: ir.Value, shape: Sequence[int] | ir.Value) -> ir.Value:
        """Broadcast a value to a shape."""
        if isinstance(shape, ir.Value):
            return self("Expand", value, shape, shape=_told_by(shape))
        return self("Expand", value, self.integers(*shape))

    def reshape(self, value: ir.Value, shape: Sequence[int] | ir.Value) -> ir.Value:
        """Reshape a value to a shape given as a value, empty axes included, or to numbers: 0 keeps a size, -1 fits."""
        if isinstance(shape, ir.Value):
            return self("Reshape", value, shape, shape=_told_by(shape), allowzero=1 if self.opset >= 14 else None)
        return self("Reshape", value, self.integers(*shape))

    def axis(self, value: ir.Value, axis: int) -> int:
        """Return an axis, counted from the front where the opset does not count from the back."""
        return axis + self.rank(value) if axis < 0 and self.opset < 11 else axis

    def within(self, name: str) -> Self:
        """Return a writer for a new body with a name; `build.closed` completes the body."""
        return dataclasses.replace(self, build=self.build.within(name))

    def _runs_along(self, value: ir.Value, axis: int) -> bool:
        """Return whether to leave an axis to Softmax: the last one, and from opset 13 on an axis of unknown number.

        Before opset 13, Softmax computes along the last axis alone; later, ONNX Runtime transposes for all others.
        """
        rank = None if value.shape is None else len(value.shape)
        return axis == -1 or (self.opset >= 13 if rank is None else axis == rank - 1)

    def _reduce(self, op_type: str, since: int, value: ir.Value, axes: _Axes, keepdims: bool) -> ir.Value:
        if axes is None:
            return self(op_type, value, keepdims=int(keepdims))
        if isinstance(axes, ir.Value):
            if self.opset < since:
                raise self.refusal(f"{op_type} over computed axes needs opset {since}")
            return self(op_type, value, axes, keepdims=int(keepdims))
        if not axes:
            return value
        numbers = [self.axis(value, axis) for axis in axes]
        if self.opset < since:
            return self(op_type, value, axes=numbers, keepdims=int(keepdims))
        return self(op_type, value, self.integers(*numbers), keepdims=int(keepdims))

    def _move(self, op_type: str, value: ir.Value, axes: Sequence[int] | ir.Value, counted: bool) -> ir.Value:
        if isinstance(axes, ir.Value):
            if self.opset < 13:
                raise self.refusal(f"{op_type} of computed axes needs opset 13")
            return self(op_type, value, axes)
        numbers = [self.axis(value, axis) for axis in axes] if counted else list(axes)
        if self.opset < 13:
            return self(op_type, value, axes=numbers)
        return self(op_type, value, self.integers(*numbers))


def _told_by(shape: ir.Value) -> ir.Shape | None:
    """Return the shape in a value, if it is the shape of another value."""
    measured = measured_by(shape)
    return None if measured is None else measured.shape


# A formula: it returns a value for each output of a node, or None, or nothing at the end, for one without readers.
Formula = Callable[[Writer], Sequence[ir.Value | None]]
