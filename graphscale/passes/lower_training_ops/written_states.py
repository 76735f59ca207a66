"""The states that optimizers, accumulators and batch normalization write in place.

The standard form gives the next state as an output of the same node. A state that only the write in place brings out of
the graph has no standard form.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["check_states", "scalar"]


def check_states(f: Writer, written: Mapping[int, int], *, is_optional: bool = False) -> None:
    """Refuse a state of the graph's whose next value does not leave the graph.

    Args:
        f: the writer.
        written: the inputs that the node writes in place, each with the output for its next value.
        is_optional: whether the node writes nothing where it has no such output.
    """
    for index, result in written.items():
        state, outputs = f.data(index), f.node.outputs
        if not (state.is_graph_input() or state.is_initializer()):
            continue
        output = outputs[result] if result < len(outputs) and outputs[result].name else None
        if output is None and is_optional:
            continue
        graph = f.build.editor.graph
        if not state.is_graph_input():
            raise f.refusal(f"it writes {state.name!r} in place, an initializer that is no graph input")
        if output is None or not output.is_graph_output() or output.graph is not graph:
            raise f.refusal(
                f"it writes {state.name!r} in place, and its output {result}, the next value, is no output of the graph"
            )


def scalar(f: Writer, value: ir.Value) -> ir.Value:
    """Return a value of one element as a scalar."""
    return value if f.shape(value) == () else f.reshape(value, ())
