"""Recurrences over time steps: unrolled for a few known steps, else a Scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from graphscale.passes.lower_training_ops.recurrent_parts import joined, split
from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["LONGEST", "Cell", "Step", "run_steps"]

# Nodes run in CUDA graphs, and a Scan does not; more nodes take long to load, and run no faster.
LONGEST = 32

# The next states and the results of one step, and the formula for them, from states and slices.
Step = tuple[Sequence[ir.Value], Sequence[ir.Value]]
Cell = Callable[[Writer, Sequence[ir.Value], Sequence[ir.Value]], Step]


def run_steps(
    f: Writer, cell: Cell, states: Sequence[ir.Value], sequences: Sequence[ir.Value], *, backward: bool = False
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Write a cell for each time step.

    Args:
        f: the writer.
        cell: the formula of one step.
        states: the first states, of shape [1, batch, n].
        sequences: values with a slice for each step, of shape [steps, batch, n].
        backward: True if the last step comes first.

    Returns:
        the last states; the results of the steps as sequences.
    """
    steps = (f.shape(sequences[0]) or (None,))[0]
    if steps == 0:  # ONNX Runtime's Scan fails, and so does the kernel of GRUTraining
        raise f.refusal("it has no time steps")
    if steps is None or steps > LONGEST:
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
    # An output of a body is computed in the body, and leaves it only once.
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
