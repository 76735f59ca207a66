"""Parts of recurrent operators: states and weights in the shapes of a time step, and sums over all steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.passes.lower_training_ops.writer import Writer

__all__ = [
    "check_recurrence",
    "joined",
    "part",
    "previous",
    "sigmoid_slope",
    "split",
    "total",
    "transposed",
    "weight_gradient",
    "zeros",
]


def check_recurrence(f: Writer, activations: Sequence[str], lengths: int) -> None:
    """Refuse the forms that the kernels refuse; one input holds the lengths of the sequences."""
    if f.input(lengths) is not None:
        raise f.refusal("its sequences have lengths of their own")
    if (direction := f.attribute("direction", "forward")) != "forward":
        raise f.refusal(f"its direction is {direction!r}")
    if [name.lower() for name in f.attribute("activations", None) or activations] != list(activations):
        raise f.refusal(f"its activations are not {', '.join(activations)}")
    if f.attribute("clip", 0.0) not in (0.0, float(np.finfo(np.float32).max)):
        raise f.refusal("it clips")
    if f.attribute("input_forget", 0):
        raise f.refusal("its input and forget gates are one")


def split(f: Writer, value: ir.Value, count: int, axis: int) -> tuple[ir.Value, ...]:
    """Split a value into equal parts."""
    if count == 1:
        return (value,)
    number = count if f.opset >= 18 else None
    return f.several(count, "Split", value, axis=f.axis(value, axis), num_outputs=number)


def joined(f: Writer, parts: Sequence[ir.Value], axis: int) -> ir.Value:
    """Concatenate values."""
    return parts[0] if len(parts) == 1 else f("Concat", *parts, axis=f.axis(parts[0], axis))


def part(f: Writer, value: ir.Value, axis: int, start: int, stop: int) -> ir.Value:
    """Return a part of a value along one axis."""
    return f("Slice", value, f.integers(start), f.integers(stop), f.integers(axis))


def total(f: Writer, value: ir.Value) -> ir.Value:
    """Sum a value of shape [steps, batch, n] over steps and batch, in the shape [1, n]."""
    return f.reduce_sum(f.reduce_sum(value, [0], keepdims=False), [0])


def sigmoid_slope(f: Writer, y: ir.Value) -> ir.Value:
    """Compute `y * (1 - y)`, the slope of a sigmoid with the value y."""
    return f("Mul", y, f("Sub", 1.0, y))


def transposed(f: Writer, weight: ir.Value) -> ir.Value:
    """Return a weight of shape [1, n, m] in the shape [m, n]."""
    return f("Transpose", f.squeeze(weight, [0]), perm=[1, 0])


def zeros(f: Writer, like: ir.Value, size: int) -> ir.Value:
    """Return zeros of shape [1, batch, size], with the batch of a value of shape [steps, batch, n]."""
    dtype, batch = dtype_of(like), (f.shape(like) or (None, None))[1]
    if batch is not None:
        return f.constant(np.zeros((1, batch, size), dtype.numpy()))
    sizes = f("Concat", f.integers(1), f("Gather", f.shape_of(like), f.integers(1)), f.integers(size), axis=0)
    return f("Expand", f.number(0.0, dtype), sizes, shape=(1, None if like.shape is None else like.shape[1], size))


def previous(f: Writer, first: ir.Value, states: ir.Value) -> ir.Value:
    """Return the states before all steps, from the first state and the states after each step."""
    earlier = f("Slice", joined(f, [first, states], 0), f.integers(0), f.integers(-1), f.integers(0))
    earlier.shape = states.shape
    return earlier


def weight_gradient(f: Writer, gradients: ir.Value, data: ir.Value) -> ir.Value:
    """Sum the outer products of gradients and data, both of shape [steps, batch, n], over steps and batch."""
    rows, columns = (f("Flatten", value, axis=2) for value in (gradients, data))
    return f.unsqueeze(f("MatMul", f("Transpose", rows, perm=[1, 0]), columns), [0])
