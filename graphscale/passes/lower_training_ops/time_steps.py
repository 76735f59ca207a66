"""Recurrences over time steps: written out for a few known steps, a Scan otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.passes.lower_training_ops.writer import Writer

__all__ = [
    "Cell",
    "check_recurrence",
    "joined",
    "part",
    "previous",
    "run_steps",
    "sigmoid_slope",
    "split",
    "total",
    "transposed",
    "weight_gradient",
    "zeros",
]

# A Scan costs less than the nodes of more steps.
LONGEST = 32

# From the states and the slices of one step to the next states and the results of the step.
Cell = Callable[
    [Writer, Sequence[ir.Value], Sequence[ir.Value]], tuple[Sequence[ir.Value], Sequence[ir.Value]]
]


def check_recurrence(f: Writer, activations: Sequence[str], lengths: int) -> None:
    """Refuse the forms that the kernels refuse as well; an input holds the lengths of the sequences."""
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


def run_steps(
    f: Writer, cell: Cell, states: Sequence[ir.Value], sequences: Sequence[ir.Value], *, backward: bool = False
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Write a cell for each time step.

    Args:
        f: the writer.
        cell: what happens in one step.
        states: the first states, of shape [1, batch, n].
        sequences: values that hold a slice for each step, of shape [steps, batch, n].
        backward: whether the last step comes first.

    Returns:
        the last states; the results of the steps as sequences.
    """
    steps = (f.shape(sequences[0]) or (None,))[0]
    if steps is None or not 0 < steps <= LONGEST:
        return _scan(f, cell, states, sequences, backward)
    slices = [split(f, sequence, steps, 0) for sequence in sequences]
    results = []
    for number in reversed(range(steps)) if backward else range(steps):
        states, found = cell(f, states, [parts[number] for parts in slices])
        results.append(found)
    ordered = reversed(results) if backward else results
    return list(states), [joined(f, parts, 0) for parts in zip(*ordered, strict=True)]


def _scan(
    f: Writer, cell: Cell, states: Sequence[ir.Value], sequences: Sequence[ir.Value], backward: bool
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Write a Scan over slices of shape [1, batch, n]."""
    sequences = [f.unsqueeze(sequence, [1]) for sequence in sequences]
    body = f.within(f"{f.build.prefix}.step")
    graph, unique = body.build.body, f.build.editor.unique
    assert graph is not None
    held = [(value, value.shape) for value in states]
    held += [(value, None if value.shape is None else ir.Shape(value.shape[1:])) for value in sequences]
    for value, shape in held:
        graph.inputs.append(ir.val(unique(f"{body.build.prefix}.slice"), value.dtype, shape))
    count = len(states)
    last, results = cell(body, graph.inputs[:count], graph.inputs[count:])
    # A value that leaves a body is one that the body makes, and leaves it once.
    outputs = [body("Identity", value, like=value) for value in (*last, *results)]
    body.build.closed(outputs)
    steps = None if sequences[0].shape is None else sequences[0].shape[0]
    name, kinds = f"{f.build.prefix}.scan", [(value.dtype, value.shape) for value in outputs]
    stacked = [(dtype, None if shape is None else (steps, *shape)) for dtype, shape in kinds[count:]]
    node = f.build.node(
        "Scan",
        [*states, *sequences],
        [(name, dtype, shape) for dtype, shape in (*kinds[:count], *stacked)],
        attributes={
            "body": graph,
            "num_scan_inputs": len(sequences),
            "scan_input_directions": [int(backward)] * len(sequences),
            "scan_output_directions": [int(backward)] * len(results),
        },
    )
    return list(node.outputs[:count]), [f.squeeze(value, [1]) for value in node.outputs[count:]]


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
    """Compute `y * (1 - y)`, the slope of a sigmoid where it is y."""
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
    """Return the states before each step, from the first state and those after each step."""
    earlier = f("Slice", joined(f, [first, states], 0), f.integers(0), f.integers(-1), f.integers(0))
    earlier.shape = states.shape
    return earlier


def weight_gradient(f: Writer, gradients: ir.Value, data: ir.Value) -> ir.Value:
    """Sum the outer products of gradients and data, both of shape [steps, batch, n], over steps and batch."""
    rows, columns = (f("Flatten", value, axis=2) for value in (gradients, data))
    return f.unsqueeze(f("MatMul", f("Transpose", rows, perm=[1, 0]), columns), [0])
